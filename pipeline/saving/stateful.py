"""What stages remember, in checkpoints of torch.distributed.checkpoint, as other programs write them."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO

import torch
import torch.distributed as dist

from thinwire.pipeline.errors import PipelineError
from thinwire.pipeline.stages.compressed_stage import CompressedStage


class SavedStages:
    """The stages of this process as one `torch.distributed.checkpoint.stateful.Stateful`.

    Each stage is one entry of bytes, because a run that goes on does not know the shapes of buffers before its first
    step.

    PipelineError if two stages have one index.
    """

    def __init__(self, *stages: CompressedStage) -> None:
        self._stages = {f"process {dist.get_rank()} stage {stage.stage_index}": stage for stage in stages}
        if len(self._stages) < len(stages):
            raise PipelineError(
                f"SavedStages takes the stages of one pipeline, each once, got stages "
                f"{[stage.stage_index for stage in stages]}; give each pipeline a SavedStages of its own"
            )

    def state_dict(self) -> dict[str, bytes]:
        """The state of each stage, by process and stage."""
        written = {}
        for name, stage in self._stages.items():
            torch.save(stage.state_dict(), file := BytesIO())
            written[name] = file.getvalue()
        return written

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Take the state that `state_dict` returned; PipelineError if a stage has none there."""
        if missing := self._stages.keys() - state.keys():
            raise PipelineError(
                f"a checkpoint must hold what each stage remembers, and there is none of {sorted(missing)[0]}; go on "
                f"with the processes and stages that wrote it, or leave the buffers of feedback out when loading"
            )
        for name, stage in self._stages.items():
            stage.load_state_dict(torch.load(BytesIO(state[name]), weights_only=True))
