"""Stages of traced models have the gradients of the model; what torch would send past a stage is refused."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B, pipe_split, pipeline

from support.processes import run
from thinwire.errors import ThinwireWarning
from thinwire.pipeline import CompressionOptions, Wire, stage_from
from thinwire.pipeline.errors import OptionsError

WIDTH, ROWS, COUNT = 6, 2, 4
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        y = torch.tanh(self.first(x))
        return self.last(y) * mask, y


class Net(nn.Module):
    """Two tensors cross each cut, and every stage reads the mask; `skip` is what the end adds of the beginning."""

    def __init__(self, skip=0.0, returns_first=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.skip, self.returns_first = skip, returns_first

    def forward(self, x, mask):
        q, y = first = self.blocks[0](x, mask)
        for block in self.blocks[1:]:
            pipe_split()
            q, y = block(q + y, mask)
        if self.skip:
            q = q + self.skip * first[1]
        return (q, first[0]) if self.returns_first else q - y


def net(**options):
    torch.manual_seed(0)
    return Net(**options)


def traced(**options):
    return pipeline(net(**options), (torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)))


def batch():
    generator = torch.Generator().manual_seed(7)
    return torch.randn(2, COUNT * ROWS, WIDTH, generator=generator)


def loss_of(output, target):
    return (output * output).sum()


def gradients(rank, indices):
    """Gradients of two stages of the traced model on each process, by name."""
    pipe, wire = traced(), Wire(CompressionOptions(activations="none", gradients="none"))
    stages = [stage_from(pipe, index, CPU, wire=wire) for index in indices[rank]]
    x, mask = batch()
    ScheduleInterleaved1F1B(stages, COUNT, loss_fn=loss_of, scale_grads=False).step(
        *([x] if rank == 0 else []), mask=mask, target=x
    )
    for stage in stages:
        stage.flush()
    return {name: parameter.grad for stage in stages for name, parameter in stage.submod.named_parameters()}


@pytest.mark.processes
def test_stages_of_a_traced_model_have_its_gradients():
    model, (x, mask) = net(), batch()
    loss_of(model(x, mask), None).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    first, second = run(gradients, 2, [[0, 2], [1, 3]])
    assert {**first, **second}.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close({**first, **second}[name], gradient)


class MaskFirst(nn.Module):
    """Uses its second input before the first one, in both stages; `tied` makes their weights one."""

    def __init__(self, tied):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x, mask):
        scale = mask + 1
        x = self.first(x) * scale
        pipe_split()
        scale = mask + 2
        return self.last(x) * scale


def test_stages_take_inputs_in_the_order_of_the_model_whatever_they_use_first(alone):
    """torch sorts them by use: the first stage took the mask for x, and the second one two values for the mask."""
    model, (x, mask) = MaskFirst(tied=False), batch()
    pipe = pipeline(model, (torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)))
    for _ in range(2):
        wire = Wire(CompressionOptions(activations="none", gradients="none"))
        first, last = (stage_from(pipe, index, CPU, wire=wire) for index in range(2))
        found = ScheduleInterleaved1F1B([first, last], COUNT, loss_fn=loss_of).eval(x, mask=mask, target=x)
        for output in (found, last.submod(first.submod(x, mask), mask), *pipe(x, mask)):
            torch.testing.assert_close(output, model(x, mask))


def test_a_weight_of_two_traced_stages_is_warned_about(alone):
    """Each trains its copy, and they part."""
    pipe = pipeline(MaskFirst(tied=True), (torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)))
    with pytest.warns(
        ThinwireWarning, match=r"last\.weight of submod_pp_1 is one weight with first\.weight of submod_pp"
    ):
        stage_from(pipe, 1, CPU)
    for parameter in pipe.get_stage_module(0).parameters():
        parameter.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ThinwireWarning)
        stage_from(pipe, 0, CPU)


@pytest.mark.slow
def test_a_skip_connection_is_refused_on_every_stage(alone):
    pipe = traced(skip=1.0)
    for index in range(4):
        with pytest.raises(
            OptionsError,
            match=r"no skip connections: submod_pp_3 must take what submod_pp_2 returns, .* 1 of submod_pp_0; return",
        ):
            stage_from(pipe, index, CPU)


def test_what_an_early_stage_returns_to_the_user_is_refused(alone):
    with pytest.raises(
        OptionsError, match=r"what the model returns must take what submod_pp_3 returns, .*, 0 of submod_pp_0"
    ):
        stage_from(traced(returns_first=True), 0, CPU)


def test_a_model_may_return_what_is_no_tensor_beside_its_output(alone):
    """As models with a cache that is off return None: each stage ended in a traceback."""

    class WithNone(Net):
        def forward(self, x, mask):
            return super().forward(x, mask), None, 3

    pipe = pipeline(WithNone(), (torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)))
    last = stage_from(pipe, 3, CPU)
    assert last.submod(torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)).shape == (ROWS, WIDTH)
