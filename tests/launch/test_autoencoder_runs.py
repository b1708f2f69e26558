"""Runs with a learned codec: the same in every kind of process, after a stop, exported and scored again."""

import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from support.commands import THINWIRE, completed
from support.recipe_runs import evaluated, export, loaded_as_its_readme_says, simulate
from support.run_files import losses, summary, weights_of
from support.tiny_run import prepared, ran
from thinwire.launch import cli
from thinwire.launch.run.assembly import with_codecs
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import OptionsError

SAME = ("train_loss", "held_out", "channels", "weights_digest", "bytes_sent", "steps")
NARROW = ["--compression.activations", 'autoencoder(4, values="q(8)")', "--compression.gradients", "ef21(q(8))"]
DROPS = json.dumps({"vocab_size": 256, "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.1})


def maps():
    """The stage and the shape of each map of `tiny.yaml`, by name."""
    place = f"autoencoder.{prepared().cuts[1].start}.0"
    return {f"{place}.encoder": (0, [4, 16]), f"{place}.decoder": (1, [16, 4])}


@pytest.mark.processes
def test_processes_of_replicas_that_stopped_end_as_a_simulation_that_did_not(folder):
    options = [*NARROW, "--replicas.count", "2", "--optimizer.schedule", "constant", "--compression.warmup", "2 steps"]
    simulated = simulate("tiny.yaml", folder / "simulated", *options, "--training.steps", "7")
    first = [*options, "--training.steps", "5", "--checkpoint.every", "5 steps", "--debug.check_buffers", "true"]
    ended = completed([*THINWIRE, "train", "tiny.yaml", "--output", "real", *first], folder)
    assert ended.status == 0, ended.stderr
    again = completed([*THINWIRE, "train", "--resume", "real", "--training.steps", "7"], folder)
    assert again.status == 0, again.stderr
    wanted, got = summary(simulated), summary(folder / "real")
    assert {name: got[name] for name in SAME} == {name: wanted[name] for name in SAME}
    assert losses(folder / "real") == losses(simulated)


@pytest.mark.slow
def test_the_maps_are_trained_sent_narrow_and_exported_beside_the_model(folder, capsys):
    run = simulate("tiny.yaml", folder / "run", *NARROW, "--training.steps", "4")
    told, fresh = summary(run), prepared(*NARROW)
    # 4 of 16 features at 8 bits, and the scales, 16 bits for 4 elements; headers are as long as the payloads here
    for row in told["channels"]:
        assert row["bytes"] == row["frames"] * (64 + 2 * 16 * 4 + 2 * 16 * 2)
        assert row["uncompressed"] == row["frames"] * 2 * 16 * 16 * 4
    assert [stage["layers"] for stage in told["stages"]] == [len(cut) for cut in fresh.of_model().cuts]
    for name, (stage, shape) in maps().items():
        trained = load_file(weights_of(run, stage))[name]
        assert list(trained.shape) == shape
        assert (trained != 0).all(), "at the start most are zero"
    exported = export(run, folder / "export")
    assert "the model is without its autoencoders" in (exported / "README.md").read_text()
    assert set(load_file(exported / "autoencoder.safetensors")) == set(maps())
    assert not set(load_file(exported / "model.safetensors")) & set(maps())
    assert loaded_as_its_readme_says(exported).transformer is not None
    on, off = (evaluated(exported, folder / "elsewhere", capsys)[mode]["loss"] for mode in ("on", "off"))
    assert on != off
    # ef21 goes around gradients, which no evaluation has
    assert [on, off] == [pytest.approx(told["held_out"][mode]["loss"], abs=1e-6) for mode in ("on", "off")]


@pytest.mark.slow
def test_while_nothing_is_compressed_the_model_trains_as_without_it(folder):
    """Dropout too is drawn as without the layers of the codec."""
    options = ["--training.steps", "3", "--model.config", DROPS]
    plain = simulate("tiny.yaml", folder / "plain", *options, "--codec", "none")
    warm = simulate("tiny.yaml", folder / "warm", *options, *NARROW, "--compression.warmup", "3 steps")
    assert losses(warm) == losses(plain)
    for stage in (0, 1):
        found, wanted = load_file(weights_of(warm, stage)), load_file(weights_of(plain, stage))
        assert set(found) - set(wanted) == {name for name, (owner, _) in maps().items() if owner == stage}
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert summary(warm)["held_out"]["off"] == summary(plain)["held_out"]["off"]
    assert summary(warm)["held_out"]["on"] != summary(plain)["held_out"]["on"]


def test_a_rank_that_narrows_nothing_is_refused_before_a_process_starts(folder):
    with pytest.raises(ModelError, match="must be less than the features that it narrows, and 16 cross boundary 0"):
        prepared("--compression.activations", "autoencoder(16)")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("codec", ["autoencoder(1)/q(8)", "topk(0.1)/reuse"])
def test_gradients_that_do_not_cross_are_not_measured(codec, recwarn):
    """15 of 16 features have no gradient behind an autoencoder of rank 1, and `q(8)` has no zero."""
    ran("--codec", codec)
    assert not [warning for warning in recwarn if "stand still" in str(warning.message)]


@pytest.mark.parametrize(("freeze_after", "moves"), [("24 steps", False), ("25 steps", True)])
def test_weights_that_quantized_adam_would_never_move_are_refused(folder, freeze_after, moves):
    """An epoch has 24 steps, in which the maps have no gradient."""
    options = ["--compression.warmup", "1 epoch", "--optimizer.name", "quantized-adam"]
    options += ["--optimizer.freeze_after", freeze_after, "--training.steps", "99"]
    refused = pytest.raises(OptionsError, match=r"optimizer.freeze_after must be longer than compression.warmup beside")
    with nullcontext() if moves else refused:
        prepared(*NARROW, *options)


def test_the_bench_of_codecs_does_not_train(folder, capsys):
    assert cli.main(["bench", "codecs", "--codec", "autoencoder(4)"]) == 2
    assert "bench codecs cannot measure autoencoder(4), whose weights are trained" in capsys.readouterr().err


def test_the_best_cut_is_one_of_the_models_own_layers(folder, capsys):
    assert cli.main(["partition", "tiny.yaml", "--count", "--json", *NARROW]) == 0
    assert sum(json.loads(capsys.readouterr().out)["layers"]) == len(prepared().blueprint.layers)


def test_another_codec_for_the_same_data_has_layers_of_its_own(folder):
    """As the bench does, which compares codecs in one set of processes."""
    plain, narrow = prepared(), prepared(*NARROW)
    other = with_codecs(plain, narrow.recipe.compression)
    assert [layer.name for layer in other.blueprint.layers] == [layer.name for layer in narrow.blueprint.layers]
    assert other.cuts == narrow.cuts and other.first_layers == [0, plain.cuts[1].start]
    back = with_codecs(other, plain.recipe.compression)
    assert back.cuts == plain.cuts and len(back.blueprint.layers) == len(plain.blueprint.layers)
