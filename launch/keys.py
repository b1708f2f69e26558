"""`thinwire keys FILE`: make the keys of `wire.transport: zmq`, for runs over several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK
from thinwire.pipeline.errors import OptionsError


def main(argv: Sequence[str]) -> int:
    """Write the file, and return the exit status."""
    path = make_parser().parse_args(argv).file
    from thinwire.pipeline.processes.zeromq.keys import Keys

    try:
        Keys.fresh().write(path)
    except FileExistsError as error:
        raise OptionsError(f"thinwire keys needs the name of a new file, but {path} exists; name another") from error
    except OSError as error:
        raise OptionsError(f"thinwire keys cannot write {path}: {error.strerror or error}") from error
    print(f"wrote {path}; copy it to every machine of the run and name it there: --wire.keys {path}")
    return OK


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        prog="thinwire keys",
        description="Make a file of keys that only its owner can read. Copy it to every machine of a run in a safe "
        "way, such as scp, and name it as wire.keys. Everybody who has the file can take part in the run.",
    )
    parser.add_argument("file", type=Path, help="the new file")
    return parser
