"""The files of a model beside its weights. A run writes them at its start, because an export needs them.

RUN/model/
  facts.json                              classes, tied weights, and the type that the weights came in
  config.json, generation_config.json     of a model of transformers
  tokenizer files                         where a tokenizer of transformers is used

So an export needs neither the data nor the first model of the run. Both may be gone, or on another machine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from thinwire.launch.run.assembly import Prepared
from thinwire.launch.run.folders import FACTS
from thinwire.launch.run.logs.metrics import MetricsLog
from thinwire.launch.run.outputs import OutputError, save_recipe, writing
from thinwire.models import hub
from thinwire.models.data.options import BYTES
from thinwire.pipeline.errors import OptionsError


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model that its configuration does not contain."""

    num_labels: int | None
    """Number of classes; None for a language model."""
    tied: Mapping[str, str]
    """Tied weights in the library's own model: name -> the name of the weight it shares."""
    dtype: str
    """The dtype of the weights before training."""


def keep_folder(prepared: Prepared, log: MetricsLog | None) -> bool:
    """Make a run's folder anew, with what a resume and an export need, if somebody moved or removed it.

    Args:
        prepared: the run.
        log: its log, in the process that has one.

    Returns whether the files of the log were gone.

    Raises:
        OutputError: another run is in its place, or the disk has no room.
    """
    folder = prepared.recipe.folder
    with writing(folder):
        if not (folder / "recipe.yaml").exists():
            save_recipe(prepared.recipe)
        try:
            gone = log is not None and log.put_back()
        except FileExistsError as error:
            raise OutputError(
                f"{folder} must stay in its place while a run writes to it, but another run is there now; move that "
                f"one away and this one back"
            ) from error
        if gone:
            save_model_files(folder, prepared)
        return gone


def save_model_files(run: Path, prepared: Prepared) -> None:
    """Write RUN/model; it replaces that of an earlier run with this name."""
    folder = run / "model"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != FACTS:  # which tells a later run, at any moment, that a run has written here
            path.unlink()
    blueprint, tokenizer = prepared.blueprint, prepared.recipe.data.tokenizer
    facts = ModelFacts(num_labels=prepared.data.num_labels, tied=blueprint.tied, dtype=blueprint.dtype)
    (folder / FACTS).write_text(json.dumps(asdict(facts)) + "\n")
    if blueprint.save_config is not None:
        blueprint.save_config(folder)
    if tokenizer != BYTES:
        from transformers import AutoTokenizer

        with hub.reading(tokenizer):
            AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def read_facts(run: Path) -> ModelFacts:
    """The facts that `save_model_files` wrote. OptionsError if they are missing."""
    path = run / "model" / FACTS
    if not path.is_file():
        raise OptionsError(f"RUN must be the folder of a run, but {path} is missing")
    try:
        return ModelFacts(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise OptionsError(f"{path} must hold facts about the model, but it is damaged: {error}") from error


def copy_model_files(run: Path, folder: Path) -> None:
    """Copy the configuration and the tokenizer of a run's model to another folder."""
    for path in sorted((run / "model").iterdir()):
        if path.name != FACTS:
            shutil.copyfile(path, folder / path.name)
