"""Expressions: what is read, what is written, and the sentence that answers each mistake."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.codec_helpers import few, said_by
from support.own_code import own_module
from thinwire.compress import CodecError, parse
from thinwire.compress.codecs.cast import BFloat16, Float16, Uncompressed
from thinwire.compress.codecs.quantize import Quantize
from thinwire.compress.expression import CODECS

quantizers = st.builds(
    Quantize,
    st.integers(1, 8),
    scale=st.sampled_from(["absmax", "minmax"]),
    per=st.sampled_from([None, "tensor", "sample", "row", "channel"]),
    round=st.sampled_from(["nearest", "stochastic"]),
) | st.builds(Quantize, st.integers(1, 8), scale=st.sampled_from(["absmax", "minmax"]), group=st.integers(1, 10**6))


@pytest.mark.parametrize(
    ("expression", "codec", "written"),
    [
        ("none", Uncompressed(), "none"),
        ("fp16", Float16(), "fp16"),
        ("bf16()", BFloat16(), "bf16"),
        (" q( 4 ) ", Quantize(4), "q(4)"),
        ("q(bits=4)", Quantize(4), "q(4)"),
        ('q(4, per="row", scale="absmax")', Quantize(4), "q(4)"),
        ("q(4, per=None, group=None)", Quantize(4), "q(4)"),
        ("q(4, group=64)", Quantize(4, group=64), "q(4, group=64)"),
        (
            "q(2, round='stochastic', per='tensor', scale='minmax')",
            Quantize(2, scale="minmax", per="tensor", round="stochastic"),
            'q(2, scale="minmax", per="tensor", round="stochastic")',
        ),
    ],
)
def test_reading_and_writing(expression, codec, written):
    assert parse(expression) == codec
    assert str(codec) == repr(codec) == written


@pytest.mark.slow
@few
@given(quantizers)
def test_every_quantizer_is_read_as_it_is_written(codec):
    assert parse(str(codec)) == codec


def test_the_names_of_all_codecs_are_known():
    assert {"none", "fp16", "bf16", "q"} <= set(CODECS)


def test_different_codecs_are_not_equal():
    assert len({parse(text) for text in ("fp16", "bf16", "none", "q(4)", "q(3)", "q(4, group=4)")}) == 6


NO_CODEC = " is not a codec: write a name or a call, such as none or q(4)"
USAGE = "; write q(bits, scale, per, group, round, grid, step, codebook, code)"


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("", "''" + NO_CODEC),
        ("q(4", "'q(4'" + NO_CODEC),
        ("q(4, scale=1, scale=2)", "'q(4, scale=1, scale=2)' must name each argument, and only once"),
        ("q\x00", "'q\\x00'" + NO_CODEC),
        ("4", "'4'" + NO_CODEC),
        ("None", "'None'" + NO_CODEC),
        ("q(4) + 1", "'q(4) + 1'" + NO_CODEC),
        ("os.remove('x')", "\"os.remove('x')\"" + NO_CODEC),
        ("q(4)(2)", "'q(4)(2)'" + NO_CODEC),
        ("q(b)", "each argument of 'q(b)' must be a number, a quoted string or an expression"),
        (
            "q(4, scale=minmax)",
            "each argument of 'q(4, scale=minmax)' must be a number, a quoted string or an expression",
        ),
        ("q({[4]: 1})", "each argument of 'q({[4]: 1})' must be a number, a quoted string or an expression"),
        ("q(*[4])", "each argument of 'q(*[4])' must be a number, a quoted string or an expression"),
        ("q", "'q': missing a required argument: 'bits'" + USAGE),
        ("q(4, 'minmax')", "\"q(4, 'minmax')\": too many positional arguments" + USAGE),
        ("q(4, bits=4)", "'q(4, bits=4)': multiple values for argument 'bits'" + USAGE),
        ("q(4, axis=1)", "'q(4, axis=1)': got an unexpected keyword argument 'axis'" + USAGE),
        ("q(4, **{'per': 'row'})", "\"q(4, **{'per': 'row'})\" must name each argument, and only once"),
        ("fp16(1)", "'fp16(1)': too many positional arguments; write fp16"),
        ("q(0)", "q's bits must be an integer from 1 to 8, got 0"),
        ("q(-1)", "q's bits must be an integer from 1 to 8, got -1"),
        ("q(9)", "q's bits must be an integer from 1 to 8, got 9"),
        ("q(16)", "q's 16 bits are those of integers of a step, got none; write q(16, step=0.2), or q(8)"),
        ("q(4.0)", "q's bits must be an integer from 1 to 8, got 4.0"),
        ("q(True)", "q's bits must be an integer from 1 to 8, got True"),
        ("q('4')", 'q\'s bits must be an integer from 1 to 8, got "4"'),
        ('q(4, scale="max")', 'q\'s scale must be one of "absmax", "minmax", got "max"'),
        ("q(4, scale=2)", 'q\'s scale must be one of "absmax", "minmax", got 2'),
        ("q(4, scale=[])", 'q\'s scale must be one of "absmax", "minmax", got []'),
        ('q(4, per="batch")', 'q\'s per must be one of "tensor", "sample", "row", "channel", got "batch"'),
        ("q(4, per=['row'])", 'q\'s per must be one of "tensor", "sample", "row", "channel", got [\'row\']'),
        ('q(4, round="up")', 'q\'s round must be one of "nearest", "stochastic", got "up"'),
        ("q(4, group=0)", "q's group must be an integer of at least 1, got 0"),
        ("q(4, group=1.5)", "q's group must be an integer of at least 1, got 1.5"),
        ('q(4, per="row", group=64)', "q takes per or group, not both, got per='row' and group=64"),
    ],
)
def test_every_mistake_has_its_sentence(expression, sentence):
    assert said_by(expression) == sentence


@pytest.mark.parametrize("name", ["int4", "exit", "__import__", "zip"])
def test_an_unknown_name_is_answered_with_the_known_ones(name):
    for expression in (name, f"{name}()", f"{name}('os')"):
        with pytest.raises(CodecError) as error:
            parse(expression)
        start = f"unknown codec {name!r} in {expression!r}; the codecs are {', '.join(sorted(CODECS))}"
        assert str(error.value).startswith(start)


def test_an_argument_is_never_evaluated():
    with pytest.raises(CodecError):
        parse("q(__import__('os').remove('x'))")
    with pytest.raises(CodecError):
        parse("q(exit())")


@pytest.mark.parametrize("value", [4, None, Quantize(4)])
def test_only_text_is_parsed(value):
    with pytest.raises(CodecError) as error:
        parse(value)
    assert str(error.value) == f'a codec is written as text, such as "q(4)", got {value!r}'


OWN = """
from dataclasses import dataclass
from typing import ClassVar

