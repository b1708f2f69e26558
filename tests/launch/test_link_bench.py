"""`thinwire bench RECIPE` over real processes: what it compares, and what it says. How fast anything is, is no test."""

import json
import math
import os
import signal
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from support.commands import THINWIRE, hosts_of, started
from support.processes import run
from thinwire.launch import cli
from thinwire.launch.bench.links import contests
from thinwire.launch.bench.links.command import make_parser, pairs_of
from thinwire.launch.bench.links.contenders import Codecs, PlainTorch, Thinwire
from thinwire.launch.bench.links.results import Contest, simulated
from thinwire.launch.bench.links.worker import _batches
from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.run.recipe import packaged, parse
from thinwire.launch.shared.tables import Table
from thinwire.pipeline.devices import device
from thinwire.pipeline.devices.device import CPU
from thinwire.pipeline.measuring.meters import SECTIONS
from thinwire.pipeline.options.compression import FAST, MILD
from thinwire.pipeline.processes import collectives

CONFIG = '{"vocab_size": 256, "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.0, '
CONFIG += '"embd_pdrop": 0.0, "attn_pdrop": 0.0}'
SMALL = [
    *("quickstart", "--model.config", CONFIG, "--data.block_size", "16", "--data.limit", "5000"),
    *("--pipeline.num_stages", "2", "--pipeline.num_microbatches", "2", "--pipeline.microbatch_size", "2"),
]


def weights_after_two_steps(rank, kinds, folder):
    """Weights of this process's stage after the same two steps, by kind of contender."""
    plainly = ["--optimizer.name", "sgd", "--optimizer.warmup_steps", "0"]
    prepared = prepare(parse([*SMALL, *plainly], prog="thinwire bench"))
    where, found = real_placement(prepared.recipe), {}
    for kind in kinds:
        if kind == "thinwire":
            contender = Thinwire(prepared, where, rank, Codecs("none", "none"), folder)
            module = contender._trainer.stages[0].submod
        else:
            contender = PlainTorch(prepared, where, rank, kind, CPU)
            module = contender._modules[rank]
        for first in (0, 4):
            contender.step(torch.arange(first, first + 4))
        found[kind] = {name: tensor.clone() for name, tensor in module.full_state().items()}
    return found


@pytest.mark.processes
def test_plain_torch_trains_as_thinwire_does_uncompressed(tmp_path):
    kinds = ["thinwire", torch.float32, torch.bfloat16]
    for stage in run(weights_after_two_steps, 2, kinds, tmp_path):
        for name, ours in stage["thinwire"].items():
            torch.testing.assert_close(stage[torch.float32][name], ours, rtol=1e-5, atol=1e-7)
        moved = [not torch.equal(stage[torch.bfloat16][name], ours) for name, ours in stage["thinwire"].items()]
        assert any(moved), "bf16 on the wire changes nothing"


def rounds_in_turn(rank, folder):
    """By contender: the frames of each of its two rounds."""
    alone = ["--replicas.count", "2", "--replicas.sync.every", "4"]
    prepared = prepare(parse([*SMALL, "--pipeline.num_stages", "1", *alone], prog="thinwire bench"))
    where = collectives.connected(real_placement(prepared.recipe, rank), timedelta(seconds=30))
    contenders = {
        codec: Thinwire(prepared, where, rank, Codecs("none", "none", codec), folder / codec)
        for codec in ("none", "q(4)")
    }
    found = {codec: [] for codec in contenders}
    for codec, contender in [*contenders.items(), *contenders.items()]:
        found[codec].append(contender.step(torch.arange(prepared.recipe.batch_size)).frames)
    return found


@pytest.mark.processes
def test_each_round_has_the_frames_of_one_exchange(tmp_path):
    [found, _] = run(rounds_in_turn, 2, tmp_path)
    for frames, again in found.values():
        assert frames == again and {channel for _, channel, _, _ in frames} == {"parts"}


