"""`thinwire doctor`: check this machine.

Training needs little. Other commands need network namespaces, kernel modules, Docker, or an interface that other hosts
can reach. If one of these is missing, the errors come late and are hard to read. A probe that fails or hangs becomes a
row of the table, and does not stop the other probes.
"""

import argparse
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire.launch.shared import probes
from thinwire.launch.shared.probes import Finding, Verdict
from thinwire.launch.shared.strict_json import dumps

PROBE_SECONDS = 60.0
COLOURS: dict[Verdict, str] = {"ok": "green", "limited": "yellow", "missing": "red"}


@dataclass(frozen=True)
class Check:
    """One row of the table: what the probe found, whether that is enough, what needs it, and what the user can do."""

    name: str
    found: str
    verdict: Verdict
    needed_for: str
    advice: str


PROBES: dict[str, tuple[str, Callable[[], Finding]]] = {
    "Python": ("everything", probes.probe_python),
    "torch": ("everything", probes.probe_torch),
    "gloo": ("stages in processes", probes.probe_gloo),
    "NCCL": ("boundaries from GPU to GPU", probes.probe_nccl),
    "GPUs": ("stages on GPUs", probes.probe_gpus),
    "transport": ("wire.transport auto, for each pair of processes", probes.probe_transport),
    "CPU cores": ("stages at the same time", probes.probe_cores),
    "memory": ("stages on this host", probes.probe_memory),
    "disk": ("checkpoints, AQ-SGD's store", probes.probe_disk),
    "open files": ("many stages in a process", probes.probe_open_files),
    "user": ("namespaces, tc", probes.probe_user),
    "namespaces": ("throttled links on one host", probes.probe_namespace),
    "tc tbf": ("a link's bandwidth", lambda: probes.probe_namespace("tbf rate 10mbit burst 32kb latency 50ms")),
    "tc netem": ("a link's latency", lambda: probes.probe_namespace("netem delay 1ms")),
    "Docker": ("stages in containers", probes.probe_docker),
    "interface": ("several hosts: each must reach the others at this address, over gloo", probes.probe_interface),
}


def bounded(probe: Callable[[], Finding], seconds: float = PROBE_SECONDS) -> Finding:
    """Run a probe with a time limit. A probe that raises or takes too long gives a finding that says so."""
    findings: list[Finding] = []

    def work() -> None:
        try:
            findings.append(probe())
        except Exception as error:
            findings.append(Finding(f"{type(error).__name__}: {error}", "missing", "fix what the error names"))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return findings[0] if findings else Finding(f"no answer within {seconds:g} s", "missing", "check it by hand")


def examine() -> list[Check]:
    """Run every probe, in the order of the table."""
    findings = ((name, needed_for, bounded(probe)) for name, (needed_for, probe) in PROBES.items())
    return [Check(name, row.found, row.verdict, needed_for, row.advice) for name, needed_for, row in findings]


def table(checks: Sequence[Check]) -> Table:
    """The checks as a table for people."""
    rows = Table(
        box=box.SIMPLE_HEAD, collapse_padding=True, caption="A missing part matters only if you use what needs it."
    )
    rows.add_column("part", no_wrap=True)
    rows.add_column("found", overflow="fold")
    rows.add_column("needed for")
    rows.add_column("verdict", no_wrap=True)
    rows.add_column("what to do", min_width=len("GLOO_SOCKET_IFNAME,"))
    for check in checks:
        verdict = f"[{COLOURS[check.verdict]}]{check.verdict}[/]"
        rows.add_row(check.name, escape(check.found), check.needed_for, verdict, escape(check.advice))
    return rows


def main(argv: Sequence[str]) -> int:
    """Print the checks, as a table or as JSON, and return the exit status.

    It is 1 if torch is missing or its version is not supported, else 0.
    """
    options = make_parser().parse_args(argv)
    checks = examine()
    if options.json:
        sys.stdout.write(dumps([asdict(check) for check in checks], indent=2) + "\n")
    else:
        Console().print(table(checks))
    return int(any(check.name == "torch" and check.verdict == "missing" for check in checks))


def make_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="thinwire doctor", description="Check what this machine can do for Thinwire.")
    parser.add_argument("--json", action="store_true", help="print the checks as a JSON list")
    return parser
