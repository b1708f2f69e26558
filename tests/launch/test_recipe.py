"""Recipes as they are read: packaged ones, files, options, and what is written back."""

from dataclasses import replace

import pytest

from support.recipe_files import written
from thinwire.launch.recipe.recipe import Recipe, dump, packaged, parse
from thinwire.pipeline.options import BoundaryOptions, CompressionOptions


@pytest.mark.slow
@pytest.mark.parametrize("name", packaged())
def test_packaged_recipes_parse_under_their_own_name(name):
    recipe = parse([name])
    assert (recipe.name, recipe.description) == (name, packaged()[name])
    assert str(recipe.folder) == f"runs/{name}"


def test_options_override_fields_and_leave_the_others():
    plain = parse(["quickstart"])
    changed = parse(
        ["quickstart", "--compression.activations", 'q(2, per="row")', "--compression.boundaries.1.gradients", "q(6)"]
    )
    assert changed == replace(
        plain,
        compression=CompressionOptions(
            activations='q(2, per="row")', boundaries={1: BoundaryOptions(gradients="q(6)")}
        ),
    )
    codecs = [str(changed.compression.method(boundary, "gradients")) for boundary in range(3)]
    assert codecs == ["q(8, step=0.2)", "q(6)", "q(8, step=0.2)"]
    assert str(changed.compression.method(1, "activations")) == str(changed.compression.method(0, "activations"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "activations", "gradients"),
    [
        (["--codec", "bf16"], "bf16", "bf16"),
        (["--codec=bf16/q(8)"], "bf16", "q(8)"),
        (["--codec", "topk(0.3) / reuse"], "topk(0.3)", "reuse"),
        (["--codec", "q(2)", "--compression.gradients", "none"], "q(2)", "none"),
    ],
)
def test_codec_is_short_for_both_channels(options, activations, gradients):
    compression = parse(["quickstart", *options]).compression
    assert (compression.activations, compression.gradients) == (activations, gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--save-every", "3", "--pipeline.num-stages", "2"],
        ["--save_every", "3", "--pipeline.num_stages", "2"],
        ["--save-every=3", "--pipeline.num-stages=2"],
    ],
)
def test_dashes_and_underscores_are_the_same_in_names(options):
    recipe = parse(["quickstart", *options])
    assert (recipe.save_every, recipe.pipeline.num_stages) == (3, 2)


@pytest.mark.slow
def test_dashes_in_values_stay():
    assert parse(["quickstart", "--name=low-rank", "--output", "out-put/a__b"]).name == "low-rank"
    assert str(parse(["quickstart", "--output", "out-put/a__b"]).folder) == "out-put/a__b"


@pytest.mark.slow
@pytest.mark.parametrize("place", range(3))
def test_the_recipe_may_stand_anywhere_among_the_options(tmp_path, place):
    """Behind an option it was taken for granted, never read: the run trained on defaults, under the name "unnamed"."""
    arguments = ["--save-every=5", "--training.seed=7"]
    arguments.insert(place, str(written(tmp_path, "training: {steps: 3}")))
    recipe = parse(arguments)
    assert (recipe.name, recipe.save_every) == ("mine", 5)
    assert (recipe.training.steps, recipe.training.seed) == (3, 7)


def test_a_file_sets_fields_and_names_its_run(tmp_path):
    path = written(
        tmp_path, "model: {name: llama}\ncompression: {boundaries: {0: {activations: fp16}}}\n", "small.yaml"
    )
    defaults = Recipe(name="small")
    assert parse([str(path)]) == replace(
        defaults,
        model=replace(defaults.model, name="llama"),
        compression=CompressionOptions(boundaries={0: BoundaryOptions(activations="fp16")}),
    )


def test_paths_of_any_option_may_begin_with_the_users_home(tmp_path, monkeypatch):
    """`--model.name=~/model` and a recipe's `~/model` were names on the hub."""
    monkeypatch.setenv("HOME", str(tmp_path))
    clients = "clients: {count: 2, division: order, outlines: [~/a, b]}\n"
    (tmp_path / "r.yaml").write_text("data: {name: ~/text, evaluation: ~/other}\n" + clients)
    wire = ["--wire.transport=zmq", "--wire.keys=~/keys"]
    found = parse([f"{tmp_path}/r.yaml", "--model.name=~/model", "--output=~/run", *wire])
    assert (found.data.name, found.data.evaluation) == (f"{tmp_path}/text", f"{tmp_path}/other")
    paths = found.model.name, found.output, found.wire.keys
    assert paths == (f"{tmp_path}/model", f"{tmp_path}/run", f"{tmp_path}/keys")
    assert found.clients.outlines == [f"{tmp_path}/a", "b"]


