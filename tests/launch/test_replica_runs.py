"""Replicas as a user runs them."""

import json

import pytest
import torch
from torch import nn

from support.commands import free_port, node_of_two, started
from support.recipe_runs import simulate
from support.run_files import numbers, summary
from support.tiny_run import prepared
from thinwire.launch import cli
from thinwire.launch.plan.agreement import agreed_by_replicas
from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepare import check_fit
from thinwire.launch.recipe import recipe
from thinwire.launch.run.resume import header
from thinwire.models.errors import ModelError
from thinwire.models.layers import Blueprint, Layer, LayerSpec
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import CompressionOptions, ReplicaOptions
from thinwire.pipeline.wire.handshake import differences

TWO = ["--replicas.count", "2", "--replicas.gradients", "ef(q(4))", "--optimizer.schedule", "constant"]
EVERY_SIX = ["--replicas.sync.every", "6"]


@pytest.mark.processes
def test_torchrun_on_two_hosts_and_an_evaluation_have_the_numbers_of_a_simulation(folder, capsys):
    """Each host has one replica: neighbours of a pipeline have neighbouring ranks."""
    options = [*TWO, "--training.steps", "3"]
    simulated = simulate("tiny.yaml", folder / "simulated", *options)
    port = free_port()

    def node(rank):
        return node_of_two(rank, "tiny.yaml", *options, "--output", f"host-{rank}", port=port, processes=2)

    with started(node(0), folder) as first, started(node(1), folder) as second:
        assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    got = numbers(folder / "host-0")
    assert got == numbers(simulated)
    assert "stages 0 and 1 of replica 1 are done; what this host keeps is in host-1" in second.stdout
    capsys.readouterr()
    assert cli.main(["eval", "host-0", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tables"][0]["rows"]
    assert [row[:2] for row in rows] == [[mode, score["loss"]] for mode, score in got["held_out"].items()]


@pytest.mark.slow
def test_if_all_replicas_add_up_no_sum_travels(folder, capsys):
    options = ["--replicas.count", "2", "--replicas.sync.every", "2"]
    ran = simulate("tiny.yaml", folder / "ran", *options, "--training.steps", "3", "--save-every", "3")
    assert [(row["stage"], row["channel"], row["frames"]) for row in summary(ran)["replicas"]] == [
        (0, "parts", 2 * 2),  # of two replicas, after two steps and at the end
        (1, "parts", 2 * 2),
    ]
    shown = " ".join(capsys.readouterr().out.split())
    assert "to all replicas" in shown
    assert "save_every should be a multiple of replicas.sync.every, 2 steps" in shown


@pytest.mark.slow
@pytest.mark.parametrize(("freeze_after", "never"), [("2 steps", True), ("1 step", False)])
def test_a_run_says_if_quantized_adam_never_freezes(folder, capsys, freeze_after, never):
    """One replica can use it too."""
    simulate(
        "tiny.yaml", folder / "ran", "--optimizer.name", "quantized-adam", "--optimizer.freeze_after", freeze_after
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert ("quantized-adam freezes nothing: optimizer.freeze_after of 2 steps is all of training" in shown) == never


@pytest.mark.slow
def test_a_step_takes_the_samples_of_all_replicas(folder):
    # 99 samples in batches of 4 a replica
    assert prepared("--replicas.count", "3").sampler.steps_per_epoch == 99 // 12
    with pytest.raises(ModelError, match=r"a step needs 100 samples, and there are 99 .* or replicas.count"):
        prepared("--replicas.count", "25")


@pytest.mark.slow
def test_a_run_goes_on_with_another_outer_optimizer_only_where_it_has_none(folder):
    def fields(*options):
        ready = prepared("--replicas.count", "2", *options)
        return header(ready, real_placement(ready.recipe))["fields"]

    other, alone = ["--replicas.sync.lr", "1.0"], ["--replicas.sync.every", "2"]
    with pytest.raises(
        OptionsError, match=r"replicas\.sync\.every must be above 1 for replicas\.sync\.lr 1\.0: with 1"
    ):
        fields(*other)
    assert fields(*other, *alone) != fields(*alone) != fields()


def test_replicas_agree_on_all_codecs_whoever_has_them(folder):
    """Two ends of a boundary compare its codecs, and no boundary lies between two replicas."""

    def differing(*options):
        here, there = (recipe.parse(["tiny.yaml", "--replicas.count", "2", *given]) for given in ([], options))
        return differences(agreed_by_replicas(here), agreed_by_replicas(there))

    assert differing("--compression.activations", "none") == {
        "compression.activations of boundary 0": ("q(4)", "none"),
    }
    assert differing("--compression.warmup", "1 epoch") == {"compression.warmup": ("0 steps", "1 epoch")}
    assert not differing("--compression.activations", "q(4, round='nearest')", "--compression.store_folder", "/tmp")


def test_neighbours_of_a_pipeline_have_neighbouring_ranks(folder):
    wanted = recipe.parse(["tiny.yaml", "--replicas.count", "3"])
    assert wanted.num_processes == 6
    where = [real_placement(wanted, rank) for rank in range(6)]
    assert [place.process_of for place in where] == [{0: first, 1: first + 1} for first in (0, 0, 2, 2, 4, 4)]
    assert [place.reporter for place in where] == [1] * 6
    assert [where[0].stages_of(rank) for rank in range(6)] == [[0], [1]] * 3
    assert [where[0].replica_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [where[3].part(stage) for stage in range(2)] == [2, 3]
    assert where[2].watched(2) == [(2, 3), (0, 2), (2, 4)]


@pytest.mark.parametrize("transport", ["auto", "nccl", "zmq"])
def test_replicas_go_with_every_transport_between_stages(folder, transport):
    assert recipe.parse(["tiny.yaml", *TWO, "--wire.transport", transport]).wire.transport == transport


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--replicas.shuffle", "across", "--codec", "aqsgd(q(4))/q(8)"],
            "replicas.shuffle must be within for feedback with a buffer for each sample, because the buffers stay with "
            "one replica; got across beside compression.activations",
        ),
        (
            ["--optimizer.name", "quantized-adam", "--optimizer.freeze_after", "9 steps", "--replicas.sync.every", "9"],
            "replicas.sync.every must be 1 for quantized-adam, because each step exchanges its momentum, got 9",
        ),
        (["--replicas.gradients", "reuse"], "replicas.gradients: reuse needs the indices of an activation"),
        (["--replicas.count", "0"], "replicas.count must be from 1 to 1024, got 0"),
        (["--replicas.gradients", "aqsgd(q(4))"], "sums of gradients keep errors at the sender; use ef"),
        (
            [*EVERY_SIX, "--compression.shared", "q(4)"],
            "compression.shared must be none where replicas step alone, got q(4); drop it, or lower",
        ),
    ],
)
def test_what_cannot_work_is_refused(folder, options, said):
    with pytest.raises(OptionsError) as caught:
        recipe.parse(["tiny.yaml", "--replicas.count", "2", *options])
    assert said in str(caught.value)


SET = [
    (["--replicas.gradients", "bf16"], "replicas.gradients"),
    (["--replicas.shuffle", "across"], "replicas.shuffle"),
    (["--replicas.sync.every", "9", "--replicas.sync.lr", "1.0"], "replicas.sync.every and replicas.sync.lr"),
]
"""Fields that only several replicas read."""


@pytest.mark.parametrize(("options", "names"), SET)
def test_a_single_pipeline_refuses_the_fields_of_several(folder, options, names):
    """They were ignored, and a closing table told the codecs of an override that nobody used."""
    with pytest.raises(OptionsError) as caught:
        recipe.parse(["tiny.yaml", *options])
    told = str(caught.value)
    assert told.startswith("replicas.count must be above 1 for ") and f"{names}: a single replica has" in told


def test_one_replica_on_the_command_line_replaces_all_that_a_recipe_says_of_them(folder):
    text = (folder / "tiny.yaml").read_text()
    (folder / "many.yaml").write_text(f"{text}replicas: {{count: 3, gradients: bf16, sync: {{every: 9, lr: 1.0}}}}\n")
    for spelled in (["--replicas.count", "1"], ["--replicas.count=1"]):
        assert recipe.parse(["many.yaml", *spelled]).replicas == ReplicaOptions()
    with pytest.raises(OptionsError, match=r"replicas.count must be above 1 for replicas\.gradients: "):
        recipe.parse(["many.yaml", "--replicas.count", "1", "--replicas.gradients", "bf16"])


@pytest.mark.slow
@pytest.mark.parametrize("sync", [[], ["--replicas.sync.every", "2"]], ids=["every step", "every 2 steps"])
def test_a_warm_up_is_one_between_replicas_too(folder, sync):
    """So few bits would move the weights otherwise."""
    options = ["--replicas.count", "2", *sync, "--training.steps", "4", "--compression.warmup", "4 steps"]
    coded, plain = (
        summary(simulate("tiny.yaml", folder / name, *options, "--replicas.gradients", codec))
        for name, codec in (("coded", "ef(q(2))"), ("plain", "none"))
    )
    assert coded["weights_digest"] == plain["weights_digest"]
    assert sum(row["bytes"] for row in coded["replicas"]) == sum(row["bytes"] for row in plain["replicas"])


def test_weights_of_another_dtype_are_refused():
    """They ended the first step with a traceback, because their gradients came back as float32."""

    class Wide(Layer):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(3, 3, dtype=torch.float64)
            self.parts = {"wide": self.part}

    model = Blueprint((LayerSpec("wide", Wide),), lambda name, module: None)
    check_fit(model, ReplicaOptions(), CompressionOptions())
    with pytest.raises(ModelError, match=r"weights in float32, .* got wide.weight \(torch.float64\)"):
        check_fit(model, ReplicaOptions(count=2), CompressionOptions())


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("predict", [], "a prediction is of one pipeline; add --replicas.count 1, got 2"),
    ],
)
def test_what_arithmetic_does_not_know_is_refused(folder, capsys, command, options, said):
    assert cli.main([command, "tiny.yaml", *TWO, *options]) == 2
    assert said in capsys.readouterr().err
