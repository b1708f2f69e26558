"""The folder of an export: the stages of a run as one model, for the library that the model came from.

DIR/
  model.safetensors, config.json    for from_pretrained (other models: model.safetensors for load_state_dict)
  generation_config.json            how the model generates text, if the first model had this file
  tokenizer files                   if the run used a tokenizer of transformers
  facts.json                        the classes of its data, by number, and more of the run's model/
  recipe.yaml                       how the model was trained; `thinwire eval` scores it, compression on and off
  README.md                         the model card: how to load the model, its data, and whether it needs the codec
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from thinwire.errors.files import read_object
from thinwire.errors.names import first_of
from thinwire.errors.words import listed
from thinwire.launch.folder.model_files import change_config, copy_model_files
from thinwire.launch.folder.saved_run import SavedRun, require_base, weights_of
from thinwire.launch.folder.weights import with_run_weights
from thinwire.launch.recipe.recipe import Recipe, dump
from thinwire.launch.results.figures import scores_of
from thinwire.launch.shared.arguments import written
from thinwire.launch.shared.exit_codes import FailedError
from thinwire.launch.shared.tables import Table
from thinwire.models.architectures.library import AUTO_CLASSES, GENERATION, for_the_library, wide_in
from thinwire.models.data.parts import BYTES, is_split
from thinwire.models.data.sources import BUNDLED
from thinwire.models.data.tokenizer import load_tokenizer
from thinwire.models.file_mode import follow_umask
from thinwire.models.layers import build_stage
from thinwire.models.lora import CONFIG_FILE, WEIGHTS_FILE, for_peft, merged_state
from thinwire.models.model import find_model
from thinwire.models.options import FRESH, PRETRAINED, LoraOptions
from thinwire.models.smollm2 import ON_THE_HUB, SMOLLM2
from thinwire.models.source import Use
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.evaluation import advice
from thinwire.pipeline.frames import CHANNELS, ChannelName

NEEDS_CODEC = 0.01
"""If the held-out loss without compression is higher by more than this share, inference needs the codec."""
ENOUGH = 1000
"""The targets that a verdict needs, and the errors of the difference that it must be larger than."""
ERRORS = 2


def export(run: SavedRun, folder: Path, dtype: str | None = None, *, of_whole: bool = False) -> list[str]:
    """Write the folder, and return notes: a sentence for each difference to the model in memory.

    The folder is new or empty. `dtype` is that of the exported weights; None is the dtype of the model before training.
    `of_whole` names an adapter of a text model as the model of images and text around it does.

    Raises:
        OptionsError: the folder cannot be made, or there is no such model.
        FailedError: its disk is full, for example; the folder is gone again.
    """
    if of_whole and not (run.facts.inside and run.recipe.model.lora.rank):
        raise OptionsError(f"--whole is for an adapter of a text model in one of images and text, got {run.folder}")
    with written("--to", folder, "folder"):
        folder.mkdir(parents=True, exist_ok=True)
    write = _write_model if run.recipe.model.lora.rank is None else partial(_write_adapter, of_whole=of_whole)
    try:
        notes = write(run, folder, dtype)
        if date := run.recipe.data.date:
            notes.append(f"chats had the date {date} in training; the exported chat template writes that of each day")
        (folder / "recipe.yaml").write_text(dump(_for_evaluation(run, folder)))
        (folder / "README.md").write_text(readme(run, notes, of_whole=of_whole))
        return notes
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        why = getattr(error, "strerror", None) or error
        raise FailedError(f"{folder} cannot be written: {why}; free some space, or name another --to") from error


def merged(run: SavedRun, dtype: str | None = None) -> SavedRun:
    """The same run as one that has trained the model itself: its adapter is added to the model, for `export`.

    Raises:
        OptionsError: the run has no adapter, or not all of it, or its model has changed.
        ModelError: its model is not there.
    """
    options = run.recipe.model
    if options.lora.rank is None:
        raise OptionsError(f"--merged is for a run with model.lora, and {run.folder} has trained the model itself")
    _check_adapter(run)
    # what the adapter is added to must have all its bits
    wide = replace(
        options, lora=replace(options.lora, weights=FRESH), dtype="fp32" if options.dtype == "fp32" else "bf16"
    )
    use = Use(task=run.recipe.data.task, num_labels=run.facts.num_labels)
    model = find_model(with_run_weights(wide)).blueprint(use)
    whole = build_stage(model, range(len(model.layers)), seed=run.recipe.training.seed)
    require_base(options.name, [whole], run.base, ", or export without --merged")
    for name, tensor in whole.saved_state().items():
        tensor.detach().copy_(run.weights[name])
    recipe = replace(run.recipe, model=replace(wide, lora=LoraOptions()))
    scored = "" if options.dtype == "fp32" else f"an adapter beside weights in {options.dtype}"
    return replace(
        run, recipe=recipe, scored=scored, weights=merged_state(whole, getattr(torch, dtype or run.facts.dtype))
    )


def _check_adapter(run: SavedRun) -> None:
    """Raise OptionsError unless a run has saved the tensors that its adapter has, and no others."""
    if wrong := sorted(set(run.facts.trained) ^ run.weights.keys()):
        raise OptionsError(
            f"{run.folder} must hold the {len(run.facts.trained)} tensors of its adapter and no others, but "
            f"{first_of(wrong)} {'is' if len(wrong) == 1 else 'are'} missing or too many; copy it again from its hosts"
        )


def _write_model(run: SavedRun, folder: Path, dtype: str | None) -> list[str]:
    """Write a model that was trained itself."""
    from huggingface_hub import save_torch_state_dict

    copy_model_files(run.folder, folder, CONFIG_FILE)
    chosen = dtype or run.facts.dtype
    tied, apart = tied_again(run.weights, run.facts.tied)
    kept = {name: tensor for name, tensor in run.weights.items() if name not in tied}
    by_library = (folder / "config.json").is_file()
    wide = {*run.facts.wide, *(wide_in(folder, run.recipe.data.task, getattr(torch, chosen)) if by_library else ())}
    dtypes = {name: "float32" if name in wide else chosen for name in kept}
    rounded = {name: _of_dtype(tensor, dtypes[name]) for name, tensor in kept.items()}
    if by_library:
        rounded = for_the_library(folder, run.recipe.data.task, rounded)
        ties = {"tie_word_embeddings": True} if tied else {}
        change_config(folder, {"dtype": chosen, **ties, **_of_classes(run)})
    save_torch_state_dict(rounded, folder)  # large weights become several files and an index
    for path in folder.glob("*.safetensors"):
        follow_umask(path)
    notes = [
        f"{name} and {other} were tied, but are no longer equal: the export has both, untied" for name, other in apart
    ]
    scored = run.scored
    if any(_rounds(tensor, dtypes[name]) for name, tensor in kept.items()):
        notes.append(f"the weights are rounded to {chosen}; --dtype float32 keeps all their digits")
        scored = scored or "the weights before they were rounded"
    if run.held_out and scored:
        notes.append(f"the held-out scores in README.md are of {scored}; `thinwire eval` scores the export as it is")
    return [*notes, *_of_another_tokenizer(folder)]


def _of_another_tokenizer(folder: Path) -> list[str]:
    """A sentence if the library takes the exported tokenizer for one of another class, because of the model's type."""
    if not all((folder / name).is_file() for name in ("config.json", "tokenizer.json")):
        return []
    from transformers import PreTrainedTokenizerFast

    found = load_tokenizer(str(folder))
    took, saved = type(found).__name__, read_object(folder / "tokenizer_config.json").get("tokenizer_class")
    if took == saved or not found.is_fast:
        return []
    as_saved: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    if found.backend_tokenizer.to_str() == as_saved.backend_tokenizer.to_str():
        return []
    return [
        f"AutoTokenizer loads the tokenizer as a {took}, because of the model's type, and that gives other tokens than "
        f"in training; load it with PreTrainedTokenizerFast.from_pretrained"
    ]


