"""Short simulated runs of recipes in this process, and what they leave."""

import json
from contextlib import chdir
from pathlib import Path

import torch

from support.run_files import weights_of
from thinwire.launch import cli
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.recipe import recipe
from thinwire.models.layers import build_stage

TINY = {
    "gpt2-tiny": ["--data.limit", "5000"],
    "gpt2-xl-tiny": ["--data.limit", "5000"],
    "deberta-tiny": ["--data.limit", "120"],
    "resnet-tiny": ["--data.limit", "250"],
    "qwen3-tiny": ["--data.limit", "5000"],
    "split-tiny": ["--data.limit", "250"],
    "vit-tiny": ["--data.limit", "250"],
    "bert-tiny": ["--data.limit", "120"],
}
"""The packaged recipes that need no download, and what makes them short."""
SHORT = ["--training.steps", "2", "--training.evaluate_every", "0 steps", "--data.held_out", "0.3"]


def simulate(name: str, folder: Path, *options: str) -> Path:
    """Simulate a recipe with its output in `folder`; AssertionError unless it ends well."""
    assert cli.main(["simulate", name, "--output", str(folder), *map(str, options)]) == 0
    return folder


def export(run: Path, folder: Path) -> Path:
    """Export a run; AssertionError unless it ends well."""
    assert cli.main(["export", str(run), "--to", str(folder)]) == 0
    return folder


def outputs_of(run: Path):
    """What the stages of a run make of four held-out samples: inputs, side inputs, outputs."""
    prepared = prepare(recipe.parse([str(run / "recipe.yaml")]))
    ids = torch.arange(4)
    inputs, side = prepared.data.held_out.inputs(ids), prepared.data.held_out.side(ids)
    x = inputs
    with torch.no_grad():
        for index, cut in enumerate(prepared.cuts):
            stage = build_stage(prepared.blueprint, cut, seed=0).eval()
            saved = weights_of(run, index)
            for name, tensor in stage.full_state().items():
                tensor.copy_(saved[name])
            x = stage(x, **side)
    return inputs, side, x


def evaluated(folder: Path, elsewhere: Path, capsys):
    """The scores that `thinwire eval` prints, by mode and name; AssertionError if it wrote any file."""
    elsewhere.mkdir(exist_ok=True)
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    with chdir(elsewhere):
        assert cli.main(["eval", str(folder), "--json"]) == 0
        assert list(Path().iterdir()) == []
    assert sorted(folder.rglob("*")) == before
    [table] = json.loads(capsys.readouterr().out)["tables"]
    names = ["loss", *table["columns"][2:-1], "num_targets"]
    return {mode: dict(zip(names, values, strict=True)) for mode, *values in table["rows"]}


def loaded_as_its_readme_says(folder: Path):
    """The unsplit model that the code in an export's README makes."""
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    known = {}
    with chdir(folder):
        exec(code, known)
    return known["model"].eval()
