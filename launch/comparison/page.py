"""The page of a report: the values that the template shows, from the files of runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from thinwire.launch.comparison.comparison import Comparison, distinct_names
from thinwire.launch.comparison.plots import Curve, curves, points
from thinwire.launch.comparison.runs import RunFiles, training_bytes
from thinwire.launch.results import figures
from thinwire.launch.shared.tables import Table, duration_text, size_text
from thinwire.pipeline.measuring.meters import SECTIONS


def render(runs: Sequence[RunFiles], comparison: Comparison | None = None) -> str:
    """The page as HTML, which needs nothing but itself; `comparison` compares the same runs."""
    names = distinct_names(runs)
    environment = Environment(
        loader=PackageLoader("thinwire.launch.comparison", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup  # only for pictures of ours, which escape all text
    return environment.get_template("report.html").render(
        title=", ".join(dict.fromkeys(names)) or (comparison.title if comparison else ""),
        runs=[_view(run, name) for run, name in zip(runs, names, strict=True)],
        comparison=comparison,
    )


def _view(run: RunFiles, name: str) -> dict[str, Any]:
    """The values that the template shows of a run."""
    summary = run.summary
    sent = (figures.channels(summary), figures.shared(summary), figures.replicas(summary))
    spent = (figures.stages(summary), figures.exchange(summary), figures.cut(summary))
    held_out = [
        Curve(f"held out, compression {mode}", points(run.scored(mode)), marker)
        for mode, marker in (("on", "o"), ("off", "x"))
    ]
    losses = [Curve("training", points(run.trained)), *held_out]
    return {
        "name": name,
        "torn": run.torn,
        "facts": _facts(run),
        "command": f"thinwire train {shlex.quote(str(run.folder / 'recipe.yaml'))} --output runs/again",
        "recipe": run.recipe,
        "loss": curves(losses, f"Loss of {summary['name']} over optimizer steps, training and held out"),
        "held_out": list(filter(None, [figures.scores(summary)])),
        "answers": _answers(run),
        "bytes": list(filter(None, sent)),
        "shares": [(one["stage"], _shares(one["seconds"], summary["training_seconds"])) for one in summary["stages"]],
        "time": list(filter(None, spent)),
        "digest": summary["weights_digest"],
    }


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    """The few numbers to see first: (name, value)."""
    summary = run.summary
    replicas, since = summary["replicas"], figures.since(summary)
    return [
        *(
            (f"held-out loss, compression {mode}", figures.score_text(score["loss"]))
            for mode, score in summary["held_out"].items()
        ),
        ("samples a second", f"{run.speed:,.1f}"),
        ("fewer bytes in training", f"{run.ratio:.2f}x"),
        (f"sent in training{since}", size_text(training_bytes(run.sent), digits=1)),
        *([(f"of these between replicas{since}", size_text(training_bytes(replicas), digits=1))] if replicas else []),
        (f"sent in all, with evaluations{since}", size_text(summary["bytes_sent"], digits=1)),
        ("steps, and time of the whole run", f"{figures.steps_of(summary)} in {duration_text(summary['seconds'])}"),
        ("time of training steps", duration_text(summary["training_seconds"])),
    ]


def _answers(run: RunFiles) -> list[Table]:
    """What the model said to each prompt at each evaluation; empty without prompts."""
    fields = ("step", "prompt", "on", "off")
    rows = [[line[name] for name in fields] for line in run.answers]
    return [Table("Answers", ("after step", "prompt", "compression on", "off"), rows)] if rows else []


def _shares(seconds: Mapping[str, float], total: float) -> list[tuple[str, float, str]]:
    """The parts of a bar, seconds by section and the rest as `other`: role, share and text of each."""
    parts: dict[str, float] = {name: seconds.get(name, 0.0) for name in SECTIONS}
    parts["other"] = max(0.0, total - sum(seconds.values()))
    whole = max(1e-9, sum(parts.values()))
    return [(name, spent / whole, f"{name}: {spent:.1f} s, {spent / whole:.0%}") for name, spent in parts.items()]
