"""The fused kernels give the eager code's bytes: in Triton's interpreter on the CPU, and on a card."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from support.codec_helpers import KEY
from support.fused_cases import CASES, SHAPES, SPECIAL, differing, tensor_of
from support.pages import ROOT
from thinwire.compress import parse
from thinwire.compress.codecs.fused.quantizer import _work_on, covers
from thinwire.compress.codecs.grid import AbsMaxGrid


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_interpreted_kernels_give_the_bytes_of_the_eager_code():
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "support.fused_process"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cases"] == len(CASES) * len({*SHAPES, *SPECIAL})
    assert not found["differing"]


def is_covered(expression, shape=(4, 6), dtype=torch.float32):
    codec = parse(expression)
    return covers(codec._grid, codec._blocks(shape), dtype)


@pytest.mark.parametrize("expression", ["q(2, group=4)", "q(4)", "q(8)", 'q(2, scale="minmax", per="tensor")'])
def test_the_usual_grids_have_kernels(expression):
    assert is_covered(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "q(3)",
        "q(2)",  # rows of 6 codes of 2 bits end inside a byte
        "fp8",
        "q(4, clip=0.5)",
        "q(4, scale_bits=8)",
        'q(4, per="channel")',
        'q(4, grid="midtread")',
        'q(4, round="stochastic")',
        'q(4, scale="minmax", scale_bits=32)',
    ],
)
def test_what_has_no_kernel_is_known(expression):
    assert not is_covered(expression)


def test_float64_and_tensors_beyond_32_bits_have_no_kernel():
    assert not is_covered("q(4)", dtype=torch.float64)
    assert not is_covered("q(4)", shape=(1 << 20, 1 << 10))


def test_the_cpu_never_asks_for_triton():
    code = (
        "import sys, torch; from thinwire.compress import Key, parse; codec = parse('q(4)'); x = torch.ones(4, 8)\n"
        "payload = torch.empty(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8)\n"
        "codec.encode(x, payload, Key(0, 0, 'activations', 'train', 0, 0)); sys.exit('triton' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("expression", "dtype"), CASES)
@pytest.mark.parametrize("name", [*SHAPES, *SPECIAL])
def test_a_card_gives_the_bytes_of_the_eager_code_there(expression, dtype, name):
    kernels_work = _work_on(torch.device("cuda", 0), AbsMaxGrid(4, False), torch.float32)
    assert kernels_work, "the kernels do not work here: a warning says why"

    def fused(codec, x):
        payload = torch.full((codec.nbytes(x.shape, x.dtype),), 0xA5, dtype=torch.uint8, device="cuda")
        codec.encode(x, payload, KEY)
        return payload, lambda sent, out: codec.decode(sent, out, KEY)

    wrong = differing(parse(expression), tensor_of(name, dtype).cuda(), fused)
    assert not wrong
