"""The examples are run as a user runs them, on real processes where they need them."""

import os
import re
import runpy
import signal
import sys
from unittest.mock import patch

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from support.codec_contract import assert_within_bound
from support.codec_helpers import gaussian, roundtrip
from support.commands import TORCHRUN, started
from support.data_files import WORDS, write_tokenizer
from support.pages import ROOT
from support.processes import run
from support.scripts import on_two_processes, said
from thinwire.compress import CodecError, check, parse
from thinwire.models.data.tokenizer import make_tokenizer

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


@pytest.mark.processes
def test_own_loop_trains_and_sends_less(tmp_path):
    printed = on_two_processes(EXAMPLES / "own_loop.py", tmp_path)
    losses = [float(value) for value in re.findall(r"loss ([0-9.]+)", printed)]
    assert len(losses) == 40 and losses[-1] < 0.5 * losses[0], losses
    sent = {stage: int(sent) for stage, sent in re.findall(r"stage (\d) sent (\d+) bytes instead of 327680", printed)}
    assert sorted(sent) == ["0", "1"]
    assert all(bytes_sent < 327680 / 2.5 for bytes_sent in sent.values()), sent


def with_hook(rank):
    """Losses and bytes by codec, and those of torch's own mean."""
    known = runpy.run_path(str(EXAMPLES / "ddp_hook.py"))
    found = {codec: known["train"](codec) for codec in ("none", "q(4)")}
    DistributedDataParallel = known["train"].__globals__["DistributedDataParallel"]
    with patch.object(DistributedDataParallel, "register_comm_hook"):
        found["torch"] = known["train"]("none")
    return found


@pytest.mark.processes
def test_gradients_of_data_parallelism_travel_as_payloads():
    for found in run(with_hook, 2):
        assert found["none"][0] == found["torch"][0]
        assert found["none"][1] > 6 * found["q(4)"][1] > 0
        losses = found["q(4)"][0]
        assert losses[-1] < 0.3 * losses[0] and losses != found["none"][0]


def test_the_hook_does_not_scale_what_comes_later_anyway(alone):
    """randk sent ten times what it kept, as without error feedback, and training went nowhere."""
    known = runpy.run_path(str(EXAMPLES / "ddp_hook.py"))
    losses, _ = known["train"]("randk(0.1)")
    assert losses[-1] < 0.3 * losses[0], losses
    with pytest.raises(ValueError, match="error feedback of its own, and gathers payloads of one"):
        known["train"]("aqsgd(q(4))")


def test_gradients_that_overflow_once_spoil_no_later_ones(alone):
    """What the hook kept of them was NaN for good, and so were all later gradients."""
    known = runpy.run_path(str(EXAMPLES / "ddp_hook.py"))
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    model.register_comm_hook(known["Payloads"](parse("q(4)").codec), known["mean_of_payloads"])
    for factor in (1.0, torch.inf, 1.0):
        model.zero_grad()
        (model(torch.ones(2, 16)).sum() * factor).backward()
        assert all(bool(each.grad.isfinite().all()) == (factor == 1) for each in model.parameters())


@pytest.mark.parametrize(
    ("name", "told"), [("torchft_replicas", "give the number of this replica"), ("several_stages", "give a folder for")]
)
def test_an_example_without_its_arguments_says_what_to_give(name, told, monkeypatch):
    """It ended in a traceback."""
    if name == "torchft_replicas":
        pytest.importorskip("torchft", reason="torchft is not installed")
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=told):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


EXCHANGE = re.compile(r"replica \d  stage (\d)  exchange (\d+) of (\d)  sent (\d+) bytes  ([0-9a-f]{64})")


def exchanges(command):
    """What each stage of a replica has said of the exchanges that both have done: replicas, bytes so far, digest."""
    stages = {}, {}
    for stage, exchange, count, sent, digest in EXCHANGE.findall(command.stdout):
        stages[int(stage)][int(exchange)] = int(count), int(sent), digest
    return {exchange: (stages[0][exchange], stages[1][exchange]) for exchange in stages[0].keys() & stages[1].keys()}


