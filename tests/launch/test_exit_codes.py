import re
import signal

import pytest

from thinwire.compress import CodecError, StoreError
from thinwire.errors import ThinwireError
from thinwire.launch import cli
from thinwire.launch.shared.exit_codes import FailedError, StoppedError, ended, status_of, working
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import OptionsError, PeerError, WireError

CASES = [
    (OptionsError, 2, 2),
    (ModelError, 2, 2),
    (CodecError, 2, 1),
    (StoreError, 1, 1),
    (PeerError, 1, 1),
    (WireError, 1, 1),
    (FailedError, 1, 1),
    (StoppedError, 130, 130),
]


@pytest.mark.parametrize(("kind", "before", "at_work"), CASES)
def test_an_error_has_one_status_before_work_and_one_at_work(capsys, kind, before, at_work):
    def mistaken(arguments):
        raise kind(["first", "second"])

    def failing(arguments):
        with working():
            mistaken(arguments)

    assert cli.run(mistaken, []) == before
    assert cli.run(failing, []) == at_work
    assert capsys.readouterr() == ("", f"first{kind.separator}second\n" * 2)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_work_that_a_signal_stopped_has_the_status_that_a_shell_gives(number, status):
    """It was 130 for all, and a scheduler expects 143 after SIGTERM."""
    assert status_of(StoppedError("stopped", number)) == status


def test_an_error_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        cli.run(lambda arguments: 1 // 0, [])


def test_a_process_that_the_system_may_have_killed_says_what_to_make_smaller():
    """`stage 1 was killed by SIGKILL` left its user to find out that the machine had too little memory."""
    said = ended(-signal.SIGKILL)
    assert said.startswith("was killed by SIGKILL (probably by the system, for want of memory: lower pipeline.microb")
    [(name, value)] = re.findall(r"set ([\w.]+) to (\w+)", said)
    assert f"{name} {value}" == "training.recompute block", "it was true, which is no value"
    assert (ended(-signal.SIGSEGV), ended(3)) == ("was killed by SIGSEGV", "exited with status 3")


def test_a_class_without_a_row_takes_that_of_its_base():
    assert status_of(type("NewError", (PeerError,), {})("gone")) == 1
    assert status_of(type("OtherError", (ThinwireError,), {})("wrong")) == 2
