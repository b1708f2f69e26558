"""What a cell depends on beside its recipe: files of a model, the newest weights of a run, code of your own."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from support.own_code import own_module
from thinwire.launch.recipe import recipe
from thinwire.launch.study.cells import origin_of
from thinwire.pipeline.saving.checkpoint import WeightsCheckpoint

DATA = SimpleNamespace(training=SimpleNamespace(digest="a"), held_out_digest=None)


def origin(*options):
    return origin_of(recipe.parse(["gpt2-tiny", *options]), DATA)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("model.safetensors", ["--model.weights"]),
        (
            "adapter_model.safetensors",
            ["--model.weights", "pretrained", "--model.lora.rank", "4", "--model.lora.weights"],
        ),
    ],
    ids=["model", "adapter"],
)
def test_other_weights_in_the_same_folder_are_another_origin(tmp_path, name, options):
    """A study kept the cells that another adapter had made."""
    (tmp_path / name).write_bytes(b"one")
    (tmp_path / "README.md").write_text("one")
    first = origin(*options, str(tmp_path))
    (tmp_path / "README.md").write_text("two")
    assert origin(*options, str(tmp_path)) == first
    (tmp_path / name).write_bytes(b"two")
    second = origin(*options, str(tmp_path))
    assert {name for name in first if first[name] != second[name]} == {"model's files"}


def test_another_configuration_of_a_model_in_a_folder_is_another_origin(tmp_path):
    (tmp_path / "config.json").write_text('{"resid_pdrop": 0.1}')
    first = origin("--model.name", str(tmp_path))
    (tmp_path / "config.json").write_text('{"resid_pdrop": 0.2}')
    assert origin("--model.name", str(tmp_path)) != first


def test_newer_weights_of_a_run_are_another_origin(tmp_path):
    def save(step):
        saving = WeightsCheckpoint(tmp_path / "weights", step, "")
        saving.complete({"0": saving.write(0, {"w": torch.full((1,), step)}, {})})
        (tmp_path / "recipe.yaml").write_text("data: {name: shakespeare}\n")
        return origin("--model.weights", str(tmp_path))

    assert save(1)["model's files"] != save(2)["model's files"]


OWN = """
from dataclasses import dataclass

from thinwire.compress.codecs.quantize import Quantize


@dataclass(frozen=True, repr=False)
class Fine(Quantize):
    pass


def make():
    return []
"""


@pytest.mark.parametrize(
    "options", [["--model.name", "own_origin:make"], ["--codec", "ef(own_origin.Fine(4))/none"]], ids=["model", "codec"]
)
def test_other_code_of_your_own_is_another_origin(tmp_path, monkeypatch, options):
    with own_module("own_origin", OWN, tmp_path, monkeypatch):
        importlib.import_module("own_origin")
        first = origin(*options)
        (tmp_path / "own_origin.py").write_text(f"{OWN}# other\n")
        second = origin(*options)
    assert {name for name in first if first[name] != second[name]} == {"own code"}
