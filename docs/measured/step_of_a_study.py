"""The CPU time of a step of a simulation beside that of the plain model, in one process, by turns.

    python docs/measured/step_of_a_study.py --data.name FOLDER [OPTION...]

The recipe is `resnet18-cifar10`, as the study `compression-table1` trains it at scale small, on one thread; options of
a recipe change it. The plain model is the same model in one piece: it reads the same batches, runs the same
micro-batches, and takes the same optimizer steps, with torch alone. A turn is a step of the plain model, and one of a
simulation with each codec, in an order that changes. CPU time, of the process and of the system for it, depends less on
what else the machine does than seconds do. A ratio is the median over turns of a step divided by the plain step of the
same turn.
"""

import os
import platform
import resource
import sys
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from thinwire.launch.run import recipe
from thinwire.launch.run.assembly import Prepared, assemble, make_sampler, prepare, simulated_placement
from thinwire.models.layers import build_stage

CODECS = {
    "none": "none/none",
    "q": 'q(4, scale="minmax", per="tensor")/q(8, scale="minmax", per="tensor")',
    "q, by rows": "q(4)/q(8)",
    "aqsgd": "aqsgd(q(4))/q(8)",
}
SMALL = ["--model.config", "{stem: cifar, width: 16}", "--data.image_size", "16", "--data.crop", "2"]
SMALL += ["--data.limit", "5000", "--data.evaluation_limit", "2000", "--training.threads", "1"]
TURNS, FIRST = 20, 3
PLAIN = "plain"

Step = Callable[[int], object]


def plain_step(prepared: Prepared) -> Step:
    """A step of the model in one piece, given its number."""
    wanted = prepared.recipe
    model = build_stage(prepared.blueprint, range(len(prepared.blueprint.layers)), seed=wanted.training.seed)
    how = wanted.optimizer
    optimizer = torch.optim.SGD(model.parameters(), how.lr, how.momentum, weight_decay=how.weight_decay)
    samples, sampler, loss = prepared.data.training, make_sampler(prepared), torch.nn.functional.cross_entropy

    def step(number: int) -> None:
        batch, count = sampler.batch(number), wanted.pipeline.num_microbatches
        inputs, targets = samples.inputs(batch.ids, batch.epoch), samples.targets(batch.ids)
        for pixels, labels in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            (loss(model(pixels), labels) / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def used() -> float:
    """The CPU seconds of this process so far."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


def measure(steps: dict[str, Step]) -> dict[str, list[float]]:
    """The CPU seconds of each step, by turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(FIRST + TURNS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = used()
            steps[name](turn)
            if turn >= FIRST:  # the first steps make buffers
                found[name].append(used() - began)
    return found


def main() -> None:
    """Measure, and print the table."""
    given = ["resnet18-cifar10", *SMALL, *sys.argv[1:]]
    steps: dict[str, Step] = {}
    data = None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, pair in CODECS.items():
        prepared = prepare(recipe.parse([*given, "--codec", pair]), data)
        placement = simulated_placement(prepared.recipe)
        if data is None:
            data = prepared.data
            data.training.inputs(torch.arange(len(data.training)))  # decodes all images, before the first turn
            steps[PLAIN] = plain_step(prepared)
        steps[name] = assemble(prepared, placement, 0).trainer.train_step
    found = measure(steps)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print("| | CPU ms a step | of the plain model |\n|---|---:|---:|")
    for name, seconds in found.items():
        ratio = median(own / plain for own, plain in zip(seconds, found[PLAIN], strict=True))
        print(f"| {name} | {1000 * median(seconds):.0f} | {ratio:.2f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
