"""What crosses the boundaries of a stage: from examples or torch's descriptions, checked, and compared with peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire.compress import Method
from thinwire.pipeline.errors import PipelineError
from thinwire.pipeline.wire.wire import BoundaryShape, Wire


class StageShapes:
    """The tensors of a micro-batch on both sides of a stage.

    Attributes:
        known: whether examples or torch have said what they are.
        examples: the inputs and the outputs, as meta tensors; requires_grad is set on those that need gradients.
        rows: samples of a micro-batch.
        number: distinguishes this stage from others of its process with the same index.
    """

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage, self._num_stages = stage, num_stages
        self.known = self._input_trains = False
        self.examples: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = ((), ())
        self.rows = self.number = 0
        self._tells_gradients = [False, False]  # whether a description said which inputs and which outputs need some
        self._versions: dict[int, int] = {}

    @property
    def boundaries(self) -> list[BoundaryShape]:
        """Those of this stage."""
        sides = zip((self.stage - 1, self.stage), self.examples, strict=True)
        return [
            BoundaryShape(side, examples, version=self._versions.get(side, 0))
            for side, examples in sides
            if 0 <= side < self._num_stages - 1
        ]

    def learn(
        self, inputs: Sequence[Any], outputs: Sequence[Any], *, kept_by: Method | None = None, announced: bool = False
    ) -> list[int]:
        """Take what crosses the boundaries from examples, or from torch's description of them, which may be another.

        Descriptions of an evaluation do not say what needs gradients: those of training do, before or after it.

        Args:
            inputs: of a micro-batch, or what describes them.
            outputs: likewise.
            kept_by: a method that keeps something of each row, if there is one: then shapes must stay.
            announced: whether peers know the tensors until now, so that a change is counted.

        Returns:
            The boundaries whose tensors have changed.
        """
        given = (inputs, outputs)
        left, right = (_examples(*side) for side in zip(given, self.examples, self._tells_gradients, strict=True))
        told = [any(one.requires_grad for one in side) for side in given]
        self._tells_gradients = [before or now for before, now in zip(self._tells_gradients, told, strict=True)]
        pairs = [(shape, left if shape.index < self.stage else right) for shape in self.boundaries if self.known]
        changed = [(shape, new) for shape, new in pairs if not _alike(shape.examples, new)]
        if self.known and not changed:
            return []
        for shape, new in changed:
            got, had = ([list(one.shape) for one in tensors] for tensors in (new, shape.examples))
            if kept_by is not None and got != had:
                raise PipelineError(
                    f"what crosses boundary {shape.index} must keep its shapes, because {kept_by} keeps a buffer for "
                    f"each sample, got {got} after {had}; build another stage around the same module for it, with the "
                    f"same Wire"
                )
        for shape, _ in changed:
            self._versions[shape.index] = shape.version + announced
        if not self.known:
            self.known, self._input_trains = True, self.stage == 0 and told[0]
        self.examples = (left, right)
        self.rows = left[0].shape[0] if left and left[0].shape else 1
        return [shape.index for shape, _ in changed]

    def announce(self, wire: Wire, trains: bool) -> bool:
        """Publish what peers compare, and whether weights of this stage train; False before anything is known."""
        if self.known:
            wire.announce(self._name(self.stage), self.boundaries, self.rows, trains or self._input_trains)
        return self.known

    def compared(self, wire: Wire, away: Callable[[BoundaryShape], bool]) -> Iterator[BoundaryShape]:
        """The boundaries, with whether anything before them trains, once all with a peer `away` are compared.

        MismatchError with all differences; PeerError where a peer does not answer in time.
        """
        for shape in self.boundaries:
            if away(shape):
                neighbour = shape.index + 1 if shape.index == self.stage else shape.index
                wire.compare(self._name(self.stage), self._name(neighbour), shape, self.rows)
        for shape in self.boundaries:
            # nearest first: nobody else is asked where the neighbour trains
            trains = any(wire.handshake.trains(self._name(stage)) for stage in range(shape.index, -1, -1))
            yield replace(shape, trains=trains)

    def _name(self, stage: int) -> str:
        """How stages of this one's number are distinguished from others with the same index."""
        return f"{stage}.{self.number}" if self.number else f"{stage}"

    def check(self, outputs: Sequence[Any], differentiates: bool, comes: bool) -> None:
        """Raise PipelineError if an output of the module is no tensor, or needs a gradient that would not come back.

        `differentiates` says whether the pass builds graphs, `comes` whether gradients come back over the boundary.
        """
        for index, output in enumerate(outputs):
            if (kind := _no_dense_tensor(output)) is not None:
                raise PipelineError(
                    f"stage {self.stage} must return dense tensors, got {kind} as output {index}; send numbers "
                    f"as tensors, to_dense() of a sparse one, the local part of a DTensor, and leave out what the next "
                    f"stage knows"
                )
        if not differentiates:
            return
        for index, (output, example) in enumerate(zip(outputs, self.examples[1], strict=False)):
            if output.requires_grad and not example.requires_grad:
                raise PipelineError(
                    f"output {index} of stage {self.stage} needs a gradient, but its example in output_args has "
                    f"no requires_grad; set it on all examples that need one, or detach the output"
                )
            if output.requires_grad and not comes:
                raise PipelineError(
                    f"stage {self.stage} reported to its neighbour that nothing trains until there, but its "
                    f"output {index} needs a gradient; unfreeze before the first step, or call "
                    f"wire.switch(wire.compression) and then stage.reconnect() on all processes; for gradients of "
                    f"inputs set requires_grad in the input_args of stage 0"
                )


def _examples(given: Sequence[Any], known: Sequence[Tensor] = (), told: bool = False) -> tuple[Tensor, ...]:
    """Meta copies of example tensors, or of torch's descriptions, requires_grad set on those that need gradients.

    Where none is marked, those need gradients that do in `known`, if these are of the same dtypes, else all floating
    ones. What was `told` of tensors of the same sizes stays.
    """
    copies = tuple(torch.empty(one.shape, dtype=one.dtype, device="meta") for one in given)
    marks = [one.requires_grad for one in given]
    if told and _sizes(copies) == _sizes(known):
        marks = [one.requires_grad for one in known]
    elif not any(marks):
        same = [one.dtype for one in known] == [one.dtype for one in copies]
        floating = [one.dtype.is_floating_point or one.dtype.is_complex for one in copies]
        marks = [one.requires_grad for one in known] if same else floating
    return tuple(copy.requires_grad_(mark) for copy, mark in zip(copies, marks, strict=True))


def _sizes(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(one.shape, one.dtype) for one in tensors]


def _alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two tuples of tensors have the same shapes and dtypes, and the same ones need gradients."""
    marks, other_marks = ([one.requires_grad for one in each] for each in (some, others))
    return _sizes(some) == _sizes(others) and marks == other_marks


def _no_dense_tensor(output: Any) -> str | None:
    """What an output is in place of a tensor whose elements lie in memory; None if it is one."""
    if not isinstance(output, Tensor) or isinstance(output, DTensor):
        return type(output).__name__
    kinds = (f"layout {output.layout}", output.layout != torch.strided), ("device meta", output.is_meta)
    return next((f"a tensor of {kind}" for kind, is_so in kinds if is_so), None)
