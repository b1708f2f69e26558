"""The log of a run: a line of JSON, and points for its hooks, for every step, evaluation and exchange."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.results.hooks import Hooks
from thinwire.launch.results.log_file import LogFile, keep_lines
from thinwire.launch.shared.strict_json import dumps, with_nan
from thinwire.pipeline.evaluation import Compression, Score, error_of_difference
from thinwire.pipeline.measuring.step_traffic import StageExchanged
from thinwire.pipeline.training.trainer import StepRecord

_GROWN = 1000.0
"""How many times the gradient norm of the first step is reported once. max_grad_norm would hide it."""


class MetricsLog:
    """The log of a run. Its methods raise OSError if there is no room.

    Args:
        recipe: that of the run, whose folder is there. With prompts evaluations have answers, and with several replicas
            exchanges have lines, in files of their own.
        run: the id of the run, for its hooks.
        first: the step that the run goes on from; the lines of the steps before it stay.
        evaluated: the step of the last evaluation whose line stays; 0 if there is none.
        tokens: those of a sample, if a model of language is trained.
    """

    def __init__(self, recipe: Recipe, run: str, first: int, evaluated: int, tokens: int) -> None:
        self._hooks, self._tokens = Hooks(recipe, run, first), tokens
        # each log, and which of its lines stay
        of_steps, of_evaluations = lambda line: line["step"] < first, lambda line: 0 < line["step"] <= evaluated
        staying = {"metrics": of_steps, "evaluations": of_evaluations}
        staying |= {"answers": of_evaluations} if recipe.training.prompts else {}
        staying |= {"exchanges": of_steps} if recipe.replicas.count > 1 else {}
        paths = {name: recipe.folder / f"{name}.jsonl" for name in staying}
        kept = {name: keep_lines(paths[name], stays) for name, stays in staying.items()}
        self._logs = {name: LogFile(path) for name, path in paths.items()}
        steps, evaluations = kept["metrics"], kept["evaluations"]
        self._first_norm: float | None = next((line["grad_norm"] for line in steps if line["grad_norm"]), None)
        self._growth: str | None = None
        # 16 bytes a step: a run may have millions
        self._steps = array("q", [line["step"] for line in steps])
        self._losses = array("d", [with_nan(line["loss"]) for line in steps])
        self.evaluations: list[tuple[int, dict[Compression, Score]]] = [
            (line["step"], {kind: _score(line[kind]) for kind in get_args(Compression)}) for line in evaluations
        ]

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(step, training loss) of every step."""
        return list(zip(self._steps, self._losses, strict=True))

    @property
    def last_loss(self) -> float | None:
        """The training loss of the last step; None before the first."""
        return self._losses[-1] if self._losses else None

    def news(self) -> str | None:
        """A sentence when a hook failed, and when gradients grew; else None."""
        if failed := self._hooks.news():
            return failed
        if self._growth:
            growth, self._growth = self._growth, ""  # once a run
            return growth
        return None

    def step(self, record: StepRecord) -> None:
        """Log a training step."""
        values = asdict(record)
        values.pop("exchanged")
        self._logs["metrics"].add(_line(values))
        points = {f"train/{name}": values[name] for name in ("loss", "lr", "grad_norm") if values[name] is not None}
        points |= {
            "train/samples_per_second": record.samples / record.seconds,
            **({"train/tokens_per_second": self._tokens * record.samples / record.seconds} if self._tokens else {}),
            "train/seconds": record.seconds,
            "bytes/frames": record.bytes,
            "bytes/tensors in them": record.uncompressed,
        }
        for name, seconds in record.sections.items():
            points |= {f"share/{name}": seconds / record.seconds, f"seconds/{name}": seconds}
        self._hooks(record.step, points)
        if record.exchanged:
            self._exchanged(record.step, record.exchanged)
        if record.loss is not None:
            self._steps.append(record.step)
            self._losses.append(record.loss)
        if record.grad_norm:
            self._compare(record.step, record.grad_norm)

    def _exchanged(self, step: int, stages: Sequence[StageExchanged]) -> None:
        """Log what all stages exchanged with other replicas in a step."""
        self._logs["exchanges"].add(_line({"step": step, "stages": [asdict(each) for each in stages]}))
        points: dict[str, float] = {}
        for of in stages:
            points |= {
                f"bytes/to and from replicas, stage {of.stage}": of.bytes,
                f"seconds/exchange between replicas, stage {of.stage}": of.seconds,
            }
        self._hooks(step, points)

    def _compare(self, step: int, norm: float) -> None:
        """Compare the norm of all gradients with that of the first step."""
        self._first_norm = self._first_norm or norm
        if self._growth is None and _GROWN * self._first_norm < norm < math.inf:
            times = norm / self._first_norm
            self._growth = (
                f"step {step + 1}: the norm of all gradients is {norm:.2g}, {times:,.0f} times the norm of the first "
                f"step; if the loss does not fall, lower optimizer.lr or compress less; where topk or randk leave "
                f'tokens without an element, per="row" gives each its share'
            )

    def evaluation(self, step: int, scores: dict[Compression, Score]) -> None:
        """Log an evaluation after `step` steps."""
        self.evaluations.append((step, scores))
        values: dict[str, Any] = {mode: score.values() for mode, score in scores.items()}
        self._logs["evaluations"].add(_line({"step": step} | values | {"error": error_of_difference(scores)}))
        self._hooks(
            step,
            {
                f"held-out/{name} compression {mode}": value
                for mode, score in scores.items()
                for name, value in {"loss": score.loss, **score.metrics}.items()
            },
        )

    def answers(self, step: int, said: Sequence[tuple[str, Mapping[Compression, str]]]) -> None:
        """Log the answers to all prompts after `step` steps."""
        rows = [{"step": step, "prompt": prompt, "on": by["on"], "off": by["off"]} for prompt, by in said]
        for row in rows:
            self._logs["answers"].add(_line(row))
        if rows:
            self._hooks.answers(rows)

    def sync(self) -> None:
        """Wait until the disk has every line, on any thread."""
        for log in self._logs.values():
            log.sync()

    def close(self) -> None:
        """Wait until the disk has all, and close the files."""
        for log in self._logs.values():
            log.close()
        self._hooks.close()


def _line(values: Mapping[str, Any]) -> bytes:
    return (dumps(values) + "\n").encode()


def _score(values: Mapping[str, Any]) -> Score:
    """The score in a line of evaluations.jsonl."""
    metrics = {name: with_nan(value) for name, value in values.items() if name not in ("loss", "num_targets")}
    return Score(with_nan(values["loss"]), values["num_targets"], metrics)
