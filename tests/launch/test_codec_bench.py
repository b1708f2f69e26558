import json
import math
from pathlib import Path

import pytest
import torch

from thinwire.compress import parse
from thinwire.compress.expression import CODECS
from thinwire.launch import cli
from thinwire.launch.bench.codecs import trial
from thinwire.launch.bench.codecs.capture import Passage, snapshots
from thinwire.launch.bench.codecs.command import EXAMPLES, captured, default_codecs, gaussian, parse_method
from thinwire.launch.bench.codecs.trial import FeedbackTrial, _key, quality
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.run import recipe
from thinwire.launch.shared.tables import read_document
from thinwire.models.data.sampler import Sampler
from thinwire.models.layers import build_stage
from thinwire.models.tasks import LanguageModeling
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.wire.boundary import Sender

pytestmark = pytest.mark.slow

RECIPE = """
model:
  name: gpt2
  config:
    {vocab_size: 256, n_layer: 2, n_embd: 16, n_head: 2, n_positions: 16, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}
data: {name: TEXT, block_size: 16, held_out: 0.2}
pipeline: {num_stages: 3, schedule: 1f1b, num_microbatches: 3, microbatch_size: 2}
compression: {activations: q(1), gradients: "ef(topk(0.1))", boundaries: {1: {activations: q(2)}}}
optimizer: {lr: 0.1}
"""
STAGES, MICROBATCHES = 3, 3
EVERY_PASSAGE = [
    Passage(boundary, channel, microbatch, 0)
    for boundary in range(STAGES - 1)
    for channel in ("activations", "gradients")
    for microbatch in range(MICROBATCHES)
]


@pytest.fixture
def tiny(tmp_path):
    """The path of a recipe as small as can be."""
    (tmp_path / "text").write_bytes(b"some words, many times; " * 83)
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.replace("TEXT", str(tmp_path / "text")))
    return str(path)


@pytest.fixture
def quick(tiny, monkeypatch):
    """A command line that ends within a second, but for the codecs."""
    monkeypatch.setattr(trial, "MEMCPY_BYTES", 2**16)
    return ["codecs", "--recipe", tiny, "--steps", "1", "--rounds", "1", "--threads", "1", "--elements", "8192"]


def unsplit(wanted):
    """What crosses in the first step, computed by autograd alone: passage -> tensor."""
    prepared = prepare(wanted)
    samples = prepared.data.training
    stages = [build_stage(prepared.blueprint, cut, seed=wanted.training.seed) for cut in prepared.cuts]
    ids = Sampler(len(samples), wanted.pipeline.batch_size, wanted.training.seed).batch(0).ids
    task, crossed = LanguageModeling(), {}
    valid = task.num_valid(samples.targets(ids))
    for microbatch, part in enumerate(ids.chunk(MICROBATCHES)):
        x, crossing = samples.inputs(part, 0), []
        for stage in stages:
            x = stage(x)
            crossing.append(x)
        gradients = torch.autograd.grad(task.loss_sum(x, samples.targets(part)) / valid, crossing[:-1])
        for boundary, gradient in enumerate(gradients):
            crossed[Passage(boundary, "activations", microbatch, 0)] = crossing[boundary].detach()
            crossed[Passage(boundary, "gradients", microbatch, 0)] = gradient
    return crossed


def test_what_is_captured_is_what_an_unsplit_model_computes(tiny):
    wanted = recipe.parse([tiny])
    passages, expected = snapshots(wanted, [1])[1], unsplit(wanted)
    assert list(passages) == EVERY_PASSAGE
    assert expected.keys() == passages.keys()
    for passage, tensor in passages.items():
        assert tensor.shape == (2, 16, 16)
        assert torch.equal(tensor, expected[passage]), passage


def test_the_last_step_is_captured_and_nothing_of_the_capture_remains(tiny):
    wanted, send = recipe.parse([tiny]), Sender.send
    first, third = snapshots(wanted, [1, 3]).values()
    assert list(third) == EVERY_PASSAGE
    assert not any(torch.equal(first[passage], third[passage]) for passage in EVERY_PASSAGE)
    assert Sender.send is send
    assert not torch.distributed.is_initialized()