@pytest.mark.namespaces
@pytest.mark.usefixtures("can_make_hosts")
def test_every_contender_is_measured_at_every_bandwidth(capsys):
    arguments = [*SMALL, "--bandwidth", "50mbit", "--codec", "q(4)/q(8)", "aqsgd(q(2))/q(8)"]
    assert cli.main(["bench", *arguments, "--repetitions", "2", "--steps", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    speeds, sections, visits, conditions = map(Table.from_json, found["tables"])
    rows = [dict(zip(speeds.columns, row, strict=True)) for row in speeds.rows]
    names = ["none", "q(4)/q(8)", "aqsgd(q(2))/q(8)", "torch fp32", "torch bf16"]
    assert [(row["links"], row["who"]) for row in rows] == [
        (links, name) for links in ("unshaped", "50 Mbit/s") for name in names
    ]
    assert all(row["samples/s"] > 0 for row in rows)
    # a frame carries 2 x 16 rows of 16: bits, a bf16 scale a row, 64 bytes of header
    sizes = {"none": 2 * (32 * 16 * 4 + 64), "q(4)/q(8)": (64 + 64 + 256) + (64 + 64 + 512)}
    sizes["aqsgd(q(2))/q(8)"] = (64 + 64 + 128) + (64 + 64 + 512)
    assert {row["who"]: row["MB a step"] for row in rows if row["LIMIT"]} == {
        name: pytest.approx(2 * size / 1e6) for name, size in sizes.items()
    }
    assert {row[2] for row in sections.rows} == {0, 1} and len(visits.rows) == 2
    assert 0 < conditions.rows[1][1] < 55, "the goodput of 50 Mbit/s, which load makes less and nothing more"
    assert found["machine"]["cores"] >= 1
    assert found["command"].startswith("thinwire bench quickstart --model.config ")


@pytest.mark.namespaces
@pytest.mark.usefixtures("can_make_hosts")
def test_replicas_are_measured_beside_their_limit(capsys):
    arguments = [*SMALL, "--replicas.count", "2", "--replicas.gradients", "ef(q(4))", "--bandwidth", "20mbit"]
    arguments += ["--replicas.overrides.1.compression.activations", "none"]
    assert cli.main(["bench", *arguments, "--codec", "q(4)/q(8)", "--repetitions", "1", "--steps", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    speeds, sections, exchanges, conditions = map(Table.from_json, found["tables"])
    rows = [dict(zip(speeds.columns, row, strict=True)) for row in speeds.rows]
    names = ["none", "q(4)/q(8)", "none, replicas ef(q(4))", "q(4)/q(8), replicas ef(q(4))"]
    assert [row[:3] for row in exchanges.rows[-4:]] == [
        ["20 Mbit/s", name, process] for name in names[2:] for process in (0, 1)
    ]
    assert all(row[3] > 0 and row[4] > 0 for row in exchanges.rows)
    assert [(row["links"], row["who"]) for row in rows] == [
        (links, name) for links in ("unshaped", "20 Mbit/s") for name in names
    ]
    assert all(row["samples/s"] > 0 and row["LIMIT"] > 0 for row in rows)
    sizes = [row["MB a step"] for row in rows[4:]]
    assert sizes == sorted(sizes, reverse=True)
    # frames as above, of two replicas; one of them sends its activations uncompressed
    compressed = 4 * (64 + 64 + 512) + 2 * (64 + 64 + 256) + 2 * (32 * 16 * 4 + 64)
    assert sizes[0] - sizes[1] == pytest.approx((8 * (32 * 16 * 4 + 64) - compressed) / 1e6)
    assert {row[2] for row in sections.rows} == {0, 1, 2, 3}
    assert 0 < conditions.rows[1][1] < 22, "the goodput of 20 Mbit/s"


def test_each_codec_between_replicas_is_a_contender():
    wanted = parse([*SMALL, "--replicas.count", "2", "--replicas.gradients", "bf16"], prog="thinwire bench")
    options = make_parser().parse_args(["--codec", "q(4)/q(8)", "--replica-codec", "ef(q(4))", "bf16"])
    assert {name: codecs.between for name, codecs in contests._contenders(options, wanted).items()} == {
        "none": "none",
        "q(4)/q(8)": "none",
        "none, replicas bf16": "bf16",
        "q(4)/q(8), replicas bf16": "bf16",
        "none, replicas ef(q(4))": "ef(q(4))",
        "q(4)/q(8), replicas ef(q(4))": "ef(q(4))",
    }


def test_samples_that_come_again_are_no_first_visit():
    """With few samples, the speed of AQ-SGD at its first visits was that of later ones."""
    some = SimpleNamespace(recipe=SimpleNamespace(batch_size=4), data=SimpleNamespace(training=range(9)))
    batches = _batches(some)
    taken = [next(batches) for _ in range(3)]
    assert [(ids.tolist(), new) for ids, new in taken] == [
        ([0, 1, 2, 3], True),
        ([4, 5, 6, 7], True),
        ([8, 0, 1, 2], False),
    ]
    told = measured(1000)
    told["turns"] = [
        {**turn, "new": new, "first": {**turn["first"], "seconds": seconds}}
        for turn in told["turns"]
        for new, seconds in ((True, 3.0), (False, 9.0))
    ]
    assert Contest(None, [told]).seconds("none", "first") == 3.0
    told["turns"] = told["turns"][1:]
    assert math.isnan(Contest(None, [told]).seconds("none", "first"))


def test_a_bandwidth_that_is_given_twice_is_measured_once():
    """All was measured, and then the two tables of one name were a traceback."""
    assert contests._bandwidths("100mbit,none,0.1gbit,50mbit") == [100.0, 50.0]


def test_replicas_of_one_stage_have_no_boundary_to_compress():
    alone = ["--pipeline.num_stages", "1", "--replicas.count", "2"]
    wanted = parse([*SMALL, *alone], prog="thinwire bench")
    options = make_parser().parse_args(["--replica-codec", "ef(q(4))"])
    options.codec = pairs_of(wanted, options.codec)
    assert list(contests._contenders(options, wanted)) == ["none", "none, replicas ef(q(4))"]


def test_without_codecs_those_of_the_recipe_take_turns_with_examples_that_suit_the_model():
    own = parse([*SMALL, "--codec", "ef(q(4))/bf16"], prog="thinwire bench")
    assert pairs_of(own, None) == ("ef(q(4))/bf16", *FAST)
    pretrained = parse(["smollm2-tiny"], prog="thinwire bench")
    assert pairs_of(pretrained, None) == ("q(8, step=0.2)/q(8, step=0.2)", *MILD), "few bits break it"


@pytest.mark.parametrize(
    ("processes", "size", "cores", "taken"),
    [
        (4, 2, 2, [0, 0, 1, 1]),  # a core for each replica, of whose stages some wait
        (4, 2, 4, [0, 1, 2, 3]),
        (4, 2, 3, [0, 0, 1, 1]),
        (8, 4, 4, [0, 1, 0, 1, 2, 3, 2, 3]),
        (6, 2, 2, [0, 0, 1, 1, 0, 0]),
        (4, 4, 2, [0, 1, 0, 1]),
        (2, 2, 8, [0, 1]),
    ],
)
def test_each_replica_has_cores_of_its_own_if_there_are_enough(processes, size, cores, taken):
    assert contests.core_of(processes, size, cores) == taken


def measured(nbytes, seconds=0.001):
    """What a process of the second stage or the first measured: compute, and frames of so many bytes."""
    compute = [[stage, task, seconds] for stage in (0, 1) for task in ("forward", "backward", "optimizer")]
    frames = [[0, channel, 2, 2 * nbytes] for channel in ("activations", "gradients")]
    links = [
        {"source": source, "target": target, "goodput": 1e6, "latency": 0.0, "duplex": 1.0}
        for source, target in ((0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0), (1, 3), (3, 1))
    ]
    sections = dict.fromkeys(SECTIONS, 0.0)
    step = {"seconds": 1.0, "sections": sections, "compute": compute, "frames": frames, "exchange": {}}
    return {"links": links, "turns": [{"contender": "none", "new": True, "first": step, "later": [step]}]}


@pytest.mark.slow
def test_the_limit_is_that_of_the_replica_with_the_longest_frames():
    prepared = prepare(parse([*SMALL, "--replicas.count", "2"], prog="thinwire bench"))

    def limit(*sizes):
        processes = [measured(nbytes) for nbytes in sizes for _ in range(2)]
        return simulated(Contest(None, processes, size=2), prepared, free_codecs=True)["none"]

    assert limit(1000, 9000) == limit(9000, 1000) == limit(9000, 9000) > limit(1000, 1000)


@pytest.mark.slow
def test_the_limit_waits_for_the_replica_that_computes_longest():
    prepared = prepare(parse([*SMALL, "--replicas.count", "2"], prog="thinwire bench"))

    def limit(*seconds):
        processes = [measured(1000, each) for each in seconds for _ in range(2)]
        return simulated(Contest(None, processes, size=2), prepared, free_codecs=True)["none"]

    assert limit(0.001, 0.05) == limit(0.05, 0.001) > 2 * limit(0.001, 0.001)


def test_an_exchange_is_that_of_the_replica_that_comes_last():
    """Two replicas of two stages, two steps: who comes first waits for the other, and that is no part of it."""

    def process(*steps):
        later = [{"exchange": {"encode": encode, "neighbour": wait, "wire": 1.0}} for encode, wait in steps]
        return {"links": [], "turns": [{"contender": "none", "later": later}]}

    first = [process((0.5, 8.0), (0.5, 0.0)), process((2.0, 0.0), (2.0, 0.0))]
    second = [process((0.7, 0.1), (0.9, 5.0)), process((9.0, 1.0), (9.0, 1.0))]
    assert Contest(None, [*first, *second], size=2).exchange_together("none") == pytest.approx([1.65, 3.0])


@pytest.mark.slow
def test_replicas_of_one_stage_have_a_limit():
    alone = ["--pipeline.num_stages", "1", "--replicas.count", "2", "--optimizer.max_grad_norm", "null"]
    prepared = prepare(parse([*SMALL, *alone], prog="thinwire bench"))
    processes = [measured(1000) for _ in range(2)]
    for process in processes:
        process["turns"][0]["later"][0]["frames"] = [[0, "gradients between replicas", 2, 2000]]
    stage = next(iter(prepared.build_all(real_placement(prepared.recipe), 0).values()))
    weights = sum(weight.numel() for weight in stage.parameters())
    # two micro-batches forward and back, half of the gradients twice at 1 MB/s in padded rows, and the optimizer
    seconds = simulated(Contest(None, processes, size=1), prepared, free_codecs=True)["none"]
    assert seconds == pytest.approx(2 * 0.002 + 2 * weights / 2 * 4 / 1e6 + 0.001, rel=0.04)


@pytest.mark.slow
def test_what_cannot_be_measured_is_a_sentence(capsys, monkeypatch):
    assert cli.main(["bench", *SMALL, "--codec", "zip"]) == 2
    assert "unknown codec 'zip'" in capsys.readouterr().err
    assert cli.main(["bench", *SMALL, "--replica-codec", "bf16"]) == 2
    assert "--replica-codec needs replicas" in capsys.readouterr().err
    assert cli.main(["bench", *SMALL, "--replicas.count", "2", "--replica-codec", "reuse"]) == 2
    assert "--replica-codec reuse: reuse needs the indices of an activation" in capsys.readouterr().err
    assert cli.main(["bench", *SMALL, "--compressed-only", "--codec", "none"]) == 2
    assert capsys.readouterr().err == "--compressed-only needs a --codec or a --replica-codec that compresses\n"
    assert cli.main(["bench", *SMALL, "--bandwidth", "fast"]) == 2
    assert "a bandwidth must be like 500kbit, 100mbit, 1gbit, or none, got 'fast'" in capsys.readouterr().err
    assert cli.main(["bench", *SMALL, "--pipeline.accumulation", "2", "--repetitions", "0", "--steps", "0"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split(" must be ")[0] for line in told[1:]] == ["--repetitions", "--steps"]
    assert told[0] == "a bench measures one pass in each step; set pipeline.accumulation to 1"
    assert cli.main(["bench", *SMALL, "--training.compile", "true"]) == 2
    assert "plain torch, whose layers are not compiled; set training.compile to false" in capsys.readouterr().err
    assert cli.main(["bench", *SMALL, "--pipeline.num_stages", "1"]) == 2
    assert "must give at least 2 processes, got 1" in capsys.readouterr().err
    alone = ["--pipeline.num_stages", "1", "--replicas.count", "2", "--compressed-only"]
    assert cli.main(["bench", *SMALL, *alone, "--codec", "q(4)/q(8)"]) == 2
    assert "--codec and --like need a boundary; leave them out" in capsys.readouterr().err
    assert cli.main(["bench", *SMALL, *alone]) == 2
    assert "--compressed-only needs a --codec or a --replica-codec" in capsys.readouterr().err
    assert cli.main(["bench", *SMALL, "--like", "aqsgd", "--bandwidth", "1gbit,2gbit"]) == 2
    said = (
        "--bandwidth with --like aqsgd must name bandwidths of its table, got 1gbit,2gbit; known: 10000mbit, 1000mbit, "
        "500mbit, 300mbit, 100mbit\n"
    )
    assert capsys.readouterr().err == said
    assert cli.main(["bench", *SMALL, "--bandwidth", "1gbit,0mbit"]) == 2
    assert "a bandwidth must be from 10kbit to 100gbit" in capsys.readouterr().err
    monkeypatch.setattr(device, "choose", lambda wanted: torch.device("cuda", 0))
    assert cli.main(["bench", *SMALL, "--training.device", "cuda", "--wire.transport", "nccl"]) == 2
    assert "a bench measures frames that cross its links; set wire.transport to gloo or zmq" in capsys.readouterr().err


def test_a_wrong_option_is_a_sentence(capsys):
    assert cli.main(["bench", *SMALL, "--steps", "two"]) == 2
    said = "argument --steps: must be a whole number, got 'two'; see thinwire bench --help\n"
    assert capsys.readouterr() == ("", said)


def test_a_recipe_named_codecs_is_reached_by_its_path(tmp_path, monkeypatch, capsys):
    assert "codecs" not in packaged(), "thinwire bench codecs measures codecs"
    (tmp_path / "codecs.yaml").write_text("pipeline: {num_stages: 1}")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "./codecs.yaml"]) == 2
    assert capsys.readouterr().err.startswith("a bench needs links: pipeline.num_stages and replicas.count")
    assert cli.main(["bench", "--help"]) == 0
    assert "thinwire bench ./codecs.yaml" in capsys.readouterr().out


def test_who_is_not_root_is_told_before_anything_is_prepared(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(contests, "prepare", lambda wanted: pytest.fail("prepared data and model"))
    assert cli.main(["bench", *SMALL]) == 1
    assert capsys.readouterr().err.startswith("a cluster needs root, ")


@pytest.mark.namespaces
@pytest.mark.usefixtures("can_make_hosts")
def test_a_bench_that_is_stopped_leaves_no_host(tmp_path):
    with started([*THINWIRE, "bench", *SMALL], tmp_path) as command:
        command.wait_until(lambda: len(hosts_of(command.process.pid)) == 3)
        command.process.terminate()
        assert command.wait() == 128 + signal.SIGTERM
    assert hosts_of(command.process.pid) == set()


@pytest.mark.namespaces
@pytest.mark.usefixtures("can_make_hosts")
def test_codecs_alone_at_one_ratio_of_the_table(capsys):
    arguments = [*SMALL, "--like", "aqsgd", "--bandwidth", "100mbit", "--compressed-only", "--codec", "q(2)/q(4)"]
    assert cli.main(["bench", *arguments, "--repetitions", "1", "--steps", "1", "--json"]) == 0
    speeds = Table.from_json(json.loads(capsys.readouterr().out)["tables"][0])
    rows = [dict(zip(speeds.columns, row, strict=True)) for row in speeds.rows]
    assert [row["who"] for row in rows[:-1]] == ["none", "q(2)/q(4)", "torch fp32", "torch bf16"]
    assert (rows[-1]["links"], rows[-1]["who"], rows[-1]["x none"]) == ("like 100 Mbps", "q(2)/q(4)", None)
    assert rows[-1]["of unshaped"] == pytest.approx(rows[-1]["samples/s"] / rows[0]["samples/s"])
