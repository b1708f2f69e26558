"""The codec of each channel: the fields of a recipe's `compression`, with their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from thinwire import compress
from thinwire.errors import broken
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS, ChannelName
from thinwire.pipeline.options.durations import is_over, misspelt

MILD = ("q(8, step=0.2)", "q(8, step=0.1)")
"""Codecs of activations that cost a pretrained language model less than 1 % of its loss, at three boundaries; the one
with the fewest bits first."""

FAST = ("q(8)", "q(4)/q(8)", "q(3)/q(6)", "q(2)/q(4)")
"""Pairs of codecs of fewer and fewer bits, for models that are trained from scratch."""


@dataclass(frozen=True, kw_only=True)
class BoundaryOptions:
    """Codecs of one boundary. A channel that is left out keeps the common codec."""

    activations: str | None = None
    """Codec of this boundary's activations."""
    gradients: str | None = None
    """Codec of this boundary's gradients."""


@dataclass(frozen=True, kw_only=True)
class CompressionOptions:
    """The codec of each channel, as an expression such as q(4) or q(8, step=0.2)."""

    activations: str = "q(8, step=0.2)"
    """Codec of the activations, which go forward."""
    gradients: str = "q(8, step=0.2)"
    """Codec of the gradients, which go back."""
    boundaries: dict[int, BoundaryOptions] = field(default_factory=dict)
    """Codecs of single boundaries, by index; boundary i is the cut between stages i and i+1."""
    shared: str = "none"
    """Codec of the gradients of weights that several stages hold, as a tied head is one weight with the embedding
    (model.tied sum); such as bf16 or ef(q(8)). With ef, each stage adds what a message lost to its next one."""
    warmup: str = "0 steps"
    """How long nothing is compressed at the start of training: "20 epochs" or "500 steps"."""
    warmup_fill: bool = True
    """Whether feedback fills its buffers during the warm-up; 2401.07788 starts with empty buffers."""
    store_folder: str = ""
    """Folder on each stage's own disk for stores with store="disk". A run makes a subfolder with its own name there.
    Empty means the run's output folder."""

    def __post_init__(self) -> None:
        mistakes = self._mistakes_of_expressions() or self._mistakes_of_pairs()
        mistakes += mistakes_of_sums("compression.shared", self.shared)
        mistakes += misspelt("compression.warmup", self.warmup)
        if mistakes:
            raise OptionsError(mistakes)

    def _mistakes_of_expressions(self) -> list[str]:
        """A sentence for each mistake in an expression, once for all fields that have it."""
        fields: dict[str, list[str]] = {}
        for where, channel, expression in self._expressions():
            try:
                compress.parse(expression).check_channel(channel)
            except compress.CodecError as error:
                for mistake in error.mistakes:
                    fields.setdefault(mistake, []).append(where)
        return [f"{' and '.join(names)}: {mistake}" for mistake, names in fields.items()]

    def _mistakes_of_pairs(self) -> list[str]:
        """Codecs of gradients that the activations' codec does not go with; expressions must be codecs."""
        mistakes = []
        for where, pair in self._pairs().items():
            try:
                compress.parse(pair["gradients"]).bound_to(compress.parse(pair["activations"]).codec)
            except compress.CodecError as error:
                mistakes.append(f"{where}.gradients: {error}")
        return mistakes

    def _pairs(self) -> dict[str, dict[ChannelName, str]]:
        """The expressions of both channels, by field: the common pair, and the pair of each boundary of its own."""
        own = {
            f"compression.boundaries.{index}": {channel: self._expression(index, channel) for channel in CHANNELS}
            for index in self.boundaries
        }
        return {"compression": {"activations": self.activations, "gradients": self.gradients}, **own}

    def _expressions(self) -> list[tuple[str, ChannelName, str]]:
        """Where each expression stands, its channel, and the expression."""
        overrides = {f"compression.boundaries.{index}": override for index, override in self.boundaries.items()}
        return [
            (f"{where}.{channel}", channel, expression)
            for where, group in {"compression": self, **overrides}.items()
            for channel in CHANNELS
            if (expression := getattr(group, channel)) is not None
        ]

    def warms_up(self, step: int, steps_per_epoch: int) -> bool:
        """Whether an optimizer step, counted from 0, belongs to the warm-up."""
        return not is_over(self.warmup, step, steps_per_epoch)

    def method(self, boundary: int, channel: ChannelName) -> compress.Method:
        """The method of one channel of one boundary."""
        return compress.parse(self._expression(boundary, channel))

    def methods(self, num_boundaries: int, channel: ChannelName) -> list[compress.Method]:
        """The method of one channel at each boundary, as `method` gives it. Each expression is parsed once."""
        read = cache(compress.parse)
        return [read(self._expression(boundary, channel)) for boundary in range(num_boundaries)]

    @property
    def on_disk(self) -> list[str]:
        """The dotted names of fields whose method keeps its buffers on disk."""
        from thinwire.compress.stores.files import is_on_disk

        return [where for where, _, expression in self._expressions() if is_on_disk(compress.parse(expression))]

    @property
    def by_sample(self) -> list[str]:
        """The dotted names of fields whose method keeps a buffer for each sample."""
        methods = {where: compress.parse(expression) for where, _, expression in self._expressions()}
        return [where for where, method in methods.items() if _is_by_sample(method)]

    def note_on_warmup(self, steps: int, steps_per_epoch: int) -> str | None:
        """A sentence if nothing is compressed in so many steps, because all belong to the warm-up."""
        if not steps or not self.warms_up(steps - 1, steps_per_epoch):
            return None
        return f"nothing is compressed in training: compression.warmup of {self.warmup} is as long as all {steps} steps"

    def mistakes_of_boundaries(self, num_stages: int) -> list[str]:
        """A sentence if there are codecs for boundaries that a pipeline of so many stages does not have."""
        unknown = sorted(index for index in self.boundaries if not 0 <= index < num_stages - 1)
        told = ", ".join(map(str, unknown))
        mistake = f"compression.boundaries must lie in 0..{num_stages - 2} for {num_stages} stages, got {told}"
        return [mistake] if unknown else []

    def _expression(self, boundary: int, channel: ChannelName) -> str:
        override: str | None = getattr(self.boundaries.get(boundary), channel, None)
        common: str = getattr(self, channel)
        return override if override is not None else common


