"""Text from the cut model: one token after the other, each through all stages, over boundaries of its own.

The hidden state of a token crosses each boundary as a frame, as in an evaluation: [1, T, ..] for the T tokens of the
prompt, then [1, 1, ..] for each token, because the layers remember the others. Where layers remember nothing, all
tokens pass again for each new one, filled up to one length. Codecs are those of the activations, without what feedback
keeps between messages: a token is never sent twice, so each is a first visit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.compress import Method, PassKind
from thinwire.compress.transfer import put
from thinwire.errors.words import were
from thinwire.models.seed import derive_seed
from thinwire.models.tasks import WithLoss
from thinwire.models.tensors import as_tuple
from thinwire.pipeline.errors import EvaluationStoppedError, NonFiniteError
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.options.compression import BoundaryOptions
from thinwire.pipeline.processes.collectives import all_gather_json
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.saving.state import module_of
from thinwire.pipeline.stages.compressed_stage import CompressedStage
from thinwire.pipeline.wire.boundary import BoundaryEnd
from thinwire.pipeline.wire.channel import is_sums
from thinwire.pipeline.wire.maker import Holder
from thinwire.pipeline.wire.passes import Pass
from thinwire.pipeline.wire.wire import BoundaryShape


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from its logits: the largest one, or drawn."""

    temperature: float = 0.0
    """What logits are divided by before one is drawn; 0 takes the largest."""
    top_p: float = 1.0
    """Only the most likely tokens are drawn, as few as have this probability together."""
    seed: int = 0

    def __call__(self, logits: Tensor, step: int) -> int:
        """The token of step `step`, from logits [V]. NonFiniteError if one is to be drawn, and they are no numbers."""
        if not self.temperature:
            return int(logits.argmax())
        largest = float(logits.max())
        if not math.isfinite(largest):
            raise NonFiniteError(
                f"the largest logit of the next token must be finite, got {largest}; take training.precision fp32 or "
                "milder codecs, or other weights"
            )
        # from the largest one on: what is divided by next to nothing stays a number
        below = (logits.double().cpu() - largest) / self.temperature
        chances, tokens = below.softmax(0).sort(descending=True, stable=True)
        chances[chances.cumsum(0) - chances >= self.top_p] = 0
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "token", step))
        drawn = torch.multinomial(chances, 1, generator=generator)
        return int(tokens[drawn])


GREEDY = Sampling()


