"""docs/measured/links.py over real processes: what it compares, and what it says. How fast anything is, is no test."""

import json
import sys
from types import SimpleNamespace

import links
import pytest
import torch
from contenders import PlainTorch, Thinwire
from documents import read_document
from links import COLUMNS, batches_of, contenders_of, main, slowest, table

from support.commands import completed
from support.pages import ROOT
from support.processes import run
from thinwire.errors.files import SIGNATURE
from thinwire.launch import cli
from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.recipe.recipe import parse
from thinwire.launch.shared.tables import Table, document
from thinwire.launch.timing.workload import codec_pair
from thinwire.pipeline.devices.device import CPU
from thinwire.pipeline.measuring.meters import SECTIONS
from thinwire.pipeline.options.compression import FAST, MILD

CONFIG = '{"vocab_size": 256, "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.0, '
CONFIG += '"embd_pdrop": 0.0, "attn_pdrop": 0.0}'
SMALL = [
    *("quickstart", "--model.config", CONFIG, "--data.block_size", "16", "--data.limit", "5000"),
    *("--pipeline.num_stages", "2", "--pipeline.num_microbatches", "2", "--pipeline.microbatch_size", "2"),
]


def weights_after_two_steps(rank, kinds, folder):
    """Weights of this process's stage after the same two steps, by kind of contender."""
    plainly = ["--optimizer.name", "sgd", "--optimizer.warmup_steps", "0"]
    prepared = prepare(parse([*SMALL, *plainly], prog="links.py"))
    where, found = real_placement(prepared.recipe), {}
    for kind in kinds:
        if kind == "thinwire":
            contender = Thinwire(prepared, where, rank, codec_pair("none"), folder)
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


@pytest.mark.namespaces
@pytest.mark.usefixtures("can_make_hosts")
def test_the_rows_of_a_call_over_slow_links_stand_below_those_before(tmp_path):
    before = ["unshaped", "an earlier call", *[1.0] * (len(COLUMNS) - 2)]
    earlier = {"generator": SIGNATURE, **document("bench of quickstart", [Table("before", COLUMNS, [before])])}
    (tmp_path / "speed.json").write_text(json.dumps(earlier))
    codecs = ["none", "q(4)/q(8)", "aqsgd(q(2))/q(8)", "torch fp32"]
    few = ["--repetitions", "2", "--steps", "1", "--links", "50mbit", "--out", "speed.json", "--codec", *codecs]
    bench = [sys.executable, ROOT / "docs/measured/links.py", *SMALL, *few]
    ended = completed([sys.executable, ROOT / "examples/slow_links.py", "--rate", "50mbit", "--", *bench], tmp_path)
    assert ended.status == 0, ended.stderr
    title, [found] = read_document((tmp_path / "speed.json").read_text())
    assert title == "bench of quickstart" and tuple(found.columns) == COLUMNS
    assert list(found.rows[0]) == before
    rows = [dict(zip(found.columns, row, strict=True)) for row in found.rows[1:]]
    assert [(row["links"], row["who"]) for row in rows] == [("50mbit", who) for who in codecs]
    assert all(row["samples/s"] > 0 and row["first visits, samples/s"] > 0 for row in rows)
    # a frame carries 2 x 16 rows of 16: bits, a bf16 scale a row, 64 bytes of header
    sizes = [2 * (32 * 16 * 4 + 64), (64 + 64 + 256) + (64 + 64 + 512), (64 + 64 + 128) + (64 + 64 + 512)]
    assert [row["MB a step"] for row in rows if row["forward, ms"]] == [pytest.approx(2 * size / 1e6) for size in sizes]
    assert [row["activation, kB"] for row in rows] == [(32 * 16 * 4 + 64) / 1e3] * 4
    assert rows[0]["x none"] == 1.0
    told = json.loads((tmp_path / "speed.json").read_text())
    assert told["machine"]["cores"] >= 1 and told["command"].startswith("links.py quickstart --model.config ")


def step(seconds, sent=0.0, forward=0.0, **sections):
    """A step as a process tells it."""
    return {"seconds": seconds, "sent": sent, "forward": forward, "sections": dict.fromkeys(SECTIONS, 0.0) | sections}


def turn(who, first, *later, new=True):
    return {"contender": who, "new": new, "first": first, "later": list(later)}


