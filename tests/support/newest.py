"""The newest torch that setup.cfg allows: `make test-newest` asks pip for it, and holds setup.cfg's cap against it.

CompressedStage takes over private parts of torch's pipelining, and those move with minor releases. So setup.cfg allows
a minor release only once the tests have run on it.
"""

import configparser
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]

Release = tuple[int, ...]


def release(version: str) -> Release:
    """(2, 15, 0) of 2.15.0+cu130."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def written(numbers: Release) -> str:
    return ".".join(map(str, numbers))


def cap(setup: str) -> Release:
    """The first release of torch that a setup.cfg of this text does not allow: (2, 16) of torch>=2.11,<2.16."""
    parser = configparser.ConfigParser()
    parser.read_string(setup)
    found = re.search(r"^torch\b.*<([\d.]+)$", parser["options"]["install_requires"], re.MULTILINE)
    assert found, "setup.cfg names no first release of torch that it does not allow"
    return release(found[1])


def unseen(below: Release, newest: Release) -> str:
    """A sentence if a minor release between the newest that pip brings and the cap would be allowed, else nothing."""
    major, minor = newest[:2]
    if below == (major, minor + 1):
        return ""
    return (
        f"setup.cfg may allow only releases of torch that tests ran on, got torch<{written(below)}, and the newest "
        f"below it that pip finds is {written(newest)}; write torch<{major}.{minor + 1}, or let pip find a newer one"
    )


def listed(answer: str) -> list[Release]:
    """The releases in the answer of `pip index versions torch`."""
    found = re.search(r"^Available versions: (.*)$", answer, re.MULTILINE)
    return [release(version) for version in found[1].split(", ")] if found else []


def news(below: Release, releases: Sequence[Release]) -> str:
    """A sentence if there is a release that setup.cfg does not allow yet, else nothing."""
    newest = max(releases)
    if newest < below:
        return ""
    return f"torch {written(newest)} is out, which setup.cfg does not allow: raise its cap and run make test-newest."


def ask() -> None:
    """Before the installation: ask the index, and have make install again what is older than its answer."""
    question = [sys.executable, "-m", "pip", "index", "versions", "torch", "--retries", "1", "--timeout", "20"]
    releases = listed(subprocess.run(question, capture_output=True, text=True).stdout)
    below = cap((ROOT / "setup.cfg").read_text())
    allowed = [one for one in releases if one < below]
    if not allowed:
        sys.exit(
            "make test-newest needs an index of packages that has torch, and pip finds none; connect this machine, or "
            "name an index in PIP_INDEX_URL"
        )
    if said := unseen(below, max(allowed)):
        sys.exit(said)
    if said := news(below, releases):
        print(said)
    if installed() != max(allowed):
        (Path(sys.prefix) / "installed-dev").unlink(missing_ok=True)


def check(wanted: str = "") -> None:
    """After the installation: other packages may hold torch back. A release that was asked for may be an older one."""
    brought = installed()
    assert brought, "pip installed no torch"
    if wanted:
        assert brought == release(wanted), f"pip was to install torch {wanted}, and installed {written(brought)}"
    elif said := unseen(cap((ROOT / "setup.cfg").read_text()), brought):
        sys.exit(said)
    print(f"The tests run on torch {written(brought)}.", flush=True)


def installed() -> Release | None:
    try:
        return release(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    {"ask": ask, "check": check}[sys.argv[1]](*sys.argv[2:])