def _write_adapter(run: SavedRun, folder: Path, dtype: str | None, *, of_whole: bool) -> list[str]:
    """Write an adapter as PEFT does."""
    _check_adapter(run)
    copy_model_files(run.folder, folder, "config.json", GENERATION)
    tensors = {name: _of_dtype(tensor, dtype or "float32") for name, tensor in run.weights.items()}
    config = json.loads((folder / CONFIG_FILE).read_text())
    base = Path(config["base_model_name_or_path"])
    if of_whole:
        tensors = _as_in_whole(tensors, str(base))
        config["target_modules"] = sorted({name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name})
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    save_file(for_peft(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    follow_umask(folder / WEIGHTS_FILE)
    notes = []
    if base.is_dir() and not (base / "config.json").is_file():
        notes.append(
            f"PEFT cannot read {base}, which a run saved: export that run, and name the export in {CONFIG_FILE}"
        )
    if run.facts.ends and (run.folder / "model" / GENERATION).is_file():
        ends = read_object(run.folder / "model" / GENERATION)["eos_token_id"]
        notes.append(f"{base} does not name all tokens that end an answer: generate with eos_token_id={ends}")
    if of_whole:
        notes.append(f"the adapter has the names of the whole {run.facts.inside}: load that, and PeftModel around it")
    elif run.facts.inside:
        notes.append(
            f"the adapter is of the text model in {run.facts.inside}, as AutoModelForCausalLM loads it: who serves the "
            f"whole finds none of its names, so export with --whole for that, or with --merged"
        )
    if changed := run.recipe.model.config:
        notes.append(
            f"PEFT knows nothing of model.config: load the adapter with {', '.join(changed)} as README.md does"
        )
    return notes


def _as_in_whole(tensors: Mapping[str, Tensor], base: str) -> dict[str, Tensor]:
    """The tensors of an adapter by the names in the model of images and text at `base`, whose text model has it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(base))
    text = whole.get_decoder()
    place = next(name for name, module in whole.named_modules() if module is text)
    return {f"{place}.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}


def tied_again(weights: Mapping[str, Tensor], tied: Mapping[str, str]) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The tied weights that are still equal, and the pairs that now differ.

    Only one of two equal weights must be saved. `tied` names for each weight the one that it was tied to.
    """
    pairs = {name: other for name, other in tied.items() if name in weights and other in weights}
    equal = {name: other for name, other in pairs.items() if torch.equal(weights[name], weights[other])}
    return equal, [pair for pair in pairs.items() if pair[0] not in equal]


def _of_dtype(tensor: Tensor, dtype: str) -> Tensor:
    """The tensor with that dtype. Tensors of whole numbers keep theirs."""
    return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


def _rounds(tensor: Tensor, dtype: str) -> bool:
    """Whether `_of_dtype` takes digits away."""
    wanted = getattr(torch, dtype)
    return tensor.is_floating_point() and torch.promote_types(tensor.dtype, wanted) != wanted


def _of_classes(run: SavedRun) -> dict[str, Any]:
    """The fields of a configuration on classes: not as the model before had them, which may have been a regression.

    Their names are those of the data, else numbers.
    """
    count, names = run.facts.num_labels, run.facts.classes
    fields = {"problem_type": "single_label_classification"} if run.recipe.data.task == "classification" else {}
    if count is None or "id2label" in run.recipe.model.config:
        return fields
    named = names if len(names) == count else [f"LABEL_{number}" for number in range(count)]
    return {
        **fields,
        "id2label": dict(enumerate(named)),
        "label2id": {name: number for number, name in enumerate(named)},
    }


_WITH_TRANSFORMERS = """from transformers import {auto}

model = {auto}.from_pretrained(".")"""
_WITH_PEFT = """from peft import {auto}

model = {auto}.from_pretrained("."{changes})"""
_WITH_WHOLE = """from peft import PeftModel
from transformers import AutoModelForImageTextToText

model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained({base!r}), ".")"""
_WITHOUT = """from safetensors.torch import load_file
{makes}
model.load_state_dict(load_file("model.safetensors"))"""


def readme(run: SavedRun, notes: Sequence[str] = (), *, of_whole: bool = False) -> str:
    """The README of the folder; `notes` are the sentences that `export` returns, and `of_whole` is as there."""
    num_labels, by_transformers = run.facts.num_labels, (run.folder / "model" / "config.json").is_file()
    auto = AUTO_CLASSES[run.recipe.data.task]
    if of_whole:
        loads = _WITH_WHOLE.format(base=run.recipe.model.name)
    elif run.recipe.model.lora.rank is not None:
        given = run.recipe.model.config
        fields = ({"text_config": given} if given and run.facts.inside else given) | _of_classes(run)
        changes = "".join(f", {name}={value!r}" for name, value in fields.items())
        loads = _WITH_PEFT.format(auto=auto.replace("Auto", "AutoPeft"), changes=changes)
    elif by_transformers:
        loads = _WITH_TRANSFORMERS.format(auto=auto)
    else:
        loads = _WITHOUT.format(makes=find_model(run.recipe.model).code(num_labels))
    wanted, data, scores = run.recipe, run.recipe.data, run.held_out
    by_mode = {f"compression {mode}": score for mode, score in scores.items()}
    paragraphs = [
        f"---\n{_metadata(run, by_transformers)}\n---",
        f"# {wanted.name}",
        f"{wanted.model.name} after {run.steps} steps in {wanted.pipeline.num_stages} stages, trained with Thinwire.",
        f"```python\n{loads}\n```",
        "\n".join(f"- {note}" for note in notes),
        f"Data: {listed([f'`{name}`' for name in (data.name, *data.mixture)])}, read as {data.chosen_kind.name}; "
        f"{run.steps * wanted.batch_size:,} samples, each counted as often as it was seen.",
        Table(
            "Boundaries in training",
            ["boundary", "channel", "codec", "bits a value, as sent"],
            [_boundary(run, boundary, channel) for boundary in range(wanted.num_boundaries) for channel in CHANNELS],
        ).markdown,
        "## Compression at inference",
        _verdict(run),
        scores_of("Held-out scores", "held out", by_mode).markdown if scores else "",
        "`thinwire eval` with this folder measures both again. The export does not hold the buffers of feedback. They "
        "start empty, so the first evaluation with AQ-SGD or EF21 differs from the evaluations of the run.",
    ]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _boundary(run: SavedRun, boundary: int, channel: ChannelName) -> list[str]:
    bits = f"{run.bits[boundary, channel]:.2f}" if (boundary, channel) in run.bits else "not known"
    return [str(boundary), channel, f"`{run.recipe.compression.method(boundary, channel)}`", bits]


def _metadata(run: SavedRun, by_transformers: bool) -> str:
    """What the hub reads of a model card, as YAML: of the model and of data the names that are names on the hub."""
    from huggingface_hub import ModelCardData

    model, data = run.recipe.model, run.recipe.data
    names = (data.name, *data.mixture)
    base = ON_THE_HUB if model.name == SMOLLM2 else model.name
    adapter = model.lora.rank is not None
    return ModelCardData(
        base_model=base if model.weights == PRETRAINED and _of_the_hub(base) else None,
        datasets=[name for name in names if _of_the_hub(name)] or None,
        library_name="peft" if adapter else "transformers" if by_transformers else None,
        pipeline_tag="text-generation" if by_transformers and data.task == "causal-lm" else None,
        tags=["thinwire", *(["lora"] if adapter else [])],
    ).to_yaml()


def _of_the_hub(name: str) -> bool:
    """Whether a name can be one on the hub, OWNER/NAME, and is no path of this machine."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def _verdict(run: SavedRun) -> str:
    """Whether inference needs the codec, in a sentence."""
    scores: Mapping[str, Mapping[str, float | None]] = run.held_out
    if not scores:
        return "The run did not score these weights, so it is not known whether inference needs the codec."
    on, off = scores["on"]["loss"], scores["off"]["loss"]
    if on is None or off is None:
        return "The training diverged: the held-out loss is NaN. Lower the learning rate, and train again."
    change = f"the held-out loss is {on:.4f} with compression and {off:.4f} without"
    if run.error is not None:
        change += f", and the error of the difference over this text {run.error:.4f}"
    if (targets := scores["on"]["num_targets"] or 0) < ENOUGH:
        return (
            f"Whether inference needs the codec is not known from {targets:,.0f} targets: {change}. Score {ENOUGH:,} "
            f"or more, with a larger data.held_out or with data.evaluation."
        )
    if off - on > max(NEEDS_CODEC * on, ERRORS * (run.error or 0), run.gap):
        return (
            f"Inference needs the codec: {change}. The library alone does not compress, so cut the model as in "
            "training, and put the codec above at each boundary."
        )
    costly = advice(on, off)
    return f"Inference does not need the codec: {change}." + (f" In training {costly}." if costly else "")


def _for_evaluation(run: SavedRun, folder: Path) -> Recipe:
    """The recipe with the exported weights and absolute paths."""
    trained = run.recipe
    data = trained.data
    evaluation = data.evaluation and (data.evaluation if is_split(data.evaluation) else _resolved(data.evaluation))
    model = trained.model
    if model.lora.rank is not None:
        model = replace(model, name=_resolved(model.name), weights=_resolved(model.weights))
    return replace(
        trained,
        model=weights_of(model, folder),
        data=replace(
            data,
            name=_resolved(data.name),
            mixture={_resolved(name): share for name, share in data.mixture.items()},
            tokenizer=_resolved(data.tokenizer),
            evaluation=evaluation,
        ),
        training=replace(trained.training, steps=0, epochs=None),
        output="",
    )


def _resolved(name: str) -> str:
    """The absolute path, if `name` is a path; else the name as it is."""
    path = Path(name)
    return str(path.resolve()) if name not in (*BUNDLED, BYTES, SMOLLM2) and path.exists() else name