def test_a_row_is_of_medians_of_the_slowest_process():
    prepared = prepare(parse(SMALL, prog="links.py"))
    plain = {**step(4.0), "sections": {}}
    told = [
        [
            turn("q(4)/q(8)", step(3.0), step(1.0, 50, 0.2, compute=0.4, encode=0.1, decode=0.1, wire=0.2)),
            turn("none", step(9.0), step(5.0, 1000, 0.3), step(6.0, 1000, 0.3), step(7.0, 1000, 0.3)),
            turn("torch fp32", plain, plain),
            turn("none", step(1.0), step(6.5, 1000, 0.3), step(6.6, 1000, 0.3), new=False),
        ],
        [
            turn("q(4)/q(8)", step(2.0), step(2.0, 70, 0.1, compute=0.2, encode=0.1, neighbour=0.3, wait=0.1)),
            turn("none", step(9.0), step(8.0, 2000, 0.5), step(2.0, 2000, 0.5), step(7.5, 2000, 0.5)),
            turn("torch fp32", plain, plain),
            turn("none", step(1.0), step(6.4, 2000, 0.5), step(6.5, 2000, 0.5), new=False),
        ],
    ]
    found = table(prepared, told, "slow")
    rows = {row[1]: dict(zip(found.columns, row, strict=True)) for row in found.rows}
    ours, none, torchs = (rows[name] for name in ("q(4)/q(8)", "none", "torch fp32"))
    assert (none["samples/s"], none["first visits, samples/s"]) == (4 / 6.6, 4 / 9.0), "8, 6, 7.5, 6.5, 6.6"
    assert (ours["samples/s"], ours["x none"], torchs["x none"]) == (2.0, 3.3, 1.65)
    assert (ours["MB a step"], none["MB a step"], torchs["MB a step"]) == (120 / 1e6, 3000 / 1e6, None)
    assert (ours["forward, ms"], none["forward, ms"], torchs["forward, ms"]) == (200, 500, None)
    parts = [ours[f"{part}, ms"] for part in ("compute", "codecs", "waits", "other")]
    assert parts == pytest.approx([300, 150, 300, 2000 - 750]), "means over both processes"


def test_samples_that_come_again_are_no_first_visit():
    """With few samples, the speed of AQ-SGD at its first visits was that of later ones."""
    some = SimpleNamespace(recipe=SimpleNamespace(batch_size=4), data=SimpleNamespace(training=range(9)))
    batches = batches_of(some)
    taken = [next(batches) for _ in range(3)]
    assert [(ids.tolist(), new) for ids, new in taken] == [
        ([0, 1, 2, 3], True),
        ([4, 5, 6, 7], True),
        ([8, 0, 1, 2], False),
    ]
    assert slowest([[], []]) != slowest([[], []]), "NaN"


def test_without_codecs_those_of_the_recipe_take_turns_with_examples_that_suit_the_model():
    own, plain = parse([*SMALL, "--codec", "ef(q(4))/bf16"], prog="links.py"), ("torch fp32", "torch bf16")
    assert list(contenders_of(own, None)) == ["none", "ef(q(4))/bf16", *FAST, *plain]
    pretrained = parse(["smollm2-tiny"], prog="links.py")
    own = 'q(8, step=0.28, codebook=4096)/q(16, step=0.65, per="tensor")'
    assert list(contenders_of(pretrained, None)) == ["none", own, *MILD, *plain], "few bits break it"


@pytest.mark.slow
def test_what_cannot_be_measured_is_a_sentence(capsys, monkeypatch):
    def said(*options):
        assert cli.run(main, [*SMALL, *options]) == 2
        return capsys.readouterr().err

    assert "unknown codec 'zip'" in said("--codec", "zip")
    assert said("--replicas.count", "2") == "a bench is of one pipeline; add --replicas.count 1, got 2\n"
    told = said("--pipeline.accumulation", "2", "--training.compile", "true").splitlines()
    assert told[0] == "a bench measures one pass in each step; set pipeline.accumulation to 1"
    assert "plain torch, whose layers are not compiled; set training.compile to false" in told[1]
    assert "must give at least 2 processes, got 1" in said("--pipeline.num_stages", "1")
    monkeypatch.setattr(links, "choose", lambda wanted: torch.device("cuda", 0))
    told = said("--training.device", "cuda", "--wire.transport", "nccl")
    assert "a bench measures frames that cross its links; set wire.transport to gloo or zmq" in told


@pytest.mark.parametrize(
    ("environment", "got"), [({}, 1), ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, 4)]
)
def test_a_bench_without_all_its_processes_says_how_to_start_them(monkeypatch, capsys, environment, got):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.run(main, SMALL) == 2
    assert capsys.readouterr().err == (
        f"a bench must have a process for each of the recipe's 2, got {got}; start it with torchrun, as in "
        "torchrun --nproc-per-node 2 docs/measured/links.py ...\n"
    )


def test_a_file_of_something_else_keeps_what_it_has(tmp_path, capsys):
    path = tmp_path / "kept.json"
    for text, why in (("{}", "is another: "), ('{"title": "x", "tables": []}', "is another: ")):
        path.write_text(text)
        assert cli.run(main, [*SMALL, "--out", str(path)]) == 2
        told = capsys.readouterr().err
        assert told.startswith("--out must name a new file, or one of this bench; ") and why in told
        assert path.read_text() == text


def test_a_wrong_option_is_a_sentence(capsys):
    assert cli.run(main, [*SMALL, "--steps", "two"]) == 2
    said = "argument --steps: must be a whole number of at least 1, got 'two'; see links.py --help\n"
    assert capsys.readouterr() == ("", said)
