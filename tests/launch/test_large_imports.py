"""What is imported when. All in one new interpreter: each that imports torch needs seconds for it."""

import subprocess
import sys

import pytest

from support.commands import TIMEOUT

CODE = """
import io, sys, threading
from thinwire.launch.cli import main
from thinwire.launch.processes import forks
from thinwire.launch.shared import progress

def imported(*libraries):
    return [library for library in libraries if library in sys.modules]

class Terminal(io.StringIO):
    def isatty(self):
        return True

KERNELS = "thinwire.compress.codecs.fused.kernels"
progress.PATIENCE = 600  # no seconds are counted
forks.use_one_thread()
assert not imported("torch", "numpy")
sys.stdout = Terminal()
sys.stdout.write = lambda said: sys.__stdout__.write(said.replace("...", str(imported("torch"))))
assert main(["simulate", "quickstart", "--training.steps", "-1"]) == 2
sys.stdout = sys.__stdout__

import torch
import thinwire.models.architectures.vision
from thinwire.compress import Key, parse
from thinwire.models import checkpoint, digest, layers, model, partition
from thinwire.models.architectures import library, parity
from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions

load(DataOptions())
codec, x = parse("q(4)"), torch.ones(4, 8)
codec.encode(x, torch.empty(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8), Key(0, 0, "activations", "train", 0, 0))
print(imported("transformers", "torchvision", "datasets", "PIL", "sklearn", KERNELS))

import datasets
from thinwire.launch.processes import worker

print(forks.is_safe())
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(forks.is_safe(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_what_is_large_is_imported_when_it_is_needed_and_starts_no_thread(tmp_path):
    """The first words on a terminal come before torch: nothing was said for 4 to 11 seconds. Our modules need no
    transformers, names of vision models no torchvision, bytes no library of data, a codec on the CPU no kernels. A
    process may be forked while it has one thread."""
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=TIMEOUT, cwd=tmp_path)
    assert ran.stdout.splitlines() == ["importing torch []", "[]", "True", "False"], ran.stderr
