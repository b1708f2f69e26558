"""Room for a run: in memory for its model, on the disks for its files. It is checked before training."""

from __future__ import annotations

from pathlib import Path

from thinwire.compress.stores.space import SpaceNeed, by_medium, check_space, needs_of
from thinwire.compress.stores.store import StoreLayout
from thinwire.launch.folder.policy import checkpoint_folder
from thinwire.launch.folder.weights import newest
from thinwire.launch.results.console import show_stores
from thinwire.launch.run.parts.part import RunPart
from thinwire.pipeline.options.durations import in_steps
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.saving.checkpoint_folder import manifests
from thinwire.pipeline.saving.state import module_of


class Room(RunPart):
    """The room that one process of a run needs."""

    @property
    def stores(self) -> list[tuple[StoreLayout, Path | None]]:
        """The layout of each store of this process, with its file if it is on disk."""
        return self._trainer.stages[0].wire.maker.stores

    def check(self) -> None:
        """Raise StoreError, in every process, if a disk has too little room for the whole run. Collective."""
        on_disk = needs_of("stores", ((layout.nbytes, path) for layout, path in self.stores if path is not None))
        mine = [vars(need) for need in (*on_disk, *self._weights(), *self._checkpoints())]
        told = collectives.everyone(self._where, mine)
        check_space([[SpaceNeed(**need) for need in needs] for needs in told])

    def begin(self) -> None:
        """Print the final size of the stores of all processes before training fills them; collective."""
        here = tuple(stage.stage_index for stage in self._trainer.stages)
        gathered = collectives.gather(self._where, dict.fromkeys(here, (here, by_medium(self.stores))))
        if gathered is not None and self._trainer.reports:
            show_stores({tuple(stages): taken for stages, taken in gathered})

    def _weight_bytes(self) -> int:
        tensors = [tensor for stage in self._trainer.stages for tensor in module_of(stage).saved_state().values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _weights(self) -> list[SpaceNeed]:
        if self._where.replica:  # the first replica saves the weights
            return []
        # a set of weights is removed after the next one is whole
        several = 0 < self._recipe.save_every < self._recipe.training.steps
        sets = 2 if several and newest(self._recipe.folder) is None else 1
        return needs_of("weights", [(sets * self._weight_bytes(), self._recipe.folder / "weights" / "new")])

    def _checkpoints(self) -> list[SpaceNeed]:
        """The kept checkpoints and a new one, without those on the disk already; and the rows of stores.

        Those are there twice at most if each sample comes once an epoch: a file of rows stays as long as a checkpoint
        links to it for one of them.
        """
        options, folder = self._recipe.checkpoint, checkpoint_folder(self._recipe)
        if not options.wanted:
            return []
        # and one at the end, where none is due there
        written = -(-self._recipe.training.steps // in_steps(options.every, self._prepared.sampler.steps_per_epoch))
        count = max(1, min(options.keep + 1, written) - len(manifests(folder)))
        rows = 2 * sum(by_medium(self.stores).values())
        nbytes = count * (self._recipe.optimizer.copies + self._of_replicas()) * self._weight_bytes() + rows
        return needs_of("checkpoints", [(nbytes, folder / "new")])

    def _of_replicas(self) -> int:
        """Tensors as large as the parameters that a checkpoint has for replicas."""
        replicas = self._recipe.replicas
        if replicas.count == 1:
            return 0
        here = len(self._trainer.sync.replicas.here)
        # errors: as a worker of all gradients, as an owner of a part
        errors = here + 1 if replicas.method.feedback is not None else 0
        if replicas.sync.every == 1:
            return errors
        # the common weights with their momentum; a simulation has the weights and optimizers of all replicas
        return errors + 2 + (here - 1) * self._recipe.optimizer.copies
