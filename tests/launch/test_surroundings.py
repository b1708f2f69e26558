"""What a shell, a scheduler or a terminal gives a run: nothing of it ends one."""

import os
import subprocess
import sys

import pytest

from support.commands import NEW_THINWIRE as NEW
from support.tiny_run import write_recipe
from thinwire.launch import cli

RUN = "from thinwire.launch import cli; sys.exit(cli.main(sys.argv[1:]))"


@pytest.mark.slow
@pytest.mark.parametrize("closed", [[1], [2], [0, 1, 2]])
def test_closed_streams_change_nothing(tmp_path, closed):
    redirected = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    script = f"import os, sys; {RUN}"
    command = ["sh", "-c", f'"$0" "$@" {redirected}', sys.executable, "-c", script, "keys", str(tmp_path / "keys")]
    assert subprocess.run(command).returncode == 0
    assert "thinwire" not in (tmp_path / "keys").read_text()


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_ends_well_where_the_parent_ignores_children_and_a_terminal_cannot_show_its_folder(tmp_path):
    """The kernel kept no status of the stages, and a complete run ended in a traceback, as for the folder's name."""
    write_recipe(tmp_path)
    found = subprocess.run(
        ["sh", "-c", 'trap "" CHLD; exec "$0" "$@"', *NEW, "train", "tiny.yaml", "--output", "模型 ü"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "120"},
    )
    assert found.returncode == 0, found.stderr
    assert "weights digest" in found.stdout
    assert "everything is in \\u6a21\\u578b \\xfc" in found.stdout
    assert (tmp_path / "模型 ü/summary.json").exists()


def test_a_folder_for_words_without_room_is_one_sentence(tmp_path):
    script = """
import resource, signal, sys
from thinwire.errors import ThinwireError
from thinwire.launch.shared import scratch

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    scratch.folder().__enter__()
except ThinwireError as error:
    sys.exit(str(error))
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert found.stderr == (
        f"TMPDIR must have room for 1 MiB, for the rendezvous of a run, but {tmp_path} has not: "
        f"File too large; name another folder, and see ulimit -f\n"
    )


def test_a_mistake_shows_no_escape_codes_and_no_endless_word(capsys):
    assert cli.main(["recipes\x1b[2J"]) == 2
    assert "\x1b" not in capsys.readouterr().err
    assert cli.main(["train", "quickstart", "--pipeline.schedule", "x" * 5000]) == 2
    assert len(capsys.readouterr().err) < 1500


@pytest.mark.parametrize("field", ["num_stages", "num_microbatches"])
def test_a_pipeline_of_a_thousand_million_is_refused_before_its_order_is_made(field, tmp_path, capsys):
    assert (
        cli.main(["train", "quickstart", f"--pipeline.{field}", "1000000000", "--output", str(tmp_path / "run")]) == 2
    )
    told = capsys.readouterr().err
    assert f"pipeline.{field} must be at most " in told and "got 1000000000" in told
