"""Codecs on a GPU, beside the CPU: `make test-gpu`."""

import json
from pathlib import Path

import pytest
import torch

from support.codec_helpers import EXPRESSIONS, FLOATING, KEY, assert_identical, encode, gaussian, roundtrip
from thinwire.compress import parse

pytestmark = pytest.mark.gpu
FOLDER = Path(__file__).parent / "golden"
CASES = json.loads((FOLDER / "cases.json").read_text())
SUMS = ("auto_grid", 'values="means"')
"""What adds many numbers, or multiplies matrices, while it encodes: the order of a sum is the device's own."""
MORE = (
    "topk(0.1)",
    "topk(0.7)",
    'topk(0.1, values="q(4)")',
    "randk(0.1)",
    "short_scales.ByteScales(4)",
    "q(8, step=0.2)",
    'q(8, step=0.2, code="plain")',
    'q(16, step=0.01, per="tensor")',
)


def exact(expression):
    return not any(name in expression for name in SUMS)


def on_gpu(codec, x, shared=None):
    payload = torch.empty(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8, device="cuda")
    codec.encode(x.cuda(), payload, KEY, shared)
    return payload.cpu()


def decoded_on_gpu(codec, payload, like, shared=None):
    out = torch.empty_like(like, device="cuda")
    codec.decode(payload.cuda(), out, KEY, shared)
    return out.cpu()


def test_a_message_of_several_chunks_is_coded_as_on_the_cpu():
    codec, x = parse("q(8, step=0.2)"), gaussian(300, 1000)
    payload = encode(codec, x)
    assert_identical(on_gpu(codec, x), payload)
    assert_identical(decoded_on_gpu(codec, payload, x), roundtrip(codec, x))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_known_payloads_are_those_of_a_gpu_too(case):
    codec, shared = parse(case["codec"]), None
    if "indices" in case:
        codec, shared = codec.bound_to(parse(case["activations"])), torch.tensor(case["indices"]).cuda()
    payload = torch.frombuffer(bytearray((FOLDER / f"{case['name']}.bin").read_bytes()), dtype=torch.uint8)
    dtype = getattr(torch, case["dtype"])
    sent, values = (torch.tensor(case[which], dtype=dtype).view(case["shape"]) for which in ("input", "decoded"))
    decoded = decoded_on_gpu(codec, payload, sent, shared)
    if exact(case["codec"]):
        assert_identical(decoded, values)
    else:
        torch.testing.assert_close(decoded, values)
    if not case.get("decode_only") and exact(case["codec"]):
        assert_identical(on_gpu(codec, sent, shared), payload)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("expression", [*EXPRESSIONS, *MORE])
def test_random_tensors_are_encoded_and_decoded_as_on_the_cpu(expression, dtype):
    codec, x = parse(expression), gaussian(5, 33, 130, dtype=dtype)
    payload = encode(codec, x)
    differ = int((on_gpu(codec, x) != payload).sum())
    # the scales of normal.py are sums, and one may round to the next bf16, which moves some of its block's codes
    assert differ <= (8 if expression.startswith("normal") else 0)
    assert_identical(decoded_on_gpu(codec, payload, x), roundtrip(codec, x))


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *MORE])
def test_the_host_does_not_wait_while_a_codec_works(expression):
    codec, x = parse(expression), gaussian(4, 16, 64).cuda()
    payload = torch.empty(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(x)
    codec.encode(x, payload, KEY)  # tables are made once, and copied
    codec.decode(payload, out, KEY)
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec.encode(x, payload, KEY)
        codec.decode(payload, out, KEY)
    finally:
        torch.cuda.set_sync_debug_mode("default")
