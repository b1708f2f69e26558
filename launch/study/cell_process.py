"""The process of one cell: it ends with the study, and is `thinwire simulate` or `thinwire train` otherwise."""

from __future__ import annotations

import sys

from thinwire.launch.run import parent

if __name__ == "__main__":
    parent.end_with_parent()  # before anything large is imported
    from thinwire.launch import cli

    sys.exit(cli.main(sys.argv[1:]))
