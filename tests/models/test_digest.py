import hashlib

import pytest
import torch

from thinwire.models.digest import tensor_lines, weights_digest

STATE = {"b.weight": torch.arange(6.0).reshape(2, 3), "a.count": torch.tensor(3), "c.half": torch.ones(2).bfloat16()}


def test_a_line_as_a_literal():
    content = b"\0\0\0\0\0\0\x80\x3f"
    expected = f"ln.bias, float32, [2], {hashlib.sha256(content).hexdigest()}"
    assert tensor_lines({"ln.bias": torch.tensor([0.0, 1.0])}) == [expected]


def test_lines_of_unusual_tensors():
    digest = hashlib.sha256(b"\x03" + b"\0" * 7).hexdigest()
    assert tensor_lines({"a": torch.tensor(3)}) == [f"a, int64, [], {digest}"]
    assert tensor_lines({"a": torch.empty(0, 4)}) == [f"a, float32, [0,4], {hashlib.sha256(b'').hexdigest()}"]
    half = hashlib.sha256(b"\x80\x3f").hexdigest()
    assert tensor_lines({"a": torch.ones(1).bfloat16()}) == [f"a, bfloat16, [1], {half}"]
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert tensor_lines({"a": parameter}) == tensor_lines({"a": torch.zeros(1)})


def test_strides_do_not_count_but_order_does():
    matrix = STATE["b.weight"]
    assert tensor_lines({"x": matrix.t().contiguous().t()}) == tensor_lines({"x": matrix})
    assert tensor_lines({"x": matrix.t().contiguous().reshape(2, 3)}) != tensor_lines({"x": matrix})


def test_the_digest_is_of_sorted_lines():
    assert weights_digest(["b", "a"]) == hashlib.sha256(b"a\nb").hexdigest()


def test_the_digest_does_not_depend_on_the_cut():
    names = list(STATE)
    halves = [{name: STATE[name] for name in part} for part in (names[1:], names[:1])]
    lines = [line for half in halves for line in tensor_lines(half)]
    assert weights_digest(lines) == weights_digest(tensor_lines(STATE))


def test_copies_of_a_weight_on_several_stages_count_once():
    halves = [{"shared": STATE["c.half"], **part} for part in ({"a": torch.ones(1)}, {"b": torch.ones(2)})]
    lines = [line for half in halves for line in tensor_lines(half)]
    assert weights_digest(lines) == weights_digest(tensor_lines(halves[0] | halves[1]))
    other = tensor_lines({"shared": STATE["c.half"] * 2})
    assert weights_digest([*lines, *other]) != weights_digest(lines)


@pytest.mark.parametrize(
    "change",
    [
        {"b.weight": torch.arange(6.0).reshape(3, 2)},
        {"b.weight": torch.arange(6.0).reshape(2, 3).nextafter(torch.tensor(9.0))},
        {"a.count": torch.tensor(3, dtype=torch.int32)},
        {"c.half": torch.ones(2).half()},
        {"d": torch.tensor(3)},
    ],
    ids=["shape", "last bit", "integer dtype", "float dtype", "name"],
)
def test_every_change_shows(change):
    assert weights_digest(tensor_lines(STATE | change)) != weights_digest(tensor_lines(STATE))
