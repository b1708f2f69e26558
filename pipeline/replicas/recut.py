"""What the exchanges of a stage remember, from a checkpoint of another cut.

Errors are named by parameters, and by the first of some elements of a parameter. So they fit the stages of any cut, and
any owners: what messages have lost still goes with later ones.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.pipeline.saving.checkpoint_folder import SavedStage

PREFIX = "replicas/"
USED = "used"
_PIECE = re.compile(r"^(worker/\d+|owner)/(?P<name>.+)/(?P<first>\d+)$")


def read_for(
    wanted: Mapping[str, Tensor],
    parts: Sequence[SavedStage],
    holders: Mapping[str, int] | None,
    prefix: str = PREFIX,
) -> dict[str, Tensor]:
    """What the parts of a checkpoint hold of `wanted`, which has the names and shapes of a stage of another cut.

    An error that no part holds is zero, such as that of the zeros that fill the last row.

    Args:
        wanted: the state of the stage's exchanges.
        parts: all parts of the checkpoint.
        holders: the stages that hold each parameter, if their gradients are added up; None if they take the mean.
        prefix: what names in the checkpoint begin with.
    """
    names = {_parameter_of(name) for name in wanted} - {None}
    saved: list[tuple[str, Tensor]] = []
    for part in parts:
        needed = {name for name in part.names(prefix) if name == USED or _parameter_of(name) in names}
        saved += part.tensors(prefix, needed).items()
    return recut(wanted, saved, holders)


def recut(
    wanted: Mapping[str, Tensor], saved: Sequence[tuple[str, Tensor]], holders: Mapping[str, int] | None
) -> dict[str, Tensor]:
    """`wanted` with the values that are saved under names of another cut; other errors are zero.

    Several stages may hold the same weights, each with an error of its own. If their gradients are added up, the new
    holders share the sum of the errors; if they are averaged, each gets the mean.

    `used` has no names of parameters, only their places in a stage. So a stage takes all its parameters as used if each
    saved one was used; else it learns them anew.
    """
    pieces: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for name, values in saved:
        key, first = _key_of(name)
        pieces[key].append((first, values))
    found: dict[str, Tensor] = {}
    for name, like in wanted.items():
        key, first = _key_of(name)
        there = pieces[key]
        if name == USED:
            found[name] = torch.full_like(like, bool(there) and all(bool(values.all()) for _, values in there))
        else:
            total, count = _sum(there, first, like)
            holding = count.clamp(min=1) if holders is None else holders.get(_parameter_of(name) or "", 1)
            found[name] = total / holding
    return found


def _sum(pieces: Sequence[tuple[int, Tensor]], first: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of what pieces have of the elements from `first` on, and how many have each element."""
    total, count = torch.zeros_like(like), torch.zeros_like(like)
    for start, values in pieces:
        begin, end = max(first, start), min(first + len(like), start + len(values))
        if begin < end:
            total[begin - first : end - first] += values[begin - start : end - start]
            count[begin - first : end - first] += 1
    return total, count


def _key_of(name: str) -> tuple[str, int]:
    """What a name says in every cut, and its first element."""
    piece = _PIECE.match(name)
    return (f"{piece[1]}/{piece['name']}", int(piece["first"])) if piece else (name, 0)


def _parameter_of(name: str) -> str | None:
    """The parameter that a name is about; None if it is about none, or about the zeros behind the last one."""
    found = _PIECE.match(name)
    return None if found is None or found["name"] == "padding" else found["name"]
