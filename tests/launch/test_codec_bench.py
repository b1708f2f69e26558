import json
import math

import pytest
import torch

from thinwire.compress import parse
from thinwire.compress.expression import CODECS
from thinwire.launch import cli
from thinwire.launch.bench.codecs import trial
from thinwire.launch.bench.codecs.command import EXAMPLES, default_codecs, gaussian, parse_method
from thinwire.launch.bench.codecs.trial import FeedbackTrial, _key, quality
from thinwire.launch.shared.tables import read_document

pytestmark = pytest.mark.slow


@pytest.fixture
def quick(monkeypatch):
    """A command line that ends within a second, but for the codecs."""
    monkeypatch.setattr(trial, "MEMCPY_BYTES", 2**16)
    return ["codecs", "--rounds", "1", "--threads", "1", "--elements", "8192"]


@pytest.mark.parametrize(
    ("expression", "messages", "bits"),
    [
        ("none", [torch.ones(3, 5), torch.ones(7)], 32),
        ("none", [torch.ones(3, 5).bfloat16()], 16),
        ("q(4)", [gaussian(2**15)], 4 + 16 / 1024),
        ("q(4)", [gaussian(2**15)] * 3, 4 + 16 / 1024),
        ("q(3)", [torch.ones(2, 8, 192), torch.ones(1, 16, 96)], 3 + 16 * (16 + 16) / (16 * 192 + 16 * 96)),
        ('q(4, scale="minmax")', [gaussian(2**15)], 4 + 64 / 1024),
        ("topk(0.5)", [gaussian(2**15)], 1 + 16),
    ],
)
def test_bits_an_element_are_exact(expression, messages, bits):
    assert quality(parse(expression), messages).bits_per_element == bits


@pytest.mark.parametrize(
    ("expression", "low", "high"),
    [
        ("fp16", 72, 75),
        ("q(8)", 41.6, 42.6),
        ("q(4)", 17.5, 18.5),
        ("q(2)", 5.5, 6.5),
        ("topk(0.1)", 2.3, 2.7),
        ("randk(0.1)", -9.8, -9.3),
    ],
)
def test_snr_on_gaussian_data_lies_where_theory_has_it(expression, low, high):
    snr = quality(parse(expression), [gaussian(2**17)]).snr_db
    assert low < snr < high, snr


def test_noise_and_signal_are_summed_over_messages_before_their_ratio():
    loud, still = 100 * gaussian(2**13), torch.zeros(4, 8)
    assert quality(parse("q(4)"), [loud, still]).snr_db == quality(parse("q(4)"), [loud]).snr_db


def test_what_is_exact_has_no_snr():
    assert quality(parse("none"), [gaussian(2**13)]).snr_db is None
    assert quality(parse("topk(1.0)"), [gaussian(2**13)]).snr_db is None
    assert quality(parse("fp16"), [gaussian(2**13)]).snr_db is not None


@pytest.mark.parametrize("expression", ["topk(0.5)", "topk(1.0)"])
def test_a_bitmap_of_half_and_no_positions_of_all_meet_the_entropy_bound(expression):
    assert quality(parse(expression), [gaussian(2**15)]).of_entropy == 1.0


@pytest.mark.parametrize("values", ["fp32", "q(8)"])
def test_topk_is_set_against_the_entropy_of_positions_and_its_values(values):
    x = gaussian(2**17)
    n = 2**17 // 8
    k = round(0.1 * n)
    entropy = -(k / n * math.log2(k / n) + (1 - k / n) * math.log2(1 - k / n))
    bits_of_values = {"fp32": 32, "q(8)": 8 + 16 / k}[values]
    found = quality(parse(f'topk(0.1, values="{values}")'), [x])
    bound = entropy + k / n * bits_of_values
    assert found.of_entropy == pytest.approx(found.bits_per_element / bound, rel=1e-12)
    assert 1 < found.of_entropy < 1.05, found.of_entropy


@pytest.mark.parametrize(
    ("expression", "scale_bits"),
    [('q(4, per="tensor")', 16), ('q(3, per="tensor", scale="minmax")', 64)],
)
def test_codes_are_set_against_their_entropy(expression, scale_bits):
    """With one scale for all, values decoded differ where their codes do."""
    x, codec = gaussian(2**13), parse(expression)
    payload, decoded = torch.empty(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8), torch.empty_like(x)
    codec.encode(x, payload, _key(0))
    codec.decode(payload, decoded, _key(0))
    shares = decoded.view(torch.int32).unique(return_counts=True)[1].double() / x.numel()
    bound = scale_bits + x.numel() * -float((shares * shares.log2()).sum())
    found = quality(codec, [x])
    assert found.of_entropy == pytest.approx(8 * len(payload) / bound, rel=1e-9)
    assert found.of_entropy > 1.05


@pytest.mark.parametrize("expression", ["randk(0.1)", "none", "bf16"])
def test_values_count_as_they_are_sent(expression):
    assert quality(parse(expression), [gaussian(2**13)]).of_entropy == 1.0


