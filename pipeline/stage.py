"""CompressedStage: torch's PipelineStage, but compressed frames cross its boundaries.

This file alone overrides hooks of PipelineStage; tests/pipeline/test_stage_contract.py checks them against torch. The
schedule orders the work and sends nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from thinwire.compress import Key, Microbatch, PassKind
from thinwire.models.seed import Seeded
from thinwire.pipeline.boundary import BoundaryEnd
from thinwire.pipeline.devices.memory import GradientsApart, told_if_full
from thinwire.pipeline.ends import EndsOfReplicas, learned_ends
from thinwire.pipeline.errors import OptionsError, PipelineError
from thinwire.pipeline.frames import Phase
from thinwire.pipeline.meters import Meter
from thinwire.pipeline.passes import Pass, phase_of, require_expected
from thinwire.pipeline.tracing.spans import Work
from thinwire.pipeline.wire import BoundaryShape, Holder, Wire

Tensors = Tensor | tuple[Tensor, ...]


class CompressedStage(PipelineStage):
    """A stage of a pipeline whose activations and gradients travel compressed.

    Takes the place of `torch.distributed.pipelining.PipelineStage` in any of torch's schedules. Call `flush()` after
    the last step, before the process group is destroyed.

    Args:
        submodule: this stage's part of the model.
        stage_index, num_stages, device, group, dw_builder: as for PipelineStage.
        input_args, output_args: examples of one micro-batch's inputs and outputs, real or meta; required. If any
            example of a tuple has requires_grad set, those need gradients; else all floating ones do.
        wire: shared by all stages of this process.
        first_layer: seeds the random numbers of each forward (dropout) from (wire.seed, first_layer, step,
            micro-batch); None leaves torch's generator alone.

    Attributes:
        meter: seconds and bytes of this stage.
        ends: the ends of its boundaries that the next pass uses; empty until the stage is connected.
        all_ends: these, and those that passes of other replicas use.
        passes: index of the last pass through the schedule, by phase; -1 before the first.
        keep_outputs: whether the schedule returns the last stage's outputs; False saves the memory of their batch.
        keeps_codecs: whether its ends keep their codecs from step to step, as they do but for auto.

    Raises:
        OptionsError: input_args or output_args are missing, or a codec's weights.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: Tensors | None = None,
        output_args: Tensors | None = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        *,
        wire: Wire,
        first_layer: int | None = None,
    ) -> None:
        if input_args is None or output_args is None:
            raise OptionsError(
                "CompressedStage needs input_args and output_args, because frames have a size known in advance"
            )
        super().__init__(
            submodule,
            stage_index,
            num_stages,
            device,
            input_args=input_args,
            output_args=output_args,
            group=group,
            dw_builder=dw_builder,
        )
        self.wire = wire
        self.meter = Meter()
        self.keep_outputs, self.keeps_codecs = True, True
        self._first_layer = first_layer
        self._gradients = GradientsApart(submodule.parameters())
        self._examples = (_examples(input_args), _examples(output_args))
        self._boundaries = [
            BoundaryShape(index, examples)
            for index, examples in zip((stage_index - 1, stage_index), self._examples, strict=True)
            if 0 <= index < num_stages - 1
        ]
        self._halves = learned_ends(submodule, stage_index, num_stages - 1, wire.compression)
        wire.announce(stage_index, self._boundaries)
        self.all_ends = EndsOfReplicas(wire)
        self.ends = self.all_ends.common
        self._connected = False
        self.passes: dict[Phase, int] = {"train": -1, "eval-on": -1, "eval-off": -1}
        self._coming: Pass | None = None
        self._pass = Pass()
        self._open = False
        self._num_microbatches = 0
        self._rows = _num_rows(self._examples[0][0])
        self._microbatches: list[Microbatch] = []

    def use(self, replica: int) -> None:
        """Let the next passes go through the ends of a replica, in a process that runs those of several."""
        self.ends = self.all_ends.of(replica)

    def begin(self, coming: Pass) -> None:
        """Say what the next pass through the schedule is, before `schedule.step` or `.eval`, alike on every stage.

        Without this call, a pass trains, or evaluates with compression on, and has no sample ids.
        """
        self._coming = coming

    def skip(self, kind: PassKind, count: int) -> None:
        """Count passes of a kind that this stage does not run, because other replicas do."""
        self.passes[phase_of(kind)] += count

    def connect(self) -> None:
        """Set up both boundaries, after the schedule is built, and compare them with peers; or the first step does."""
        if self._connected:
            return
        for wire, ends in self.all_ends:
            for shape in self._boundaries:
                if shape.index == self.stage_index:
                    ends.downstream = self._end(wire, shape, ends.downstream)
                else:
                    ends.upstream = self._end(wire, shape, ends.upstream)
        self.wire.compare(self.stage_index, [shape for shape in self._boundaries if self._peer(shape) is not None])
        self._connected = True

    def reconnect(self) -> None:
        """Use the codecs that the wire switched to, between two steps. A channel with a new codec has empty buffers.

        Every stage of the pipeline calls it, after the wire of every process has switched.
        """
        self.flush()
        self._connected = False
        self.connect()

    def flush(self) -> None:
        """Wait until everything this stage sent has left; PeerError if a neighbour is gone or silent."""
        self.all_ends.flush()

    def post_ahead(self) -> None:
        """Make room for the next pass's activations, unless codecs may change, or a card would wait for them."""
        if (end := self.ends.upstream) and self.keeps_codecs and not self.wire.cards.groups:
            end.incoming.post_ahead(self._num_microbatches)

    def digests(self) -> dict[str, str]:
        """A hash of every buffer at this stage's ends of its boundaries, by name; the other ends have the same."""
        return self.all_ends.digests()

    def in_memory(self) -> AbstractContextManager[None]:
        """A context in which MemoryFullError names this stage where its device has no memory left."""
        return told_if_full(self.stage_index, self.device)

    def state_dict(self) -> dict[str, Any]:
        """The state of this stage's ends of its boundaries: number of passes, buffers of feedback."""
        return {"steps": dict(self.passes), "ends": self.ends.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take exactly the state that `state_dict` returned. The stage must be connected."""
        self.passes = dict(state["steps"])
        self.ends.load_state_dict(state["ends"])

    def close(self) -> None:
        """Flush, and close the stores of feedback."""
        self.flush()
        self.all_ends.close()

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs for one micro-batch, as meta tensors; requires_grad is set where gradients come back."""
        return self._examples[1]

    @property
    def step(self) -> int:
        """Index of the current or last pass through the schedule in the current phase."""
        return self.passes[phase_of(self._pass.kind)]

    # --- hooks of PipelineStage ---------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """Called by every schedule at the start of a step."""
        super().clear_runtime_states()
        self._open = False

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        # torch 2.11 asks every receive buffer for a gradient, even integers, if it expects a backward
        training, self.has_backward = self.has_backward, False
        try:
            result = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        finally:
            self.has_backward = training
        self._num_microbatches = num_microbatches
        _drop_buffers(self.args_recv_info)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        _drop_buffers(self.grad_recv_info)
        return result

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run one micro-batch forward and send its output on."""
        self._open_pass()
        work = Work("forward", self.step, fwd_chunk_id)
        with self.meter.section("compute", work=work), self._seeded(fwd_chunk_id), self.in_memory():
            output = super().forward_one_chunk(
                fwd_chunk_id, args, kwargs, save_forward_output=save_forward_output and self.keep_outputs
            )
        if self.is_last and save_forward_output and not self.keep_outputs:
            self.output_chunks.append(torch.empty(0))  # the schedule concatenates all of output_chunks
        if self.ends.downstream is not None:
            self.ends.downstream.outgoing.send(self._microbatch(fwd_chunk_id), _as_tuple(output))
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run one micro-batch backward and send its input's gradients back."""
        if not self.has_backward:
            return
        with self.meter.section("compute", work=Work("backward", self.step, bwd_chunk_id)), self.in_memory():
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            self._gradients.look()
        # in torch 2.11 and 2.13, gradients of side inputs follow those of the received tensors
        gradients = self.bwd_cache.pop(bwd_chunk_id)[: len(self._examples[0])]
        if self.ends.upstream is not None:
            needed = [
                gradient
                for gradient, example in zip(gradients, self._examples[0], strict=True)
                if example.requires_grad
            ]
            self.ends.upstream.outgoing.send(self._microbatch(bwd_chunk_id), needed)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the part of a split backward that computes the gradients of the weights."""
        with self.meter.section("compute", work=Work("weights", self.step, bwd_chunk_id)), self.in_memory():
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            self._gradients.look()

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        assert self.ends.upstream is not None, "the first stage receives no activations"
        received = self.ends.upstream.incoming.receive(self._microbatch(fwd_chunk_id))
        needs_gradient = self.has_backward and torch.is_grad_enabled()
        activations = []
        for tensor, example in zip(received, self._examples[0], strict=True):
            assert tensor is not None, "an activation is never None"
            activations.append(tensor.requires_grad_(needs_gradient and example.requires_grad))
        return tuple(activations)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        assert self.ends.downstream is not None, "the last stage receives no gradients"
        received = iter(self.ends.downstream.incoming.receive(self._microbatch(bwd_chunk_id)))
        return tuple(
            _or_zeros(next(received), example, self.device) if example.requires_grad else None
            for example in self._examples[1]
        )

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The schedule receives nothing itself. This is the earliest call of a step, so receives are posted here."""
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

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """The boundary looks at shapes. Torch 2.11 looks at strides too, which tensors without data do not know."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """No first messages: torch 2.11 sends one to both neighbours. The boundaries have their own process group."""
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """A neighbour on this process sent its output through the boundary already."""

    def get_local_bwd_output(self, mb_index: int) -> tuple[()]:
        """This stage sent its gradients through the boundary already."""
        return ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """A neighbour on this process sent its gradients through the boundary already."""

    # --- inside ---------------------------------------------------------------------------------------------------

    def _open_pass(self) -> None:
        """Open the pass at its first hook: count it, and post every receive it will need."""
        if self._open:
            return
        # 1. Connect: by now the schedule has decided the process of each neighbour and the rows of a pass.
        self.connect()
        # 2. Take the announced pass, once: the next pass must not use it again.
        coming = self._coming or Pass(kind="train" if self.has_backward else "eval-on")
        samples = self._num_microbatches * self._rows
        require_expected(coming, self.stage_index, trains=self.has_backward, samples=samples)
        self._pass, self._coming = coming, None
        # 3. Count the pass before its micro-batches are made: they carry the number, the same at both ends.
        phase = phase_of(self._pass.kind)
        self.passes[phase] += 1
        self._microbatches = self._pass.microbatches(self.passes[phase], self._num_microbatches, self._rows)
        # 4. A learned codec maps nothing where the boundaries do not compress.
        for half in self._halves:
            half.active = self._pass.kind in ("train", "eval-on")
        # 5. Post every receive before this stage computes: gloo moves bytes only once the receiver has posted.
        self.ends.begin(self._microbatches)
        self._gradients.begin()
        self._open = True

    def _microbatch(self, index: int) -> Microbatch:
        if index >= len(self._microbatches):
            raise PipelineError(
                f"a step of {len(self._microbatches)} micro-batches has no micro-batch {index}; use one schedule for "
                f"each stage, or schedules with the same number of micro-batches"
            )
        return self._microbatches[index]

    def _end(self, wire: Wire, shape: BoundaryShape, before: BoundaryEnd | None) -> BoundaryEnd:
        holder = Holder(
            stage=self.stage_index,
            peer=self._peer(shape),
            meter=self.meter,
            positions=self._num_microbatches * self._rows,
            device=self.device,
        )
        return wire.attach(shape, holder, before)

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
        return Seeded(key.generator(), self.device)


def _examples(tensors: Tensors) -> tuple[Tensor, ...]:
    """Meta copies of example tensors, requires_grad set on those that need gradients."""
    given = (tensors,) if isinstance(tensors, Tensor) else tensors
    marked = any(tensor.requires_grad for tensor in given)
    examples = []
    for tensor in given:
        needs_gradient = tensor.requires_grad if marked else tensor.is_floating_point()
        examples.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").requires_grad_(needs_gradient))
    return tuple(examples)


def _num_rows(example: Tensor) -> int:
    """Rows of a micro-batch: the first dimension of its first tensor."""
    return example.shape[0] if example.shape else 1


def _as_tuple(output: Any) -> tuple[Tensor | None, ...]:
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, tuple | list):
        return tuple(output)
    raise PipelineError(f"a stage must return a tensor or a tuple of tensors, got {type(output).__name__}")


def _or_zeros(gradient: Tensor | None, example: Tensor, device: torch.device) -> Tensor:
    """A gradient that was None at the next stage, as zeros, because autograd needs a tensor."""
    return gradient if gradient is not None else torch.zeros(example.shape, dtype=example.dtype, device=device)


def _drop_buffers(recv_info: dict[int, Any]) -> None:
    """Empty the receive buffers that torch 2.11 to 2.13 allocate and no frame will ever use; 2.11 clears their grad."""
    for infos in recv_info.values():
        for info in infos:
            if getattr(info, "buffer", None) is not None:
                info.buffer = torch.empty(0)
