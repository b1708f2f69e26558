"""The codec q: uniform quantization to 1 to 8 bits, with one scale for each block of the tensor.

payload     | scale of block 0 | .. | scale of block C-1 | codes, packed |
absmax        bf16                                         ceil(b*n/8) bytes
minmax        float32 min, float32 max-min

The option grid is in grid.py, step in steps.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal, Self, get_args

from thinwire.compress.codebook import MOST_ENTRIES, Codebook
from thinwire.compress.codec import CodecError, require_choice, require_int
from thinwire.compress.codecs.blockwise import Blockwise
from thinwire.compress.codecs.coding.lengths import Code
from thinwire.compress.codecs.granularity import Per
from thinwire.compress.codecs.grid import AbsMaxGrid, Grid, MidTreadGrid, MinMaxGrid
from thinwire.compress.codecs.quantizer import Quantizer
from thinwire.compress.codecs.steps import StepQuantizer
from thinwire.errors import attempt

ScaleRule = Literal["absmax", "minmax"]
Round = Literal["nearest", "stochastic"]
GridPoints = Literal["midrise", "midtread"]
_GRIDS: Mapping[GridPoints, type[AbsMaxGrid | MidTreadGrid]] = MappingProxyType(
    {"midrise": AbsMaxGrid, "midtread": MidTreadGrid}
)
_LARGEST_STEP = 2.0


@dataclass(frozen=True, repr=False)
class Quantize(Blockwise):
    """`q(bits)`: each element becomes a code of `bits` bits on its block's grid.

    Arithmetic is in float32, and the result is rounded to the tensor's dtype. The largest error, with the block's own
    s, min and max, is

        absmax, nearest    s/2**b,  s = max|x| rounded up to bf16: at most max|x| * (1 + 2**-7)
        minmax, nearest    (max-min) / (2 * (2**b-1))

    and twice that for values at the far end of a grid with zero, or with stochastic rounding (for absmax with a larger
    s, see AbsMaxGrid). With `step` it is half of step * rms(x), if that is more. The rounding of float32 and of the
    tensor's dtype come on top; `error_bound` counts all.
    """

    name: ClassVar[str] = "q"

    bits: int
    """Bits a code, 1 to 8; with `step` 8 or 16, those of an integer that is not coded."""
    scale: ScaleRule = field(default="absmax", kw_only=True)
    """`absmax`: a grid from -max|x| to max|x|; `minmax`: from the least to the largest value."""
    per: Per | None = field(default=None, kw_only=True)
    """What shares one scale; `row` if neither this nor `group` is given."""
    group: int | None = field(default=None, kw_only=True)
    """Instead of `per`: how many consecutive elements share one scale."""
    round: Round = field(default="nearest", kw_only=True)
    """`stochastic`: up or down by chance, so that the expectation is the value itself."""
    grid: GridPoints | None = field(default=None, kw_only=True)
    """`midtread`: zero is a point, the default but at 1 bit; `midrise`: no point is zero, the only one beside minmax
    and stochastic rounding."""
    step: float | None = field(default=None, kw_only=True)
    """The least distance of two points, in root mean squares of the block; a block's largest value may need a larger
    one. Frequent integers take fewer bits, so it sets the size, and `bits` how large an integer may be."""
    codebook: int | None = field(default=None, kw_only=True)
    """With `step`: of 2 to 65536 rows that both ends of a channel keep, one predicts each row of a message. It changes
    the bytes, and no bound of an error. Outside a channel nothing is kept, and nothing predicted."""
    code: Code | None = field(default=None, kw_only=True)
    """`entropy`: frequent codes take fewer bits, so a payload may be shorter than `nbytes`; `plain`, with `step`: its
    integers take all of their `bits`, and payloads have one length."""

    def __post_init__(self) -> None:
        attempt(
            self._check_bits,
            lambda: require_choice(self, "scale", self.scale, get_args(ScaleRule)),
            lambda: require_choice(self, "round", self.round, get_args(Round)),
            super().__post_init__,
            lambda: require_choice(self, "grid", self._points, get_args(GridPoints)),
            self._check_step,
            self._check_codebook,
        )
        if not (self.scale == "absmax" and self.round == "nearest") and self._points != "midrise":
            raise CodecError(
                f'q\'s grid is for scale="absmax" and round="nearest", got scale="{self.scale}" and '
                f'round="{self.round}"'
            )

    @property
    def _points(self) -> GridPoints:
        """The grid that was asked for, or the default one."""
        knows_zero = self.scale == "absmax" and self.round == "nearest"
        # at 1 bit one of the two points would be zero
        return self.grid or ("midtread" if knows_zero and self.bits != 1 else "midrise")

    def _check_bits(self) -> None:
        if self.bits == 16 and self.step is None:
            raise CodecError("q's 16 bits are those of integers of a step, got none; write q(16, step=0.2), or q(8)")
        require_int(self, "bits", self.bits, 1, 8 if self.step is None else 16)

    def _check_step(self) -> None:
        if self.step is None:
            return
        if type(self.step) not in (int, float) or not 0 < self.step <= _LARGEST_STEP:
            raise CodecError(f"q's step must be above 0 and at most {_LARGEST_STEP:g}, got {self.step!r}")
        if self.bits not in (8, 16) or self._points != "midtread" or self.code == "entropy":
            raise CodecError(
                f"q's step needs 8 or 16 bits, of which frequent integers take fewer, and a grid with zero, without "
                f"code, got {self}; write q(8, step={self.step})"
            )

    def _check_codebook(self) -> None:
        if self.codebook is None:
            return
        require_int(self, "codebook", self.codebook, 2, MOST_ENTRIES)
        if self.step is None or self.bits != 8 or self.per != "row":
            raise CodecError(
                f"q's codebook predicts rows of 8 bits with a step of their own, got {self}; write "
                f"q(8, step={self.step or 0.2}, codebook={self.codebook})"
            )

    @property
    def entries(self) -> int:
        """How many rows both ends keep."""
        return self.codebook or 0

    def predicting(self, codebook: Codebook) -> Self:
        """The codec of one channel, which predicts by these entries; itself without the option."""
        quantizer = self._quantizer
        if self.codebook is None or not isinstance(quantizer, StepQuantizer):
            return self
        made = replace(self)
        vars(made)["_complete"] = replace(quantizer, codebook=codebook)
        return made

    @property
    def varies(self) -> bool:
        """Whether frequent codes take fewer bits."""
        # torch.compile takes a property of super() for its value, which is always true
        return self.code == "entropy" or (self.step is not None and self.code is None)

    def of_known_length(self) -> Self:
        """The codec without `code`, or with integers of a step as they are."""
        return replace(self, code=None if self.step is None else "plain")

    @property
    def _codes(self) -> Sequence[Code]:
        return ("entropy",) if self.step is None else get_args(Code)

    @property
    def _grid(self) -> Grid:
        stochastic = self.round == "stochastic"
        if self.scale == "minmax":
            return MinMaxGrid(self.bits, stochastic)
        return _GRIDS[self._points](self.bits, stochastic)

    @property
    def _most_growth(self) -> int | None:
        if self.scale != "absmax":
            return None
        return 1 if self._points == "midrise" else 2  # midtread cuts up to a step where it rounds by half of one

    @property
    def _quantizer(self) -> Quantizer:
        if self.step is None:
            return super()._quantizer
        rows, plain = self.per == "row", self.code == "plain"
        return StepQuantizer(float(self.step), self.bits, self._blocks, rows, plain, self.entries)
