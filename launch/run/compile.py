"""The stages of this process, compiled before the first step.

A compiler may take longer than a stage waits for another. So while any process compiles, a thread of each exchanges a
word with all others every second, and nobody waits longer than for that word.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from thinwire.errors import ThinwireError
from thinwire.errors.calls import message_of
from thinwire.launch.shared.progress import showing
from thinwire.models.compiled import compile_layers
from thinwire.models.errors import ModelError
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.saving.state import module_of
from thinwire.pipeline.stages.compressed_stage import CompressedStage

if TYPE_CHECKING:
    from thinwire.launch.plan.prepared import Prepared

EVERY = 1.0
"""Seconds between two words."""


def compile_stages(stages: Sequence[CompressedStage], prepared: Prepared, where: Placement) -> None:
    """Compile the stages of this process, and return once all processes have. Collective.

    Raises:
        ModelError: torch cannot compile the layers.
    """
    compiled = threading.Event()

    def stay_in_touch() -> None:
        with suppress(ThinwireError):  # the next wait of this process reports it
            while collectives.anyone(where, not compiled.is_set()):
                compiled.wait(EVERY)

    contact = threading.Thread(target=stay_in_touch, name="compiling", daemon=True)
    contact.start()
    try:
        with showing("compiling the layers"):
            for stage in stages:
                _compile(stage, prepared)
    finally:
        compiled.set()
    contact.join()


def _compile(stage: CompressedStage, prepared: Prepared) -> None:
    index = stage.stage_index
    _, inputs, side = prepared.stage_inputs(index, stage.device)
    try:
        compile_layers(module_of(stage), inputs, side)
    except Exception as error:
        raise ModelError(
            f"training.compile must be false, because torch cannot compile stage {index}: {message_of(error)}"
        ) from error
