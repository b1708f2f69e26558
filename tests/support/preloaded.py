"""Done once in the process that tests fork: the first preparation of a run takes three times as long as others."""

import io
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path

from support import known_models
from support.tiny_run import write_recipe
from thinwire.launch.plan.training import prepare_training
from thinwire.launch.recipe import recipe

known_models.remember()
with tempfile.TemporaryDirectory() as _folder, chdir(_folder), redirect_stdout(io.StringIO()):
    write_recipe(Path())
    prepare_training(recipe.parse(["tiny.yaml"]), copies=1)