from thinwire.compress import Codec
from thinwire.compress.codecs.quantize import Quantize
from thinwire.compress.feedback import ErrorFeedback


@dataclass(frozen=True, repr=False)
class Fine(Quantize):
    pass


@dataclass(frozen=True, repr=False)
class Twice(ErrorFeedback):
    pass


@dataclass(frozen=True, repr=False)
class Called(Quantize):
    name: ClassVar[str] = "called"


class Plain(Quantize):
    pass


class Unfinished(Codec):
    pass


class Other:
    pass


number = 3
"""


@pytest.fixture
def own_codecs(tmp_path, monkeypatch):
    """A module `own_codecs` in the current directory."""
    with own_module("own_codecs", OWN, tmp_path, monkeypatch):
        yield


@pytest.mark.usefixtures("own_codecs")
@pytest.mark.parametrize(
    "expression",
    ["own_codecs.Fine(4)", "own_codecs.Fine(2, group=64)", "ef(own_codecs.Fine(4))", "own_codecs.Twice(q(4))"],
)
def test_a_class_of_ones_own_is_written_by_its_path(expression):
    method = parse(expression)
    assert str(method) == expression
    assert parse(str(method)) == method
    assert method != parse("q(4)")


@pytest.mark.usefixtures("own_codecs")
@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("own_codecs.Coarse(4)", "module own_codecs has no 'Coarse'"),
        ("own_codecs.dataclass(4)", "'own_codecs.dataclass(4)'" + NO_CODEC),
        ("own_codecs.ClassVar", "'own_codecs.ClassVar'" + NO_CODEC),
        ("own_codecs.Other(4)", "own_codecs.Other must be a class that extends thinwire.compress.Codec or Feedback"),
        ("own_codecs.number", "'own_codecs.number'" + NO_CODEC),
        ("own_codecs.Called(4)", "the name of own_codecs.Called in expressions is called; write that"),
        ("own_codecs.Plain(4)", "own_codecs.Plain must have the decorator @dataclass(frozen=True, repr=False)"),
        ("own_codecs.Unfinished", "own_codecs.Unfinished must define _decode, _encode, error_bound, nbytes"),
        ("no_codecs.Fine(4)", "module no_codecs of 'no_codecs.Fine(4)' cannot be imported, from "),
        ("own_codecs.Fine(9)", "own_codecs.Fine's bits must be an integer from 1 to 8, got 9"),
    ],
)
def test_a_mistake_in_a_class_of_ones_own_is_one_sentence(expression, answer):
    with pytest.raises(CodecError) as error:
        parse(expression)
    assert answer in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("topkk(0.1)", "unknown codec 'topkk' (did you mean topk?) in 'topkk(0.1)'; "),
        ("aqsg(q(4))", "unknown codec 'aqsg' (did you mean aqsgd?) in 'aqsg(q(4))'; "),
        ("Q(4)", "unknown codec 'Q' (did you mean q?) in 'Q(4)'; "),
        ("own:Fine(4)", "'own:Fine(4)'" + NO_CODEC + "; a codec of your own is written with a dot: own.Fine"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_right_one(expression, said):
    with pytest.raises(CodecError) as error:
        parse(expression)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (
            'q(9, scale="x", round="y", per="z")',
            ["bits", "scale", "round", "per"],
        ),
        ('q(9, per="z")', ["bits", "per"]),
        ('topk(2, values="x")', ["fraction", "values"]),
        ('ef(q(4), slot="x", store="y", store_bits=3)', ["store_bits", "slot", "store"]),
        ("ef(q(9), store=topk(2))", ["bits", "fraction"]),
    ],
)
def test_all_mistakes_in_an_expression_are_told_at_once(expression, words):
    with pytest.raises(CodecError) as error:
        parse(expression)
    assert [mistake.split("'s ")[1].split()[0] for mistake in error.value.mistakes] == words
