"""Modules that are hard to cut, under every schedule: gradients are those of plain torch on the unsplit model.

All stages are in one process, as in a simulation; what needs processes is at the end.
"""

import itertools
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from support.processes import run
from support.toy import needs_inference
from thinwire.compress import CodecError
from thinwire.models import large_weights, tasks
from thinwire.pipeline import CompressedStage, CompressionOptions, Pass, PipelineError, Wire
from thinwire.pipeline.schedules import SCHEDULES, actions, build_merged, merge
from thinwire.pipeline.stages.split_backward import SplitBackward

pytestmark = pytest.mark.slow

WIDTH, ROWS, COUNT, STAGES = 6, 3, 4, 4
CODECS = {
    "none": {"activations": "none", "gradients": "none"},
    "feedback": {"activations": "ef21(none)", "gradients": "ef(none)"},
}


class Plain(nn.Module):
    """A stage as most are; the awkward ones build on it."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, width)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class WeightTwice(Plain):
    def forward(self, x):
        return self.first(torch.tanh(self.last(torch.tanh(self.first(x)))))


class Several(Plain):
    """Returns several tensors: `after` is a function of (module, x, y)."""

    def __init__(self, after, width=WIDTH):
        super().__init__(width)
        self.query, self.after = nn.Parameter(torch.randn(WIDTH)), after

    def forward(self, x):
        return self.after(self, x, super().forward(x))


class Join(Plain):
    """Reads several tensors."""

    def __init__(self, join):
        super().__init__()
        self.join = join

    def forward(self, *tensors):
        return super().forward(self.join(*tensors))


class InPlace(Plain):
    def forward(self, x):
        x += 1
        return super().forward(nn.functional.relu(x, inplace=True))


class Checkpointed(Plain):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Hooked(Plain):
    """Hooks that change gradients, on a tensor, a weight and a module."""

    def __init__(self):
        super().__init__()
        self.last.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))

    def forward(self, x):
        x = self.first(x)
        x.register_hook(lambda gradient: gradient * 2)
        y = torch.tanh(x)
        y.register_hook(lambda gradient: gradient.clamp(-0.2, 0.2))
        return self.last(y)


class TokensFirst(Plain):
    def forward(self, x):
        return super().forward(x).unsqueeze(1).expand(-1, 5, -1).transpose(0, 1)


def hooked_module():
    module = Plain()
    module.first.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    return module


def normed():
    module = Plain()
    weight_norm(module.first)
    return module


def frozen(*indices):
    modules = [Plain() for _ in range(STAGES)]
    for index in indices:
        modules[index].requires_grad_(False)
    return modules


def partly_frozen():
    modules = frozen(0)
    modules[1].first.requires_grad_(False)
    return modules


def among(awkward, join=None):
    return [Plain(), awkward, Plain() if join is None else Join(join), Plain()]


def flat_gradients(modules):
    """All gradients of a stage in one buffer, as a fused optimizer keeps them."""
    for module in modules:
        parameters = list(module.parameters())
        flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
        for parameter, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        module.flat = flat
    return modules


CASES = {
    "plain": lambda: [Plain() for _ in range(STAGES)],
    "a weight used twice": lambda: among(WeightTwice()),
    "weights under a parametrization": lambda: among(normed()),
    "a weight past the input": lambda: among(
        Several(lambda self, x, y: (y, (self.query * 2).expand_as(y))), lambda y, q: y * q
    ),
    "a weight past the input and through it": lambda: among(
        Several(lambda self, x, y: (y, self.first.weight.sum(0).expand_as(y))), lambda y, q: y * q
    ),
    "a view": lambda: among(Several(lambda self, x, y: y[:, :WIDTH], width=2 * WIDTH)),
    "chunks": lambda: among(Several(lambda self, x, y: y.chunk(2, -1), width=2 * WIDTH), lambda a, b: a * b),
    "the input itself": lambda: among(Several(lambda self, x, y: (x, y)), lambda x, y: x * y),
    "one tensor twice": lambda: among(Several(lambda self, x, y: (y, y)), lambda x, y: x * y),
    "in place at the beginning": lambda: among(InPlace()),
    "integers and booleans": lambda: among(
        Several(lambda self, x, y: (x > 0, y, y.argmax(-1))), lambda b, y, i: y * b + i[:, None]
    ),
    "an empty tensor": lambda: among(Several(lambda self, x, y: (y, y[:, :0])), lambda y, e: y + e.sum()),
    "an unused tensor": lambda: among(Several(lambda self, x, y: (torch.tanh(x), y)), lambda x, y: y),
    "a weight of an unused tensor": lambda: among(
        Several(lambda self, x, y: (y, (self.query * 2).expand_as(y))), lambda y, q: y
    ),
    "a detached output": lambda: among(Several(lambda self, x, y: y.detach())),
    "only an integer": lambda: [
        Plain().requires_grad_(False),
        Several(lambda self, x, y: y.argmax(-1)).requires_grad_(False),
        nn.Embedding(WIDTH, WIDTH),
        Plain(),
    ],
    "frozen first": lambda: frozen(0),
    "frozen first two": lambda: frozen(0, 1),
    "frozen first, partly the second": partly_frozen,
    "frozen middle": lambda: frozen(1, 2),
    "frozen last": lambda: frozen(3),
    "a result that its own backward needs": lambda: among(
        Several(lambda self, x, y: (z := torch.tanh(y), torch.exp(z * self.query))), lambda x, y: x * y
    ),
    "without weights": lambda: among(nn.Tanh()),
    "hooks on tensors": lambda: among(Hooked()),
    "hooks on a module": lambda: among(hooked_module()),
    "a checkpoint": lambda: among(Checkpointed(False)),
    "a reentrant checkpoint": lambda: among(Checkpointed(True)),
    "flat gradients": lambda: flat_gradients([Plain() for _ in range(STAGES)]),
}
BY_TENSOR = {
    "tokens first": lambda: among(TokensFirst()),
    "0 dimensions": lambda: among(Several(lambda self, x, y: (y, self.first.weight.norm())), lambda y, n: y * n),
}
"""Their tensors have something else than samples in the first dimension."""


def built(case):
    torch.manual_seed(0)
    return (CASES | BY_TENSOR)[case]()


def batch():
    generator = torch.Generator().manual_seed(7)
    return torch.randn(ROWS * COUNT, WIDTH, generator=generator)


def loss_of(output, target):
    return (output * output).sum()


def unsplit(modules):
    """The gradients of plain torch, and what crosses each boundary for the first micro-batch."""
    crossing = []
    for part in batch().chunk(COUNT):
        tensors = (part,)
        for module in modules:
            crossing.append(tensors)
            output = module(*tensors)
            tensors = output if isinstance(output, tuple) else (output,)
        crossing.append(tensors)
        loss_of(*tensors, None).backward()
    return gradients_of(modules), [tuple(x.detach() for x in tensors) for tensors in crossing[: STAGES + 1]]


def gradients_of(modules):
    return {
        (index, name): parameter.grad
        for index, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }


@cache
def expected(case):
    return unsplit(built(case))


@cache
def order_of(schedule):
    return merge(actions(schedule, STAGES, STAGES // SCHEDULES[schedule].stages_per_process, COUNT))


def stages_of(modules, crossing, codec, **options):
    wire = Wire(CompressionOptions(**CODECS[codec]))
    return [
        CompressedStage(module, index, STAGES, torch.device("cpu"), *crossing[index : index + 2], wire=wire, **options)
        for index, module in enumerate(modules)
    ]


def trained(case, schedule, codec):
    """The stages after a step, and their modules."""
    modules = built(case)
    stages = stages_of(modules, expected(case)[1], codec)
    build_merged(order_of(schedule), stages, COUNT, loss_of).step(batch(), target=torch.zeros(ROWS * COUNT))
    return stages, modules


def assert_gradients(found, wanted):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (gradient is None) == (found[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "schedule", "codec"),
    [
        (case, schedule, list(CODECS)[(row + column) % 2])
        for row, case in enumerate(CASES)
        for column, schedule in enumerate(SCHEDULES)
    ],
)
def test_gradients_are_those_of_the_unsplit_model(case, schedule, codec, alone):
    _, modules = trained(case, schedule, codec)
    assert_gradients(gradients_of(modules), expected(case)[0])
    if case == "flat gradients":
        for module in modules:
            assert torch.equal(module.flat, torch.cat([p.grad.flatten() for p in module.parameters()]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", BY_TENSOR)
def test_what_has_no_sample_in_the_first_dimension_is_right_without_feedback_and_refused_with_it(case, schedule, alone):
    _, modules = trained(case, schedule, "none")
    assert_gradients(gradients_of(modules), expected(case)[0])
    with pytest.raises(PipelineError, match="so the first dimension of what crosses boundary 1 must be"):
        trained(case, schedule, "feedback")


@pytest.mark.parametrize(
    ("case", "bytes_back"),
    [("frozen first", [0, 4, 4]), ("frozen first two", [0, 0, 4]), ("frozen middle", [4, 4, 4]), ("plain", [4, 4, 4])],
)
def test_gradients_are_sent_only_to_where_something_trains(case, bytes_back, alone):
    """A gradient's frame is a header of 64 bytes and its numbers; activations travel as ever."""
    stages, _ = trained(case, "1f1b", "none")
    frame = 64 + ROWS * WIDTH * 4
    sent = [stage.meter.sent for stage in stages]
    back = [sent[index + 1].get((index, "gradients", "train")) for index in range(STAGES - 1)]
    assert [each.frames if each else 0 for each in back] == bytes_back
    assert [each.bytes if each else 0 for each in back] == [count * frame for count in bytes_back]
    assert [sent[index][index, "activations", "train"].bytes for index in range(STAGES - 1)] == [COUNT * frame] * 3


