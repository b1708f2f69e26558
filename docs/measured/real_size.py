"""What a model of real size asks: memory and seconds by cause, and bytes, beside what partition said.

    python docs/measured/real_size.py FOLDER [--dtype fp32] [--steps 3] [...]

A Qwen3-0.6B with random weights, a folder of bf16 files, trains in two processes for a few steps. FOLDER holds the
model and the run. Each process resets the peak that Linux keeps for it where a cause begins and ends; what the process
has before its model, and pages of files, are not counted. A checkpoint is waited for, so that its memory is seen apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from thinwire.launch.processes import forks

forks.use_one_thread()  # else the stages would be new interpreters, which know nothing of what is changed here

from thinwire.launch import cli  # noqa: E402
from thinwire.launch.plan.prepared import Prepared  # noqa: E402
from thinwire.launch.run.parts.evaluation import Evaluation  # noqa: E402
from thinwire.launch.run.parts.saving import Saving  # noqa: E402
from thinwire.launch.run.run import Run  # noqa: E402
from thinwire.pipeline.saving.checkpoint import Checkpoints  # noqa: E402
from thinwire.pipeline.training.optimization import Update  # noqa: E402
from thinwire.pipeline.training.runner import Runner  # noqa: E402
from thinwire.pipeline.training.trainer import Trainer  # noqa: E402

QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
"""Qwen3-0.6B."""
CAUSES = {
    (Prepared, "build_all"): "loading",
    (Runner, "run"): "passes",
    (Update, "step"): "optimizer",
    (Checkpoints, "save"): "checkpoint",
    (Saving, "save"): "weights",
    (Evaluation, "evaluate"): "evaluation",
    (Evaluation, "begin"): "evaluation",
}
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _status(*names: str) -> list[int]:
    """Fields of this process's status, in bytes."""
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return [int(fields[name].split()[0]) * 1024 for name in names]


@dataclass
class Watch:
    """The peak of this process's own memory and its seconds, by cause."""

    begun: float = 0.0
    """Bytes of the process before it has a model."""
    peaks: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    at: dict[str, float] = field(default_factory=dict)
    """Seconds since the command began, at moments."""
    _open: list[str] = field(default_factory=lambda: ["all else"])

    def _turn(self) -> None:
        """Take the peak since the last turn for the cause that was on, and begin another."""
        [peak, files] = _status("VmHWM", "RssFile")
        cause = self._open[-1]
        self.peaks[cause] = max(self.peaks.get(cause, 0), peak - files)
        _CLEAR.write_text("5")

    @contextmanager
    def on(self, cause: str) -> Iterator[None]:
        """What the code inside takes is of this cause."""
        self._turn()
        self._open.append(cause)
        began = time.monotonic()
        try:
            yield
        finally:
            self._turn()
            self._open.pop()
            self.seconds[cause] = self.seconds.get(cause, 0.0) + time.monotonic() - began


def watch(folder: Path) -> None:
    """Have each stage process note its memory and seconds, and write them into a folder when its run ends."""
    noted, began = Watch(), time.monotonic()
    steps = 0

    def wrap(owner: Any, name: str, cause: str) -> None:
        real = getattr(owner, name)

        @wraps(real)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            first = "first step's " if steps == 0 and cause in ("passes", "optimizer") else ""
            with noted.on(first + cause):
                found = real(*arguments, **named)
                if cause == "checkpoint":
                    arguments[0].wait()  # else its memory would be that of the passes beside it
                return found

        setattr(owner, name, wrapper)

    for (owner, name), cause in CAUSES.items():
        wrap(owner, name, cause)
    real_go, real_init, real_step = Run.go, Run.__init__, Trainer.train_step

    def init(run: Run, *arguments: Any, **named: Any) -> None:
        noted.at["processes"] = time.monotonic() - began
        [noted.begun] = _status("RssAnon")
        _CLEAR.write_text("5")
        real_init(run, *arguments, **named)

    def train_step(trainer: Trainer, step: int) -> Any:
        nonlocal steps
        noted.at.setdefault("first step", time.monotonic() - began)
        record = real_step(trainer, step)
        noted.at.setdefault("second step", time.monotonic() - began)
        steps += 1
        return record

    def go(run: Run) -> None:
        real_go(run)
        noted._turn()
        for stage, optimizer in zip(run.trainer.stages, run.trainer.sync.optimizers, strict=True):
            parameters = list(stage.submod.parameters())
            weights = sum(each.nbytes for each in parameters)
            moments = sum(
                value.nbytes for each in optimizer.state.values() for value in each.values() if hasattr(value, "nbytes")
            )
            said = {
                "parameters": sum(each.numel() for each in parameters),
                "microbatches": run.recipe.pipeline.num_microbatches,
                "weights": weights,
                "gradients": sum(each.nbytes for each in parameters if each.requires_grad),
                "moments": moments,
                "begun": noted.begun,
                "peaks": noted.peaks,
                "seconds": noted.seconds,
                "at": noted.at,
            }
            (folder / f"stage-{stage.stage_index}.json").write_text(json.dumps(said))

    Run.__init__, Run.go, Trainer.train_step = init, go, train_step  # type: ignore[method-assign]


