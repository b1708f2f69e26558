"""One value that says which pass through the schedule comes next, for `CompressedStage.begin`.

The caller of the schedule knows whether it trains or evaluates, and on which samples. Headers, keys, plans and slots
all follow from this value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor, int64

from thinwire.compress import Microbatch, PassKind
from thinwire.pipeline.errors import PipelineError
from thinwire.pipeline.frames import Phase


@dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """One pass through the schedule, given alike on every stage. PipelineError if there is no such kind."""

    kind: PassKind = "train"
    """train; warmup (trains, with nothing compressed); eval-on or eval-off (evaluates, with compression on or off)."""
    accumulation: int = 0
    """The index of the pass in an accumulated batch; feedback by position needs it."""
    sample_ids: Tensor | None = None
    """The ids of its samples in order, int64 [samples], each id once; feedback by sample needs them."""
    lengths: Tensor | None = None
    """How many tokens of each sample stand before its padding, int64 [samples], where no stage's output for a token
    depends on later ones, and each tensor that crosses has the tokens as its second dimension, if it has one. Then the
    padding behind the longest sample of a micro-batch does not cross: zeros arrive.
    It does cross where feedback or `reuse` keep something of each row."""

    def __post_init__(self) -> None:
        if self.kind not in (kinds := get_args(PassKind)):
            raise PipelineError(f"the kind of a Pass must be one of {', '.join(kinds)}, got {self.kind!r}")

    @property
    def trains(self) -> bool:
        """Whether gradients flow."""
        return phase_of(self.kind) == "train"

    def is_split_by(self, count: int) -> bool:
        """Whether `count` micro-batches can share its samples evenly, and it says no lengths of them."""
        ids = self.sample_ids
        known = isinstance(ids, Tensor) and ids.dtype == int64 and ids.dim() == 1 and self.lengths is None
        return known and ids is not None and len(ids) % count == 0

    def microbatches(self, step: int, count: int, rows: int) -> list[Microbatch]:
        """Its `count` micro-batches of `rows` rows; `step` is its index among the passes of its phase."""
        return [self._microbatch(step, index, count, rows) for index in range(count)]

    def _microbatch(self, step: int, index: int, count: int, rows: int) -> Microbatch:
        first = (self.accumulation * count + index) * rows
        own = slice(index * rows, (index + 1) * rows)
        ids = None if self.sample_ids is None else self.sample_ids[own]
        length = None if self.lengths is None else int(self.lengths[own].max())
        return Microbatch(self.kind, range(first, first + rows), ids, step, index, length)


def phase_of(kind: PassKind) -> Phase:
    """The phase in a frame's header; a warm-up is `train` there."""
    return "train" if kind == "warmup" else kind


def require_expected(coming: Pass, stage: int, *, trains: bool, samples: int) -> None:
    """Raise PipelineError unless a pass has the kind and the number of samples that the schedule runs on a stage."""
    if coming.trains != trains:
        runs = "trains, with a loss function" if trains else "evaluates"
        raise PipelineError(
            f"begin announced to stage {stage} that a pass of kind {coming.kind} comes, but the schedule {runs}; "
            f"begin a training pass before schedule.step, an evaluation before schedule.eval"
        )
    for name, given, does in (("sample_ids", coming.sample_ids, "name"), ("lengths", coming.lengths, "be of")):
        if given is None:
            continue
        if not isinstance(given, Tensor):
            raise PipelineError(f"{name} must be a tensor of int64, got {type(given).__name__}")
        if given.dtype != int64 or given.dim() != 1:
            raise PipelineError(f"{name} must be int64 [samples], got {given.dtype} {list(given.shape)}")
        if len(given) != samples:
            raise PipelineError(
                f"{name} must {does} each of the {samples} samples of a pass, got {len(given)} on stage {stage}; the "
                f"first dimension of the first tensor that a stage gets is taken for that of the samples"
            )
        if name == "lengths" and bool((given < 0).any()):
            raise PipelineError(f"lengths must be at least 0, got {int(given.min())} on stage {stage}")
