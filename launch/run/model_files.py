"""What an export must know of a run's model beside its weights, kept in the run's folder from its start.

RUN/model/
  facts.json                              classes, tied weights, and the type that the weights came in
  config.json, generation_config.json     of a model of transformers
  tokenizer files                         where a tokenizer of transformers is used

So an export reads neither the data nor the model that the run began with: both may be gone, or on another machine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from thinwire.launch.run.assembly import Prepared
from thinwire.models.data.tokenizer import BYTES
from thinwire.pipeline.errors import OptionsError

FACTS = "facts.json"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What no configuration says."""

    num_labels: int | None
    """The classes to tell apart; None for a language model."""
    tied: Mapping[str, str]
    """Weights that the library's own model shares, and whose they are there."""
    dtype: str
    """The type of the weights as the model came."""


def save_model_files(run: Path, prepared: Prepared) -> None:
    """Write RUN/model, in place of that of an earlier run of the same name."""
    folder = run / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    blueprint, tokenizer = prepared.blueprint, prepared.recipe.data.tokenizer
    if blueprint.save_config is not None:
        blueprint.save_config(folder)
    if tokenizer != BYTES:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    facts = ModelFacts(num_labels=prepared.data.num_labels, tied=blueprint.tied, dtype=blueprint.dtype)
    (folder / FACTS).write_text(json.dumps(asdict(facts)) + "\n")


def read_facts(run: Path) -> ModelFacts:
    """What `save_model_files` wrote of the model itself; OptionsError where it is missing."""
    path = run / "model" / FACTS
    if not path.is_file():
        raise OptionsError(f"RUN must be the folder of a run, and {path} is missing")
    return ModelFacts(**json.loads(path.read_text()))


def copy_model_files(run: Path, folder: Path) -> None:
    """Put the configuration and the tokenizer of a run's model into another folder."""
    for path in sorted((run / "model").iterdir()):
        if path.name != FACTS:
            shutil.copyfile(path, folder / path.name)
