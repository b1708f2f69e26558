"""Where the stages of a run live."""

from __future__ import annotations

from thinwire.launch.recipe.recipe import Recipe
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.schedules import process_of_stages


def real_placement(recipe: Recipe, rank: int = 0) -> Placement:
    """The process of each stage in a real run, as the process of a rank of its process group sees it."""
    pipeline = recipe.pipeline
    replica = rank // pipeline.num_processes
    alone = process_of_stages(pipeline.schedule, pipeline.num_stages, pipeline.num_processes)
    process_of = {stage: process + replica * pipeline.num_processes for stage, process in alone.items()}
    return Placement(process_of, replica, recipe.replicas.count)


def simulated_placement(recipe: Recipe) -> Placement:
    """All stages on process 0, which does the work of all replicas."""
    return Placement(dict.fromkeys(range(recipe.pipeline.num_stages), 0))
