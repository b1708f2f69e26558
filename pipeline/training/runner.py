"""The stages of this process with the schedule that runs micro-batches through them, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from thinwire.compress.transfer import put
from thinwire.pipeline.devices.device import put_all
from thinwire.pipeline.stages.compressed_stage import CompressedStage
from thinwire.pipeline.stages.torch_stage import name_questions
from thinwire.pipeline.training.optimization import WholeBatchLoss
from thinwire.pipeline.wire.passes import Pass


class Runner:
    """Runs passes through the stages of this process.

    Args:
        stages: this process's stages, in stage order.
        schedule: a schedule of torch.distributed.pipelining over them, its loss function `loss`.
        loss: the loss of a micro-batch as a share of the batch's.

    Attributes:
        has_first, has_last: whether the first stage is here, which reads inputs; and the last one, which reads targets.
    """

    def __init__(self, stages: Sequence[CompressedStage], schedule: Any, loss: WholeBatchLoss) -> None:
        self.stages, self.schedule, self.loss = list(stages), schedule, loss
        self.has_first = any(stage.is_first for stage in stages)
        self.has_last = any(stage.is_last for stage in stages)
        self._trains: bool | None = None
        for stage in self.stages:
            stage.keep_outputs = False
        name_questions(schedule, self.stages[0].stage_index)

    def run(self, coming: Pass, side: dict[str, Tensor], inputs: Tensor | None, targets: Tensor | None) -> list[Tensor]:
        """One pass through the schedule: the micro-batches' losses on the last stage.

        Args:
            coming: which pass, with the ids of its samples.
            side: its side inputs. Where padding does not cross, the `lengths` of the samples are one more.
            inputs: None except in the process of the first stage.
            targets: None except in the process of the last stage.
        """
        losses: list[Tensor] = []
        # all stages before the schedule: it may run any of them first
        for stage in self.stages:
            stage.begin(coming)
        device = self.stages[0].device
        args = () if inputs is None else (put(inputs, device),)
        kwargs = {} if targets is None else {"target": put(targets, device), "losses": losses}
        act = self.schedule.step if coming.trains else self.schedule.eval
        known = {} if coming.lengths is None else {"lengths": coming.lengths}
        act(*args, **kwargs, **put_all(side | known, device))
        # wait for sends only now: they ran while the stages computed
        for stage in self.stages:
            stage.flush()
        return [loss.detach() for loss in losses]

    def set_mode(self, *, trains: bool) -> None:
        """Put the modules into the mode of training or of evaluation, if they are not in it: the walk takes time."""
        if self._trains == trains:
            return
        self._trains = trains
        for stage in self.stages:
            stage.submod.train(trains)
