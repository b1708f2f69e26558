"""The definition of a study: recipe, rows or grid, scales, published numbers, and claims to judge."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, Literal

from thinwire.launch.recipe.fields import read_fields
from thinwire.launch.recipe.yaml_text import fields_in, read_named
from thinwire.pipeline.errors import OptionsError

PACKAGED = files("thinwire.launch") / "studies"

Mode = Literal["on", "off"]
SCORES = ("loss", "perplexity", "accuracy", "matthews")
"""What trained cells may be compared by; which of them there are, the task of the recipe says."""

Options = dict[str, Any]
"""Options of a recipe by dotted name, without the dashes of the command line."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: a setting that is trained once for each seed."""

    options: Options = field(default_factory=dict)
    """What the row changes in the recipe."""
    published: dict[Mode, float] = field(default_factory=dict)
    """The published scores, with compression off and on."""
    note: str = ""
    """A note about the published numbers."""
    starts_with: str = ""
    """A row above this one. Its weights after the last step are the first weights of this row, seed by seed."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison."""

    row: str
    mode: Mode = "on"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence about the difference of two scores, which holds above or below a number."""

    claim: str
    """The sentence."""
    of: Side
    """The score that the sentence is about."""
    minus: Side
    """The score that is taken from it, seed by seed."""
    above: float | None = None
    """The claim holds if the difference is above this, in the unit of the table."""
    below: float | None = None
    """The claim holds if the difference is below this."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A size at which the study is run."""

    about: str = ""
    """What differs from the published size, and how long a cell takes."""
    recipe: str = ""
    """Another recipe to begin with; empty keeps that of the study."""
    options: Options = field(default_factory=dict)
    """What all rows change in the recipe, over the options of the study; what a row sets itself stays."""
    rows: list[str] = field(default_factory=list)
    """The rows that are run; empty runs all."""
    seeds: list[int] = field(default_factory=list)
    """The seeds; empty keeps those of the study."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study, as its YAML file describes it."""

    name: str = "unnamed"
    """Name of the study."""
    description: str = ""
    """The question of the study, in a sentence."""
    source: str = ""
    """The source of the published numbers."""
    recipe: str = ""
    """The recipe that all cells begin with: a packaged name, or the path of a YAML file."""
    options: Options = field(default_factory=dict)
    """Options that all cells change in the recipe."""
    score: str = "loss"
    """The score that the tables show: loss, accuracy, perplexity or matthews."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Every row is trained once with each."""
    rows: dict[str, Row] = field(default_factory=dict)
    """The rows by name."""
    grid: dict[str, list[Any]] = field(default_factory=dict)
    """Options with several values each; every combination is a row."""
    scales: dict[str, Scale] = field(default_factory=dict)
    """Sizes by name; the first is taken where none is asked for."""
    claims: list[Claim] = field(default_factory=list)
    """The claims to judge."""

    @property
    def all_rows(self) -> dict[str, Row]:
        """The rows, and those of the grid."""
        names, values = list(self.grid), product(*self.grid.values())
        combined = [dict(zip(names, combination, strict=True)) for combination in values] if names else []
        return {**self.rows, **{_said(options): Row(options=options) for options in combined}}

    def rows_at(self, scale: Scale) -> dict[str, Row]:
        """The rows that a scale runs, in the order of the study."""
        return {name: row for name, row in self.all_rows.items() if not scale.rows or name in scale.rows}

    def scaled(self, name: str | None) -> tuple[str, Scale]:
        """A scale and its name: the one asked for, else the first; one without any change where there is none."""
        if not self.scales and name is None:
            return "all", Scale()
        wanted = name or next(iter(self.scales))
        if wanted not in self.scales:
            known = ", ".join(self.scales) or "none: leave --scale out"
            raise OptionsError(f"--scale must be a scale of the study {self.name}, got {wanted!r}; known: {known}")
        return wanted, self.scales[wanted]


def read_study(named: str) -> Study:
    """A study by packaged name or path. OptionsError with every mistake in it."""
    return parse_study(read_named(named, PACKAGED, "NAME must be a packaged study"), named, Path(named).stem)


def parse_study(text: str, where: str, name: str) -> Study:
    """The study in a YAML text; `name` is what it is called where it does not say so."""
    study: Study = read_fields(Study, {"name": name, **fields_in(text, where, "study")}, where)
    if mistakes := _mistakes(study):
        raise OptionsError([f"{where}: {mistake}" for mistake in mistakes])
    return study


def _mistakes(study: Study) -> list[str]:
    """A sentence for each mistake."""
    rows, known = study.all_rows, ", ".join(study.all_rows)
    count = len(study.rows) + (math.prod(map(len, study.grid.values())) if study.grid else 0)
    names = f"{len(rows)} names for {count} rows"
    claims = {f"claims.{index}": claim for index, claim in enumerate(study.claims)}
    named = {
        **{f"{where}.of": [claim.of.row] for where, claim in claims.items()},
        **{f"{where}.minus": [claim.minus.row] for where, claim in claims.items()},
        **{f"scales.{name}.rows": scale.rows for name, scale in study.scales.items()},
    }
    options = {
        **{"options": study.options, "grid": study.grid},
        **{f"rows.{name}.options": row.options for name, row in study.rows.items()},
        **{f"scales.{name}.options": scale.options for name, scale in study.scales.items()},
    }
    seeds = {"seeds": study.seeds, **{f"scales.{name}.seeds": scale.seeds for name, scale in study.scales.items()}}
    return [
        *([] if rows else ["rows or grid must name what is trained; give one of them"]),
        # of two rows with the same name only one would be trained
        *([] if len(rows) == count else [f"rows and grid must give each row a name of its own, got {names}"]),
        *(f"grid.{name} must hold at least one value, got none" for name, values in study.grid.items() if not values),
        *(f"rows must have names of some letters, got {name!r}" for name in study.rows if not name.strip()),
        *([] if study.seeds else ["seeds must hold at least one seed, got none"]),
        *(f"{where} must hold each seed once, got {its}" for where, its in seeds.items() if len({*its}) < len(its)),
        *(
            f"{where} must name options without dashes, got {name}; write {name.lstrip('-')}"
            for where, names in options.items()
            for name in names
            if name.startswith("-")
        ),
        *(
            f"{where} must name rows of the study, got {row!r}; known: {known}"
            for where, wanted in named.items()
            for row in wanted
            if row not in rows
        ),
        *(
            f"{where} must have above or below, but not both"
            for where, claim in claims.items()
            if (claim.above is None) == (claim.below is None)
        ),
        *_mistakes_of_starts(study),
        *([] if study.recipe else ["recipe must name the recipe of all cells; it is missing"]),
        *([] if study.score in SCORES else [f"score must be one of {', '.join(SCORES)}, got {study.score!r}"]),
    ]


def _mistakes_of_starts(study: Study) -> list[str]:
    """A sentence for each row that cannot start with the weights of the row that it names."""
    mistakes, above = [], list[str]()
    for name, row in study.rows.items():
        if row.starts_with and row.starts_with not in above:
            known = ", ".join(above) or "none stands above"
            mistakes.append(
                f"rows.{name}.starts_with must name a row above it, got {row.starts_with!r}; known: {known}"
            )
        above.append(name)
        mistakes += [
            f"scales.{size}.rows must hold {row.starts_with!r} too, because {name!r} starts with its weights"
            for size, scale in study.scales.items()
            if row.starts_with and name in scale.rows and row.starts_with not in scale.rows
        ]
    return mistakes


def _said(options: Options) -> str:
    """The name of a row of the grid: the values, each with the last part of its option's name."""
    return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in options.items())
