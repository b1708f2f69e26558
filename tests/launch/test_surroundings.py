"""What a shell, a scheduler or a terminal gives a run: nothing of it ends one."""

import os
import subprocess
import sys

import pytest

from support.commands import NEW_THINWIRE as NEW
from support.tiny_run import write_recipe

RUN = "from thinwire.launch import cli; sys.exit(cli.main(sys.argv[1:]))"


def run(before, *words, **environment):
    """A command in a new interpreter, after other lines."""
    script = f"import os, signal, sys\n{before}\n{RUN}"
    given = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env=given)


@pytest.mark.parametrize("closed", [[1], [2], [0, 1, 2]])
def test_closed_streams_change_nothing(tmp_path, closed):
    redirected = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    script = f"import os, sys; {RUN}"
    command = ["sh", "-c", f'"$0" "$@" {redirected}', sys.executable, "-c", script, "keys", str(tmp_path / "keys")]
    assert subprocess.run(command).returncode == 0
    assert "thinwire" not in (tmp_path / "keys").read_text()


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_hears_how_its_stages_end_where_the_parent_ignores_children(tmp_path):
    """The kernel kept no status of them, and a complete run ended in a traceback."""
    write_recipe(tmp_path)
    found = subprocess.run(
        ["sh", "-c", 'trap "" CHLD; exec "$0" "$@"', *NEW, "train", "tiny.yaml", "--output", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert "weights digest" in found.stdout


@pytest.mark.slow
@pytest.mark.processes
def test_a_folder_that_a_terminal_cannot_show_is_shown_as_escapes(tmp_path):
    """The run was trained and saved, and ended with status 1."""
    write_recipe(tmp_path)
    found = subprocess.run(
        [*NEW, "train", "tiny.yaml", "--output", "模型 ü"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "120"},
    )
    assert found.returncode == 0, found.stderr
    assert "everything is in \\u6a21\\u578b \\xfc" in found.stdout
    assert (tmp_path / "模型 ü/summary.json").exists()


def test_a_folder_for_words_without_room_is_one_sentence(tmp_path):
    before = "import resource; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    before += "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    before += "from thinwire.launch.shared import scratch\nfrom thinwire.errors import ThinwireError\n"
    before += "try:\n    scratch.folder().__enter__()\nexcept ThinwireError as error:\n    sys.exit(str(error))"
    found = run(before, TMPDIR=str(tmp_path))
    assert found.stderr == (
        f"TMPDIR must have room for 1 MiB, for the rendezvous of a run, but {tmp_path} has not: "
        f"File too large; name another folder, and see ulimit -f\n"
    )


def test_a_mistake_shows_no_escape_codes_and_no_endless_word():
    found = run("", "recipes\x1b[2J")
    assert (found.returncode, "\x1b" in found.stderr) == (2, False)
    found = run("", "train", "quickstart", "--pipeline.schedule", "x" * 5000)
    assert found.returncode == 2 and len(found.stderr) < 1500, found.stderr


@pytest.mark.parametrize("field", ["num_stages", "num_microbatches"])
def test_a_pipeline_of_a_thousand_million_is_refused_before_its_order_is_made(field, tmp_path):
    found = run("", "train", "quickstart", f"--pipeline.{field}", "1000000000", "--output", str(tmp_path / "run"))
    assert found.returncode == 2
    assert f"pipeline.{field} must be at most " in found.stderr and "got 1000000000" in found.stderr
