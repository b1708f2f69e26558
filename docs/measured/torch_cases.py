"""The cases of torch's own pipelining tests, with PipelineStage and with CompressedStage, beside each other.

    python docs/measured/torch_cases.py

The cases are those of torch's test_stage.py and test_schedule_multiproc.py, written anew for two processes on a CPU,
with models and schedules of the same kinds, and torch's tolerances. Each runs in processes of its own, because where
one fails, the other would wait for it. Prints those that pass with both, and a table of the others. Takes a minute.
"""

from __future__ import annotations

import copy
import multiprocessing
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import timedelta
from functools import partial
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Pipe,
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipe_split,
    pipeline,
)
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, _ScheduleForwardOnly

from thinwire.pipeline import CompressedStage, compressed, stage_from

WIDTH, BATCH, COUNT = 32, 16, 8
CPU = torch.device("cpu")
Make = Callable[..., Any]


class Layer(nn.Module):
    """Two linear layers, as torch's tests have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Their output; x is [rows, WIDTH]."""
        return self.last(torch.relu(self.first(x)))


class WithKeyword(nn.Module):
    """Two stages, the first of which reads a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The output of both; x and y are [rows, WIDTH]."""
        x = self.layers[0](x + y)
        pipe_split()
        return self.layers[1](x)


def layers(count: int) -> nn.Sequential:
    """The unsplit model of a case: the same weights in each process."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(count)))


def batch() -> tuple[Tensor, Tensor]:
    """Inputs and targets, both [BATCH, WIDTH]."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, BATCH, WIDTH, generator=generator)
    return x, y


def trained(
    make: Make, schedule_class: Any, indices: list[list[int]], *, through: str = "", **how: Any
) -> list[Tensor]:
    """Outputs and gradients of two steps of a pipeline of layers; AssertionError if they are not the model's.

    Args:
        make: makes a stage.
        schedule_class: the schedule.
        indices: the stages of each process.
        through: `runtime` has the schedule's actions written to a file, and run from there.
        how: `kind`, of the stage: `examples`, `inferred` or `traced`; options of the schedule; `evaluates`.
    """
    rank, total = dist.get_rank(), sum(map(len, indices))
    model, (x, target) = layers(total), batch()
    kind, evaluates, outputs_too = how.get("kind", "inferred"), how.get("evaluates"), how.get("return_outputs", True)
    parts, loss_fn = copy.deepcopy(model), nn.MSELoss(reduction="sum")
    examples = torch.empty(BATCH // COUNT, WIDTH, requires_grad=kind == "examples")
    options = {"input_args": examples, "output_args": examples} if kind == "examples" else {}
    if kind == "traced":
        points = {str(index): SplitPoint.BEGINNING for index in range(1, total)}
        pipe = pipeline(parts, mb_args=(examples,), split_spec=points)
        stages = [make(pipe, index) for index in indices[rank]]
    else:
        stages = [make(parts[index], index, total, CPU, **options) for index in indices[rank]]
    several = not issubclass(schedule_class, Schedule1F1B | ScheduleGPipe | _ScheduleForwardOnly)
    schedule = schedule_class(stages if several else stages[0], COUNT, loss_fn=loss_fn, scale_grads=False)
    if through:
        order, runtime = schedule.pipeline_order, _PipelineScheduleRuntime(stages, COUNT, loss_fn, scale_grads=False)
        runtime._prepare_schedule_with_comms(order)
        with tempfile.NamedTemporaryFile() as file:
            runtime._dump_csv(file.name, format="compute_comms")
            schedule = _PipelineScheduleRuntime(stages, COUNT, loss_fn, scale_grads=False)
            schedule._load_csv(file.name, format="compute_comms")
    first, last = 0 in indices[rank], total - 1 in indices[rank]
    output, losses = None, []
    for _ in range(2):
        losses = []
        parts.zero_grad()
        given = {"target": target, "losses": losses} if last else {}
        if not evaluates and not outputs_too:
            given["return_outputs"] = False
        with torch.inference_mode() if evaluates else torch.enable_grad():
            output = (schedule.eval if evaluates else schedule.step)(*([x] if first else []), **given)
    loss_fn(wanted := model(x), target).backward()
    if last and outputs_too:
        torch.testing.assert_close(output, wanted)
    if last:
        torch.testing.assert_close(sum(losses), loss_fn(wanted, target))
    found = []
    for index, stage in zip(indices[rank], stages, strict=True):
        for (name, parameter), reference in zip(
            stage.submod.named_parameters(), model[index].parameters(), strict=True
        ):
            assert (parameter.grad is None) == bool(evaluates), name
            if not evaluates:
                torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-5, atol=4e-5)
                found.append(parameter.grad)
    return [*found, *([output] if last and outputs_too else [])]