def test_what_is_unfrozen_later_is_refused_until_stages_connect_again(alone):
    modules = built("frozen first")
    stages = stages_of(modules, expected("plain")[1], "none")
    schedule = build_merged(order_of("1f1b"), stages, COUNT, loss_of)
    schedule.step(batch(), target=torch.zeros(ROWS * COUNT))
    for module in modules:
        module.requires_grad_(True).zero_grad()
    with pytest.raises(PipelineError, match="stage 0 reported to its neighbour that nothing trains until there, but"):
        schedule.step(batch(), target=torch.zeros(ROWS * COUNT))
    schedule = build_merged(order_of("1f1b"), stages, COUNT, loss_of)
    stages[0].wire.switch(stages[0].wire.compression)
    for stage in stages:
        stage.reconnect()
    schedule.step(batch(), target=torch.zeros(ROWS * COUNT))
    assert_gradients(gradients_of(modules), expected("plain")[0])


REFUSED = {
    "a number": (lambda self, x, y: (y, 3), "stage 1 must return dense tensors, got int as output 1"),
    "None": (lambda self, x, y: (y, None), "stage 1 must return dense tensors, got NoneType as output 1"),
    "a sparse tensor": (
        lambda self, x, y: y.to_sparse(),
        "stage 1 must return dense tensors, got a tensor of layout torch.sparse_coo as output 0; send",
    ),
    "a tensor without data": (
        lambda self, x, y: y.to("meta"),
        "stage 1 must return dense tensors, got a tensor of device meta as output 0; send",
    ),
    "a dict": (lambda self, x, y: {"y": y}, "stage 1 must return a tensor or a tuple of tensors, got dict"),
    "a gradient that its example denies": (
        lambda self, x, y: (y, y.sum(-1)),
        "output 1 of stage 1 needs a gradient, but its example in output_args has no requires_grad",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_cross_a_boundary_is_refused_before_its_first_frame(case, alone):
    after, told = REFUSED[case]
    hidden = torch.empty(ROWS, WIDTH, requires_grad=True)
    between = (hidden, torch.empty(ROWS)) if "gradient" in case else hidden
    crossing = [hidden, hidden, between, hidden, hidden]
    stages = stages_of(among(Several(after), lambda y, *_: y), crossing, "none")
    with pytest.raises(PipelineError, match=told):
        build_merged(order_of("gpipe"), stages, COUNT, loss_of).step(batch(), target=torch.zeros(ROWS * COUNT))
    assert (1, "activations", "train") not in stages[1].meter.sent


class Autocast(Plain):
    """A stage in bf16 whose weights stay as they are; what crosses is bf16."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv-zero-bubble"])
def test_autocast_inside_stages_gives_the_gradients_of_the_model_under_autocast(schedule, alone):
    torch.manual_seed(0)
    modules = [Autocast() for _ in range(STAGES)]
    wanted, crossing = unsplit(modules)
    assert [x.dtype for tensors in crossing for x in tensors] == [torch.float32] + [torch.bfloat16] * STAGES
    nn.ModuleList(modules).zero_grad()
    stages = stages_of(modules, crossing, "none")
    build_merged(order_of(schedule), stages, COUNT, loss_of).step(batch(), target=torch.zeros(ROWS * COUNT))
    assert_gradients(gradients_of(modules), wanted)
    sent = stages[0].meter.sent[0, "activations", "train"]
    assert sent.uncompressed == COUNT * ROWS * WIDTH * 2


def test_a_backward_is_split_also_where_the_loss_is_computed_in_parts(monkeypatch):
    monkeypatch.setattr(tasks, "_WHOLE", 14)
    monkeypatch.setattr(tasks, "_PART", 14)
    leaf, linear = torch.randn(2, 3, 5, requires_grad=True), nn.Linear(5, 7)

    def loss():
        return tasks.LanguageModeling().loss_sum(linear(leaf), torch.arange(6).view(2, 3))

    wanted = torch.autograd.grad(loss(), [leaf, linear.weight])
    split = SplitBackward([loss()], [None], [leaf])
    assert split.is_possible
    assert torch.equal(split.of_inputs()[0], wanted[0])
    split.of_weights()
    assert torch.equal(linear.weight.grad, wanted[1])


def test_a_split_backward_adds_to_the_gradient_of_a_large_layer_once(monkeypatch):
    monkeypatch.setattr(large_weights, "LARGE", 35)
    leaf, linear = torch.randn(2, 3, 5, requires_grad=True), nn.Linear(5, 7, bias=False)
    large_weights.add_in_place(linear)
    wanted = torch.autograd.grad(linear(leaf).sum(), [leaf, linear.weight])
    linear.weight.grad = torch.ones(7, 5)
    split = SplitBackward([linear(leaf).sum()], [None], [leaf])
    assert split.is_possible == (torch.__version__ >= "2.13"), "an older torch runs it whole"
    if not split.is_possible:
        return
    assert torch.equal(split.of_inputs()[0], wanted[0])
    assert torch.equal(linear.weight.grad, torch.ones(7, 5))
    split.of_weights()
    torch.testing.assert_close(linear.weight.grad, wanted[1] + 1)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv-zero-bubble"])
def test_compiled_stages_have_the_gradients_of_the_unsplit_model(schedule, alone):
    """The backward of a compiled layer runs whole. This backend of torch.compile needs no compiler of C++."""
    wanted, crossing = expected("plain")
    modules = built("plain")
    compiled = [torch.compile(module, backend="aot_eager") for module in modules]
    stages = stages_of(compiled, crossing, "none")
    build_merged(order_of(schedule), stages, COUNT, loss_of).step(batch(), target=torch.zeros(ROWS * COUNT))
    assert_gradients(gradients_of(modules), wanted)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv-zero-bubble"])
def test_conjugate_and_negative_numbers_cross_as_they_are(schedule, alone):
    """torch only notes that they are, and leaves the numbers in memory as they were."""
    modules = among(Several(lambda self, x, y: (torch.complex(x, y).conj(), torch.complex(y, x).conj().imag)))
    modules[2] = Join(lambda z, negative: z.real * z.imag + negative)
    wanted, crossing = unsplit(modules)
    assert crossing[2][0].is_conj() and crossing[2][1].is_neg()
    nn.ModuleList(modules).zero_grad()
    stages = stages_of(modules, crossing, "none")
    build_merged(order_of(schedule), stages, COUNT, loss_of).step(batch(), target=torch.zeros(ROWS * COUNT))
    assert_gradients(gradients_of(modules), wanted)


@pytest.mark.parametrize(
    ("codec", "factor", "error", "told"),
    [
        ("feedback", 1, CodecError, r"ef21\(none\) keeps buffers of real numbers, got torch.complex64; send this"),
        ("none", torch.nan, PipelineError, "stage 1 has NaN or infinity in the activations of micro-batch 0"),
    ],
)
def test_complex_numbers_lose_no_part_and_are_finite(codec, factor, error, told, alone):
    """Buffers kept the real part alone, and NaN went on."""
    modules = among(Several(lambda self, x, y: torch.complex(x, factor * y)))
    modules[2] = Join(lambda z: z.real * z.imag)
    stages = stages_of(modules, unsplit(modules)[1], codec)
    with pytest.raises(error, match=told):
        build_merged(order_of("1f1b"), stages, COUNT, loss_of).step(batch(), target=torch.zeros(ROWS * COUNT))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv-zero-bubble"])
def test_accumulated_passes_have_the_gradients_of_one_batch(schedule, alone):
    wanted, crossing = expected("plain")
    modules = built("plain")
    stages = stages_of(modules, crossing, "none")
    for index, part in enumerate(batch().repeat(2, 1).chunk(2)):
        for stage in stages:
            stage.begin(Pass(accumulation=index))
        build_merged(order_of(schedule), stages, COUNT, loss_of).step(part, target=torch.zeros(ROWS * COUNT))
    assert_gradients(gradients_of(modules), {name: 2 * gradient for name, gradient in wanted.items()})


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_a_weight_that_stages_of_a_process_share_is_divided_once(name, alone):
    """Also in the second step, and where the stage that is through first is the last one."""
    torch.manual_seed(0)
    modules = [Plain() for _ in range(2)]
    modules[1].last = modules[0].last
    wanted, crossing = unsplit(modules), [torch.empty(ROWS, WIDTH)] * 3
    nn.ModuleList(modules).zero_grad()
    wire = Wire(CompressionOptions(**CODECS["none"]))
    stages = [
        CompressedStage(module, index, 2, torch.device("cpu"), *crossing[index : index + 2], wire=wire)
        for index, module in enumerate(modules)
    ]
    schedule = next(each for each in MULTI if each.__name__ == name)(stages, COUNT, loss_fn=loss_of)
    for _ in range(2):
        nn.ModuleList(modules).zero_grad()
        schedule.step(batch(), target=torch.zeros(ROWS * COUNT))
        found = gradients_of(modules)
        assert_gradients(found, {key: gradient / COUNT for key, gradient in wanted[0].items()})


SHARDED = {
    "ddp": lambda module, mesh: nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group()),
    "fsdp": lambda module, mesh: fully_shard(module, mesh=mesh),
    "tensor parallel": lambda module, mesh: parallelize_module(
        module, mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()}
    ),
}
MULTI = [ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble]


def groups_of(count):
    """What wraps modules over `count` processes, and the group of each one's own pipeline; collective."""
    return init_device_mesh("cpu", (count,)), dist.new_subgroups(1)[0]


def wrapped(rank, how, schedule_class, mesh, pipeline):
    """Gradients after two steps of two stages here, wrapped over a mesh, each process with its own batch."""
    torch.manual_seed(0)
    modules = [Plain() for _ in range(2)]
    wire, example = Wire(CompressionOptions(**CODECS["none"]), group=pipeline), torch.empty(ROWS, WIDTH)
    stages = [
        CompressedStage(
            module, index, 2, torch.device("cpu"), input_args=example, output_args=example, group=pipeline, wire=wire
        )
        for index, module in enumerate(modules)
    ]
    for stage in stages:  # as other programs do: the stage is built before its module is wrapped
        stage.submod = SHARDED[how](stage.submod, mesh)
    schedule = schedule_class(stages, COUNT, loss_fn=loss_of, scale_grads=False)
    inputs = batch() * (rank + 1 if how != "tensor parallel" else 1)
    for _ in range(2):
        schedule.step(inputs, target=torch.zeros(ROWS * COUNT))
    return {
        (index, name): whole(parameter.grad)
        for index, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def wanted_of(how, count):
    torch.manual_seed(0)
    modules = [Plain() for _ in range(2)]
    replicas = 1 if how == "tensor parallel" else count
    for rank in range(replicas):
        for _ in range(2):
            (loss_of(modules[1](modules[0](batch() * (rank + 1))), None) / replicas).backward()
    return gradients_of(modules)


@pytest.mark.parametrize("schedule_class", MULTI)
@pytest.mark.parametrize("wrap", [lambda module, mesh: module, SHARDED["fsdp"]], ids=["plain", "fsdp"])
@needs_inference
@pytest.mark.parametrize("examples", [(), (torch.empty(ROWS, WIDTH),) * 2], ids=["inferred", "examples"])
def test_an_evaluation_before_the_optimizer_steps_leaves_the_gradients(wrap, schedule_class, examples, alone):
    """torch divides gradients at the end of evaluations too, and drops those of FSDP where the mode changes."""
    mesh, pipeline = groups_of(1)

    def after(*acts):
        torch.manual_seed(0)
        modules = [wrap(Plain(), mesh) for _ in range(2)]
        wire = Wire(CompressionOptions(**CODECS["none"]), group=pipeline)
        stages = [
            CompressedStage(module, index, 2, torch.device("cpu"), *examples, group=pipeline, wire=wire)
            for index, module in enumerate(modules)
        ]
        schedule = schedule_class(stages, COUNT, loss_fn=loss_of)
        for act in acts:
            getattr(schedule, act)(batch(), target=torch.zeros(ROWS * COUNT))
        return {name: whole(gradient) for name, gradient in gradients_of(modules).items()}

    assert_gradients(after("step", "eval", "step"), after("step", "step"))
    assert_gradients(after("step", "eval"), after("step"))


@pytest.mark.parametrize("schedule_class", MULTI)
@pytest.mark.parametrize("how", SHARDED)
def test_modules_wrapped_over_one_process_have_the_gradients_of_the_unsplit_model(how, schedule_class, alone):
    assert_gradients(wrapped(0, how, schedule_class, *groups_of(1)), wanted_of(how, 1))


def all_wrapped(rank):
    groups = groups_of(2)
    return {
        (how, schedule_class.__name__): wrapped(rank, how, schedule_class, *groups)
        for how in SHARDED
        for schedule_class in MULTI
    }


@pytest.mark.processes
def test_modules_wrapped_over_two_processes_have_the_gradients_of_the_unsplit_model():
    for found in run(all_wrapped, 2):
        for (how, _), gradients in found.items():
            assert_gradients(gradients, wanted_of(how, 2))


def across(rank):
    """Gradients of a stage in this process, which is wrapped over two of four, by how."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "copies"))
    index, copy = mesh.get_coordinate()
    pipeline, found = mesh["stages"].get_group(), {}
    for how, shard in SHARDED.items():
        torch.manual_seed(0)
        module = [Plain() for _ in range(2)][index]
        wire, example = Wire(CompressionOptions(**CODECS["none"]), group=pipeline), torch.empty(ROWS, WIDTH)
        given = {"input_args": example, "output_args": example, "group": pipeline, "wire": wire}
        stage = CompressedStage(module, index, 2, torch.device("cpu"), **given)
        stage.submod = shard(stage.submod, mesh["copies"])
        schedule = Schedule1F1B(stage, COUNT, loss_fn=loss_of, scale_grads=False)
        inputs = batch() * (copy + 1 if how != "tensor parallel" else 1)
        for _ in range(2):
            schedule.step(*([inputs] if index == 0 else []), target=torch.zeros(ROWS * COUNT))
        found[how] = {(index, name): whole(parameter.grad) for name, parameter in module.named_parameters()}
    return found


@pytest.mark.processes
def test_stages_in_two_processes_wrapped_over_two_each_have_the_gradients_of_the_unsplit_model():
    found = run(across, 4)
    for how in SHARDED:
        for first, last in itertools.product(found[:2], found[2:]):
            assert_gradients(first[how] | last[how], wanted_of(how, 2))
