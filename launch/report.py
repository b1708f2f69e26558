"""`thinwire report RUN [RUN ...]`: one HTML page about runs, in one file.

A RUN is the folder of a run. Several runs are compared first: the cost of compression, over steps, bytes
and time, against a baseline. The baseline is the run that --baseline names, or the first uncompressed run. The page
holds all its pictures and styles, so one file can be mailed, printed and archived.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.compress.stores.durable import write_for_user
from thinwire.errors.files import as_written
from thinwire.launch.comparison.comparison import compare, find_baseline
from thinwire.launch.comparison.page import render
from thinwire.launch.comparison.runs import read
from thinwire.launch.shared.arguments import Parser, written
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.progress import showing
from thinwire.pipeline.errors import OptionsError


def main(argv: Sequence[str]) -> int:
    """Write a report, and return the exit status."""
    options = make_parser().parse_args(argv)
    runs = read(options.runs)
    baseline = find_baseline(runs, options.baseline)
    where = Path(", ".join(map(str, options.runs)))
    with showing("drawing the page"), as_written(where, OptionsError):
        comparison = compare(runs, baseline) if len(runs) > 1 else None
        page = render(runs, comparison)
    with written("--out", options.out):
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_for_user(options.out, page.encode())
    for said in (*(sentence for run in runs for sentence in run.torn), comparison and comparison.warning):
        if said:
            print(said)
    print(f"{options.out} is about {', '.join(map(str, options.runs))}")
    return OK


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(prog="thinwire report", description="Write one HTML page about runs, in one file.")
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run")
    add("--out", type=Path, default=Path("report.html"), metavar="FILE", help="where to write (default: %(default)s)")
    add(
        "--baseline",
        type=Path,
        metavar="RUN",
        help="the run that the others are compared with (default: the first uncompressed run)",
    )
    return parser
