import os
import signal

from thinwire.launch.shared.signals import gathered_signals


def test_signals_end_the_process_again_afterwards():
    before = signal.getsignal(signal.SIGINT)
    with gathered_signals() as came:
        os.kill(os.getpid(), signal.SIGINT)
        assert came == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_terminal_that_closes_is_one_signal():
    """The kernel and the shell send SIGHUP each; a run that was writing its checkpoint took the second for hurry."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with gathered_signals() as came:
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT):
                signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert came == [signal.SIGHUP, signal.SIGINT]


def test_a_terminal_that_closes_after_a_signal_does_not_hurry_the_run():
    """Ctrl-C, then a window that closes: SIGHUP counted as the second signal, and cost the checkpoint under way."""
    with gathered_signals() as came:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGINT):
            signal.raise_signal(number)
    assert came == [signal.SIGINT, signal.SIGINT]


def test_nohup_is_kept():
    """A run under `nohup` stopped when its terminal closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with gathered_signals() as came:
            signal.raise_signal(signal.SIGHUP)
        assert came == [] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