def test_every_codec_that_stands_alone_is_measured_by_default():
    assert {parse_method(expression).name for expression in default_codecs()} == set(CODECS) - {"reuse"}
    assert len(default_codecs()) == len(set(default_codecs()))
    for expressions in EXAMPLES.values():
        assert set(expressions) <= set(default_codecs())


@pytest.mark.parametrize("expression", ["aqsgd(q(4))", "ef21(q(4))", "ef(topk(0.1))", "efmixed(topk(0.1))"])
def test_feedback_is_measured_at_later_visits_of_two_ends_that_agree(expression):
    method, messages = parse(expression), [gaussian(2**14), 3 * gaussian(2**13)]
    rule = FeedbackTrial(method, messages)
    assert rule.nbytes == sum(method.codec.nbytes(message.shape, torch.float32) for message in messages)
    for _ in range(trial.CALLS):  # as they are timed
        rule.encode()
        rule.decode()
    assert rule.nbytes == sum(method.codec.nbytes(message.shape, torch.float32) for message in messages)
    for encoder, decoder in zip(rule._encoders, rule._decoders, strict=True):
        assert encoder.buffers.digests() == decoder.buffers.digests()


def test_the_last_call_of_each_turn_counts(monkeypatch):
    """A clock that moves by what each act takes: the first calls of a turn take longer, and rounds differ."""
    now, calls = [0.0], {"encode": 0, "decode": 0}

    class Slow:
        def encode(self):
            calls["encode"] += 1
            now[0] += 9.0 if calls["encode"] % trial.CALLS else 1.0

        def decode(self):
            calls["decode"] += 1
            now[0] += 9.0 if calls["decode"] % trial.CALLS else 2.0 + calls["decode"] // trial.CALLS

    monkeypatch.setattr(trial.time, "process_time", lambda: now[0])
    monkeypatch.setattr(trial, "MEMCPY_BYTES", 2)
    memcpy, [spent] = trial.timed([Slow()], 1, 3)
    assert memcpy == 0.0 and spent == (1.0, 4.0), "the median of 3, 4 and 5"


COLUMNS = ["codec", "bits", "x bound", "SNR, dB", "encode, GB/s", "decode, GB/s"]


def test_one_table_has_a_row_for_each_codec_and_each_rule(quick, capsys):
    assert cli.main(["bench", *quick, "--codec", "q(4)", "none", "--codec", "ef21(q(4))", "--json"]) == 0
    text = capsys.readouterr().out
    told = json.loads(text, parse_constant=pytest.fail)
    title, [table] = read_document(text)
    assert title == "bench of codecs" and table.title == "codecs with 1 thread: Gaussian 8x1x1024"
    assert table.columns == COLUMNS
    assert told["torch"] == torch.__version__ and told["machine"]["cores"] >= 1
    assert told["command"].endswith("--codec 'q(4)' none --codec 'ef21(q(4))' --json")
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == ["q(4)", "none", "ef21(q(4))"]
    found = quality(parse("q(4)"), [gaussian(8192)])
    assert rows["q(4)"][:3] == [4 + 16 / 1024, found.of_entropy, found.snr_db]
    assert rows["none"][:3] == [32, 1.0, None], "all values come back"
    assert rows["ef21(q(4))"][:3] == [4 + 16 / 1024, None, None]
    assert all(row[-2] > 0 and row[-1] > 0 for row in rows.values())
    assert cli.main(["bench", *quick, "--codec", "q(4)", "q(8)"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith(" q(")][:2] == [
        ["q(4)", "4.016"],
        ["q(8)", "8.016"],
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--codec", "q(9)"], "q's bits must be an integer from 1 to 8, got 9"),
        (["--codec", "zip"], "unknown codec 'zip' in 'zip'; the codecs are "),
        (["--codec", "reuse"], "reuse needs topk or randk on the activations"),
        (["--codec", "ef(reuse)"], "ef cannot go around reuse"),
        (["--codec", 'ef(q(4), store="disk")'], "thinwire bench codecs measures buffers in the host's memory, got "),
        (["--elements", "1000"], "--elements must be a multiple of 8192 (8 samples with rows of 1024), got 1000"),
        (["--rounds", "0"], "argument --rounds: must be a whole number of at least 1, got '0'; see thinwire bench "),
        (["--threads", "few"], "argument --threads: must be a whole number of at least 1, got 'few'; see "),
        (["--color"], "unrecognized arguments: --color; see thinwire bench codecs --help"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, arguments, said):
    assert cli.main(["bench", "codecs", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(said)
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_bench_alone_says_what_can_be_measured(capsys, arguments):
    assert cli.main(["bench", *arguments]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("usage: thinwire bench codecs ...\n       torchrun ... -m thinwire bench ")
    assert told.err == ""


def test_what_is_neither_codecs_nor_a_recipe_is_answered_with_the_recipes(capsys):
    assert cli.main(["bench", "codec"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("RECIPE must be a packaged name or the path of a YAML file, got 'codec'; known: ")