@pytest.mark.processes
def test_a_replica_of_torchft_comes_back_after_a_kill_and_holds_the_weights_of_the_other(tmp_path):
    coordination = pytest.importorskip("torchft.coordination", reason="needs torchft: pip install torchft-nightly")
    # a replica on a busy machine may be late; it must not train alone then
    lighthouse = coordination.LighthouseServer("127.0.0.1:0", 1, 100_000, heartbeat_timeout_ms=5000)

    def replica(number):
        options = ["--standalone", "--max-restarts", "1", "--nproc-per-node", "2"]
        script = [EXAMPLES / "torchft_replicas.py", number, "q(4)", 100_000]
        return started([*TORCHRUN, *options, *script], tmp_path, TORCHFT_LIGHTHOUSE=lighthouse.address())

    try:
        with replica(0) as stays, replica(1) as dies:
            dies.wait_until(lambda: len(exchanges(dies)) > 10)
            os.kill(dies.stage_process(1), signal.SIGKILL)
            before = exchanges(dies)
            dies.wait_until(lambda: len(exchanges(dies)) > len(before) + 10)
            both = exchanges(dies)
            stays.wait_until(lambda: max(exchanges(stays)) >= max(both))
            first = exchanges(stays)
    finally:
        lighthouse.shutdown()
    began = min(first)  # it may be late, and begin with the weights of the other
    assert sorted(first) == list(range(began, max(first) + 1)), "the other one lost no exchange"
    assert any(count == 1 for (count, *_), _ in first.values()), "and went on alone"
    for number, stages in ((number, stages) for number, stages in both.items() if number >= began):
        for (count, _, digest), (count_of_first, _, digest_of_first) in zip(stages, first[number], strict=True):
            assert (count, digest) == (count_of_first, digest_of_first) and count == 2
    codec, shapes = parse("q(4)").codec, ([(64, 16), (64,)], [(1, 64), (1,)])
    last, end = max(both) - 5, max(both)
    for stage, own in enumerate(shapes):
        payload = sum(codec.nbytes(shape, torch.float32) for shape in own)
        assert both[end][stage][1] - both[last][stage][1] == 5 * payload


def several_stages(rank, folder, *steps):
    known = runpy.run_path(str(EXAMPLES / "several_stages.py"))
    return [known["train"](folder, count) for count in steps]


@pytest.mark.processes
def test_a_loop_of_several_stages_goes_on_as_if_it_had_not_stopped(tmp_path):
    _, [whole] = run(several_stages, 2, tmp_path / "whole", 12)
    _, [first, rest] = run(several_stages, 2, tmp_path / "stopped", 7, 12)
    assert len(whole) == 12 + 2 and whole[11] < 0.9 * whole[0], whole
    assert first[:7] + rest == whole


@pytest.mark.processes
def test_fine_tuning_starts_from_the_folder_and_ends_better(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=len(WORDS) + 5, n_positions=64, n_embd=32, n_layer=2, n_head=2, **ends)
    pretrained = GPT2LMHeadModel(config)
    folder = tmp_path / "pretrained"
    pretrained.save_pretrained(folder)
    write_tokenizer(folder, pairs=False)
    (tmp_path / "text").write_text(" ".join(WORDS * 200))
    options = ["--model.name", folder, "--data.tokenizer", folder, "--data.name", "text", "--optimizer.lr", "0.003"]
    script = [sys.executable, EXAMPLES / "fine_tune.py", tmp_path / "out", *options, "--training.steps", "20"]
    printed = said([*map(str, script)], tmp_path)
    assert "one held-out batch before training, compression on loss " in printed
    assert len(printed.splitlines()[-1].split()) > len(["The", "capital", "of", "France", "is"]), "it goes on"
    tuned = GPT2LMHeadModel.from_pretrained(tmp_path / "out" / "model")
    text = make_tokenizer(str(folder)).tokens([" ".join(WORDS * 4)])[None].long()
    with torch.no_grad():
        before, after = (model.eval()(text, labels=text).loss.item() for model in (pretrained, tuned))
    assert after < before - 0.5
    moved = (tuned.transformer.wpe.weight - pretrained.transformer.wpe.weight).abs().max().item()
    assert 0 < moved < 0.2, "the weights of the folder are where training starts"


def test_fine_tuning_says_before_training_where_it_has_exported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from fine_tune import fine_tune

    (tmp_path / "model").mkdir()
    with pytest.raises(SystemExit, match="model must be new, but an earlier run exported there; remove it"):
        fine_tune(tmp_path, ["--overwrite"])


