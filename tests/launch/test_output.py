"""What is printed where nobody can read it any more."""

import os
import subprocess
import sys

import pytest

from support import forked
from support.commands import THINWIRE
from support.tiny_run import write_recipe

PRINTS = """
import sys
from thinwire.launch.shared.output import lasting

before = sys.stdout, sys.stderr
with lasting():
    for _ in range(3):
        print("x" * 10_000, flush=True)
        print("y" * 10_000, file=sys.stderr)
assert (sys.stdout, sys.stderr) == before
"""


@pytest.mark.parametrize("place", ["a full disk", "a pipe without a reader"])
def test_what_cannot_be_printed_is_dropped(place):
    """A run ended in a traceback when the disk of its log was full, and when its terminal had closed."""
    if place == "a full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, descriptor = os.pipe()
        os.close(reading)
    found = subprocess.run([sys.executable, "-c", PRINTS], stdout=descriptor, stderr=descriptor)
    os.close(descriptor)
    assert found.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["simulate", "tiny.yaml"], ["study", "study.yaml", "--jobs", "1"]], ids=["simulate", "study"]
)
def test_a_run_goes_on_if_the_disk_of_its_log_is_full(command, tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "study.yaml").write_text("recipe: tiny.yaml\nrows: {none: {options: {codec: none}}}")
    errors = tmp_path / "errors"
    errors.touch()
    call = forked.call_of([*THINWIRE, *command], tmp_path)
    ran = forked.Forked(call, ["/dev/full", errors], cwd=tmp_path, env=dict(os.environ))
    assert ran.wait() == 0, errors.read_text()
    assert len([*tmp_path.rglob("weights/step-00000002/stage-*")]) == 2


def test_what_can_be_printed_is():
    found = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True)
    assert (found.returncode, found.stdout.split(), found.stderr.split()) == (0, ["x" * 10_000] * 3, ["y" * 10_000] * 3)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_printed_appears_at_once(unbuffered):
    script = f"{PRINTS.split('before')[0]}with lasting(): print('now', file=sys.stderr); sys.stdin.read()"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, **pipes) as process:
        assert process.stderr.readline() == "now\n"
        process.communicate()