def test_a_recipe_of_one_stage_has_nothing_to_capture(tiny):
    wanted = recipe.parse([tiny, "--pipeline.num_stages", "1", "--compression.boundaries", "{}"])
    with pytest.raises(OptionsError, match="--recipe must have at least 2 stages, got tiny with 1: it sends nothing"):
        snapshots(wanted, [1])


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


@pytest.mark.parametrize("expression", ["randk(0.1)", "none", "bf16", "lowrank(2)"])
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
    for act in (rule.encode, rule.decode, rule.encode_alone, rule.decode_alone) * 2:  # as they are timed
        for _ in range(trial.CALLS):
            act()
    for encoder, decoder in zip(rule._encoders, rule._decoders, strict=True):
        assert encoder.buffers.digests() == decoder.buffers.digests()


def test_a_rule_for_activations_alone_is_not_measured_on_gradients():
    data = {name: [gaussian(2**13)] for name in ("activations", "gradients")}
    processor = trial.Processor(device="cpu", threads=1)
    _, results = trial.measure([], [parse("aqsgd(q(4))"), parse("ef21(q(4))")], data, [processor], 1)
    assert [(result.data, result.method) for result in results] == [
        ("activations", "aqsgd(q(4))"),
        ("activations", "ef21(q(4))"),
        ("gradients", "ef21(q(4))"),
    ]


def test_own_work_is_what_both_ends_do_beside_one_encode_and_two_decodes(monkeypatch):
    monkeypatch.setattr(trial, "_timed", lambda acts, processor, rounds: (10.0, [3.0, 2.0, 1.0, 0.5]))
    processor = trial.Processor(device="cpu", threads=1)
    (speed,) = trial.feedback_speeds([parse("ef21(q(4))")], [gaussian(2**13)], processor, 1)
    assert speed.own == (3 + 2 - (1 + 2 * 0.5)) / (1 + 2 * 0.5)
    assert (speed.encode, speed.decode) == (2**15 / 1e9 / 3, 2**15 / 1e9 / 2)


DATA = ("gaussian", "activations", "gradients")


def told_as_json(capsys, *arguments):
    """What `--json` says: the document, and its tables."""
    assert cli.main(["bench", *arguments, "--json"]) == 0
    text = capsys.readouterr().out
    title, found = read_document(text)
    assert title == "bench of codecs" and tuple(table.title.split(":")[0] for table in found) == DATA
    return json.loads(text, parse_constant=pytest.fail), found


def test_json_and_tables_of_feedback(quick, capsys):
    arguments = [*quick, "--codec", "ef21(q(4))", "ef(topk(0.1))"]
    told, tables = told_as_json(capsys, *arguments)
    assert not told["codecs"]
    methods = [(data, method) for data in DATA for method in ("ef21(q(4))", "ef(topk(0.1))")]
    assert [(one["data"], one["method"]) for one in told["feedback"]] == methods
    assert [row[0] for table in tables for row in table.rows] == [method for _, method in methods]
    for one in told["feedback"]:
        [speed] = [speed for speed in one["speeds"] if speed["processor"] == {"device": "cpu", "threads": 1}]
        assert speed["encode"] > 0 and speed["decode"] > 0 and math.isfinite(speed["own"])
    assert told["feedback"][0]["bits_per_element"] == 4 + 16 / 1024
    assert cli.main(["bench", *arguments]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["ef21(q(4))"]]
    assert rows == [["ef21(q(4))", "4.02"], ["ef21(q(4))", "5.00"], ["ef21(q(4))", "5.00"]]


def test_markdown_has_a_table_of_codecs_and_one_of_feedback_for_each_kind_of_data(quick, capsys):
    arguments = ["--codec", "q(4)", "none", "aqsgd(q(4))", "--threads", "1"]
    assert cli.main(["bench", *quick, "--markdown", *arguments]) == 0
    head, *parts = capsys.readouterr().out.split("\n\n")
    assert head.startswith("`thinwire bench codecs --recipe ")
    tables = [part.splitlines() for part in parts if part.startswith("|")]
    assert [table[0].split(" |")[0] for table in tables] == ["| codec", "| feedback"] * 2 + ["| codec"]
    assert tables[0][0].startswith("| codec | bits | x bound | SNR dB | enc 1 thread | dec 1 thread |")
    assert tables[0][3].startswith("| none | 32.00 | 1.000 | exact | ")
    assert tables[1][0].startswith("| feedback | bits | enc 1 thread | dec 1 thread | own 1 thread |")
    assert tables[1][2].startswith("| aqsgd(q(4)) | 4.02 | ")


