"""Runs as a user starts them: each test below is one group of real processes, or looks at what such a group left."""

import math
import os
import re
import signal
import struct
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from support.commands import NEW_THINWIRE, THINWIRE, TORCHRUN, TRAIN, completed, free_port, node_of_two, started
from support.run_files import metrics, numbers, summary, weights_of
from support.tiny_run import SMALL
from thinwire.launch import cli
from thinwire.launch.folder.weights import find_checkpoint, newest
from thinwire.launch.recipe import recipe
from thinwire.launch.shared.exit_codes import ended

pytestmark = pytest.mark.processes

STEPS, MICROBATCHES = 3, 2
TEXT = "some words, many times; " * 72 + "the end."
RECIPE = f"""
description: As small as can be.
{SMALL}
compression: {{activations: q(4), gradients: "q(8, round='stochastic')"}}
optimizer: {{lr: 0.01, max_grad_norm: 1.0}}
training: {{steps: 3}}
"""
# payload and header of a micro-batch of 2 x 16 rows of 16: bits, a bf16 scale a row, 64 bytes
FRAME_BYTES = {"activations": 16 * 32 // 2 + 2 * 32 + 64, "gradients": 16 * 32 + 2 * 32 + 64}
# the text is 1736 bytes, of which 139 are held out in blocks of 16 with a byte behind: 8 samples in batches of 4
EVALUATION_BATCHES = 2
FILES = [
    "evaluations.jsonl",
    "loss.png",
    "metrics.jsonl",
    "model/config.json",
    "model/facts.json",
    "model/written-by-thinwire.txt",
    "recipe.yaml",
    "summary.json",
    "weights/step-00000003/manifest.json",
    "weights/step-00000003/stage-0/model-00001-of-00001.safetensors",
    "weights/step-00000003/stage-0/values.json",
    "weights/step-00000003/stage-1/model-00001-of-00001.safetensors",
    "weights/step-00000003/stage-1/values.json",
    "weights/step-00000003/written-by-thinwire.txt",
    "weights/written-by-thinwire.txt",
    "written-by-thinwire.txt",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with the recipe `tiny.yaml` and its text."""
    made = tmp_path_factory.mktemp("runs")
    (made / "tiny.yaml").write_text(RECIPE)
    (made / "text").write_text(TEXT)
    return made


@pytest.fixture(scope="module")
def trained(folder):
    """The run that most tests look at: `thinwire train`, whose output it is."""
    command = completed([*NEW_THINWIRE, "train", "tiny.yaml", "--output", "trained"], folder)
    assert command.status == 0, command.stderr
    return command


def simulated(folder, *options):
    """`thinwire simulate` in this process: the status."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return cli.main(["simulate", "tiny.yaml", *options])
    finally:
        os.chdir(before)


# --- what a run leaves --------------------------------------------------------------------------------------------


def test_a_run_leaves_what_it_promises_and_nothing_else(trained, folder):
    run = folder / "trained"
    found = {path.relative_to(run) for path in run.rglob("*") if path.is_file()}
    assert sorted(map(str, found)) == FILES


def test_metrics_have_a_line_a_step(trained, folder):
    lines = metrics(folder / "trained")
    assert [line["step"] for line in lines] == list(range(STEPS))
    for line in lines:
        assert 0 < line["loss"] < 2 * math.log(256)
        assert line["samples"] == 4
        assert line["bytes"] == MICROBATCHES * sum(FRAME_BYTES.values())
        assert line["uncompressed"] == MICROBATCHES * 2 * (2 * 16 * 16 * 4)
        assert set(line["sections"]) == {"compute", "encode", "neighbour", "wire", "wait", "decode"}
        assert line["sections"]["wait"] == 0, "every wait of a run over sockets is told apart"
        assert sum(line["sections"].values()) <= line["seconds"]
    assert all(later["loss"] < earlier["loss"] for earlier, later in pairwise(lines)), lines


def test_the_bytes_of_the_summary_are_frames_times_plan(trained, folder):
    told = summary(folder / "trained")
    assert {
        (channel["boundary"], channel["channel"], channel["codec"]): (channel["frames"], channel["bytes"])
        for channel in told["channels"]
    } == {
        (0, "activations", "q(4)"): (STEPS * MICROBATCHES, STEPS * MICROBATCHES * FRAME_BYTES["activations"]),
        (0, "gradients", 'q(8, round="stochastic")'): (
            STEPS * MICROBATCHES,
            STEPS * MICROBATCHES * FRAME_BYTES["gradients"],
        ),
    }
    plain = 2 * 16 * 16 * 4 + 64
    evaluation = EVALUATION_BATCHES * MICROBATCHES * (FRAME_BYTES["activations"] + plain)
    assert told["bytes_sent"] == sum(channel["bytes"] for channel in told["channels"]) + evaluation


def test_the_summary_scores_held_out_text_both_ways(trained, folder):
    scores = summary(folder / "trained")["held_out"]
    assert set(scores) == {"on", "off"}
    for score in scores.values():
        assert score["num_targets"] == 8 * 16
        assert score["perplexity"] == math.exp(score["loss"])
    assert 0 < abs(scores["on"]["loss"] - scores["off"]["loss"]) < 0.1


def test_the_recipe_it_leaves_reads_back(trained, folder, monkeypatch):
    monkeypatch.chdir(folder)
    asked = recipe.parse(["tiny.yaml", "--output", "trained", "--model.tied", "untie"])
    assert recipe.parse(["trained/recipe.yaml"]) == asked, "with what the run chose"
    assert recipe.parse(["trained/recipe.yaml", "--output", "elsewhere"]) == replace(asked, output="elsewhere")


def test_weights_are_named_as_in_the_unsplit_model(trained, folder):
    config = GPT2Config(
        vocab_size=256, n_layer=2, n_embd=16, n_head=2, n_positions=16, tie_word_embeddings=False, use_cache=False
    )
    expected = {name: tuple(tensor.shape) for name, tensor in GPT2LMHeadModel(config).state_dict().items()}
    found = {}
    for stage in range(2):
        shapes = {name: tuple(tensor.shape) for name, tensor in weights_of(folder / "trained", stage).items()}
        assert shapes and not shapes.keys() & found.keys()
        found |= shapes
    assert found == expected


def test_the_picture_is_one(trained, folder):
    picture = (folder / "trained/loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 400 and height > 200


def test_it_shows_progress_and_a_closing_table(trained, folder):
    assert trained.stderr == ""
    assert [line for line in trained.stdout.splitlines() if line.startswith(f"step {STEPS}/{STEPS}  loss ")]
    assert f"weights digest {summary(folder / 'trained')['weights_digest']}" in trained.stdout
    assert "everything is in trained" in trained.stdout


# --- the same numbers however it is started -----------------------------------------------------------------------


def test_simulate_has_the_same_numbers(trained, folder):
    assert simulated(folder, "--output", "simulated") == 0
    assert numbers(folder / "trained") == numbers(folder / "simulated")
    assert simulated(folder, "--output", "other", "--training.seed", "1") == 0
    assert numbers(folder / "trained") != numbers(folder / "other")


SOURCE = f"""
import os

def words(split):
    with open("read", "a") as file:
        print(os.getpid(), file=file)
    return [{TEXT!r}]
"""


def test_torchrun_has_the_same_numbers_and_one_process_calls_a_source_for_all(trained, folder):
    (folder / "my_words.py").write_text(SOURCE)
    launch = [*TORCHRUN, "--nproc-per-node", 2, "--master-port", free_port(), *TRAIN]
    command = completed([*launch, "tiny.yaml", "--data.name", "my_words:words", "--output", "torchrun"], folder)
    assert command.status == 0, command.stderr
    assert numbers(folder / "trained") == numbers(folder / "torchrun")
    first, second = (folder / "read").read_text().split()  # called twice, and compared
    assert first == second


def test_simulate_writes_beside_the_run_it_simulates(folder):
    assert simulated(folder, "--training.steps", "0", "--data.held_out", "0") == 0
    told = summary(folder / "runs/tiny-simulated")
    assert (told["steps"], told["bytes_sent"], told["train_loss"], told["held_out"]) == (0, 0, None, {})


# --- runs that break ----------------------------------------------------------------------------------------------

ENDLESS = ["--training.steps", 1_000_000]
LOST = (
    "what was trained is lost: the recipe asks for no checkpoints; --checkpoint.every '100 steps' keeps more of the "
    "next run"
)


def test_a_killed_stage_is_named_and_the_weights_of_the_last_save_stay(folder):
    options = ["--pipeline.num-stages", 3, "--save-every", 2, "--output", "killed"]
    with started([*THINWIRE, "train", "tiny.yaml", *ENDLESS, *options], folder) as command:
        command.wait_until(lambda: len(metrics(folder / "killed")) >= 4)
        os.kill(command.stage_process(1), signal.SIGKILL)
        assert command.wait() == 1
        assert command.processes() == {}
    cause, *others, last = command.stderr.splitlines()
    assert cause == f"stage 1 {ended(-signal.SIGKILL)}"
    waiting = r"lost a peer: .*\b(making room|waiting|sending|reporting)\b"
    told = rf"  stage (\d) ({waiting}|was asked to stop: \w)"  # the kill may find a stage at anything
    assert sorted(re.match(told, line)[1] for line in others) == ["0", "2"], command.stderr
    step = newest(folder / "killed").step
    assert step % 2 == 0 and 2 <= step <= len(metrics(folder / "killed")) + 1
    assert find_checkpoint(folder / "killed").manifest.step == step and len(newest(folder / "killed").files) == 3
    kept = f"lost, but for the weights of step {step} in killed/weights:"
    assert last == LOST.replace("lost:", kept)
    said = summary(folder / "killed")
    assert said["running"] and said["steps"] in (step, step - 2), "killed between the two, it says so of the set before"


FAILING = """
from torch.nn.functional import cross_entropy

calls = []


def third(output, targets):
    calls.append(1)
    assert len(calls) <= 4, "two steps of two micro-batches"
    return cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
"""


def test_a_run_that_fails_finishes_the_checkpoint_that_it_is_writing(folder):
    """The first one was lost if the step behind it failed."""
    (folder / "failing.py").write_text(FAILING)
    options = ["--training.loss", "failing:third", "--checkpoint.every", "2 steps", "--output", "failing"]
    command = completed([*THINWIRE, "train", "tiny.yaml", *options], folder)
    assert command.status == 1 and "two steps of two micro-batches" in command.stderr
    said = "the newest checkpoint is of step 2; thinwire train --resume failing goes on from there"
    assert command.stderr.splitlines()[-1] == said


def test_an_interrupted_launcher_leaves_no_process(folder):
    with started([*THINWIRE, "train", "tiny.yaml", *ENDLESS, "--output", "interrupted"], folder) as command:
        command.wait_until(lambda: len(metrics(folder / "interrupted")) >= 2)
        assert len(command.processes()) == 3
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130
        assert command.processes() == {}
    assert command.stderr == f"stopped by SIGINT; {LOST}\n"


def test_processes_that_have_just_started_end_without_a_word(folder):
    """They printed over a hundred tangled lines of tracebacks above the sentence."""
    with started([*THINWIRE, "train", "tiny.yaml", *ENDLESS, "--output", "early"], folder) as command:
        command.wait_until(lambda: len(command.stage_processes()) == 2)
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130
        assert command.processes() == {}
    assert command.stderr == "stopped by SIGINT\n"


def test_a_stage_that_raises_is_told_first(folder):
    diverging = ["--optimizer.lr", "1e30", "--optimizer.max_grad_norm", "null", "--output", "diverged"]
    command = completed([*THINWIRE, "train", "tiny.yaml", *diverging], folder)
    assert command.status == 1
    cause, other, last = command.stderr.splitlines()
    assert last == LOST
    assert cause == (
        "stage 0 failed: stage 0 has NaN or infinity in the activations of micro-batch 0, train pass 1, over boundary "
        "0; lower the learning rate, or pass it on, with wire.nonfinite send and a codec without feedback"
    )
    # it may be at the step before
    waiting = "lost a peer: stage 1 was ((making room|waiting) for activations|waiting for the report on a step)"
    assert re.match(rf"  stage 1 ({waiting}|was asked to stop: \w)", other), other


def test_a_stage_that_cannot_write_is_told_with_its_traceback_and_its_peers_are_not_blamed(folder):
    """The others wait for it at the very end, where a lost peer was taken for a failure of their own."""
    steps = ["--training.steps", 100]
    with started([*THINWIRE, "train", "tiny.yaml", *steps, "--output", "blocked"], folder) as command:
        command.wait_until(lambda: metrics(folder / "blocked"))
        (folder / "blocked/loss.png").mkdir()  # before the run begins it would be refused
        assert command.wait() == 1
    cause, *traceback, error, other, last = command.stderr.splitlines()
    assert last.startswith("what was trained is lost, but for the weights of step 100 in blocked/weights: ")
    assert cause == "stage 1 failed: Traceback (most recent call last):"
    assert any("save_picture" in line for line in traceback)
    assert error.startswith("IsADirectoryError: ")
    assert re.match(r"  stage 0 (lost a peer|was asked to stop): ", other)


def test_a_simulated_stage_that_raises_tells_the_same(folder, capsys):
    diverging = ["--optimizer.lr", "1e30", "--optimizer.max_grad_norm", "null", "--output", "simulated-diverged"]
    assert simulated(folder, *diverging) == 1
    assert capsys.readouterr().err.startswith("stage 0 has NaN or infinity in the activations of micro-batch 0")
    assert simulated(folder, *diverging, "--wire.nonfinite", "send", "--overwrite") == 0
    first, *others = (line["loss"] for line in metrics(folder / "simulated-diverged"))
    assert math.isfinite(first)
    assert others == [None] * (STEPS - 1), "NaN is null in JSON"


def test_a_wrong_number_of_processes_is_one_sentence(folder):
    # what torchrun sets; it would add a page of its own
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = completed([TORCHRUN[0], *TRAIN, "tiny.yaml"], folder, **environment)
    assert command.status == 1
    assert command.stderr == (
        "stage 0 failed: this recipe needs 2 processes, got 1; start torchrun with --nproc-per-node times --nnodes "
        "equal to 2, or change pipeline.num_stages\n"
    )


def test_a_run_that_torchrun_may_not_start_has_lost_nothing(folder):
    """It said that what the run before it had trained was lost, but for its weights."""
    alone = [TORCHRUN[0], *TRAIN, "tiny.yaml", "--pipeline.num_stages", "1", "--codec", "none", "--training.steps", "1"]
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert completed([*alone, "--output", "alone"], folder, **environment).status == 0
    again = completed([*alone, "--output", "alone"], folder, **environment)
    assert again.status == 1
    assert again.stderr.startswith("stage 0 failed: output must name a folder without a run, but alone holds one;")
    assert again.stderr.count("\n") == 1


def test_ends_started_differently_both_list_every_difference(folder):
    port = free_port()

    def node(rank, *options):
        return node_of_two(rank, "tiny.yaml", "--model.tied=sum", *options, port=port)

    others = ["--training.seed=1", "--compression.gradients=q(6)", "--wire.checksum=false", "--optimizer.lr=0.02"]
    others.append("--compression.shared=q(4)")
    with (
        started(node(0, "--output", "here"), folder) as here,
        started(node(1, *others, "--output", "there"), folder) as there,
    ):
        assert (here.wait(), there.wait()) == (1, 1)
    values = {
        "seed": ("0", "1"),
        "training.seed": ("0", "1"),
        "gradients codec": ("'q(8, round=\"stochastic\")'", "'q(6)'"),
        "checksum": ("True", "False"),
        "optimizer.lr": ("0.01", "0.02"),
        "compression.shared": ("'none'", "'q(4)'"),
    }
    for stage, command in enumerate((here, there)):
        head = (
            f"stage {stage} failed: the two ends of boundary 0 must be started alike; stage {stage} (here) and stage "
            f"{1 - stage} (there) differ in:"
        )
        lines = command.stderr.splitlines()
        assert head in lines, command.stderr
        place = lines.index(head)
        listed = lines[place + 1 : place + 1 + len(values)]
        assert sorted(listed) == sorted(
            f"  {name}: {pair[stage]} here, {pair[1 - stage]} there" for name, pair in values.items()
        )
        assert not lines[place + 1 + len(values)].startswith("  "), "another field is listed"