def test_a_recipe_and_a_run_to_go_on_with_may_lie_in_the_users_home(tmp_path, monkeypatch):
    """`--output ~/run` was $HOME/run, and `--resume=~/run` was ./~/run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    written(tmp_path, "training: {steps: 3}", "run/recipe.yaml")
    resumed = parse(["--resume=~/run"])
    assert (resumed.output, resumed.training.steps) == (f"{tmp_path}/run", 3)
    assert parse(["~/run/recipe.yaml"]).training.steps == 3


def test_fields_that_share_a_group_in_the_file_are_set_one_by_one(tmp_path):
    shared = written(tmp_path, "compression: {boundaries: {0: &a {activations: q(2)}, 1: *a}}")
    boundaries = parse([str(shared), "--compression.boundaries.1.activations", "q(3)"]).compression.boundaries
    assert boundaries == {0: BoundaryOptions(activations="q(2)"), 1: BoundaryOptions(activations="q(3)")}


def test_a_name_in_the_file_or_on_the_command_line_wins(tmp_path):
    path = written(tmp_path, "name: given")
    assert parse([str(path)]).name == "given"
    assert parse([str(path), "--name", "given later"]).name == "given later"


def test_an_option_changes_one_channel_of_the_files_boundaries(tmp_path):
    path = written(tmp_path, "compression: {boundaries: {1: {activations: q(2)}, 2: {activations: q(3)}}}")
    boundaries = parse([str(path), "--compression.boundaries.1.gradients", "q(6)"]).compression.boundaries
    assert boundaries == {
        1: BoundaryOptions(activations="q(2)", gradients="q(6)"),
        2: BoundaryOptions(activations="q(3)"),
    }


def test_another_optimizer_has_its_own_usual_numbers_over_a_recipe_that_was_written(tmp_path):
    """Muon had the momentum of 0.9 that AdamW does not use, and RMSprop was refused for betas that nobody gave."""
    file = str(written(tmp_path, dump(parse(["gpt2-tiny", "--optimizer.eps", "1e-6"]))))
    assert parse([file, "--optimizer.name", "muon"]).optimizer.momentum == 0.95
    kept = parse([file, "--optimizer.name", "RMSprop"]).optimizer
    assert (kept.betas, kept.momentum, kept.eps) == (None, None, 1e-6)
    assert parse([file]).optimizer.betas == (0.9, 0.999)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--compression.boundaries.1.gradients", 'q(6, scale="minmax")', "--pipeline.layers", "[1,2,2,1]"],
        ["--optimizer.betas", "[0.8, 0.95]", "--optimizer.max_grad_norm", "null", "--optimizer.eps", "1e-30"],
        ["--name", "3", "--description", "null: [#'\"", "--wire.checksum", "false", "--wire.nonfinite", "send"],
    ],
)
def test_a_dumped_recipe_reads_back_equal(tmp_path, options):
    recipe = parse(["quickstart", *options])
    assert parse([str(written(tmp_path, dump(recipe)))]) == recipe


@pytest.mark.parametrize(
    ("stages", "activations", "gradients"),
    [
        (4, "q(8, step=0.28, codebook=4096)", 'q(16, step=0.65, per="tensor")'),
        (8, "q(8, step=0.15, codebook=4096)", "q(8, step=0.2)"),
    ],
)
def test_codecs_of_a_pretrained_model_follow_the_number_of_stages(stages, activations, gradients):
    """In eight stages those of four left 0.045 nats in the exported model of 500 steps."""
    options = ["--pipeline.num_stages", str(stages), "--pipeline.num_microbatches", str(stages)]
    usual = parse(["smollm2-tiny", *options]).compression
    assert (usual.activations, usual.gradients) == (activations, gradients)
    named = parse(["smollm2-tiny", *options, "--codec", "q(5)/q(6)"]).compression
    assert (named.activations, named.gradients) == ("q(5)", "q(6)")
    assert parse(["quickstart"]).compression.gradients == "q(8, step=0.2)"
