"""Tables as data: the result of a measurement, for a terminal, for JSON and for a page.

    {"title": "bench quickstart", "tables": [{"title": "...", "columns": ["codec", "GB/s"], "rows": [["q(4)", 1.5]]}]}

A document may hold other values beside its title and tables, such as the environment. They are not shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import rich.table

Value = str | int | float | bool | None

ALIGNED_RANGE = 1e4
"""If the largest number of a column is at most so many times the smallest, all have the same number of decimals."""

FOLDED = 32
"""Characters of a line of folded text, in a terminal that is too narrow for the whole text."""


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns. Names of columns contain the units. None is a cell without a value."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    note: str = ""
    """A sentence that explains the table."""

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"a row must have one cell for each column, got {len(row)} for {len(self.columns)} in row {index} "
                    f"of {self.title!r}"
                )

    @cached_property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each column holds numbers. Such columns are aligned to the right."""
        cells = zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns)
        return tuple(bool(column) and all(cell is None or _is_number(cell) for cell in column) for column in cells)

    @cached_property
    def texts(self) -> list[list[str]]:
        """Every cell as text for people, by row. The fractions of a column have the same number of decimals."""
        return [list(row) for row in zip(*map(_column_texts, zip(*self.rows, strict=True)), strict=True)]

    def to_json(self) -> dict[str, Any]:
        """The table as JSON values."""
        return asdict(self)

    def rich(self) -> rich.table.Table:
        """The cells for a terminal, without title and note."""
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape
        from rich.table import Table as RichTable

        shown = RichTable(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)  # close enough for 80 columns
        for index, (name, numeric) in enumerate(zip(self.columns, self.numeric, strict=True)):
            if numeric:
                width = max(map(len, [*name.split(), *(row[index] for row in self.texts)]), default=1)
                name = "\n".join(wrap(name, width, break_long_words=False, break_on_hyphens=False))
            shown.add_column(escape(name), justify="right" if numeric else "left", overflow="fold", no_wrap=numeric)
        for row in self.texts:
            shown.add_row(*map(escape, row))
        return shown

    @property
    def markdown(self) -> str:
        """The table as Markdown, below its title and above its note."""
        rule = "|".join("---:" if numeric else "---" for numeric in self.numeric)
        lines = [f"| {' | '.join(map(_escaped, row))} |" for row in [self.columns, *self.texts]]
        body = "\n".join([lines[0], f"|{rule}|", *lines[1:]])
        return "\n\n".join([f"## {self.title}", body, *([self.note] if self.note else [])])

    @cached_property
    def widths(self) -> list[int]:
        """The least width of each column that shows all numbers on one line. Longer texts are folded."""
        found = []
        for index, (name, numeric) in enumerate(zip(self.columns, self.numeric, strict=True)):
            width = max(map(len, [*name.split(), *(row[index] for row in self.texts)]), default=0)
            found.append(2 + (width if numeric else min(width, FOLDED)))
        return found

    def parts(self, width: int) -> list[Table]:
        """Tables that fit a terminal of so many columns, each with the texts at the left and some of the numbers."""
        keys = list(range(max(1, [*self.numeric, True].index(True))))
        if sum(self.widths[key] for key in keys) > width / 2:
            keys = [0]
        groups: list[list[int]] = [[*keys]]
        for index in range(len(keys), len(self.columns)):
            if len(groups[-1]) > len(keys) and sum(self.widths[each] for each in [*groups[-1], index]) > width:
                groups.append([*keys])
            groups[-1].append(index)
        return [
            Table(self.title, [self.columns[i] for i in group], [[row[i] for i in group] for row in self.rows])
            for group in groups
        ]


def show(tables: Iterable[Table], *, notes: bool = True) -> None:
    """Print tables. One that is too wide for the terminal is printed in parts."""
    from rich.console import Console

    console = Console()
    given = console.width
    for table in tables:
        console.print(table.title, style="italic", highlight=False, markup=False)
        for part in table.parts(given):
            console.width = max(given, sum(part.widths))
            console.print(part.rich())
            console.width = given
        if table.note and notes:
            console.print(table.note, style="dim", highlight=False, markup=False)
            console.print()


def say(*lines: str | None) -> None:
    """Print lines as they are, however wide the terminal is; empty ones are left out."""
    from rich.console import Console

    console = Console()
    for line in filter(None, lines):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def text_of(cell: Value) -> str:
    """A cell as text for people: four significant digits, and commas between thousands."""
    match cell:
        case None:
            return "-"
        case bool():
            return "yes" if cell else "no"
        case int():
            return f"{cell:,}"
        case float():
            return f"{cell:,.0f}" if 1000 <= abs(cell) < 1e12 else f"{cell:.4g}"
    return cell


def rounded(value: float | None, digits: int) -> float | None:
    """A number with a few decimals; None for NaN, as in a cell without a value."""
    return None if value is None or math.isnan(value) else round(float(value), digits)


def size_text(count: float, digits: int = 0) -> str:
    """A number of bytes, in units that never show it as 0; `digits` are decimals of megabytes."""
    if count < 1000:
        return f"{count:.0f} bytes"
    return f"{count / 1e3:,.0f} kB" if count < 1e6 else f"{count / 1e6:,.{digits}f} MB"


def duration_text(seconds: float) -> str:
    """A time as people say it: 0.2 s, 12 s, 5 min 20 s, 3 h 5 min, 2 days 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    units = ((86_400, "day", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    unit, name, part, below = next(each for each in units if whole >= each[0])
    count, rest = whole // unit, whole % unit // part
    return f"{count} {name}{'s' * (name == 'day' and count > 1)}" + (f" {rest} {below}" if rest else "")


def _column_texts(cells: Sequence[Value]) -> list[str]:
    fractions = [cell for cell in cells if isinstance(cell, float) and math.isfinite(cell) and cell]
    texts = [text_of(cell) for cell in fractions]
    if not fractions or any("e" in text for text in texts):
        return [text_of(cell) for cell in cells]
    sizes = [abs(cell) for cell in fractions]
    if max(sizes) > ALIGNED_RANGE * min(sizes):
        return [text_of(cell) for cell in cells]
    digits = max(len(text.partition(".")[2]) for text in texts)
    return [f"{cell:,.{digits}f}" if _is_number(cell) and math.isfinite(cell) else text_of(cell) for cell in cells]


def document(title: str, tables: Sequence[Table], **beside: Any) -> dict[str, Any]:
    """A document of tables as JSON values; `beside` are its other values."""
    return {"title": title, "tables": [table.to_json() for table in tables], **beside}


def _is_number(cell: Value) -> TypeGuard[float]:
    return isinstance(cell, int | float) and not isinstance(cell, bool)