def test_json_says_everything(quick, capsys):
    told, tables = told_as_json(capsys, *quick, "--codec", "q(4)", "none", "--codec", "topk(0.1)")
    assert told["torch"] == torch.__version__
    assert told["command"].startswith("thinwire bench codecs --recipe ")
    assert told["command"].endswith("--codec 'q(4)' none --codec 'topk(0.1)' --json")
    assert told["machine"]["cores"] >= 1
    codecs = [(data, codec) for data in DATA for codec in ("q(4)", "none", "topk(0.1)")]
    found = {(one["data"], one["codec"]): one for one in told["codecs"]}
    assert list(found) == codecs and [row[0] for table in tables for row in table.rows] == [name for _, name in codecs]
    for (_, codec), one in found.items():
        assert (one["quality"]["snr_db"] is None) == (codec == "none")
        assert (one["quality"]["of_entropy"] == 1.0) == (codec == "none")
        [speed] = [speed for speed in one["speeds"] if speed["processor"] == {"device": "cpu", "threads": 1}]
        assert min(speed["encode"], speed["decode"], speed["memcpy"]) > 0
    bits = {key: one["quality"]["bits_per_element"] for key, one in found.items()}
    assert bits["gaussian", "q(4)"] == 4 + 16 / 1024
    assert bits["activations", "q(4)"] == bits["gradients", "q(4)"] == 4 + 16 / 16


def test_the_table_has_a_row_for_each_codec_and_a_part_for_each_kind_of_data(quick, capsys):
    assert cli.main(["bench", *quick, "--codec", "q(4)", "q(8)"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "; memcpy" in line] == [
        "gaussian",
        "activations",
        "gradients",
    ]
    rows = [line.split()[:4] for line in lines if line.split()[:1] in (["q(4)"], ["q(8)"])]
    found = [quality(parse(f"q({bits})"), [gaussian(8192)]) for bits in (4, 8)]
    assert rows[:2] == [
        [f"q({bits})", f"{bits}.02", f"{of.of_entropy:.3f}", f"{of.snr_db:.1f}"]
        for bits, of in zip((4, 8), found, strict=True)
    ]
    assert len(rows) == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--codec", "q(9)"], "q's bits must be an integer from 1 to 8, got 9"),
        (["--codec", "zip"], "unknown codec 'zip' in 'zip'; the codecs are "),
        (["--codec", "reuse"], "reuse needs topk or randk on the activations"),
        (["--codec", "ef(reuse)"], "ef cannot go around reuse"),
        (["--codec", 'ef(q(4), store="disk")'], "thinwire bench codecs measures buffers in the host's memory, got "),
        (["--elements", "1000"], "--elements must be a multiple of 8192 (8 samples with rows of 1024), got 1000; see "),
        (["--steps", "0"], "argument --steps: must be a whole number of at least 1, got '0'; see thinwire bench "),
        (["--threads", "1,few"], "argument --threads: must be a whole number of at least 1, got 'few'; see "),
        (["--recipe", "nowhere"], "RECIPE must be a packaged name or the path of a YAML file, got 'nowhere'; known: "),
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
    assert told.out.startswith("usage: thinwire bench codecs ...\n       thinwire bench RECIPE ...\n")
    assert told.err == ""


def test_what_is_neither_codecs_nor_a_recipe_is_answered_with_the_recipes(capsys):
    assert cli.main(["bench", "codec"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("RECIPE must be a packaged name or the path of a YAML file, got 'codec'; known: ")


def test_several_recipes_are_captured_under_their_names(tiny):
    other = Path(tiny).with_name("other.yaml")
    other.write_text(Path(tiny).read_text())
    found = captured([tiny, str(other)], 1)
    assert list(found) == [
        f"{name} {channel}" for name in ("tiny", "other") for channel in ("activations", "gradients")
    ]
    assert len(found["other gradients"]) == 2 * MICROBATCHES
