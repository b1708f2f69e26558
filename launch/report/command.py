"""`thinwire report RUN [RUN ...]`: one HTML page about runs and tables that needs nothing but itself.

A RUN is the folder of a run, or a JSON file with tables (`thinwire bench`, `thinwire predict`); tables that lie in the
folder are shown with it. Every picture, style and number is inside the page: it can be mailed, printed and archived.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.launch.report.page import render
from thinwire.launch.report.perfetto import write
from thinwire.launch.report.reading import read
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK


def main(argv: Sequence[str]) -> int:
    """Write a report; the exit status."""
    parser = Parser(prog="thinwire report", description="Write one self-contained HTML page about runs and tables.")
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, or a JSON file of thinwire bench or predict"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE", help="where to write (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    write(options.out, render(*read(options.runs)))
    print(f"{options.out} is about {', '.join(map(str, options.runs))}")
    return OK
