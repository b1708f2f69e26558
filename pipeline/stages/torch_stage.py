"""torch's PipelineStage of any known release, its private side behind public methods: the one place that knows it.

| torch | what is different |
|---|---|
| 2.11 | needs examples, sends first messages, looks at strides |
| 2.13 and later | learns shapes in the first step |
| until 2.14 | allocates what it receives into before the first step |
| 2.14 and later | asks all stages for examples at each switch between training and evaluation |

tests/pipeline/test_stage_contract.py checks all this against the installed torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_leaves

from thinwire.errors.calls import first_line
from thinwire.pipeline.errors import OptionsError, PipelineError
from thinwire.pipeline.processes.transport import reaching

RELEASES = "2.11 to 2.15"
NEEDED = ("_prepare_forward_infra", "_retrieve_recv_activations")
"""Private hooks that all releases have and a stage can't do without; it could do without the others."""
QUESTIONS = ("_warmup_p2p", "_initialize_pipeline_distributed_state")
"""Where schedules of torch 2.14 and of 2.15 ask all stages whether they have examples."""


class TorchStage(PipelineStage):
    """A stage that takes what it computes with from `received`, and that torch keeps nothing for.

    Raises:
        OptionsError: torch is of a release that keeps its hooks elsewhere.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if missing := [hook for hook in NEEDED if not hasattr(PipelineStage, hook)]:
            raise OptionsError(
                f"CompressedStage works with torch {RELEASES}, got torch {torch.__version__}, whose PipelineStage has "
                f"no {' and no '.join(missing)}; install one of these releases"
            )
        super().__init__(*args, **kwargs)
        # the boundary looks at shapes; torch, with TORCH_DISTRIBUTED_DEBUG=DETAIL, wants marked examples
        self._runtime_validate = False

    @property
    def learns_shapes(self) -> bool:
        """Whether this torch finds out shapes in the first step, where there are no examples."""
        return hasattr(self, "_user_meta")

    def received(self, microbatch: int) -> tuple[Tensor, ...]:
        """The activations of a micro-batch, as the module gets them."""
        raise NotImplementedError

    def prepare(self, num_microbatches: int, trains: bool, shapes: tuple[Sequence[Any], Sequence[Any]] | None) -> None:
        """Called before the first pass, and where the mode switches; `shapes` of inputs and outputs, if torch says."""
        raise NotImplementedError

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The module's output for a micro-batch; torch forgets it and its inputs."""
        chunks = list(self.output_chunks)
        with _running(self.stage_index, args):
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output=False)
        PipelineStage.clear_runtime_states(self)
        self.output_chunks += chunks
        return output

    def drop_buffers(self) -> None:
        """Empty the buffers that torch 2.11 to 2.14 receive into and no frame will ever use; 2.11 clears their grad."""
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            for info in infos:
                if getattr(info, "buffer", None) is not None:
                    info.buffer = torch.empty(0)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        # torch 2.11 asks every receive buffer for a gradient, even integers, if it expects a backward
        trains, self.has_backward = self.has_backward, False
        try:
            result = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        finally:
            self.has_backward = trains
        self.drop_buffers()
        meta = getattr(self, "_stage_meta", None)
        self.prepare(num_microbatches, trains, meta and (meta.inputs or (), meta.outputs or ()))
        return result

    def _compute_outputs(self, *args: Any, **kwargs: Any) -> Any:
        with _running(self.stage_index, args):
            return super()._compute_outputs(*args, **kwargs)

    def _recv_meta(self, *args: Any) -> Any:
        with reaching(f"stage {self.stage_index} was waiting for the shapes of what it receives"):
            return super()._recv_meta(*args)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        return self.received(fwd_chunk_id)

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """The boundary looks at shapes. Torch 2.11 looks at strides too, which tensors without data do not know."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """No first messages: torch 2.11 sends one to both neighbours. The boundaries have their own process group."""
        return []

    def _post_metadata_inference_cleanup(self) -> None:
        # torch 2.14 drops all gradients of FSDP here, at each switch of the mode too; its look at shapes adds none
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        gradients = [(parameter, parameter.grad) for parameter in self.submod.parameters()]
        super()._post_metadata_inference_cleanup()
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def _running(stage: int, inputs: Any) -> Iterator[None]:
    """Raise PipelineError where a module cannot compute with whole numbers: torch's error is about matrices."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__cause__ or error
        tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
        whole = [str(each.dtype).removeprefix("torch.") for each in tensors if not each.is_floating_point()]
        if whole and "type" in str(cause):
            raise PipelineError(
                f"stage {stage} must get inputs of the type that its module computes with, got {', '.join(whole)}: "
                f"{first_line(cause)}; give it floating numbers, or begin the module with an embedding"
            ) from error
        raise


def name_questions(schedule: Any, stage: int) -> None:
    """Let a PeerError name the stage that asks all others for examples, where torch would raise an error of gloo's."""
    for name in QUESTIONS:
        if (ask := getattr(schedule, name, None)) is not None:
            setattr(schedule, name, reaching(f"stage {stage} was asking whether all stages have examples")(ask))
