"""A model that memory cannot hold is refused in a sentence before it is built; building took minutes, in silence."""

from dataclasses import replace

import pytest

from thinwire.launch import cli
from thinwire.launch.plan import prepare
from thinwire.launch.recipe import recipe
from thinwire.models import source
from thinwire.models.options import LoraOptions, ModelOptions
from thinwire.pipeline.errors import OptionsError

PARAMETERS = 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "simulate"])
def test_thousands_of_layers_are_answered_before_they_are_built(command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "machine_memory", lambda: 16 * 10**9)
    monkeypatch.setattr(source.ModelSource, "blueprint", lambda *_: pytest.fail("the model was built"))
    assert cli.main([command, "quickstart", "--model.config.n_layer", "10000"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("the model must fit into memory: its ")
    assert "GB to train, and this machine has 16.0 GB, its swap included; make the model smaller, or" in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (["--model.config.foo", "1"], "the config of resnet18 takes "),
        (["--model.config.width", "wide"], "width must be a whole number of at least 1, got 'wide'"),
        (
            ["--model.name", "vit_b_32", "--model.config", "{num_heads: 7}", "--pipeline.layers", "null"],
            "torchvision cannot build vit_b_32 with ",
        ),
    ],
)
def test_a_mistake_in_a_vision_model_is_a_sentence(mistake, said, monkeypatch, tmp_path, capsys):
    """Its parameters are counted before its configuration is checked, and that was a traceback."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["simulate", "resnet-tiny", *mistake]) == 2
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told


@pytest.fixture
def needed(monkeypatch):
    """The least memory with which a recipe of a million parameters is not refused, found by trying."""

    def numbers_of_a_parameter(replicas=1, parameters=PARAMETERS, **changes):
        wanted = recipe.parse(["quickstart"])
        wanted = replace(wanted, **{name: replace(getattr(wanted, name), **more) for name, more in changes.items()})
        for numbers in range(20):
            monkeypatch.setattr(prepare, "machine_memory", lambda held=4 * numbers * PARAMETERS: held)
            try:
                prepare.check_memory(wanted, parameters, replicas)
            except OptionsError:
                continue
            return numbers
        return None

    return numbers_of_a_parameter


def test_what_training_keeps_for_a_parameter(needed):
    assert needed() == 4, "itself, its gradient, two moments"
    assert needed(replicas=3) == 12
    assert needed(optimizer={"name": "quantized-adam", "freeze_after": "9 steps"}) == 4
    plain = {"name": "sgd", "weight_decay": 0.1}
    assert needed(optimizer=plain) == 3
    assert needed(optimizer={**plain, "momentum": 0.0}) == 2
    assert needed(optimizer={"name": "Adafactor", "betas": None, "eps": None, "momentum": None}) == 2
    assert needed(training={"steps": 0}) == 1
    assert needed(training={"steps": 0, "epochs": 2}) == 4


def test_nothing_is_refused_that_may_work(needed, monkeypatch):
    """Some models cannot be counted. Whether other machines hold most of the stages is asked before."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert needed() == 4, "a cluster may have set it for other programs"
    assert needed(parameters=None) == 0


@pytest.mark.parametrize(
    ("dtype", "rank", "nbytes"),
    [("fp32", 4, 4), ("bf16", 4, 2), ("nf4", 4, 0.5), ("fp32", None, 16), ("bf16", None, 8)],
)
def test_weights_take_what_their_type_takes(dtype, rank, nbytes, monkeypatch):
    """Those of bf16 were counted as fp32, so a model that fits was refused. Gradients and moments are of that dtype."""
    model = ModelOptions(weights="pretrained", dtype=dtype, lora=LoraOptions(rank=rank))
    wanted = replace(recipe.parse(["quickstart"]), model=model)
    monkeypatch.setattr(prepare, "machine_memory", lambda: nbytes * PARAMETERS)
    prepare.check_memory(wanted, PARAMETERS, 1)
    monkeypatch.setattr(prepare, "machine_memory", lambda: nbytes * PARAMETERS - 1)
    with pytest.raises(OptionsError, match="the model must fit into memory"):
        prepare.check_memory(wanted, PARAMETERS, 1)
