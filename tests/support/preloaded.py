"""Done once in the process that tests fork: the first preparation of a run takes three times as long as others."""

import io
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path

from support.tiny_run import prepared, write_recipe

with tempfile.TemporaryDirectory() as _folder, chdir(_folder), redirect_stdout(io.StringIO()):
    write_recipe(Path())
    prepared()
