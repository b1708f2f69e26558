"""Rule 1 for whole runs: real processes have the numbers of `thinwire simulate`, whatever a recipe asks for.

Codecs, feedback and schedules are in `tests/pipeline/test_parity.py`, ways to start a run in `test_launch.py`. One run
of processes a case serves all that is asked of it here.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.commands import THINWIRE, completed
from support.recipe_files import WITH_DROPOUT, with_routers, write_chats, write_lora
from support.recipe_runs import SHORT, TINY, export, simulate
from support.run_files import digest, losses, metrics, numbers, summary, weights_of
from support.tiny_run import write_recipe
from thinwire.compress import parse
from thinwire.launch.recipe import recipe
from thinwire.launch.shared.tables import size_text
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.pipeline.replicas.shared import bytes_of_step

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@dataclass(frozen=True)
class Case:
    """A recipe, which processes train at once or in two parts."""

    options: Sequence[str]
    steps: int
    recipe: str = "tiny.yaml"
    write: Callable[[Path], None] = write_recipe
    """Writes the recipe, and what it names, into a folder."""
    first: Sequence[str] = ()
    """Options of the first part alone, which asks for checkpoints."""
    stop: int = 0
    """The steps of the first part; 0 for a run in one."""
    lost: str = ""
    """A folder of the run that is removed between its parts."""
    turn: int = 0
    """The step at which the simulation stops and goes on, if not 0."""
    needs: str = ""
    """A package that not everybody has."""


@dataclass(frozen=True)
class Runs:
    """What a case left."""

    real: Path
    simulated: Path
    stopped: Path
    """As the run of processes was between its parts."""
    said: str
    """By the last command that started processes."""


FEW_PROGRAMS = """
from torch import nn

def layers():
    return [nn.Sequential(nn.Embedding(256, 8), nn.Dropout(0.2)), nn.Linear(8, 256)]
"""
"""Two stages, of which a compiler makes few programs: each takes it seconds."""


def write_few_layers(folder):
    write_recipe(folder)
    (folder / "few.py").write_text(FEW_PROGRAMS)


DROPOUT = (
    "--model.config={vocab_size: 256, n_layer: 2, n_embd: 16, n_head: 2, n_positions: 16, resid_pdrop: 0.2, "
    "embd_pdrop: 0.2, attn_pdrop: 0.2}"
)
STOCHASTIC = ["--codec", "q(4, round='stochastic')/ef(q(8, round='stochastic'))"]
CONSTANT = ["--optimizer.schedule", "constant"]
TWO = ["--replicas.count", "2", "--replicas.gradients", "ef(q(4))", *CONSTANT]
BY_SAMPLE = [
    *("--codec", "aqsgd(q(4), store='disk')/ef(q(8, round='stochastic'))"),
    *("--training.evaluate_every", "3 steps", "--data.held_out", "0.05"),
]
"""The last pass of an evaluation has 3 rows of other samples."""
EVERY_FIFTH = ["--checkpoint.every", "5 steps", "--debug.check_buffers", "true"]
FEW = ["--model.name", "few:layers", "--model.config", "{}", "--codec", "q(8)", "--data.held_out", "0", *CONSTANT]
FEW += ["--checkpoint.every", "2 steps"]

CASES = {
    # four processes; DeBERTa's relative positions are in each of them
    "weights that stages share, over zmq": Case(
        [*TINY["deberta-tiny"], *SHORT[2:], "--wire.transport", "zmq", "--wire.timeout", "120"],
        steps=2,
        recipe="deberta-tiny",
        write=lambda folder: None,
    ),
    "a tied head that goes through a codec": Case(
        [
            *("--model.tied", "sum", "--compression.shared", "ef(q(4))", "--pipeline.num_stages", "3"),
            *("--data.held_out", "0", *CONSTANT),
        ],
        steps=4,
        first=["--checkpoint.every", "2 steps"],
        stop=2,
    ),
    "weights in bfloat16, blocks computed again": Case(
        [
            DROPOUT,
            *STOCHASTIC,
            "--model.dtype",
            "bf16",
            "--training.precision",
            "bf16",
            "--training.recompute",
            "block",
        ],
        steps=2,
    ),
    "compiled stages": Case(
        [*FEW, "--training.recompute", "block", "--training.compile", "true"],
        steps=2,
        write=write_few_layers,
    ),
    "conversations, routers and prompts": Case(
        [
            *(*with_routers(0.5), "--codec", "q(4)/q(8)", "--data.held_out", "0.4", "--pipeline.num_microbatches", "1"),
            *("--training.prompts", '["why did it", "the dog"]', "--training.evaluate_every", "1 step"),
        ],
        steps=2,
        recipe="chat.yaml",
        write=write_chats,
    ),
    "an adapter with dropout": Case(WITH_DROPOUT, steps=4, recipe="lora.yaml", write=write_lora, needs="peft"),
    # 99 samples make three clients with 8 steps an epoch each; behind step 24, AQ-SGD sends differences
    "clients in turn": Case(
        ["--clients.count", "3", "--clients.turn", "2 steps", "--codec", "aqsgd(q(4))/q(8)", *CONSTANT],
        steps=30,
        turn=27,
    ),
    # an epoch has 12 steps, and behind it AQ-SGD sends differences to what the first one left in the checkpoint
    "replicas": Case([*TWO, *BY_SAMPLE], steps=15, first=EVERY_FIFTH, stop=12),
    # it goes on between two exchanges, and every replica adds up for itself
    "replicas that step alone": Case(
        [*TWO, *BY_SAMPLE, "--replicas.sync.every", "6"],
        steps=15,
        first=EVERY_FIFTH,
        stop=12,
        lost="checkpoints/step-00000012",
    ),
    # statistics travel with the moves; evaluations and the digest have their mean
    "replicas that step alone, with batch norms": Case(
        [
            *("--replicas.count", "2", "--replicas.sync.every", "2", "--model.config", "{stem: cifar, width: 4}"),
            *("--pipeline.num_stages", "2", "--pipeline.layers", "[layer2]", "--data.limit", "250"),
            *("--data.held_out", "0.3", "--data.image_size", "8"),
        ],
        steps=3,
        recipe="resnet-tiny",
        write=lambda folder: None,
        needs="sklearn",
    ),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Make the runs of a case, once."""
    made = {}

    def runs_of(name):
        if name not in made:
            if CASES[name].needs:
                pytest.importorskip(CASES[name].needs, reason=f"needs {CASES[name].needs}")
            made[name] = ran(CASES[name], tmp_path_factory.mktemp("case"))
        return made[name]

    return runs_of