@dataclass(eq=False)
class Generator:
    """Generates text with the stages of a pipeline. Every process of the pipeline has one, and calls it alike."""

    stages: Sequence[CompressedStage]
    """The stages of this process, in stage order, around those of a model (`models.layers.Stage`)."""
    where: Placement
    outputs: Sequence[tuple[Tensor, ...]]
    """The output of each stage for a micro-batch: meta tensors [rows, tokens, ..]."""
    remembers: bool
    """Whether the layers remember earlier tokens."""

    def __post_init__(self) -> None:
        self._wire = self.stages[0].wire.beside()
        self._ends: dict[tuple[int, int, int], BoundaryEnd] = {}

    def tokens(
        self,
        prompt: Tensor,
        most: int,
        ends: Collection[int],
        kind: PassKind,
        sampling: Sampling = GREEDY,
        asked: Callable[[], bool] = lambda: False,
    ) -> Iterator[int]:
        """The tokens that follow a prompt, one by one, in every process of the pipeline.

        The modules must be in the mode of evaluation. What they remember is forgotten when the iterator ends.

        Args:
            prompt: token ids, int64 [N], at least one.
            most: how many tokens there may be.
            ends: tokens that end the text; they are not given out.
            kind: eval-on or eval-off, whether boundaries compress.
            sampling: chooses each token.
            asked: says whether this process was asked to stop.

        Raises:
            EvaluationStoppedError: in every process of the pipeline, after a token, if any was asked.
        """
        self._begin()
        text, known = prompt.tolist(), 0
        whole = len(text) + most
        self._remember(self.remembers)
        try:
            for step in range(most):
                given = text[known:] if self.remembers else text + [text[-1]] * (whole - len(text))
                logits = self._pass(torch.tensor([given]), step, kind)
                here = None if logits is None else sampling(logits[0, len(text) - known - 1], step)
                what = f"{were(self.where.stages_of(dist.get_rank()))} waiting for the next token"
                everyone = all_gather_json([here, asked()], what, self.where.pipeline)
                if any(stops for _, stops in everyone):
                    raise EvaluationStoppedError
                [token] = (token for token, _ in everyone if token is not None)
                if token in ends:
                    return
                known = len(text) if self.remembers else 0
                text.append(token)
                yield token
        finally:
            self._remember(False)

    def logits(self, text: Tensor, kind: PassKind) -> Tensor | None:
        """What follows each token of a text, int64 [N]: logits [N, V] where the last stage is, else None.

        The modules must be in the mode of evaluation; `kind` is as for `tokens`.
        """
        self._begin()
        found = self._pass(text[None], 0, kind)
        return None if found is None else found[0]

    def _begin(self) -> None:
        """Take the codecs as they are now, at new boundaries."""
        compression = self.stages[0].wire.compression
        self._wire.compression, self._ends = of_first_visits(compression, self.where.num_stages), {}

    def _remember(self, remembers: bool) -> None:
        for stage in self.stages:
            module_of(stage).remember(remembers)

    @torch.no_grad()
    def _pass(self, tokens: Tensor, step: int, kind: PassKind) -> Tensor | None:
        """Tokens [1, T] through the stages of this process: the logits [1, T, V] where the last stage is."""
        [microbatch] = Pass(kind=kind).microbatches(step, 1, 1)
        length, logits, used = tokens.shape[1], None, []
        for stage in self.stages:
            index = stage.stage_index
            given: tuple[Tensor | None, ...] = (put(tokens, stage.device),)
            if not stage.is_first:
                used.append(end := self._end(stage, index - 1, length))
                given = end.incoming.receive(microbatch)
            with stage.meter.section("compute"), stage.in_memory():
                output = stage.submod(*given)
            if stage.is_last:
                logits = output.output if isinstance(output, WithLoss) else output
            else:
                used.append(end := self._end(stage, index, length))
                end.outgoing.send(microbatch, as_tuple(output))
        for end in used:
            end.outgoing.flush()
            end.incoming.confirm()
        return logits

    def _end(self, stage: CompressedStage, boundary: int, length: int) -> BoundaryEnd:
        """A stage's end of a boundary for tensors of so many tokens."""
        if (key := (stage.stage_index, boundary, length)) not in self._ends:
            neighbour = boundary + 1 if boundary == stage.stage_index else boundary
            elsewhere = self.where.process_of[neighbour] != dist.get_rank()
            examples = tuple(
                torch.empty(
                    one.shape if is_sums(one) else (1, length, *one.shape[2:]), dtype=one.dtype, device="meta"
                ).requires_grad_(one.requires_grad)
                for one in self.outputs[boundary]
            )
            holder = Holder(
                stage=stage.stage_index,
                peer=self.where.place_of(neighbour) if elsewhere else None,
                meter=stage.meter,
                rows=1,
                positions=1,
                device=stage.device,
            )
            self._ends[key] = self._wire.attach(BoundaryShape(boundary, examples, trains=False), holder)
        return self._ends[key]


def of_first_visits(compression: CompressionOptions, num_stages: int) -> CompressionOptions:
    """Codecs that send what an evaluation sends of a sample that it has not seen."""
    methods = compression.methods(num_stages - 1, "activations")
    boundaries = {
        index: BoundaryOptions(activations=str(_of_first_visit(method)), gradients="none")
        for index, method in enumerate(methods)
    }
    return CompressionOptions(activations="none", gradients="none", boundaries=boundaries)


def _of_first_visit(method: Method) -> Method:
    feedback = method.feedback
    if feedback is None:
        return method
    in_full = feedback.opening if feedback.slot == "sample" and feedback.remembers_evaluation else None
    return in_full or feedback.inner
