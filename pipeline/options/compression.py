"""The codec of each channel: the fields of a recipe's `compression`, with their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from thinwire import compress
from thinwire.errors import mistakes_in
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS, ChannelName
from thinwire.pipeline.options.durations import is_over, misspelt

FEW_STAGES = 4
"""The most stages in which OF_PRETRAINED was measured to cost less than 0.03 nats."""
OF_PRETRAINED = {"activations": "q(8, step=0.28, codebook=4096)", "gradients": 'q(16, step=0.65, per="tensor")'}
"""The codecs of channels that a recipe does not name, if it has pretrained weights and few stages."""
OF_PRETRAINED_IN_MANY = {"activations": "q(8, step=0.15, codebook=4096)"}
"""The same for more stages. Each cut adds an error, so both channels need finer steps."""

MILD = ("q(8, step=0.2, codebook=4096)", "q(8, step=0.1, codebook=4096)")
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

    activations: str = "q(8, step=0.2, codebook=4096)"
    """Codec of the activations, which go forward; in a recipe with pretrained weights q(8, step=0.28, codebook=4096)
    if none is named, and in more than four stages q(8, step=0.15, codebook=4096)."""
    gradients: str = "q(8, step=0.2)"
    """Codec of the gradients, which go back; in a recipe with pretrained weights and at most four stages
    q(16, step=0.65, per="tensor") if none is named."""
    boundaries: dict[int, BoundaryOptions] = field(default_factory=dict)
    """Codecs of single boundaries, by index; boundary i is the cut between stages i and i+1."""
    shared: str = "none"
    """Codec of the gradients of weights that several stages hold, as a tied head is one weight with the embedding
    (model.tied sum); such as bf16 or ef(q(8)). With ef, each stage adds the error of a message to its next message."""
    warmup: str = "0 steps"
    """Length of the uncompressed start of training: "20 epochs" or "500 steps"."""
    warmup_fill: bool = True
    """Whether feedback fills its buffers during the warm-up; 2401.07788 starts with empty buffers."""
    store_folder: str = ""
    """Folder on each stage's own disk for stores with store="disk". A run makes a subfolder with its own name there.
    Empty means the run's output folder."""

    def __post_init__(self) -> None:
        mistakes = mistakes_in(lambda: self._coded) or self._mistakes_of_pairs()
        if mistakes := [*mistakes, *misspelt("compression.warmup", self.warmup)]:
            raise OptionsError(mistakes)

    @cached_property
    def _coded(self) -> Mapping[str, compress.Method]:
        """The method of each field that has an expression, by dotted name.

        Raises:
            OptionsError: a sentence for each mistake in an expression, once for all fields that have it.
        """
        methods, fields = dict[str, compress.Method](), dict[str, list[str]]()
        groups = {f"boundaries.{index}.": override for index, override in self.boundaries.items()}
        for where, group in {"": self, **groups}.items():
            for channel in CHANNELS:
                name, expression = f"compression.{where}{channel}", getattr(group, channel)
                if expression is not None:
                    try:
                        methods[name] = compress.parse(expression)
                        methods[name].check_channel(channel)
                    except compress.CodecError as error:
                        for mistake in error.mistakes:
                            fields.setdefault(mistake, []).append(name)
        mistakes = [f"{' and '.join(names)}: {mistake}" for mistake, names in fields.items()]
        if mistakes := [*mistakes, *mistakes_in(lambda: self.method_of_shared)]:
            raise OptionsError(mistakes)
        return methods

    def _mistakes_of_pairs(self) -> list[str]:
        """Codecs of gradients that the activations' codec does not go with."""
        mistakes = []
        for index in (None, *self.boundaries):
            try:
                self.method(index, "gradients").codec.bound_to(self.method(index, "activations").codec)
            except compress.CodecError as error:
                where = "" if index is None else f"boundaries.{index}."
                mistakes.append(f"compression.{where}gradients: {error}")
        return mistakes

    def warms_up(self, progress: compress.Progress) -> bool:
        """Whether the coming step belongs to the warm-up."""
        return not is_over(self.warmup, progress.step, progress.steps_per_epoch)

    def method(self, boundary: int | None, channel: ChannelName) -> compress.Method:
        """The method of one channel of one boundary; that of all which have none of their own, if it is None."""
        own = f"compression.boundaries.{boundary}.{channel}"
        return self._coded[own if own in self._coded else f"compression.{channel}"]

    def methods(self, num_boundaries: int, channel: ChannelName) -> list[compress.Method]:
        """The method of one channel at each boundary, as `method` gives it."""
        return [self.method(boundary, channel) for boundary in range(num_boundaries)]

    @cached_property
    def method_of_shared(self) -> compress.Method:
        """What the gradients of weights that several stages hold go through. OptionsError if it cannot carry them."""
        return method_of_sums("compression.shared", self.shared)

    @property
    def on_disk(self) -> list[str]:
        """The dotted names of fields whose method keeps its buffers on disk."""
        from thinwire.compress.stores.files import is_on_disk

        return [name for name, method in self._coded.items() if is_on_disk(method)]

    @property
    def by_sample(self) -> list[str]:
        """The dotted names of fields whose method keeps a buffer for each sample."""
        return [name for name, method in self._coded.items() if method.feedback and method.feedback.slot == "sample"]

    def note_on_warmup(self, steps: int, steps_per_epoch: int) -> str | None:
        """A sentence if nothing is compressed in so many steps, because all belong to the warm-up."""
        if not steps or not self.warms_up(compress.Progress(steps - 1, steps_per_epoch)):
            return None
        return f"nothing is compressed in training: compression.warmup of {self.warmup} is as long as all {steps} steps"

    def mistakes_of_boundaries(self, num_stages: int) -> list[str]:
        """A sentence if there are codecs for boundaries that a pipeline of so many stages does not have."""
        unknown = sorted(index for index in self.boundaries if not 0 <= index < num_stages - 1)
        told = ", ".join(map(str, unknown))
        mistake = f"compression.boundaries must lie in 0..{num_stages - 2} for {num_stages} stages, got {told}"
        return [mistake] if unknown else []


def split_pair(text: str) -> tuple[str, str]:
    """The two expressions of `activations/gradients`. A single expression is used for both. Nothing is checked."""
    activations, slash, gradients = text.partition("/")
    return activations.strip(), (gradients if slash else activations).strip()


def method_of_sums(field: str, expression: str) -> compress.Method:
    """The method of a field for gradients of weights that are added up. OptionsError if it cannot carry those."""
    try:
        method = compress.parse(expression)
        compress.CodecError.require(*_rules_of_sums(method))
        method.check_channel("gradients")
    except compress.CodecError as error:
        raise OptionsError([f"{field}: {mistake}" for mistake in error.mistakes]) from None
    return method


def _rules_of_sums(method: compress.Method) -> list[tuple[bool, str]]:
    """What must hold for gradients of weights, each with a sentence where it does not."""
    feedback = method.feedback
    rules = [
        (
            not method.codec.reuses_indices,
            f"{method} needs the indices of an activation, and the gradients of weights have none; use topk",
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