def ran(case, folder):
    case.write(folder)
    steps = ["--training.steps", str(case.steps)]
    runs = {name: folder / name for name in ("real", "simulated", "stopped")}
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        if case.turn:
            first = ["--training.steps", str(case.turn), "--checkpoint.every", f"{case.turn} steps"]
            simulate(case.recipe, runs["simulated"], *case.options, *first)
            simulate("simulated/recipe.yaml", runs["simulated"], "--checkpoint.resume", "always", *steps)
        else:
            simulate(case.recipe, runs["simulated"], *case.options, *steps)
    new = [*THINWIRE, "train", case.recipe, "--output", "real", *case.options]
    if case.stop:
        trained(folder, *new, "--training.steps", case.stop, *case.first)
        shutil.copytree(runs["real"], runs["stopped"])
        shutil.rmtree(runs["real"] / case.lost) if case.lost else None
        return Runs(**runs, said=trained(folder, *THINWIRE, "train", "--resume", "real", *steps))
    return Runs(**runs, said=trained(folder, *new, *steps))


def trained(folder, *words):
    command = completed(words, folder)
    assert command.status == 0, command.stderr
    return command.stdout


@pytest.mark.parametrize("name", CASES)
def test_processes_have_the_numbers_of_a_simulation(both, name):
    runs = both(name)
    assert numbers(runs.real) == numbers(runs.simulated)


def test_stages_that_share_weights_hold_equal_copies(both):
    runs = both("weights that stages share, over zmq")
    assert "of the 84 x 96 tokens are padding, which crosses the wire too" in runs.said
    copies = [weights_of(runs.real, index).get("deberta.encoder.rel_embeddings.weight") for index in range(4)]
    assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_the_bytes_of_a_tied_head_are_those_that_were_said_before_training(both):
    """Its errors are in the checkpoint."""
    runs = both("a tied head that goes through a codec")
    told, nbytes = summary(runs.simulated), bytes_of_step(256 * 16, [0, 2], parse("ef(q(4))"))
    assert told["bytes_sent"] == sum(channel["bytes"] for channel in told["channels"]) + 4 * nbytes
    assert sum(row["bytes"] for row in told["shared"]) == 4 * nbytes
    said = f"each step sends {size_text(nbytes)} to sum its gradients over them through ef(q(4))"
    assert f"2 stages hold transformer.wte: {said}\n" in runs.said