def make_model(folder: Path, config: dict[str, Any]) -> None:
    """Write a model with random weights, in bf16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Qwen3ForCausalLM(Qwen3Config(**config, dtype="bfloat16")).save_pretrained(folder)


def recipe(options: argparse.Namespace, model: Path) -> list[str]:
    """The words after `thinwire train` or `partition`."""
    given = {
        "name": "real-size",
        "model": {"name": str(model), "weights": "pretrained", "dtype": options.dtype},
        "data": {"name": "pydoc", "limit": 60_000, "held_out": 0.05, "block_size": options.tokens},
        "pipeline": {
            "num_stages": options.stages,
            "schedule": "1f1b",
            "num_microbatches": options.microbatches,
            "microbatch_size": 1,
        },
        "optimizer": {"name": "adamw", "lr": 1.0e-05, "max_grad_norm": 1.0},
        "training": {"steps": options.steps, "precision": options.precision, "evaluate_every": "0 steps"},
        "checkpoint": {"every": "2 steps"},
    }
    path = model.parent / "recipe.yaml"
    path.write_text(json.dumps(given))
    return [str(path), *options.rest]


def main() -> None:
    """Make the model, ask partition, train, export, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--blocks", type=int, default=QWEN3["num_hidden_layers"])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["partition", "train"])
    options, options.rest = parser.parse_known_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / f"qwen3-{options.blocks}"
    if not model.exists():
        config = QWEN3 | {"num_hidden_layers": options.blocks}
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import real_size, pathlib; "
        code += f"real_size.make_model(pathlib.Path({str(model)!r}), {config!r})"
        subprocess.run([sys.executable, "-c", code], check=True)
    words = recipe(options, model)
    if "partition" in options.only:
        with (folder / "partition.json").open("wb") as said:
            command = [sys.executable, "-m", "thinwire", "partition", *words, "--memory", "100", "--json"]
            subprocess.run(command, check=True, stdout=said)
    if "train" in options.only:
        assert forks.is_safe(), "another thread runs"
        for earlier in folder.glob("stage-*.json"):
            earlier.unlink()
        watch(folder)
        assert cli.main(["train", *words, "--output", str(folder / "run")]) == 0
    show(folder)


def show(folder: Path) -> None:
    """Print what was measured, and what partition had said."""
    partition = json.loads((folder / "partition.json").read_text())
    costs = partition["measured"]["costs"]
    _, of_recipe, *_ = partition["tables"]
    stages = [json.loads(path.read_text()) for path in sorted(folder.glob("stage-*.json"))]
    causes = list(dict.fromkeys(cause for stage in stages for cause in stage["peaks"]))
    first = 0
    for stage, row in zip(stages, of_recipe["rows"], strict=True):
        said = dict(zip(of_recipe["columns"], row, strict=True))
        layers = costs[first : first + said["layers"]]
        first += said["layers"]
        kept = sum(cost["activation_bytes"] for cost in layers)
        waiting = min(stage["microbatches"], len(stages) - said["stage"]) * kept
        if said["stage"] == len(stages) - 1:
            waiting += layers[-1]["output_bytes"]
        stage["waiting"] = waiting
        stage["said"] = said["memory, MB"] * 1e6 - partition["measured"]["process_bytes"]
        stage["needed"] = stage["weights"] + stage["gradients"] + stage["moments"] + waiting
    print(f"| GB | {' | '.join(f'stage {index}' for index in range(len(stages)))} |")
    print("|---" * (len(stages) + 1) + "|")
    for name in ("weights", "gradients", "moments", "waiting", "needed", "said"):
        print(f"| {name} | {' | '.join(f'{stage[name] / 1e9:.2f}' for stage in stages)} |")
    for cause in causes:
        cells = (
            f"{stage['peaks'][cause] / 1e9 - stage['begun'] / 1e9:.2f}, {stage['seconds'].get(cause, 0.0):.1f} s"
            for stage in stages
        )
        print(f"| {cause} | {' | '.join(cells)} |")
    peaks = [max(stage["peaks"].values()) - stage["begun"] for stage in stages]
    print(f"| peak | {' | '.join(f'{peak / 1e9:.2f}' for peak in peaks)} |")
    shares = (f"{peak / stage['needed']:.2f}" for peak, stage in zip(peaks, stages, strict=True))
    print(f"| of what is needed | {' | '.join(shares)} |")
    for stage in stages:
        print({moment: round(seconds, 1) for moment, seconds in stage["at"].items()}, f"{stage['begun'] / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
