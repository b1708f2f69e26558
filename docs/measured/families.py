"""Every language model that transformers knows, in its default configuration: whether it can be cut, or why not.

    python docs/measured/families.py
    python docs/measured/families.py --rotary [TYPE ...]

Nothing is downloaded: a tiny copy of each is cut after every block and compared with the uncut one, as before a run.

With `--rotary`, a tiny pretrained model of each type that turns its positions is made with each kind of rotary angles.
Cut after every block, it must give the logits of the library's own, in bf16 to the last bit and in fp32 to 1e-6, in
texts of several lengths, one after another, where the library can run it; and each buffer of each layer must be the
library's in fp32, bf16 and nf4.
"""

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from thinwire.errors import ThinwireError
from thinwire.errors.calls import first_line
from thinwire.models.architectures.library import unsplit
from thinwire.models.architectures.parity import tiny
from thinwire.models.errors import ModelError
from thinwire.models.layers import Layer, build_stage
from thinwire.models.model import find_model
from thinwire.models.options import LoraOptions, ModelOptions
from thinwire.models.source import Use

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


def main() -> None:
    """Print a line for each, and how many there are."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rotary, names = sys.argv[1:2] == ["--rotary"], sys.argv[2:]
    counted: Counter[str] = Counter()
    for name in names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        for what, verdict, said in rotations(name) if rotary else [in_default(name)]:
            counted[f"{what} {verdict}".strip()] += 1
            print(f"{name} {what}".strip() + f": {verdict}: {said}", flush=True)
    print(dict(counted))


def in_default(name: str) -> tuple[str, str, str]:
    """Whether a type can be cut, and what was found."""
    try:
        compare = find_model(ModelOptions(name=name)).blueprint(Use(task="causal-lm")).compare
        assert compare is not None, "only layers of one's own are not compared"
        return "", "cut", compare()
    except ModelError as error:
        return "", "refused", str(error)


def rotations(name: str) -> Iterator[tuple[str, str, str]]:
    """The kinds of rotary angles of a type that can be cut: (kind, "equal", "refused" or "DIFFERS", what was found)."""
    try:
        options = ModelOptions(name=name)
        small, whole, *_ = tiny(find_model(options).config, "causal-lm")  # type: ignore[attr-defined]
        given = getattr(small, "rope_parameters", None)
        if not given or in_default(name)[1] != "cut":
            return
    except ModelError:
        return
    widths = {name.rpartition(".")[2]: len(each) for name, each in whole.named_buffers() if name.endswith("inv_freq")}
    for kind in FIELDS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                make(small, given, kind, widths, Path(folder))
            except Exception as error:
                yield kind, "not made", f"the library cannot build or run it: {first_line(error)}"
                continue
            try:
                yield kind, *compared(folder)
            except ThinwireError as error:
                yield kind, "refused", str(error)
            except Exception as error:
                yield kind, "DIFFERS", first_line(error)


def make(small: Any, given: Mapping[str, Any], kind: str, widths: Mapping[str, int], folder: Path) -> None:
    """Save a tiny model with this kind of angles, which runs at all lengths."""

    def of(kept: Mapping[str, Any], width: int) -> dict[str, Any]:
        own = {name: kept[name] for name in ("rope_theta", "partial_rotary_factor", "mrope_section") if name in kept}
        lists = {"short_factor": [1.0] * width, "long_factor": [1.5 + place for place in range(width)]}
        return {**own, "rope_type": kind, **FIELDS[kind], **(lists if kind == "longrope" else {})}

    nested = all(isinstance(each, dict) for each in given.values())
    most = max(widths.values(), default=4)
    angles = {k: of(v, widths.get(f"{k}_inv_freq", most)) for k, v in given.items()} if nested else of(given, most)
    fields = small.to_dict() | {"rope_parameters": angles}
    lengths = {"max_position_embeddings": max(LENGTHS), "original_max_position_embeddings": 16}
    if "head_dim" in fields and fields["head_dim"] is None:
        fields["head_dim"] = small.hidden_size // small.num_attention_heads
    fields |= {field: value for field, value in lengths.items() if fields.get(field)}
    config = type(small).from_dict(fields | {"tie_word_embeddings": False})
    torch.manual_seed(0)
    model = unsplit(config, "causal-lm")
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


def compared(folder: str) -> tuple[str, str]:
    """What a run says of the model before training, or what differs between its layers and the library's model."""
    auto, logits, buffers, wrong, wider = transformers.AutoModelForCausalLM, 0, 0, [], set()
    worst = 0.0
    for dtype in ("fp32", "bf16", "nf4"):
        options = ModelOptions(
            name=folder,
            weights="pretrained",
            dtype=dtype,
            tied="untie",
            lora=LoraOptions(rank=2, targets="all-linear") if dtype == "nf4" else LoraOptions(),
        )
        loaded: dict[str, Any] = {"dtype": torch.float32 if dtype == "fp32" else torch.bfloat16}
        if dtype == "nf4":
            loaded["quantization_config"] = transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
        theirs = auto.from_pretrained(folder, **loaded).eval()
        blueprint = find_model(options).blueprint(Use(task="causal-lm"))
        if dtype == "fp32":
            assert blueprint.compare is not None
            blueprint.compare()
        stages = [build_stage(blueprint, range(i, i + 1), seed=0).eval() for i in range(len(blueprint.layers))]
        with torch.no_grad():
            for length in LENGTHS if dtype != "nf4" else ():
                ids = tokens(theirs.config, length)
                try:
                    expected, found = theirs(input_ids=ids).logits, ids
                except RuntimeError:  # the library cannot run it in this dtype on this device
                    break
                for stage in stages:
                    found = stage(found)
                logits += 1
                worst = max(worst, apart := float((found - expected).abs().max() / expected.abs().max()))
                if apart > (1e-6 if dtype == "fp32" else 0):
                    wrong.append(f"logits of {length} tokens in {dtype} by {apart:.1g}")
        expected_of = dict(theirs.named_buffers())
        for stage in stages:
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
    return "equal", f"{logits} texts, by {worst:.1g} at most, and {buffers} buffers{rounded}"


def buffers_of(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a layer reads, by their names in the library's model."""
    around = layer.around
    assert isinstance(around, nn.Module)
    for name, buffer in around.named_buffers():
        if not name.endswith((".absmax", ".code")):  # of 4 bits
            yield name.replace(".own.", ".").replace(".base_layer.", "."), buffer


if __name__ == "__main__":
    main()