def test_a_compiled_run_is_near_a_plain_one_and_goes_on_without(both, tmp_path, monkeypatch):
    run = shutil.copytree(both("compiled stages").simulated, tmp_path / "run")
    write_few_layers(tmp_path)
    monkeypatch.chdir(tmp_path)
    plain = [*FEW, "--training.recompute", "block"]
    uncompiled = simulate("tiny.yaml", tmp_path / "plain", *plain, "--training.steps", "2")
    [before, after] = (weights_of(each, 0) for each in (uncompiled, run))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=0.01)
    assert summary(simulate("tiny.yaml", run, *plain, "--training.steps", "3"))["steps"] == 3


def test_prompts_are_answered_at_each_evaluation(both):
    answers = numbers(both("conversations, routers and prompts").real)["answers"]
    asked = [(step, prompt) for step in (1, 2) for prompt in ("why did it", "the dog")]
    assert [(line["step"], line["prompt"]) for line in answers] == asked


def test_a_pretrained_model_with_an_adapter_is_looked_at_and_all_its_boundaries_are_metered(both):
    runs = both("an adapter with dropout")
    told, sent = summary(runs.real), [line["bytes"] for line in metrics(runs.real)]
    assert told["look"]["on"]["loss"] != told["look"]["off"]["loss"]
    assert "one held-out batch before training, compression on loss " in runs.said
    assert sent == [line["bytes"] for line in metrics(runs.simulated)]
    assert sum(sent) == sum(channel["bytes"] for channel in told["channels"]), "both boundaries count in each step"


def test_clients_in_turn_see_samples_again(both):
    runs = both("clients in turn")
    assert recipe.parse(["--resume", str(runs.simulated)]).clients.count == 3
    assert max(row["full_share"] for row in summary(runs.real)["channels"]) < 1, "no sample came a second time"


@pytest.mark.parametrize(("name", "began"), [("replicas", 12), ("replicas that step alone", 10)])
def test_replicas_log_what_they_exchange(both, name, began):
    runs, steps_alone = both(name), began == 10
    assert f"goes on from the checkpoint of step {began} in real/checkpoints\n" in runs.said
    wanted, got = summary(runs.simulated), summary(runs.real)
    stages = (runs.real / "weights/step-00000015").glob("stage-*")
    assert sorted(path.name for path in stages) == ["stage-0", "stage-1"]
    assert all(4 < row["bits_per_element"] < 4.5 for row in got["replicas"])
    for stage in got["stages"]:
        assert stage["exchange"]["encode"] > 0 == stage["exchange"]["wait"], "the clocks of replicas are compared"
    sent = [[line["bytes"] for line in metrics(run)] for run in (runs.real, runs.simulated)]
    assert [2 * nbytes for nbytes in sent[0]] == sent[1], "those of all stages of a replica"
    # of replica 0 alone, or of all replicas in one process: what it sends and what it receives
    for run, share in ((runs.real, 1), (runs.simulated, 2)):
        lines = [json.loads(line) for line in (run / "exchanges.jsonl").open()]
        steps, some = [line["step"] for line in lines], [line["stages"] for line in lines]
        assert steps == sorted(set(steps)) and (5 in steps and 14 in steps if steps_alone else len(steps) == 15)
        assert all([each["stage"] for each in line] == [0, 1] for line in some)
        for stage in (0, 1):
            total = sum(row["bytes"] for row in wanted["replicas"] if row["stage"] == stage)
            assert sum(line[stage]["bytes"] for line in some) == share * total
            assert all(line[stage]["seconds"] > 0 for line in some)


@pytest.mark.parametrize("name", ["replicas", "replicas that step alone"])
def test_a_run_is_exported_without_the_parts_of_its_second_replica(both, tmp_path, name):
    run = shutil.copytree(both(name).stopped, tmp_path / "alone")
    for lost in ["weights", *(f"checkpoints/step-00000012/stage-{part}" for part in (2, 3))]:
        shutil.rmtree(run / lost)
    exported = load_file(export(run, tmp_path / "exported") / "model.safetensors")
    assert weights_digest(tensor_lines(exported)) == digest(both(name).stopped)


def test_a_simulation_goes_on_in_processes_and_back(folder):
    """A checkpoint of processes has other parts, so what replicas have lost in messages is not in those of the next."""
    options = ["--replicas.count", "2", *CONSTANT, "--codec", "none", "--training.evaluate_every", "0 steps"]
    whole = simulate("tiny.yaml", folder / "whole", *options, "--training.steps", "9")
    first = simulate("tiny.yaml", folder / "first", *options, "--training.steps", "3", "--checkpoint.every", "3 steps")
    for command, steps in (("train", "6"), ("simulate", "9")):
        said = trained(folder, *THINWIRE, command, "--resume", "first", "--training.steps", steps)
        assert "so feedback starts empty" in said
    assert losses(first) == losses(whole)
    assert digest(first) == digest(whole)
