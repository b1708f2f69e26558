"""What `make test` does about the browser that the tests of pages need."""

import os
import shutil
import subprocess

import pytest

from support.pages import ROOT

LOUD = "******** No browser: the tests that open pages will not run."


def asked(tmp_path, **programs):
    """What the script says, and what was called, where the machine has these programs and nobody else's."""
    for name in ("sh", "timeout"):
        (tmp_path / name).symlink_to(shutil.which(name))
    for name, body in {"id": "echo 0", **programs}.items():
        path = tmp_path / name.replace("_", "-")
        path.write_text(f'#!/bin/sh\n[ {name} = id ] || echo "$0 $@" >> {tmp_path}/called\n{body}\n')
        path.chmod(0o755)
    command = ["sh", str(ROOT / "tests/support/browser.sh")]
    run = subprocess.run(command, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    called = tmp_path / "called"
    return run.stdout, called.read_text() if called.exists() else ""


def test_a_browser_that_is_there_is_left_alone(tmp_path):
    assert asked(tmp_path, chromium="", apt_get="") == ("", "")


def test_root_gets_one_from_the_package_manager(tmp_path):
    said, called = asked(tmp_path, apt_get="")
    assert said.startswith("Installing a browser") and LOUD not in said
    assert called.endswith("apt-get install --yes --no-install-recommends chromium\n")


@pytest.mark.parametrize(
    "programs",
    [{}, {"apt_get": "exit 100"}, {"apt_get": "", "id": "echo 1000"}],
    ids=["no package manager", "no such package", "not root"],
)
def test_a_machine_that_gets_none_is_told_loudly_and_goes_on(tmp_path, programs):
    said, _ = asked(tmp_path, **programs)
    assert said.splitlines()[-1].startswith(LOUD) and said.rstrip().endswith("hromium" + "." * (not programs))
