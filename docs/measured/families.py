"""Every language model that transformers knows, in its default configuration: whether it can be cut, or why not.

    python docs/measured/families.py
    python docs/measured/families.py --saved [TYPE ...] [--task classification]
    python docs/measured/families.py --rotary [TYPE ...]

Nothing is downloaded: a tiny copy of each is cut after every block and compared with the uncut one, as before a run.

With `--saved`, a tiny pretrained model of each type is made. Cut after every block, it must give the logits and the
gradients of the library's own, in bf16 to the last bit and in fp32 to 1e-6 and 1e-5 of the largest value, in texts of
several lengths, one after another, where the library can run it; and each buffer of each layer must be the library's in
fp32, bf16 and nf4. With `--rotary`, one is made for each kind of rotary angles, of each type that turns its positions.
"""

import argparse
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from thinwire.errors import ThinwireError
from thinwire.errors.calls import first_line
from thinwire.models.architectures.library import AUTO_CLASSES, unsplit
from thinwire.models.architectures.parity import tiny
from thinwire.models.errors import ModelError
from thinwire.models.layers import Blueprint, Layer, build_stage
from thinwire.models.model import find_model
from thinwire.models.options import LoraOptions, ModelOptions
from thinwire.models.source import Use
from thinwire.models.tasks import TaskName
from thinwire.models.tensors import as_tuple

