"""`check` finds each rule that a codec breaks, and none that it keeps."""

import re

import pytest
import torch

from support.own_code import add_module
from thinwire.compress import CodecError, ContractError, check, parse
from thinwire.compress.codecs.quantize import Quantize
from thinwire.compress.feedback import DifferenceFeedback, ErrorFeedback

KEEPS = ["none", "fp16", "bf16", "fp8", "q(1)", "q(4)", 'q(3, scale="minmax", per="channel")', "q(4, group=5)"]
KEEPS += ['q(4, round="stochastic")']
KEEPS += ["topk(0.1)", "topk(0.3)", 'topk(0.1, values="q(4)")', "randk(0.1)"]
KEEPS += ['q(4, code="entropy")', 'fp8(code="entropy")', "q(8, step=0.2)"]

SIGN = '''
from dataclasses import dataclass
from math import prod

import torch

from thinwire.compress import Codec, CodecError


@dataclass(frozen=True, repr=False)
class Halved(Codec):
    """float32 as fp16."""

    factor: float = 1.0

    def nbytes(self, shape, dtype):
        if not dtype.is_floating_point:
            raise CodecError("floating-point only")
        return 2 * prod(shape)

    def error_bound(self, x):
        return x.float().abs() * 2**-7 + 1e-7

    def _encode(self, x, out, key, shared):
        out.copy_(x.half().contiguous().view(-1).view(torch.uint8))

    def _decode(self, payload, out, key, shared):
        out.copy_(payload.clone().view(torch.float16).view(out.shape))
'''
BROKEN = {
    "an int of bytes": (
        "    def nbytes(self, shape, dtype): return 2.0 * prod(shape)",
        "Own's nbytes must return the number",
    ),
    "a byte short": (
        "    def nbytes(self, shape, dtype): return max(0, 2 * prod(shape) - 1)",
        "Own's nbytes must be the number of bytes that _encode writes, got 1 for float32 [], where it writes 2",
    ),
    "a failing encoder": (
        "    def _encode(self, x, out, key, shared): raise RuntimeError('no')",
        "Own's _encode failed for float32 []: RuntimeError: no",
    ),
    "bytes of nothing": (
        """
    def nbytes(self, shape, dtype): return 2 * prod(shape) + 2
    def _encode(self, x, out, key, shared): super()._encode(x, out[2:], key, shared); out[:2] = 0
    def _decode(self, payload, out, key, shared): super()._decode(payload[2:], out, key, shared)""",
        "Own must send 0 bytes of a tensor without elements: 2 bytes for float32 [0]",
    ),
    "bytes beyond those used": (
        """
    varies = True
    def used(self, payload): return len(payload) // 2""",
        "Own must decode from the bytes that are used: other bytes are read for float32",
    ),
    "bytes left out": (
        """
    def _encode(self, x, out, key, shared):
        before = out[:1].clone()
        super()._encode(x, out, key, shared)
        out[:1] = before""",
        "Own must write its whole payload and nothing else: another payload where the buffer held other bytes",
    ),
    "an input that is changed": (
        "    def _encode(self, x, out, key, shared): super()._encode(x, out, key, shared); x.mul_(2)",
        "Own must leave the tensor that it encodes as it is: it was changed for float32 []",
    ),
    "the layout of memory": (
        """
    def _encode(self, x, out, key, shared):
        flat = x.half().as_strided((x.numel(),), (1,)) if x.dim() > 1 else x.half().view(-1)
        out.copy_(flat.contiguous().view(torch.uint8))""",
        "Own must encode a tensor of any strides alike: another payload from other strides for float32 [",
    ),
    "a running generator": (
        "    def _encode(self, x, out, key, shared): super()._encode(x + torch.rand(x.shape) * 1e-3, out, key, shared)",
        "Own must draw random numbers from the key alone: ",
    ),
    "a part of the output": (
        """
    def _decode(self, payload, out, key, shared):
        before = out.view(-1)[:1].clone()
        super()._decode(payload, out, key, shared)
        out.view(-1)[:1] = before""",
        "Own must fill the decoded tensor from the payload alone: ",
    ),
    "a bound that is too small": (
        "    def error_bound(self, x): return torch.zeros(())",
        "Own must keep its error_bound: an error of ",
    ),
    "a bound that is far too large": (
        "    def error_bound(self, x): return 1000 * super().error_bound(x)",
        "Own must keep its error_bound near its errors: the largest error is 6",
    ),
    "a bound that is none": (
        "    def error_bound(self, x): return x.new_full(x.shape, torch.inf)",
        "Own must keep its error_bound: error_bound is not finite where every value is",
    ),
    "a bound of another type": (
        "    def error_bound(self, x): return 0.1",
        "Own must keep its error_bound: error_bound must return a tensor, got float",
    ),
    "a NaN that is hidden": (
        "    def _encode(self, x, out, key, shared): super()._encode(x.nan_to_num(), out, key, shared)\n"
        "    def error_bound(self, x): return x.float().nan_to_num().abs() * 2**-7 + 1e-7",
        "Own must keep its error_bound: NaN or infinity became a finite number for float32 [4, 33], with a NaN",
    ),
    "damaged bytes": (
        """
    def _decode(self, payload, out, key, shared):
        super()._decode(payload, out, key, shared)
        if not out.isfinite().all():
            torch.zeros(3)[payload[:1].long() + 3]""",
        "Own must decode damaged bytes to something, or raise CodecError: IndexError: index",
    ),
    "another length": (
        """
    def decode(self, payload, out, key, shared=None):
        if out.numel(): self._decode(payload[: 2 * out.numel()], out, key, shared)""",
        "Own must refuse a payload of another length: ",
    ),
    "too few parameters": (
        "    def _encode(self, x, out): pass",
        "Own's _encode must take (self, x, out, key, shared): too many positional arguments",
    ),
    "no float32": (
        """
    def nbytes(self, shape, dtype): raise CodecError("never")""",
        "Own must take a float32 tensor of some shape, and refused all",
    ),
}


