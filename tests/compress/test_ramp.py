"""Codecs that change while training goes on: which codec a step uses, and that both ends know."""

import pytest
import torch

from support.codec_helpers import assert_identical, encode, gaussian, roundtrip, said_by
from support.coder_pair import ROWS, WIDTH, Pair, random
from thinwire.compress import CodecError, Progress, check, parse


def course(expression, steps, steps_per_epoch=4):
    """The codec of each step."""
    codec = parse(expression).codec
    return [str(codec.at(Progress(step, steps_per_epoch))) for step in range(steps)]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (
            'q(8 -> 4, over="2 epochs")',
            ["q(8)", "q(8)", "q(7)", "q(7)", "q(6)", "q(6)", "q(5)", "q(5)", "q(4)", "q(4)"],
        ),
        ('q(2 -> 4, over="3 steps")', ["q(2)", "q(2)", "q(3)", "q(4)", "q(4)"]),
        ('q(8 -> 2, over="1 step")', ["q(8)", "q(2)", "q(2)"]),
        (
            'nf(4 -> 3, rotate="hadamard", over="1 epoch")',
            ['nf(4, rotate="hadamard")'] * 4 + ['nf(3, rotate="hadamard")'],
        ),
        (
            'lowrank(3 -> 1, over="2 steps") + q(2 -> 1, over="3 steps")',
            ["lowrank(3) + q(2)", "lowrank(2) + q(2)", "lowrank(1) + q(2)", "lowrank(1) + q(1)"],
        ),
    ],
)
def test_the_number_goes_in_even_steps_from_the_first_to_the_last(expression, expected):
    assert course(expression, len(expected)) == expected
    codec = parse(expression)
    assert str(codec) == repr(codec) == expression and parse(str(codec)) == codec
    assert {*expected} <= {str(variant) for variant in codec.variants}


def test_arrows_are_read_with_and_without_spaces_and_not_inside_quotes():
    assert parse("q(8->4,over='2 epochs')") == parse('q(bits=8 -> 4, over="2 epochs")')
    assert str(parse("ef(q( 8 ->4 , over='2 epochs'))")) == 'ef(q(8 -> 4, over="2 epochs"))'
    with pytest.raises(CodecError, match='got "a->b"'):
        parse('q("a->b")')


def test_without_a_point_in_training_it_is_the_codec_at_the_end():
    codec = parse('q(8 -> 3, over="5 steps")')
    x = gaussian(4, 30)
    check(codec)
    assert_identical(encode(codec, x), encode("q(3)", x))
    assert_identical(roundtrip(codec, x), roundtrip("q(3)", x))


@pytest.mark.parametrize("rule", ["{}", "ef({})", "ef21({})", "aqsgd({})"])
def test_both_ends_use_the_codec_of_the_step(rule):
    changing = 'q(8 -> 2, over="6 steps")'
    pair, samples = Pair(rule.format(changing)), list(range(ROWS))
    pair.carry(random(99), samples, progress=Progress(0, 1))
    for step, bits in enumerate([8, 7, 6, 5, 4, 3, 2, 2]):
        got = pair.carry(random(step), samples, step=step, progress=Progress(step, 1))
        assert pair.nbytes == parse(f"q({bits})").nbytes((ROWS, WIDTH), torch.float32)
        assert got.isfinite().all()
    assert pair.sender.capacity >= parse("q(8)").nbytes((ROWS, WIDTH), torch.float32)
    for kind in ("warmup", "eval-off"):
        pair.carry(random(1), samples, kind=kind)
        assert pair.nbytes == 4 * ROWS * WIDTH, "nothing is compressed, so no codec is asked for"


def test_evaluation_uses_the_codec_of_its_point_in_training():
    pair = Pair('q(6 -> 2, over="4 steps")')
    for done, bits in ((0, 6), (2, 4), (9, 2)):
        assert_identical(
            pair.carry(random(0), kind="eval-on", progress=Progress(done, 1)), roundtrip(f"q({bits})", random(0))
        )


def test_a_point_in_training_that_is_missing_is_asked_for():
    with pytest.raises(CodecError) as error:
        Pair('ef(q(6 -> 2, over="4 steps"))').carry(random(0))
    assert str(error.value) == (
        'q(6 -> 2, over="4 steps") depends on how far training is: say it with '
        "stage.begin(Pass(progress=thinwire.compress.Progress(...))) before each pass"
    )


ONLY = "only a whole number that comes first may change, got "


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("q(8 -> 4)", "'q(8 -> 4)' must say how long the change takes, such as q(8 -> 4, over=\"2 epochs\")"),
        ('q(8 -> 9, over="1 step")', "q's bits must be an integer from 1 to 8, got 9"),
        (
            'lowrank(1 -> 500, over="1 epoch")',
            'a codec may change up to 255 times, got lowrank(1 -> 500, over="1 epoch")',
        ),
        (
            " + ".join(['q(8 -> 1, over="1 step")'] * 3),
            "a sum may become up to 256 sums while its codecs change, got "
            + " + ".join(['q(8 -> 1, over="1 step")'] * 3),
        ),
        ('q(8 -> 8, over="1 step")', ONLY + 'q(8 -> 8, over="1 step")'),
        ('topk(0.5 -> 0.1, over="1 step")', ONLY + 'topk(0.5 -> 0.1, over="1 step")'),
        ('q(4, group=64 -> 32, over="1 step")', ONLY + 'q(4 -> 4, group=32, over="1 step")'),
        (
            'q(8 -> 4, over="0 epochs")',
            'over must be like "2 epochs" or "500 steps", got \'0 epochs\': q(8 -> 4, over="0 epochs")',
        ),
        (
            'q(8 >> 4, over="1 step")',
            "'q(8 >> 4, over=\"1 step\")' is not a codec: write a name or a call, such as none or q(4)",
        ),
        (
            'ef(q(8) -> q(4), over="1 step")',
            '\'ef(q(8) -> q(4), over="1 step")\': only a number may change, such as ef(q(8 -> 4, over="2 epochs"))',
        ),
        (
            'q(8 -> 4, clip="mse", over="1 step")',
            'q\'s clip="mse" is for 1 to 5 bits, as more gain nothing by it, got 8',
        ),
    ],
)
def test_every_mistake_has_its_sentence(expression, sentence):
    assert said_by(expression) == sentence