def forward_only(make: Make) -> list[Tensor]:
    """The outputs of many steps of a schedule without a loss, each with the outputs of the last."""
    rank, (x, _), model = dist.get_rank(), batch(), layers(2)
    stage = make(model[rank], rank, 2, CPU)
    schedule, wanted, output = _ScheduleForwardOnly(stage, COUNT), x, x
    for _ in range(20):
        output = schedule.step(*([] if rank else [output]))
        shared = output.detach() if rank else torch.empty_like(x)
        dist.broadcast(shared, src=1)
        output, wanted = shared, model(wanted)
    torch.testing.assert_close(output, wanted)
    return [output]


def with_keyword(make: Make) -> list[Tensor]:
    """Of a traced model whose first stage gets a keyword."""
    rank, (x, target), losses = dist.get_rank(), batch(), []
    torch.manual_seed(0)
    model, rows = WithKeyword(), BATCH // COUNT
    stage = make(pipeline(copy.deepcopy(model), mb_args=(x[:rows],), mb_kwargs={"y": target[:rows]}), rank)
    schedule = ScheduleGPipe(stage, COUNT, loss_fn=nn.MSELoss(reduction="sum"), scale_grads=False)
    output = schedule.step(target=target, losses=losses) if rank else schedule.step(x, y=target)
    if not rank:
        return []
    torch.testing.assert_close(output, model(x, y=target), rtol=1e-2, atol=5e-3)
    assert {name for name, _ in stage.submod.named_parameters()} <= {name for name, _ in model.named_parameters()}
    return [output]


def own_weight_backward(make: Make) -> list[Tensor]:
    """A function of the user's own for the gradients of weights is called for each micro-batch."""
    rank, (x, target), calls = dist.get_rank(), batch(), []
    stage = make(layers(2)[rank], rank, 2, CPU, dw_builder=lambda: lambda: calls.append(1))
    schedule = ScheduleGPipe(stage, COUNT, loss_fn=nn.MSELoss(reduction="sum"))
    schedule.step(*([] if rank else [x]), **({"target": target} if rank else {}))
    assert len(calls) == COUNT
    return []


def weights_before_inputs(make: Make) -> list[Tensor]:
    """The second part of a backward before the first is refused."""
    rank = dist.get_rank()
    stage = make(layers(2)[rank], rank, 2, CPU, dw_builder=lambda: None)
    stage.has_backward = True
    try:
        stage.backward_weight_one_chunk(bwd_chunk_id=0)
    except AssertionError:
        return []
    raise AssertionError("nothing was raised")


def memory_of_outputs(make: Make) -> list[Tensor]:
    """Outputs are kept at the last stage only, and nothing is left after a step."""
    rank, (x, target) = dist.get_rank(), batch()
    stage = make(layers(2)[rank], rank, 2, CPU)
    schedule = ScheduleGPipe(stage, COUNT, loss_fn=nn.MSELoss(reduction="sum"))
    schedule.step(*([] if rank else [x]), **({"target": target} if rank else {}))
    assert not getattr(stage, "_forward_chunk_states", None) and not getattr(stage, "fwd_cache", None)
    assert len(stage.output_chunks) == (COUNT if rank else 0)
    stage.clear_runtime_states()
    assert not stage.output_chunks
    return []