@pytest.fixture
def own(monkeypatch):
    """A codec of one's own with these methods."""

    def made(methods, decorator="@dataclass(frozen=True, repr=False)"):
        text = f"{SIGN}\n\n{decorator}\nclass Own(Halved):\n{methods}\n"
        return add_module(monkeypatch, "own_rules", text).Own()

    return made


@pytest.mark.slow
@pytest.mark.parametrize("expression", KEEPS)
def test_codecs_of_thinwire_keep_the_rules(expression):
    check(parse(expression))


def test_a_codec_of_ones_own_keeps_them(own):
    check(own("    pass"))


@pytest.mark.parametrize(("methods", "said"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_a_sentence(own, methods, said):
    with pytest.raises(ContractError) as caught:
        check(own(methods))
    assert any(mistake.startswith(f"own_rules.{said}") for mistake in caught.value.mistakes), str(caught.value)
    assert len(caught.value.mistakes) <= 4, "each rule is told once"
    assert "\n" not in caught.value.mistakes[0]


def test_all_broken_rules_are_told_at_once(own):
    with pytest.raises(ContractError) as caught:
        check(own(BROKEN["an input that is changed"][0] + "\n" + BROKEN["a bound that is too small"][0]))
    changed, beyond = caught.value.mistakes
    assert "it was changed" in changed and "other tensors" in changed
    assert "an error of" in beyond


def test_a_text_and_a_class_are_no_codecs(own):
    for given, made in (("q(4)", "parse(text), got 'q(4)'"), (type(own("    pass")), "Own(), got <class")):
        with pytest.raises(ContractError) as caught:
            check(given)
        assert str(caught.value).startswith(f"check takes a codec or a feedback rule, such as {made}")


def test_a_class_that_is_not_frozen_is_told(own):
    with pytest.raises(ContractError, match=r"own_rules\.Own must have the decorator"):
        check(own("    pass", decorator=""))


USES = {
    "own_rules.Own('x')": "own_rules.Own's factor must be a number, got 'x'",
    "own_rules.Own(factor=True)": "own_rules.Own's factor must be a number, got True",
    "own_rules.Own(nothing=1)": "unexpected keyword argument 'nothing'",
}


@pytest.mark.parametrize(("expression", "said"), USES.items())
def test_a_wrong_argument_in_an_expression_is_one_sentence(own, expression, said):
    own("    pass")
    with pytest.raises(CodecError, match=said.replace("(", r"\(")):
        parse(expression)


@pytest.mark.parametrize("broken", ["an int of bytes", "a byte short", "a failing encoder", "too few parameters"])
def test_an_expression_of_a_broken_codec_is_refused_before_it_is_used(own, broken):
    methods, said = BROKEN[broken]
    own(methods)
    with pytest.raises(CodecError) as caught:
        parse("ef(own_rules.Own)")
    assert str(caught.value).startswith(f"own_rules.{re.split(' for |, got', said)[0]}")
    assert "\n" not in str(caught.value)


def test_a_codec_may_write_itself_into_its_refusal(monkeypatch):
    """The expression made another instance, which refused its arguments in the same words, and so on."""
    refusal = """    steps: int = 1

    def __post_init__(self):
        if self.factor > 2:
            raise CodecError(f"factor must be at most 2, got {self}")
"""
    add_module(monkeypatch, "own_rules", SIGN.replace("factor: float = 1.0", "factor: float") + refusal)
    for expression in ("own_rules.Halved(3)", "own_rules.Halved(3, steps=4)"):
        with pytest.raises(CodecError, match=f"^factor must be at most 2, got {re.escape(expression)}$"):
            parse(expression)
    assert str(parse("own_rules.Halved(2.0, steps=4)")) == "own_rules.Halved(2.0, steps=4)"


def test_an_argument_that_is_a_list_is_one_sentence(own):
    """A TypeError told that it is unhashable, from a cache of sizes."""
    codec, said = own("    widths: object = (1, 2)"), "own_rules.Own's arguments must be hashable, such as a tuple in"
    assert str(parse("own_rules.Own(widths=(3,))")) == "own_rules.Own(widths=(3,))"
    for act in (lambda: parse("own_rules.Own(widths=[3])"), lambda: check(type(codec)(widths=[3]))):
        with pytest.raises(ContractError, match=said):
            act()


def test_a_codec_may_refuse_a_shape(own):
    own("    def nbytes(self, shape, dtype):\n        raise CodecError('only images')")
    assert str(parse("own_rules.Own")) == "own_rules.Own"


RULES = ["ef(q(4))", "ef(topk(0.1), decay=0.95)", "efmixed(topk(0.1))", "ef21(q(2))", "aqsgd(q(4))", "ef(fp16)"]


@pytest.mark.parametrize("text", RULES)
def test_every_rule_of_feedback_is_kept(text):
    check(parse(text))


class Half(DifferenceFeedback):
    name = "half"

    def advance(self, message, decoded, buffer):
        buffer.add_(decoded, alpha=0.5)


class Both(Half):
    name = "both"

    def receive(self, decoded, buffer):
        decoded.mul_(0.5).add_(buffer)


class Reading(ErrorFeedback):
    name = "reading"
    forgets = True

    def advance(self, message, decoded, buffer):
        torch.sub(message + buffer, decoded, out=buffer)


class Writing(ErrorFeedback):
    name = "writing"

    def write_message(self, x, buffer, out):
        torch.add(x, buffer.add_(1), out=out)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Half, "half's receive must make of a message what advance makes of the sender's buffer, or the ends part"),
        (Reading, "reading's advance must not read the buffer, because forgets is True; set it to False"),
        (Writing, "writing's write_message and encode must leave the buffer as it is"),
        (Both, None),
    ],
)
def test_a_rule_whose_ends_part_is_told(made, said):
    """A rule with an advance of its own alone trained with other buffers at the two ends, and nobody said so."""
    if said is None:
        check(made(Quantize(4)))
        return
    with pytest.raises(ContractError, match=re.escape(said)):
        check(made(Quantize(4)))
