"""The fused kernels give the eager code's bytes: on the CPU, in Triton's interpreter there, and on a GPU."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from support.codec_helpers import KEY, encode, gaussian, roundtrip
from support.fused_cases import CPU_CASES, SELECTED, SHAPES, SPECIAL, differing, selected, tensor_of
from support.pages import ROOT
from thinwire.compress import Encoder, Microbatch, SlotCounts, parse
from thinwire.compress.codecs import indices
from thinwire.compress.codecs.fused import codebook, cpu, cpu_kernels, steps
from thinwire.compress.codecs.fused.trial import _one_first, work
from thinwire.compress.codecs.granularity import Blocks
from thinwire.compress.codecs.grid import AbsMaxGrid
from thinwire.compress.codecs.quantize import Quantize
from thinwire.compress.codecs.quantizer import GridQuantizer
from thinwire.compress.feedback import ErrorFeedback
from thinwire.compress.stores.memory import MemoryStore


@pytest.mark.slow
@pytest.mark.parametrize(("expression", "dtype"), CPU_CASES)
def test_the_kernels_for_the_cpu_give_the_bytes_of_the_eager_code(monkeypatch, expression, dtype):
    monkeypatch.setattr(cpu, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(cpu, "_LEAST_BLOCK", 1)
    codec = parse(expression)
    part = codec._blocks((2, 16)).whole
    assert cpu.covers(codec._grid, part, torch.ones(32)), "the kernels do not work here: a warning says why"

    def fused(codec, x):
        backing = torch.full((codec.nbytes(x.shape, x.dtype) + 8,), 0xA5, dtype=torch.uint8)
        codec.encode(x, backing[3:-5], KEY)
        assert (backing[:3] == 0xA5).all() and (backing[-5:] == 0xA5).all(), "wrote outside the payload"
        return backing[3:-5], lambda sent, out: codec.decode(sent, out, KEY)

    tensors = {name: tensor_of(name, dtype) for name in (*SHAPES, *SPECIAL)}
    tensors["more than a buffer"] = tensor_of("long", dtype).expand(7, 20003)[:, :4104]
    wrong = {name: differing(codec, x, fused) for name, x in tensors.items()}
    assert not {name: found for name, found in wrong.items() if found}


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
def test_the_lane_code_of_a_gpu_has_the_bytes_of_the_cpu_in_the_interpreter():
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "support.lanes_process"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"alike": True, "differing": []}


def test_what_goes_the_eager_way_on_a_cpu():
    grid, values = AbsMaxGrid(4, False), torch.ones(1 << 18)

    def covered(grid=grid, values=values, outer=1, inner=1024):
        return cpu.covers(grid, Blocks(1 << 18, outer, (1 << 18) // inner // outer, inner).whole, values)

    assert covered()
    assert not covered(AbsMaxGrid(4, True))
    assert not covered(outer=256)
    assert not covered(inner=1)
    assert not covered(values=values.to("meta"))
    assert not covered(parse("fp8")._grid)


def test_kernels_are_tried_out_alike_whatever_torchs_default_dtype():
    """With bfloat16 they were left out, and a warning told that they do not work here."""
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert cpu._agree(AbsMaxGrid(4, False))
        assert codebook._agree()
        assert steps._agree()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("expression", ["q(8, step=0.2)", "q(8, step=0.2, codebook=2)", "q(4)", "fp8"])
def test_tensors_of_another_dtype_are_decoded_whatever_torchs_default_dtype(expression):
    """Those of bfloat16 were refused with a TypeError, where they were the default too."""
    codec, x = parse(expression), gaussian(64, 32).bfloat16()
    expected = torch.empty_like(x)
    codec.decode(encode(codec, x), expected, KEY)
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = torch.empty_like(x)
        codec.decode(encode(codec, x), found, KEY)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("shapes", "calls"), [([(1, 16)] * 4, [16]), ([(512, 512), (1, 32)], [1 << 18, 32])])
def test_kernels_begin_with_a_long_message_or_after_many_short_ones(monkeypatch, shapes, calls):
    monkeypatch.setattr(cpu, "_messages", 0)
    monkeypatch.setattr(cpu, "LEAST_MESSAGES", 4)
    codec, used, kernel = parse("q(4)"), [], cpu.encode
    assert cpu.work("numba", "the CPU", cpu._agree, codec._grid), "the kernels do not work here: a warning says why"
    monkeypatch.setattr(cpu, "encode", lambda grid, part, x, *more: (used.append(len(x)), kernel(grid, part, x, *more)))
    for shape in shapes:
        x = gaussian(*shape)
        eager = torch.empty(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8)
        GridQuantizer(codec._grid, codec._blocks).encode(x, eager, KEY)
        assert torch.equal(encode(codec, x), eager)
    assert used == calls


@dataclass(frozen=True, repr=False)
class Halved(ErrorFeedback):
    """The next error is half of the last one and of what this message lost."""

    def advance(self, message, decoded, buffer):
        buffer.add_(message - decoded).mul_(0.5)


@dataclass(frozen=True, repr=False)
class Shrunk(Quantize):
    """Half of each element, so that much is left for later."""

    def _encode(self, x, out, key, shared):
        super()._encode(x / 2, out, key, shared)


@pytest.mark.parametrize(
    ("rule", "next_error"),
    [
        (Halved(parse('q(4, grid="midrise")')), lambda error, lost: (error + lost) * 0.5),
        (ErrorFeedback(Shrunk(4, grid="midrise")), lambda error, lost: lost),
    ],
)
def test_a_class_of_ones_own_counts_where_its_base_class_has_a_shorter_way(rule, next_error):
    """A decoded message lay in the buffer that `advance` reads."""
    x, message = gaussian(1, 8, 64), Microbatch("train", range(1))
    make_store, counts = lambda layout, _: MemoryStore(layout), SlotCounts(positions=1)
    coder, error = Encoder(rule, x, counts=counts, make_store=make_store), torch.zeros_like(x)
    for step in range(1, 4):
        plan = coder.plan(message)
        coder.settle(coder.encode(step * x, torch.empty(plan.nbytes, dtype=torch.uint8), KEY, plan))
        given = step * x + error
        error = next_error(error, given - roundtrip(rule.codec, given))
    assert torch.equal(coder.buffers.store("train").read(torch.tensor([0])), error)


@pytest.fixture
def untried():
    """No kernel has been tried out, neither here nor for the tests that follow."""
    work.cache_clear()
    yield
    work.cache_clear()


def test_a_kernel_that_gives_other_bytes_is_not_used_and_that_is_said_once(monkeypatch, untried):
    monkeypatch.setattr(cpu, "encode", lambda *_: None)
    with pytest.warns(UserWarning, match="for the CPU do not work here, so codecs are slower: they gave other") as said:
        assert not any(work("numba", "the CPU", cpu._agree, AbsMaxGrid(4, False)) for _ in range(2))
    assert len([each for each in said if "do not work here" in str(each.message)]) == 1


def test_of_several_that_compile_the_kernels_one_does_so_first(monkeypatch, tmp_path):
    """Four stages compiled the same at once, in twice the time on two cores."""
    monkeypatch.setattr(cpu_kernels, "encode", SimpleNamespace(stats=SimpleNamespace(cache_path=str(tmp_path))))
    log, once = list[str](), threading.Barrier(4)

    def compiles(name):
        once.wait(60)
        with _one_first("a test"):
            first = not log
            log.append(name)
            if first:
                time.sleep(0.2)  # another one would come now
                log.append(name)
            else:
                others.wait(60)  # which do not wait for each other

    others = threading.Barrier(3)
    with ThreadPoolExecutor() as pool, pytest.warns(UserWarning, match="compiling the kernels for a test") as said:
        assert len(list(pool.map(compiles, "abcd"))) == 4
    assert len(said) == 1
    assert log[0] == log[1] and sorted(log[1:]) == list("abcd")


@pytest.mark.parametrize("name", SELECTED)
def test_the_places_that_a_gpu_selects_are_those_of_a_cpu_and_of_equals_the_first(name):
    wrong = selected(name, indices._by_threshold)
    assert not wrong


@pytest.mark.parametrize("expression", ["topk(0.1)", "topk(0.7)", 'topk(0.02, values="q(4)")'])
def test_a_payload_made_by_a_gpus_selection_is_that_of_a_cpu(expression, monkeypatch):
    codec, x = parse(expression), gaussian(4, 6, 64).mul(2).round()
    wanted = encode(codec, x)
    monkeypatch.setattr(indices, "_largest_masked", lambda x, mask, k: indices._by_threshold(x & mask, k))
    assert torch.equal(encode(codec, x), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SELECTED)
def test_a_gpu_selects_the_places_of_a_cpu(name):
    wrong = selected(name, lambda integers, k: indices._by_threshold(integers.cuda(), k))
    assert not wrong
