"""The fused kernels give the eager code's bytes: on the CPU, in Triton's interpreter there, and on a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch

from support.codec_helpers import KEY, encode, gaussian, roundtrip
from support.fused_cases import CASES, CPU_CASES, ERROR_CASES, SELECTED, SHAPES, SPECIAL, differing, selected, tensor_of
from support.pages import ROOT
from thinwire.compress import Encoder, Microbatch, SlotCounts, parse
from thinwire.compress.codecs import indices
from thinwire.compress.codecs.fused import cpu, largest
from thinwire.compress.codecs.fused.largest import places_of_largest
from thinwire.compress.codecs.fused.quantizer import _work_on, covers
from thinwire.compress.codecs.fused.trial import work
from thinwire.compress.codecs.granularity import Blocks
from thinwire.compress.codecs.grid import AbsMaxGrid
from thinwire.compress.codecs.indices import largest_magnitudes
from thinwire.compress.codecs.quantize import Quantize
from thinwire.compress.codecs.quantizer import GridQuantizer
from thinwire.compress.feedback import ErrorFeedback
from thinwire.compress.stores.memory import MemoryStore
from thinwire.compress.stores.store import Loan


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
@pytest.mark.parametrize(("which", "cases"), [((), 16), (("long",), 1)], ids=["many shapes", "chunks as they are"])
def test_the_lane_code_of_a_gpu_has_the_bytes_of_the_cpu_in_the_interpreter(which, cases):
    cases = int(os.environ.get("THINWIRE_SHAPES", cases)) if cases > 1 else cases
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "support.lanes_process", *which],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"cases": cases, "differing": []}


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


@pytest.mark.parametrize("kernels", [cpu._agree, cpu._errors_agree])
def test_kernels_are_tried_out_alike_whatever_torchs_default_dtype(kernels):
    """With bfloat16 they were left out, and a warning told that they do not work here."""
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert kernels(AbsMaxGrid(4, False))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("shapes", "calls"), [([(1, 16)] * 4, [16]), ([(512, 512), (1, 32)], [1 << 18, 32])])
def test_kernels_begin_with_a_long_message_or_after_many_short_ones(monkeypatch, shapes, calls):
    monkeypatch.setattr(cpu._coded, "messages", 0)
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


@pytest.mark.slow
@pytest.mark.parametrize("expression", ERROR_CASES)
def test_feedback_in_one_pass_gives_the_payload_and_the_error_of_its_steps(monkeypatch, expression):
    monkeypatch.setattr(cpu, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(cpu, "_LEAST_BLOCK", 1)
    feedback = parse(expression)
    for name in ("rows", "images", *SPECIAL):
        x = tensor_of(name, torch.float32)
        for error in (torch.zeros(x.shape), gaussian(*x.shape, seed=1, scale=0.1)):
            assert not _unlike_its_steps(feedback, x, error), name
    for x in (gaussian(7, 4104), gaussian(1, 40, 512).bfloat16()):
        assert not _unlike_its_steps(feedback, x, gaussian(*x.shape, seed=1, scale=0.1)), tuple(x.shape)


def _unlike_its_steps(feedback, x, error):
    """What differs between one pass and its steps, in words; "" if nothing does, but for the bits of a NaN."""
    loans = [Loan(torch.arange(len(x)), (error.clone(),)) for _ in range(2)]
    payloads = torch.full((2, feedback.inner.nbytes(x.shape, torch.float32)), 0xA5, dtype=torch.uint8)
    message, decoded = feedback.encode(x, loans[0], payloads[0], KEY), torch.zeros(2, *x.shape)
    feedback.inner.decode(payloads[0], decoded[0], KEY)
    feedback.advance(message, decoded[0], loans[0].parts[0])
    if not feedback.encode_at_once(x, loans[1], payloads[1], KEY):
        return "there was no pass"
    feedback.inner.decode(payloads[1], decoded[1], KEY)
    same = torch.equal(*payloads) if message.isfinite().all() else torch.equal(*decoded.nan_to_num(123))
    errors = torch.stack([loan.parts[0] for loan in loans])
    return "" if same and torch.equal(*errors.nan_to_num(123)) else f"{errors.tolist()}, {payloads.tolist()}"


def test_a_sender_advances_its_error_as_it_encodes_where_a_kernel_can():
    x, message = gaussian(1, 512, 512), Microbatch("train", range(1))
    sent = []
    for at_once, least in ((True, 1), (False, 1 << 60)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "LEAST_MESSAGES", least)
            patch.setattr(cpu, "LEAST_ELEMENTS", 1 << 60)
            method, counts = parse('ef(q(4, grid="midrise"), decay=0.9)'), SlotCounts(positions=1)
            coder = Encoder(method, x, counts=counts, make_store=lambda layout, _: MemoryStore(layout))
            payloads = torch.zeros(3, coder.capacity, dtype=torch.uint8)
            for payload in payloads:
                plan = coder.plan(message)
                encoded = coder.encode(x, payload[: plan.nbytes], KEY, plan)
                assert (encoded.message is None) == at_once
                coder.settle(encoded)
            sent.append((payloads, coder.buffers.store("train").digests()))
    assert torch.equal(sent[0][0], sent[1][0]) and sent[0][1] == sent[1][1]


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


@pytest.mark.parametrize("least", [1, 1 << 60])
@pytest.mark.parametrize(
    ("rule", "next_error"),
    [
        (Halved(parse('q(4, grid="midrise")')), lambda error, lost: (error + lost) * 0.5),
        (ErrorFeedback(Shrunk(4, grid="midrise")), lambda error, lost: lost),
    ],
)
def test_a_class_of_ones_own_counts_where_its_base_class_takes_its_steps_at_once(monkeypatch, least, rule, next_error):
    """One pass went around `advance` and `_encode`; without it, c lay in the buffer that `advance` reads."""
    monkeypatch.setattr(cpu, "LEAST_MESSAGES", least)
    monkeypatch.setattr(cpu, "LEAST_ELEMENTS", 1 << 60)
    x, message = gaussian(1, 8, 64), Microbatch("train", range(1))
    make_store, counts = lambda layout, _: MemoryStore(layout), SlotCounts(positions=1)
    coder, error = Encoder(rule, x, counts=counts, make_store=make_store), torch.zeros_like(x)
    for step in range(1, 4):
        plan = coder.plan(message)
        coder.settle(coder.encode(step * x, torch.empty(plan.nbytes, dtype=torch.uint8), KEY, plan))
        given = step * x + error
        error = next_error(error, given - roundtrip(rule.codec, given))
    assert torch.equal(coder.buffers.store("train").read(torch.tensor([0])), error)


@pytest.mark.parametrize(("agree", "words"), [("_agree", "the CPU"), ("_errors_agree", "feedback")])
def test_a_kernel_that_gives_other_bytes_is_not_used_and_that_is_said_once(monkeypatch, agree, words):
    monkeypatch.setattr(cpu, "encode", lambda *_: None)
    work.cache_clear()
    with pytest.warns(
        UserWarning, match=f"for {words} do not work here, so codecs are slower: they gave other"
    ) as said:
        assert not any(work("numba", words, getattr(cpu, agree), AbsMaxGrid(4, False)) for _ in range(2))
    work.cache_clear()
    assert len(said) == 1


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
    assert found["cases"] == 3 * len([*SHAPES, *SPECIAL]) + 11 * len([*SHAPES, "special rows", "strided"])
    assert not found["differing"]
    assert not found["chosen otherwise"]


@pytest.mark.parametrize("name", SELECTED)
def test_the_places_that_a_gpu_selects_are_those_of_a_cpu_and_of_equals_the_first(name):
    wrong = selected(name, places_of_largest)
    assert not wrong


def test_a_long_row_and_float64_are_selected_without_the_kernel():
    x = gaussian(2, 40_000).mul(3).round()
    for dtype, integer in ((torch.float32, torch.int32), (torch.float64, torch.int64)):
        rows, mask = x.to(dtype).view(integer), torch.iinfo(integer).max
        assert not largest.covers(integer, mask, 40_000)
        assert torch.equal(places_of_largest(rows, mask, 4000), largest_magnitudes(x.to(dtype), 4000))


@pytest.mark.parametrize("expression", ["topk(0.1)", "topk(0.7)", 'topk(0.02, values="q(4)")'])
def test_a_payload_made_by_a_gpus_selection_is_that_of_a_cpu(expression, monkeypatch):
    codec, x = parse(expression), gaussian(4, 6, 64).mul(2).round()
    wanted = encode(codec, x)
    monkeypatch.setattr(indices, "places_of_largest", None)
    monkeypatch.setattr(indices, "_largest_masked", largest.places_of_largest)
    assert torch.equal(encode(codec, x), wanted)


def is_covered(expression, shape=(4, 6), dtype=torch.float32):
    codec = parse(expression)
    return covers(codec._grid, codec._blocks(shape), dtype)


@pytest.mark.parametrize(
    "expression",
    [
        'q(2, group=4, grid="midrise")',
        'q(4, grid="midrise")',
        'q(8, grid="midrise")',
        'q(2, scale="minmax", per="tensor")',
    ],
)
def test_the_usual_grids_have_kernels(expression):
    assert is_covered(expression)


@pytest.mark.parametrize(
    "expression",
    [
        'q(3, grid="midrise")',
        'q(2, grid="midrise")',  # rows of 6 codes of 2 bits end inside a byte
        "fp8",
        "short_scales.ByteScales(4)",
        'q(4, per="channel", grid="midrise")',
        'q(4, grid="midtread")',
        'q(4, round="stochastic")',
        "short_scales.ShortRanges(4)",
    ],
)
def test_what_has_no_kernel_is_known(expression):
    assert not is_covered(expression)


def test_an_empty_tensor_has_no_kernel():
    """The number of tiles was divided by their size, which is 0."""
    assert not is_covered('q(4, grid="midrise")', shape=(0,))


def test_float64_and_tensors_beyond_32_bits_have_no_kernel():
    assert not is_covered('q(4, grid="midrise")', dtype=torch.float64)
    assert not is_covered('q(4, grid="midrise")', shape=(1 << 20, 1 << 10))


@pytest.mark.gpu
@pytest.mark.parametrize(("expression", "dtype"), CASES)
@pytest.mark.parametrize("name", [*SHAPES, *SPECIAL])
def test_a_gpu_gives_the_bytes_of_the_eager_code_there(expression, dtype, name):
    kernels_work = _work_on(torch.device("cuda", 0), AbsMaxGrid(4, False), torch.float32)
    assert kernels_work, "the kernels do not work here: a warning says why"

    def fused(codec, x):
        payload = torch.full((codec.nbytes(x.shape, x.dtype),), 0xA5, dtype=torch.uint8, device="cuda")
        codec.encode(x, payload, KEY)
        return payload, lambda sent, out: codec.decode(sent, out, KEY)

    wrong = differing(parse(expression), tensor_of(name, dtype).cuda(), fused)
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("name", SELECTED)
def test_a_gpu_selects_the_places_of_a_cpu(name):
    assert largest._works_on(torch.device("cuda", 0), torch.int32), "the kernel does not work here: a warning says why"
    wrong = selected(name, lambda integers, mask, k: places_of_largest(integers.cuda(), mask, k))
    assert not wrong
