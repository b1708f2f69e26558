"""`thinwire keys FILE`: make the keys of `wire.transport: zmq`, for runs over several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK
from thinwire.pipeline.backends import check_installed
from thinwire.pipeline.errors import OptionsError


def main(argv: Sequence[str]) -> int:
    """Write the file; the exit status."""
    parser = Parser(
        prog="thinwire keys",
        description="Make a file of keys that its owner alone can read. Copy it to every machine of a run over a safe "
        "way, such as scp, and name it as wire.keys. Who has it can take part in the run.",
    )
    parser.add_argument("file", type=Path, help="the file to make; it must not be there yet")
    path = parser.parse_args(argv).file
    check_installed()
    from thinwire.pipeline.zeromq.keys import Keys

    try:
        Keys.fresh().write(path)
    except FileExistsError as error:
        raise OptionsError(f"thinwire keys makes a new file, and {path} is there already; name another one") from error
    except OSError as error:
        raise OptionsError(f"thinwire keys cannot write {path}: {error.strerror or error}") from error
    print(f"wrote {path}; copy it to every machine of the run and name it there: --wire.keys {path}")
    return OK