LENGTHS = (8, 24, 12, 32)
"""Around the 16 tokens of the first training, and up to the 32 that positions reach."""
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 16},
    "longrope": {"factor": 2.0, "original_max_position_embeddings": 16, "short_mscale": 1.1, "long_mscale": 1.2},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "proportional": {},
}
"""What each kind of rotary angles needs."""
OWN = "own"
"""The kind of a model that has no rotary angles, or keeps those of its default configuration."""
TYPES: Mapping[TaskName, Mapping[str, Any]] = {
    "causal-lm": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "classification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}


def main() -> None:
    """Print a line for each, and how many there are."""
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--task", choices=[*TYPES], default="causal-lm")
    parser.add_argument("--saved", action="store_true")
    parser.add_argument("--rotary", action="store_true")
    given = parser.parse_args()
    if unknown := [name for name in given.types if name not in TYPES[given.task]]:
        parser.error(f"TYPE must be one that transformers knows for {given.task}, got {', '.join(unknown)}")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    counted: Counter[str] = Counter()
    for name in given.types or TYPES[given.task]:
        if given.rotary or given.saved:
            found = [*saved(name, given.task, [*FIELDS] if given.rotary else [OWN])]
        else:
            found = [in_default(name, given.task)]
        for what, verdict, said in found:
            counted[f"{what} {verdict}".strip()] += 1
            print(f"{name} {what}".strip() + f": {verdict}: {said}", flush=True)
    if not counted:
        parser.error("nothing was compared: --rotary needs a type that has rotary angles")
    print(dict(counted))


def in_default(name: str, task: TaskName) -> tuple[str, str, str]:
    """Whether a type can be cut, and what was found."""
    try:
        compare = find_model(ModelOptions(name=name)).blueprint(Use(task=task)).compare
        assert compare is not None, "only layers of one's own are not compared"
        return "", "cut", compare()
    except ModelError as error:
        return "", "refused", str(error)


def saved(name: str, task: TaskName, kinds: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """The kinds of angles of a type: (kind, "equal", "refused", "not made" or "DIFFERS", what was found)."""
    try:
        config = find_model(ModelOptions(name=name)).config  # type: ignore[attr-defined]
        if task == "classification" and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
        small, whole, *_ = tiny(config, task)
    except ModelError as error:
        yield "", "refused", str(error)
        return
    angles = getattr(small, "rope_parameters", None)
    widths = {name.rpartition(".")[2]: len(each) for name, each in whole.named_buffers() if name.endswith("inv_freq")}
    for kind in kinds if angles or kinds == [OWN] else ():
        with tempfile.TemporaryDirectory() as folder:
            try:
                make(small, task, angles or {}, kind, widths, Path(folder))
            except Exception as error:
                yield kind, "not made", f"the library cannot build or run it: {first_line(error)}"
                continue
            try:
                yield kind, *compared(folder, task)
            except ThinwireError as error:
                yield kind, "refused", str(error)
            except Exception as error:
                yield kind, "DIFFERS", first_line(error)


def make(
    small: Any, task: TaskName, given: Mapping[str, Any], kind: str, widths: Mapping[str, int], folder: Path
) -> None:
    """Save a tiny model with this kind of angles, which runs at all lengths."""

    def of(kept: Mapping[str, Any], width: int) -> dict[str, Any]:
        own = {name: kept[name] for name in ("rope_theta", "partial_rotary_factor", "mrope_section") if name in kept}
        lists = {"short_factor": [1.0] * width, "long_factor": [1.5 + place for place in range(width)]}
        return {**own, "rope_type": kind, **FIELDS[kind], **(lists if kind == "longrope" else {})}

    nested = bool(given) and all(isinstance(each, dict) for each in given.values())
    most = max(widths.values(), default=4)
    fields = small.to_dict()
    if kind != OWN:
        each = {k: of(v, widths.get(f"{k}_inv_freq", most)) for k, v in given.items()} if nested else of(given, most)
        fields["rope_parameters"] = each
    reach = max(LENGTHS) + 2 * (kind == OWN)  # some number positions from behind the padding token
    lengths = {"max_position_embeddings": reach, "original_max_position_embeddings": 16}
    if "head_dim" in fields and fields["head_dim"] is None:
        fields["head_dim"] = small.hidden_size // small.num_attention_heads
    fields |= {field: value for field, value in lengths.items() if fields.get(field)}
    config = type(small).from_dict(fields | {"tie_word_embeddings": False})
    torch.manual_seed(0)
    model = unsplit(config, task).eval()
    model.initialize_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for length in LENGTHS:
            model(input_ids=tokens(config, length))
    model.save_pretrained(folder)


def tokens(config: Any, length: int) -> Tensor:
    """Two samples, [2, length]."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(config.vocab_size // 2, config.vocab_size, (2, length), generator=generator)


def compared(folder: str, task: TaskName) -> tuple[str, str]:
    """What a run says of the model before training, or what differs between its layers and the library's model."""
    auto, passes, buffers, wrong, wider = getattr(transformers, AUTO_CLASSES[task]), 0, 0, [], set()
    worst = 0.0
    for dtype in ("fp32", "bf16", "nf4"):
        options = ModelOptions(
            name=folder,
            weights="pretrained",
            dtype=dtype,
            tied=None if task == "classification" or dtype == "nf4" else "untie",
            lora=LoraOptions(rank=2, targets="all-linear") if dtype == "nf4" else LoraOptions(),
        )
        loaded: dict[str, Any] = {"dtype": torch.float32 if dtype == "fp32" else torch.bfloat16}
        if dtype == "nf4":
            loaded["quantization_config"] = transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
        try:
            blueprint = find_model(options).blueprint(Use(task=task))
        except ModelError:
            if dtype != "nf4":  # which the blocks of some have no linear modules for
                raise
            break
        if dtype == "fp32":
            assert blueprint.compare is not None
            blueprint.compare()
        theirs = auto.from_pretrained(folder, **loaded).eval()
        cut = Cut(blueprint).eval()
        for length in LENGTHS if dtype != "nf4" else ():
            ids, side = samples(theirs.config, length, task, blueprint.side)
            try:
                expected = passed(theirs, ids, side)
            except (RuntimeError, NotImplementedError):  # the library cannot run it in this dtype on this device
                break
            found = passed(cut, ids, side)
            gradients: dict[str, Tensor | None] = {}
            for name, each in (pair for stage in cut.stages for pair in stage.full_parameters().items()):
                before = gradients.get(name)  # what several stages hold they sum
                gradients[name] = before + each.grad if before is not None and each.grad is not None else each.grad
            pairs = {"logits": (found, expected)} | {
                f"gradient of {name}": (gradients[name], each.grad) for name, each in theirs.named_parameters()
            }
            passes += 1
            for what, (one, other) in pairs.items():
                worst = max(worst, apart := distance(one, other))
                if apart > ((1e-6 if what == "logits" else 1e-5) if dtype == "fp32" else 0):
                    wrong.append(f"{what} of {length} tokens in {dtype} by {apart:.1g}")
        expected_of = dict(theirs.named_buffers())
        for stage in cut.stages:
            for layer in stage._own():
                for full_name, buffer in buffers_of(layer):
                    buffers += 1
                    one = expected_of.get(full_name)
                    if one is None or not torch.equal(one, buffer.to(one.dtype)):
                        shown = "nothing" if one is None else f"{one.dtype} {one.flatten()[:3].tolist()}"
                        own = f"{buffer.dtype} {buffer.flatten()[:3].tolist()}"
                        wrong.append(f"{full_name} in {dtype}: {own} for {shown}")
                    elif one.dtype != buffer.dtype:
                        wider.add(full_name)
    if wrong:
        return "DIFFERS", "; ".join(dict.fromkeys(wrong))
    rounded = f", of which {', '.join(sorted(wider))} is equal once rounded" if wider else ""
    return "equal", f"{passes} passes, by {worst:.1g} at most, and {buffers} buffers{rounded}"


def samples(config: Any, length: int, task: TaskName, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Two texts, [2, length], and what a classifier reads beside them: the second ends early."""
    ids = tokens(config, length)
    if task == "causal-lm":
        return ids, {}
    mask = (torch.arange(length) < torch.tensor([[length], [length - length // 3]])).long()
    side = {"attention_mask": mask} if "attention_mask" in names else {}
    return torch.where(mask.bool(), ids, config.pad_token_id), side


class Cut(nn.Module):
    """All layers of a model, each a stage."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.stages = [build_stage(blueprint, range(i, i + 1), seed=0) for i in range(len(blueprint.layers))]
        self.modules_of_stages = nn.ModuleList(self.stages)

    def forward(self, input_ids: Tensor, **side: Tensor) -> Tensor:
        """The logits."""
        result: Tensor | tuple[Tensor, ...] = input_ids
        for stage in self.stages:
            result = stage(*as_tuple(result), **side)
        return as_tuple(result)[0]


def passed(model: nn.Module, ids: Tensor, side: Mapping[str, Tensor]) -> Tensor:
    """The logits, after a backward of noise into the gradients of the model."""
    model.zero_grad()
    found = model(input_ids=ids, **side)
    logits: Tensor = getattr(found, "logits", found)
    logits.backward(torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype))
    return logits.detach()


def distance(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference as a share of the largest value; no gradient is one of zeros."""
    if one is None or other is None:
        left = one if other is None else other
        return float(left is not None and bool(left.any()))
    largest = other.abs().max().item() if other.numel() else 0.0
    return (one - other).abs().max().item() / max(largest, 1e-6) if other.numel() else 0.0


def buffers_of(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a layer reads, by their names in the library's model."""
    around = layer.around
    assert isinstance(around, nn.Module)
    for name, buffer in around.named_buffers():
        if not name.endswith((".absmax", ".code")):  # of 4 bits
            yield name.replace(".own.", ".").replace(".base_layer.", "."), buffer


if __name__ == "__main__":
    main()