def test_own_codec_keeps_the_rules(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from own_codec import Ternary

    check(Ternary())
    check(Ternary(threshold=0.0))


def test_own_codec_trains_a_recipe(tmp_path):
    script = (EXAMPLES / "own_codec.py").read_text().replace('"20"', '"2", "--data.limit", "40000"')
    (tmp_path / "own_codec.py").write_text(script)
    printed = said([sys.executable, "own_codec.py"], tmp_path, COLUMNS="200")
    rows = re.findall(r"ef\(own_codec\.Ternary\).* ([0-9.]+) +0 *$", printed, re.MULTILINE)
    [bits] = {float(bits) for bits in rows}
    assert 1.6 < bits < 1.8, printed


@pytest.mark.parametrize(
    "expression",
    [
        'sums.Sum("low_rank.LowRank(2)", "q(2)")',
        "low_rank.LowRank(2)",
        'sums.Sum("topk(0.1)", "q(2)")',
        'sums.Sum("randk(0.1)", "q(2)")',
        "dither.Dither(2)",
        'dither.Dither(8, per="tensor")',
        'dither.Dither(4, code="entropy")',
        "allocate.Allocate(4, 8)",
        "allocate.Allocate(2, 16)",
        "auto_grid.Auto(2)",
        'auto_grid.Auto(4, code="entropy")',
        "short_scales.ByteScales(4, group=32)",
        "short_scales.ShortRanges(4, group=32)",
        "normal.Normal(2)",
        'normal.Normal(4, per="channel", code="entropy")',
        'rotated.Rotated("q(4)")',
        "rotated.Rotated(\"q(3, scale='minmax', code='entropy')\")",
        "tah_quant.TahQuant()",
        "tah_quant.TahQuant(high=8, low=2, tile=16, low_share=0.5)",
    ],
)
def test_the_codecs_in_examples_keep_the_rules(expression, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "codecs")
    check(parse(expression))


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        # it was parsed as Sum("q(4)", "q(2)"), which has no feedback, or never came to an end
        ('sums.Sum("ef(q(4))", "q(2)")', "without feedback or reuse, got ef(q(4))"),
        ('sums.Sum("q(4)", "ef(q(2))")', "without feedback or reuse, got ef(q(2))"),
        ("allocate.Allocate(4, group=7)", "a group of a multiple of 8, got allocate.Allocate(4, 7)"),
        ("allocate.Allocate(8, 64)", "needs 2 to 7 bits and"),
        ("tah_quant.TahQuant(tile=48, low_share=1.0)", "needs a tile of a power of two, got"),
    ],
)
def test_the_codecs_in_examples_refuse_what_they_cannot_do(expression, said, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "codecs")
    with pytest.raises(CodecError, match=re.escape(said)):
        parse(expression)


def test_a_sum_at_the_end_of_fp16_stays_finite(monkeypatch):
    """One step of the second codec beyond 65504 became infinity."""
    monkeypatch.syspath_prepend(EXAMPLES / "codecs")
    codec, x = parse('sums.Sum("fp8", "q(1)")'), gaussian(4, 33).clamp(-1, 1).mul(65504).half()
    assert_within_bound(codec, x, roundtrip(codec, x))


def test_tah_quant_rotates_tiles_of_one_outlier_and_gives_varied_rows_more_bits(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "codecs")
    codec, x = parse("tah_quant.TahQuant()").codec, gaussian(1, 10, 128)
    x[0, (3, 5), 70] = 100.0  # alone in its tile, so these two rows vary least
    assert 8 * codec.nbytes((2, 128, 576), torch.float32) / (2 * 128 * 576) == pytest.approx(4.416, abs=0.001)

    def errors(expression):
        return (roundtrip(parse(expression).codec, x) - x).square().mean(-1).sqrt()[0]

    found, same = errors("tah_quant.TahQuant()"), errors("tah_quant.TahQuant(low_share=0.0)")
    low = torch.tensor([row in (3, 5) for row in range(10)])
    assert torch.equal(found != same, low)
    assert (found[low] > 1.7 * same[low]).all(), "3 bits where the others have 4"
    assert (same[low] < 0.5 * errors('q(4, group=64, grid="midtread")')[low]).all(), "rotated"