LOOP, V, ONE = [[0, 2], [1, 3]], [[0, 3], [1, 2]], [[0], [1]]
CASES: dict[str, Callable[[Make], list[Tensor]]] = {
    "test_stage: test_tracer": partial(trained, schedule_class=ScheduleGPipe, indices=ONE, kind="traced"),
    "test_stage: test_tracer_kwargs": with_keyword,
    "test_stage: test_manual": partial(trained, schedule_class=ScheduleGPipe, indices=ONE),
    "test_stage: test_custom_dw_with_fb_schedule": own_weight_backward,
    "test_stage: test_custom_dw_errors": weights_before_inputs,
    "test_stage: test_output_chunks_memory_usage": memory_of_outputs,
    "test_forward_only": forward_only,
}
for one in (ScheduleGPipe, Schedule1F1B):
    CASES |= {
        f"test_eval_inference_mode[{one.__name__}]": partial(trained, schedule_class=one, indices=ONE, evaluates=True),
        f"test_return_output[{one.__name__}]": partial(trained, schedule_class=one, indices=ONE, return_outputs=False),
        f"test_grad_with_tracer[{one.__name__}]": partial(trained, schedule_class=one, indices=ONE, kind="traced"),
        f"test_grad_with_manual[{one.__name__}, shape_inference]": partial(trained, schedule_class=one, indices=ONE),
        f"test_grad_with_manual[{one.__name__}]": partial(trained, schedule_class=one, indices=ONE, kind="examples"),
    }
for one in (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble):
    name = f"test_grad_with_manual_interleaved[{one.__name__}"
    CASES |= {
        f"{name}]": partial(trained, schedule_class=one, indices=LOOP),
        f"{name}, use_new_runtime]": partial(trained, schedule_class=one, indices=LOOP, through="runtime"),
        f"test_eval_inference_mode[{one.__name__}]": partial(trained, schedule_class=one, indices=LOOP, evaluates=True),
    }
for one in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
    CASES |= {
        f"test_v_shape_schedules[{one.__name__}]": partial(trained, schedule_class=one, indices=V),
        f"test_eval_inference_mode[{one.__name__}]": partial(trained, schedule_class=one, indices=V, evaluates=True),
    }


def torchs(module: Any, index: int, *args: Any, **options: Any) -> Any:
    """A stage of torch's."""
    if isinstance(module, Pipe):
        return module.build_stage(index, CPU)
    return PipelineStage(module, index, *args, **options)


def ours(module: Any, index: int, *args: Any, **options: Any) -> CompressedStage:
    """The same with compressed boundaries, and codec none."""
    with compressed("none"):
        if isinstance(module, Pipe):
            return stage_from(module, index, CPU)
        return CompressedStage(module, index, *args, **options)


def in_process(rank: int, file: str, case: Callable[[Make], list[Tensor]], make: Make, answers: Any) -> None:
    """Run a case in one of two processes: `passes` and its numbers, or what failed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{file}", timedelta(seconds=20), world_size=2, rank=rank)
    try:
        with redirect_stderr(StringIO()):
            told, found = "passes", [each.detach().tolist() for each in case(make)]
        dist.barrier()
    except Exception as error:
        told, found = f"fails: {type(error).__name__}", []
    answers.put((told, rank, found))


def outcome(case: Callable[[Make], list[Tensor]], make: Make) -> tuple[str, dict[int, list[Any]]]:
    """`passes`, or what failed first, and the numbers of both processes."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        processes = [
            context.Process(target=in_process, args=(rank, f"{folder}/store", case, make, answers)) for rank in range(2)
        ]
        for process in processes:
            process.start()
        told = [answers.get(timeout=120) for _ in processes]
        for process in processes:
            process.join()
    return min(told, key=lambda each: each[0] == "passes")[0], {rank: found for _, rank, found in told}


def compare() -> dict[str, tuple[str, str, bool]]:
    """By case: how torch's stage ends, how ours does, and whether all numbers are the same."""
    table = {}
    for name, case in CASES.items():
        (torch_told, theirs), (told, found) = outcome(case, torchs), outcome(case, ours)
        table[name] = torch_told, told, theirs == found
    return table


if __name__ == "__main__":
    table = compare()
    same = [f"`{name}`" for name, told in table.items() if told == ("passes", "passes", True)]
    print(f"{', '.join(same)}\n")
    print("| case | PipelineStage | CompressedStage, codec none |\n|---|---|---|")
    for name, (torch_told, told, _) in table.items():
        if f"`{name}`" not in same:
            print(f"| `{name}` | {torch_told} | {told} |")
