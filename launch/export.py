"""`thinwire export RUN --to DIR`: the stages of a run as one model, which the library it came from loads.

DIR/
  model.safetensors, config.json    what from_pretrained loads (other models: what load_state_dict takes)
  tokenizer files                   where a tokenizer of transformers was used
  recipe.yaml                       how it was trained; `thinwire eval DIR` measures it with compression on and off
  README.md                         how to load it, and whether inference needs the codec
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from thinwire.launch.run.assembly import make_blueprint
from thinwire.launch.run.recipe import Recipe, dump
from thinwire.launch.run.saved import Ended, read_run, weights_of
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK
from thinwire.models.data.load import load
from thinwire.models.data.sources import DIGITS, PYDOC, Place, evaluation_place
from thinwire.models.data.tokenizer import BYTES
from thinwire.models.file_mode import follow_umask
from thinwire.models.model import library_code
from thinwire.pipeline.errors import OptionsError

PROG = "thinwire export"
NEEDS_CODEC = 0.01
"""The share by which the held-out loss must rise without compression for inference to need it."""


def main(argv: Sequence[str]) -> int:
    """Export a run; the exit status."""
    options = _parser().parse_args(argv)
    ended = read_run(Path(options.run), PROG)
    export(ended, Path(options.to))
    print(f"{len(ended.weights)} tensors of {ended.recipe.name} are in {options.to}; see its README.md")
    return OK


def export(ended: Ended, folder: Path) -> None:
    """Write the folder. ModelError or OptionsError if the model cannot be described, or the folder is in use."""
    if folder.exists() and any(folder.iterdir()):
        raise OptionsError(f"--to must name a new or empty folder, got {folder}")
    data = load(ended.recipe.data, seed=ended.recipe.training.seed)
    blueprint = make_blueprint(ended.recipe, data)
    folder.mkdir(parents=True, exist_ok=True)
    _save_weights(folder, ended.weights)
    by_transformers = blueprint.save_config is not None
    if blueprint.save_config is not None:
        blueprint.save_config(folder)
    if ended.recipe.data.tokenizer != BYTES:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(ended.recipe.data.tokenizer).save_pretrained(folder)
    (folder / "recipe.yaml").write_text(dump(_for_evaluation(ended, folder)))
    (folder / "README.md").write_text(readme(ended, by_transformers=by_transformers, num_labels=data.num_labels))


_WITH_TRANSFORMERS = """from transformers import {auto}

model = {auto}.from_pretrained(".")"""
_WITHOUT = """from safetensors.torch import load_file
{makes}
model.load_state_dict(load_file("model.safetensors"))"""


def readme(ended: Ended, *, by_transformers: bool, num_labels: int | None) -> str:
    """What the folder's README says."""
    auto = "AutoModelForCausalLM" if num_labels is None else "AutoModelForSequenceClassification"
    makes = library_code(ended.recipe.model, num_labels)
    loads = _WITH_TRANSFORMERS.format(auto=auto) if by_transformers else _WITHOUT.format(makes=makes)
    wanted, scores = ended.recipe, ended.summary["held_out"]
    lines = [
        f"# {wanted.name}",
        "",
        f"{wanted.model.name} after {ended.summary['steps']} steps in {wanted.pipeline.num_stages} stages, trained "
        "with Thinwire.",
        "",
        "```python",
        loads,
        "```",
        "",
        "## Boundaries in training",
        "",
        "| boundary | channel | codec |",
        "|---|---|---|",
        *(f"| {row['boundary']} | {row['channel']} | `{row['codec']}` |" for row in ended.summary["channels"]),
        "",
        "## Compression at inference",
        "",
        _verdict(scores),
        "",
    ]
    if scores:
        names = [name for name in scores["on"] if name != "num_targets"]
        lines += [
            "| held out | " + " | ".join(names) + " |",
            "|---|" + "---|" * len(names),
            *(
                f"| compression {mode} | " + " | ".join(f"{score[name]:.4f}" for name in names) + " |"
                for mode, score in scores.items()
            ),
            "",
        ]
    lines += [
        "`thinwire eval` with this folder measures both again. Buffers of feedback are not part of it: they start "
        "empty, so what AQ-SGD or EF21 send in the first evaluation differs from what they sent in the run's.",
        "",
    ]
    return "\n".join(lines)


def _verdict(scores: Mapping[str, Mapping[str, float]]) -> str:
    """Whether inference needs the codec, in a sentence."""
    if not scores:
        return "Nothing was held out, so it is not known whether inference needs the codec."
    on, off = scores["on"]["loss"], scores["off"]["loss"]
    change = f"the held-out loss is {on:.4f} with compression and {off:.4f} without"
    if off > on * (1 + NEEDS_CODEC):
        return (
            f"Inference needs the codec: {change}. The library's own inference compresses nothing, so cut the model as "
            "in training and put the codec above at each boundary."
        )
    return f"Inference does not need the codec: {change}."


def _for_evaluation(ended: Ended, folder: Path) -> Recipe:
    """The recipe with the weights that are exported, the codecs that auto chose, and paths that hold from anywhere."""
    trained = ended.recipe
    data, compression = trained.data, trained.compression
    evaluation = data.evaluation and (data.evaluation if _is_split(data.evaluation) else _resolved(data.evaluation))
    if compression.automatic:
        chosen = {(choice["boundary"], choice["channel"]): choice["codec"] for choice in ended.summary["choices"]}
        compression = compression.chosen(chosen)
    return replace(
        trained,
        model=weights_of(trained.model, folder),
        data=replace(data, name=_resolved(data.name), tokenizer=_resolved(data.tokenizer), evaluation=evaluation),
        training=replace(trained.training, steps=0, epochs=None),
        compression=compression,
        output="",
    )


def _is_split(evaluation: str) -> bool:
    return evaluation_place(Place(PYDOC), evaluation).name == PYDOC


def _resolved(name: str) -> str:
    """A path as it is known from anywhere; what is none stays."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name not in (PYDOC, DIGITS, BYTES) and path.exists() else name


def _save_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write model.safetensors, in several files with an index where it is large."""
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(dict(weights), folder)
    for path in folder.glob("*.safetensors"):
        follow_umask(path)


def _parser() -> Parser:
    parser = Parser(prog=PROG, description="Write a run's model for the library it came from.")
    parser.add_argument("run", metavar="RUN", help="the folder of a run that has ended")
    parser.add_argument("--to", required=True, metavar="DIR", help="a new folder")
    return parser