def split_pair(text: str) -> tuple[str, str]:
    """The two expressions of `activations/gradients`. A single expression is used for both. Nothing is checked."""
    activations, slash, gradients = text.partition("/")
    return activations.strip(), (gradients if slash else activations).strip()


def mistakes_of_sums(field: str, expression: str) -> list[str]:
    """A sentence for each reason why the codec of a field cannot carry gradients of weights that are added up."""
    try:
        method = compress.parse(expression)
        mistakes: Sequence[str] = broken(*_rules_of_sums(method))
        if not mistakes:
            method.check_channel("gradients")
    except compress.CodecError as error:
        mistakes = error.mistakes
    return [f"{field}: {mistake}" for mistake in mistakes]


def _rules_of_sums(method: compress.Method) -> list[tuple[bool, str]]:
    """What must hold for gradients of weights, each with a sentence where it does not."""
    feedback = method.feedback
    rules = [
        (
            not method.codec.reuses_indices,
            f"{method} needs the indices of an activation, and the gradients of weights have none; use topk",
        ),
        (
            not method.codec.warm_starts,
            f"{method} starts each message from the last one, which sums of gradients do not keep; use q or topk",
        ),
    ]
    if feedback is not None:
        rules += [
            (
                not feedback.receiver_keeps,
                f"{method} keeps a buffer at both ends, and sums of gradients keep errors at the sender; use ef",
            ),
            (
                feedback.slot == "position" or feedback.receiver_keeps,
                f"{method} keeps a buffer for each sample, and a gradient is the sum over many; drop slot",
            ),
            (feedback.store == "memory", f"{method} must keep its buffers in memory for sums of gradients; drop store"),
            (
                feedback.store_bits >= 16,
                f"{method} must keep errors of sums in 32 or 16 bits, got store_bits={feedback.store_bits}",
            ),
        ]
    return rules


def _is_by_sample(method: compress.Method) -> bool:
    return method.feedback is not None and method.feedback.slot == "sample"
