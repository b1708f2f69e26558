"""`thinwire report RUN [RUN ...]`: one HTML page about runs and tables that needs nothing but itself.

A RUN is the folder of a run, or a JSON file with tables (`thinwire bench`, `thinwire predict`); tables that lie in the
folder are shown with it. Several runs are compared first: what compression cost, over steps, bytes and time, against
the run that --baseline names, or the first uncompressed one. Every picture, style and number is inside the page: it can
be mailed, printed and archived.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.launch.report.comparison import compare, find_baseline
from thinwire.launch.report.page import render
from thinwire.launch.report.perfetto import write
from thinwire.launch.report.reading import read
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.timing.replay import parse_link


def main(argv: Sequence[str]) -> int:
    """Write a report; the exit status."""
    options = _parser().parse_args(argv)
    links = [parse_link(text) for text in options.link]
    runs, documents = read(options.runs)
    baseline = find_baseline(runs, options.baseline)
    comparison = compare(runs, baseline, links) if len(runs) > 1 or (runs and links) else None
    write(options.out, render(runs, documents, comparison))
    if comparison and comparison.warning:
        print(comparison.warning)
    print(f"{options.out} is about {', '.join(map(str, options.runs))}")
    return OK


def _parser() -> Parser:
    parser = Parser(prog="thinwire report", description="Write one self-contained HTML page about runs and tables.")
    add = parser.add_argument
    add(
        "runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, or a JSON file of thinwire bench or predict"
    )
    add("--out", type=Path, default=Path("report.html"), metavar="FILE", help="where to write (default: %(default)s)")
    add(
        "--baseline",
        type=Path,
        metavar="RUN",
        help="which of the runs the others are compared with (default: the first uncompressed one)",
    )
    add(
        "--link",
        action="append",
        default=[],
        metavar="BANDWIDTH[,LATENCY]",
        help="predict loss over time with such links between all stages, as 100mbit or 100mbit,20ms; may be repeated",
    )
    return parser
