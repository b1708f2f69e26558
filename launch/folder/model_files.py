"""The files of a model beside its weights. A run writes them at its start, because an export needs them.

RUN/model/
  facts.json                              classes, tied weights, and the type that the weights came in; exports too
  config.json, generation_config.json     of a model of transformers
  tokenizer files                         where a tokenizer of transformers is used

So an export needs neither the data nor the first model of the run. Both may be gone, or on another machine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from thinwire.compress.stores.marks import claim, remove, run_of, stray
from thinwire.errors.files import MARK, MOST_BYTES, read_object
from thinwire.models.architectures.library import GENERATION
from thinwire.models.data.parts import BYTES
from thinwire.models.data.tokenizer import load_tokenizer
from thinwire.models.tasks import MOST_CLASSES
from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from thinwire.launch.plan.prepared import Prepared

FACTS = "facts.json"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model that its configuration does not contain."""

    num_labels: int | None
    """Number of classes; None for a language model."""
    tied: Mapping[str, str]
    """Tied weights in the library's own model: name -> the name of the weight it shares."""
    dtype: str
    """The dtype of the weights before training."""
    classes: Sequence[str] = ()
    """The names of the classes, by number; empty if the data name none."""
    trained: Sequence[str] = ()
    """The full names of what trains beside a frozen model; empty without an adapter."""
    inside: str = ""
    """The type of the model of text and images whose text model it is; empty for others."""
    wide: Sequence[str] = ()
    """The full names of weights that came in float32 beside those of the narrower `dtype`."""
    ends: Sequence[int] = ()
    """Tokens that end a text in this run, and that the generation settings of its first model do not name."""


def save_model_files(run: Path, prepared: Prepared) -> None:
    """Write RUN/model; it replaces that of an earlier run with this name."""
    folder = run / "model"
    remove(folder)
    claim(folder, run_of(run) or "")
    blueprint, tokenizer = prepared.blueprint, prepared.recipe.data.tokenizer
    loaded = None if tokenizer == BYTES else load_tokenizer(tokenizer)
    known, ends = blueprint.ends(), dict.fromkeys(blueprint.more_ends)
    if loaded is not None and prepared.recipe.data.task == "causal-lm":
        ends |= dict.fromkeys(token for token in [loaded.eos_token_id] if token is not None and token not in known)
    facts = ModelFacts(
        num_labels=prepared.data.num_labels,
        tied=blueprint.tied,
        dtype=blueprint.dtype,
        classes=prepared.data.classes,
        trained=blueprint.trained,
        inside=blueprint.inside,
        wide=blueprint.checkpoint.wide(blueprint.dtype) if blueprint.checkpoint is not None else (),
        ends=tuple(ends),
    )
    (folder / FACTS).write_text(json.dumps(asdict(facts)) + "\n")
    if blueprint.save_config is not None:
        blueprint.save_config(folder)
    if loaded is not None:
        loaded.save_pretrained(folder)
        tokens = {name: getattr(loaded, name) for name in prepared.source.left_to_tokenizer}
        change_config(folder, {name: token for name, token in tokens.items() if token is not None})
    if ends and (folder / "config.json").is_file():
        _save_ends(folder, [*known, *ends])


def _save_ends(folder: Path, ends: Sequence[int]) -> None:
    """Name the tokens that end a text in generation settings; where there are none, transformers reads config.json."""
    path, config = folder / GENERATION, read_object(folder / "config.json")
    usual = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    given = read_object(path) if path.is_file() else usual
    path.write_text(json.dumps({**given, "eos_token_id": list(ends)}, indent=2) + "\n")


def ends_of(place: Path) -> frozenset[tuple[int, ...]]:
    """What ends a text of a run, a checkpoint or an export beside what its first model names; a recipe has none."""
    facts = _facts_of(place)
    return frozenset((token,) for token in (facts.ends if facts else ()))


def _facts_of(place: Path) -> ModelFacts | None:
    """The facts of the folder of a run, of its checkpoints, of one of them, or of an export; None of a recipe."""
    around = place.resolve()
    folders = [place, *(folder / "model" for folder in (around, *list(around.parents)[:2]))] if place.is_dir() else []
    return next((read_facts(folder) for folder in folders if (folder / FACTS).is_file()), None)


def change_config(folder: Path, changes: Mapping[str, Any]) -> None:
    """Set fields of config.json, if the folder has one."""
    path = folder / "config.json"
    if path.is_file():
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2) + "\n")


def read_facts(folder: Path) -> ModelFacts:
    """The facts that `save_model_files` wrote, in RUN/model or in an export. OptionsError if they are missing."""
    path = folder / FACTS
    if not path.exists():
        raise OptionsError(f"RUN must be the folder of a run, but {path} is missing")
    try:
        facts = ModelFacts(**read_object(path))
        if not isinstance(facts.num_labels, int | None) or not hasattr(torch, facts.dtype):
            raise ValueError("its fields have other types")
        for what, names in (("classes", facts.classes), ("wide weights", facts.wide)):
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"its {what} are no list of names")
        if not all(type(token) is int for token in facts.ends):
            raise ValueError("its ends are no list of tokens")
        if (facts.num_labels or 0) > MOST_CLASSES:
            raise ValueError(f"it has more than {MOST_CLASSES} classes")
        return replace(facts, tied={str(name): str(other) for name, other in facts.tied.items()})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise OptionsError(f"{path} must hold facts about the model, but it is damaged: {error}") from error


def check_classes(place: Path, classes: Sequence[str]) -> None:
    """Check that data name their classes as those that a model was trained on, where both have names and are here.

    `place` is the folder of a run, of its checkpoints, of one of them, or of an export; a recipe has no such names.
    `classes` are the names by number.

    Raises:
        OptionsError: they do not.
    """
    facts = _facts_of(place)
    trained = facts.classes if facts else ()
    if trained and classes and tuple(trained) != tuple(classes):
        raise OptionsError(
            f"the data must have the classes that {place} was trained on, {', '.join(trained)}, got "
            f"{', '.join(classes)}; name other data only as data.evaluation"
        )


def copy_model_files(run: Path, folder: Path, *left_out: str) -> None:
    """Copy the configuration and the tokenizer of a run's model to another folder, without some of the files."""
    source = run / "model"
    large = (path for path in source.rglob("*") if path.is_file() and path.stat().st_size > MOST_BYTES)
    said = stray(source) or next((f"{path} has more than {MOST_BYTES} bytes" for path in large), None)
    if said is not None:
        raise OptionsError(f"{source} must hold the files of a model, but {said}; remove it")
    for path in source.rglob("*"):  # copytree would go on where the disk is full, and fail with a list
        if path.is_file() and path.name not in (MARK, *left_out):
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
