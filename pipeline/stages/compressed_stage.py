"""CompressedStage: torch's PipelineStage, but compressed frames cross its boundaries.

It overrides public methods of PipelineStage; what torch keeps private is in torch_stage.py. The schedule orders the
work and sends nothing itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from thinwire.compress import CodecError, Key, Method, Microbatch, PassKind
from thinwire.models.seed import seeded
from thinwire.pipeline.devices.memory import GradientsApart, told_if_full
from thinwire.pipeline.errors import OptionsError, PipelineError
from thinwire.pipeline.frames import Phase
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.stages.graph import Gradients, Graph, Root, edge
from thinwire.pipeline.stages.shapes import StageShapes
from thinwire.pipeline.stages.split_backward import SplitBackward, changeable
from thinwire.pipeline.stages.torch_stage import TorchStage
from thinwire.pipeline.wire.boundary import BoundaryEnd
from thinwire.pipeline.wire.ends import StageEnds
from thinwire.pipeline.wire.maker import Holder
from thinwire.pipeline.wire.passes import Pass, phase_of, require_expected
from thinwire.pipeline.wire.wire import BoundaryShape, Wire, wire_of


class CompressedStage(TorchStage):
    """A stage of a pipeline whose activations and gradients travel compressed.

    Takes the place of `torch.distributed.pipelining.PipelineStage` in any of torch's schedules. Call `flush()` after
    the last step, before the process group is destroyed.

    Args:
        *args, **kwargs: as for PipelineStage of the installed torch. Where any tensor of the examples `input_args` or
            `output_args` has requires_grad set, those need gradients; else all floating ones do. torch before 2.13
            needs both; a later one learns shapes in the first step, and again wherever torch looks at them again.
        wire: shared by all stages of this process; None is one with the codecs of `compressed`, for each pipeline.
        first_layer: seeds the random numbers of each forward (dropout) from (wire.seed, first_layer, step,
            micro-batch); None leaves torch's generator alone.

    The module may be wrapped, filled, frozen or replaced (`stage.submod`) until the first step.

    Attributes:
        meter: seconds and bytes of this stage.
        ends: the ends of its boundaries; empty until the stage is connected.
        passes: index of the last pass through the schedule, by phase; -1 before the first.
        keep_outputs: whether the schedule returns the last stage's outputs; False saves the memory of their batch.

    Raises:
        OptionsError: torch needs examples and has none, or is of a release that is not known, or the wire is another
            process group's.
    """

    def __init__(self, *args: Any, wire: Wire | None = None, first_layer: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = inspect.signature(PipelineStage).bind(*args, **kwargs).arguments
        inputs, outputs = (given.get(name) for name in ("input_args", "output_args"))
        if (inputs is None or outputs is None) and not self.learns_shapes:
            raise OptionsError(
                "CompressedStage needs input_args and output_args with this torch, because frames have a size known in "
                "advance; torch 2.13 and later learn shapes in the first step"
            )
        self.wire = wire or wire_of(self.group, self.stage_index)
        self.wire.require_group(self.group)
        self.meter = Meter()
        self.keep_outputs = True
        self._first_layer = first_layer
        self._gradients = GradientsApart()
        self._told_if_full = told_if_full(self.stage_index, self.device)
        self._shapes = StageShapes(self.stage_index, self.num_stages)
        self._connected = False
        self._to_load: Mapping[str, Any] | None = None
        if inputs is not None and outputs is not None:
            self._shapes.learn(_as_tuple(inputs), _as_tuple(outputs))
        self._shapes.number = self.wire.join(self)
        self.ends = StageEnds()
        self._gradients_at: set[int] = set()
        self.passes: dict[Phase, int] = {"train": -1, "eval-on": -1, "eval-off": -1}
        self._coming: Pass | None = None
        self._pass = Pass()
        self._open = False
        self._unused: Phase | None = None
        self._scales = self._is_scaled = False
        self._counts: dict[bool, int] = {}
        self._backwards = 0
        self._leaves: tuple[Tensor, ...] = ()
        self._graphs: dict[int, Graph] = {}
        self._second_parts: dict[int, Callable[[bool], object]] = {}
        self._microbatches: list[Microbatch] = []

    def begin(self, coming: Pass) -> None:
        """Say what the next pass through the schedule is, before `schedule.step` or `.eval`, alike on every stage.

        Without this call, a pass trains, or evaluates with compression on, and has no sample ids.
        """
        self._coming = coming

    def skip(self, kind: PassKind, count: int) -> None:
        """Count passes of a kind that this stage does not run, because other replicas do."""
        self.passes[phase_of(kind)] += count

    def announce(self) -> bool:
        """Publish the configuration at both boundaries; False before shapes are known. Its Wire calls this."""
        return self._shapes.announce(self.wire, any(parameter.requires_grad for parameter in self.submod.parameters()))

    def connect(self) -> None:
        """Set up both boundaries, after the schedule is built, and compare them with peers; or the first step does."""
        if self._connected:
            return
        if not self._shapes.known:
            raise OptionsError(
                f"stage {self.stage_index} must know its shapes before it connects; give input_args and output_args, "
                f"or leave it to the first step"
            )
        index, wire = self.stage_index, self.wire
        if mistakes := wire.compression.mistakes_of_boundaries(self.num_stages):
            raise OptionsError(mistakes)
        wire.announce_all({stage for stage, rank in self.stage_index_to_group_rank.items() if rank == self.group_rank})
        self._gradients_at.clear()
        for shape in self._shapes.compared(wire, lambda shape: self._peer(shape) is not None):
            if shape.gradients:
                self._gradients_at.add(shape.index)
            side = "downstream" if shape.index == index else "upstream"
            setattr(self.ends, side, self._end(shape, getattr(self.ends, side)))
        self._connected = True
        self._load()

    def reconnect(self) -> None:
        """Use the codecs that the wire switched to, between two steps. A channel with a new codec has empty buffers.

        Every stage of the pipeline calls it, after the wire of every process has switched.
        """
        self.flush()
        self._connected = False
        self.connect()

    def flush(self) -> None:
        """Wait until everything this stage sent has left; PeerError if a neighbour is gone or silent."""
        self.ends.flush()

    def post_ahead(self) -> None:
        """Make room for the next pass's activations, unless a GPU would wait for them."""
        if (end := self.ends.upstream) and not self.wire.maker.gpus.groups:
            end.incoming.post(self._num_microbatches)

    def digests(self) -> dict[str, str]:
        """A hash of every buffer at this stage's ends of its boundaries, by name; the other ends have the same."""
        return self.ends.digests()

    def in_memory(self) -> AbstractContextManager[None]:
        """A context in which MemoryFullError names this stage where its device has no memory left."""
        return self._told_if_full

    def state_dict(self) -> dict[str, Any]:
        """The state of this stage's ends of its boundaries: number of passes, buffers of feedback."""
        return {"steps": dict(self.passes), "ends": self._to_load or self.ends.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take exactly the state that `state_dict` returned; where there are no ends yet, when the stage connects.

        PipelineError if it is the state of other boundaries or codecs.
        """
        self.passes, self._unused = dict(state["steps"]), None
        self._to_load = state["ends"]
        if self._connected:
            self._load()

    def close(self) -> None:
        """Flush, and close the stores of feedback."""
        self.flush()
        self.ends.close()

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs for one micro-batch, as meta tensors; requires_grad is set where gradients come back."""
        return self._shapes.examples[1]

    @property
    def step(self) -> int:
        """Index of the current or last pass through the schedule in the current phase."""
        return self.passes[phase_of(self._pass.kind)]

    # --- hooks of PipelineStage ---------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """Called by every schedule at the start of a step."""
        super().clear_runtime_states()
        self._open = self._is_scaled = False
        self._graphs.clear()
        self._second_parts.clear()

    def prepare(self, num_microbatches: int, trains: bool, shapes: tuple[Sequence[Any], Sequence[Any]] | None) -> None:
        """Called before the first pass, and where the mode switches."""
        self._counts[trains] = num_microbatches
        if shapes is not None:
            changed = self._shapes.learn(*shapes, kept_by=self._kept_by, announced=self._connected)
            if changed:
                self.flush()
                self._connected = False
            for boundary in changed:
                self.wire.forget(self, boundary, self._shapes.number)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run one micro-batch forward and send its output on."""
        if not self._open:
            self._open_pass()
        with self.meter.section("compute", "forward"), self._seeded(fwd_chunk_id), self.in_memory():
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs)
        if self.is_last and save_forward_output:
            kept = output.detach() if isinstance(output, Tensor) else tree_map_only(Tensor, Tensor.detach, output)
            # the schedule concatenates all of output_chunks
            self.output_chunks.append(kept if self.keep_outputs else torch.empty(0))
        if self.ends.downstream is not None:
            tensors = _as_tuple(output, f"stage {self.stage_index}")
            self._shapes.check(tensors, self._differentiates, self.stage_index in self._gradients_at)
            if self._shapes.examples[1]:
                self.ends.downstream.outgoing.send(self._microbatch(fwd_chunk_id), tensors)
        if self.has_backward:
            # the last stage's backward begins at its loss
            outputs = () if self.is_last or self._is_idle else _as_tuple(output)
            self._graphs[fwd_chunk_id] = Graph.of(outputs, self._leaves, keeps_outputs=self._adds_up)
        self._unused = None
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run one micro-batch backward, or the part that computes gradients of its input, and send those back."""
        if not self.has_backward:
            return
        self._backwards += 1
        graph = self._graphs.pop(bwd_chunk_id)
        if self._is_idle:
            return
        with self.meter.section("compute", "backward"), self.in_memory():
            if self.is_last:
                assert loss is not None, "the schedule gives the last stage its loss"
                graph, gradients = Graph.of((loss,), graph.leaves, keeps_outputs=True), None
            else:
                gradients = self._received_gradients(bwd_chunk_id)
            found, second_part = self._first_part(graph, gradients, full_backward, last_backward)
            if full_backward:
                second_part(last_backward)
            else:
                self._second_parts[bwd_chunk_id] = second_part
            self._gradients.look()
        if self.ends.upstream is not None and self.stage_index - 1 in self._gradients_at:
            pairs = zip(found, self._shapes.examples[0], strict=True)
            needed = [gradient for gradient, example in pairs if example.requires_grad]
            self.ends.upstream.outgoing.send(self._microbatch(bwd_chunk_id), needed)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the part of a split backward that computes the gradients of the weights."""
        if not self.has_backward or (self._connected and self._is_idle):
            return
        assert bwd_chunk_id in self._second_parts, "backward_one_chunk(full_backward=False) comes first"
        with self.meter.section("compute", "weights"), self.in_memory():
            self._second_parts.pop(bwd_chunk_id)(last_backward)
            self._gradients.look()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Called by a schedule that divides gradients by the number of micro-batches, when this stage is through.

        The last stage of this process that holds a weight divides its gradient: the others may still add to it. torch
        calls this in evaluations too, where there is nothing to divide.
        """
        if not self.has_backward:
            return
        self._scales = grad_scale_factor != 1
        self._require_unscaled()
        self._is_scaled = True
        waiting = [
            stage
            for stage in self.wire.members
            if isinstance(stage, CompressedStage)
            and stage._shapes.number == self._shapes.number
            and not stage._is_scaled
        ]
        later = {id(parameter) for stage in waiting for parameter in stage.submod.parameters()}
        for parameter in self.submod.parameters():
            if self._scales and parameter.grad is not None and id(parameter) not in later:
                parameter.grad.div_(grad_scale_factor)

    def received(self, microbatch: int) -> tuple[Tensor, ...]:
        """The activations of a micro-batch, as the module gets them, which may change them in place."""
        assert self.ends.upstream is not None, "the first stage receives no activations"
        examples = self._shapes.examples[0]
        received: tuple[Tensor | None, ...] = ()
        if examples:
            received = self.ends.upstream.incoming.receive(self._microbatch(microbatch))
            self._unused = None
        needs_gradient = self._differentiates and self.stage_index - 1 in self._gradients_at
        leaves = []
        for tensor, example in zip(received, examples, strict=True):
            assert tensor is not None, "an activation is never None"
            leaves.append(tensor.requires_grad_(needs_gradient and example.requires_grad))
        self._leaves = tuple(leaves)
        return tuple(changeable(leaf) for leaf in leaves)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The schedule receives nothing itself. This is the earliest call of a step, so receives are posted here."""
        if not self._open:
            self._open_pass()
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The schedule receives nothing itself."""
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The schedule sends nothing itself."""
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The schedule sends nothing itself."""
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """A neighbour on this process sent its output through the boundary already."""

    def get_local_bwd_output(self, mb_index: int) -> tuple[()]:
        """This stage sent its gradients through the boundary already."""
        return ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """A neighbour on this process sent its gradients through the boundary already."""

    # --- inside ---------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # buffers outlive the pass
    def _open_pass(self) -> None:
        """Open the pass at its first hook: count it, and post every receive it will need."""
        # 1. Connect: by now the schedule has decided the process of each neighbour and the rows of a pass.
        self.drop_buffers()
        self.connect()
        # 2. Take the announced pass, once: the next pass must not use it again.
        coming = self._coming or Pass(kind="train" if self.has_backward else "eval-on")
        if self._kept_by is None and coming.is_split_by(self._num_microbatches):
            coming = replace(coming, sample_ids=None)  # nothing is kept of a sample, so rows may be other things
        samples = self._num_microbatches * self._shapes.rows
        require_expected(coming, self.stage_index, trains=self.has_backward, samples=samples)
        self._pass, self._coming = coming, None
        self._require_unscaled()
        # 3. Count the pass before its micro-batches are made: they carry the number, the same at both ends. One that
        #    failed before anything was sent or received is not counted: for the neighbours it never began.
        phase = phase_of(self._pass.kind)
        if self._unused is not None:
            self.passes[self._unused] -= 1
        self.passes[phase] += 1
        self._unused = phase
        self._microbatches = self._pass.microbatches(self.passes[phase], self._num_microbatches, self._shapes.rows)
        # 4. Post every receive before this stage computes: gloo moves bytes only once the receiver has posted.
        self.ends.begin(self._microbatches)
        self._gradients.begin(self.submod.parameters() if self.has_backward else ())
        self._backwards, self._leaves = 0, ()
        self._open = True

    def _first_part(
        self, graph: Graph, gradients: Sequence[Tensor | None] | None, is_whole: bool, is_last: bool
    ) -> tuple[Gradients, Callable[[bool], object]]:
        """Run a backward up to the gradients of the inputs, and the rest with it where the graph cannot be split.

        Args:
            graph: of a micro-batch.
            gradients: of its outputs; None where it begins at a loss.
            is_whole: whether the rest is to follow at once.
            is_last: whether this is the last whole backward of a pass.

        Returns:
            The gradients of the leaves, and the rest, which is told whether it is the last one of a pass.
        """
        roots, arrived = graph.begins(gradients)
        whole = partial(self._backward, graph, roots, arrived)
        if self.dw_builder is not None:
            found = whole(is_last)
            rest = self.dw_builder()
            return found, lambda _: rest()
        if is_whole:
            return whole(is_last), _nothing
        if self.is_first:  # nobody waits for gradients of inputs
            return (), whole
        if not self._adds_up and (split := SplitBackward(roots, arrived, graph.leaves)).is_possible:
            return split.of_inputs(), lambda _: split.of_weights()
        return whole(self._backwards == self._num_microbatches), _nothing

    def _backward(
        self, graph: Graph, roots: Sequence[Root], gradients: Sequence[Tensor | None], is_last: bool
    ) -> Gradients:
        """Add the gradients of the weights to what they have, and return those of the leaves."""
        if self._adds_up:  # torch sees to it that processes add them up in the last one of a pass only
            given = {"stage_output": roots, "output_grads": gradients, "input_values": ()}
            self.backward_maybe_with_nosync("full", given, is_last)
        elif roots:
            torch.autograd.backward([edge(root) for root in roots], gradients)
        return graph.take_gradients()

    @property
    def _is_idle(self) -> bool:
        """Whether nothing trains until here, so there is no backward."""
        return not self.is_last and self.stage_index not in self._gradients_at

    def _received_gradients(self, microbatch: int) -> Gradients:
        assert self.ends.downstream is not None, "the last stage receives no gradients"
        received = iter(self.ends.downstream.incoming.receive(self._microbatch(microbatch)))
        gradients = [next(received) if example.requires_grad else None for example in self._shapes.examples[1]]
        if self._adds_up:  # it waits for each weight, so a None becomes zeros
            gradients = [
                torch.zeros(example.shape, dtype=example.dtype, device=self.device)
                if gradient is None and example.requires_grad
                else gradient
                for gradient, example in zip(gradients, self._shapes.examples[1], strict=True)
            ]
        return tuple(gradients)

    @property
    def _num_microbatches(self) -> int:
        """Those of a pass; before the first pass, 0. torch before 2.14 prepares a schedule once for both modes."""
        return self._counts.get(self.has_backward, self._counts.get(not self.has_backward, 0))

    @property
    def _differentiates(self) -> bool:
        """Whether this pass builds graphs."""
        return self.has_backward and torch.is_grad_enabled()

    @property
    def _adds_up(self) -> bool:
        """Whether the module itself adds up its gradients over several processes."""
        return isinstance(self.submod, DistributedDataParallel | FSDPModule)

    @property
    def _kept_by(self) -> Method | None:
        """A method that keeps something of each row at this stage's ends; None if there is none."""
        methods = (coder.method for coder in self.ends.coders().values())
        return next((method for method in methods if method.feedback is not None), None)

    def _load(self) -> None:
        if self._to_load is not None:
            try:
                self.ends.load_state_dict(self._to_load)
            except (KeyError, CodecError) as error:
                raise PipelineError(
                    f"stage {self.stage_index} must be given the state of a stage with the same boundaries and codecs; "
                    f"take the codecs that it was saved with, or go on without that state ({error})"
                ) from error
        self._to_load = None

    def _microbatch(self, index: int) -> Microbatch:
        missing = range(len(self._microbatches), index + 1)  # another schedule has more micro-batches
        if missing:
            more = self._pass.microbatches(self.step, missing.stop, self._shapes.rows)
            self._microbatches += more[missing.start :]
        return self._microbatches[index]

    def _require_unscaled(self) -> None:
        if self._pass.accumulation and self._scales:
            raise PipelineError(
                f"a schedule must not divide gradients where passes are accumulated, because pass "
                f"{self._pass.accumulation} would divide those of pass {self._pass.accumulation - 1} again; give the "
                f"schedule scale_grads=False, and divide the loss"
            )

    def _end(self, shape: BoundaryShape, before: BoundaryEnd | None) -> BoundaryEnd:
        holder = Holder(
            stage=self.stage_index,
            peer=self._peer(shape),
            meter=self.meter,
            rows=self._shapes.rows,
            positions=self._num_microbatches * self._shapes.rows,
            number=self._shapes.number,
            device=self.device,
        )
        return self.wire.attach(shape, holder, before)

    def _peer(self, shape: BoundaryShape) -> int | None:
        """Rank of the process that holds the stage beyond a boundary; None if it is this process."""
        neighbour = shape.index + 1 if shape.index == self.stage_index else shape.index
        rank = self.stage_index_to_group_rank[neighbour]
        return None if rank == self.group_rank else rank

    def _seeded(self, microbatch: int) -> AbstractContextManager[None]:
        if self._first_layer is None:
            return nullcontext()
        phase = phase_of(self._pass.kind)
        key = Key(self.wire.seed, self._first_layer, "forward", phase, self.step, microbatch)
        return seeded(key.generator(), self.device)


def _as_tuple(output: Any, stage: str = "a stage") -> tuple[Any, ...]:
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, tuple | list):
        return tuple(output)
    raise PipelineError(f"{stage} must return a tensor or a tuple of tensors, got {type(output).__name__}")


def _nothing(_: bool) -> None:
    """The second part of a backward that the first part ran whole."""
