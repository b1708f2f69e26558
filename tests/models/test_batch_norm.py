import pytest
import torch
from torch import nn

from support.pipelined import drawn, gradients_of, reset, run, state_of
from thinwire.compress import SlotCounts
from thinwire.models.batch_norm import batch_norm_warning, batch_norms, running_statistics
from thinwire.models.layers import Blueprint, Chain, Layer, LayerSpec, build_stage, stage_output_examples
from thinwire.pipeline.options import CompressionOptions, WireOptions
from thinwire.pipeline.schedules import actions, build_merged, merge
from thinwire.pipeline.stages.compressed_stage import CompressedStage
from thinwire.pipeline.wire.wire import Wire

IDENTICAL = {"rtol": 0, "atol": 0}
PARTS = {
    "conv": lambda: nn.Conv2d(3, 4, 3),
    "block": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2)),
    "norm": lambda: nn.BatchNorm2d(4),
    "head": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4 * 2 * 2, 2)),
}
CUTS = {1: [range(0, 4)], 2: [range(0, 2), range(2, 4)], 4: [range(i, i + 1) for i in range(4)]}
MICROBATCHES = [3 * drawn(2, 3, 8, 8, seed=seed) + seed for seed in range(4)]
GRADIENTS = [drawn(2, 2, seed=10 + seed) for seed in range(4)]


def layer_of(name):
    return lambda: Chain({name: PARTS[name]()})


def blueprint():
    return Blueprint(tuple(LayerSpec(name, layer_of(name)) for name in PARTS), reset)


def stages_of(num_stages):
    return [build_stage(blueprint(), layers, seed=1) for layers in CUTS[num_stages]]


def unsplit():
    model = nn.Sequential()
    for name, make in PARTS.items():
        model.add_module(name, make())
    model.load_state_dict({key: tensor.clone() for key, tensor in state_of(stages_of(1)).items()})
    return model


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_statistics_are_those_of_a_loop_over_micro_batches(num_stages):
    stages, whole = stages_of(num_stages), unsplit()
    outputs = run(stages, MICROBATCHES, GRADIENTS)
    for microbatch, gradient, output in zip(MICROBATCHES, GRADIENTS, outputs, strict=True):
        expected = whole(microbatch)
        expected.backward(gradient)
        torch.testing.assert_close(output, expected.detach(), **IDENTICAL)
    torch.testing.assert_close(state_of(stages), dict(whole.state_dict()), **IDENTICAL)
    torch.testing.assert_close(gradients_of(stages), {n: p.grad for n, p in whole.named_parameters()}, **IDENTICAL)
    assert state_of(stages)["norm.num_batches_tracked"] == 4


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_statistics_under_a_schedule(alone, name):
    modules, whole = stages_of(2), unsplit()
    [boundary], _ = stage_output_examples(blueprint(), CUTS[2], MICROBATCHES[0], "fp32")
    examples = [MICROBATCHES[0].to("meta"), boundary, GRADIENTS[0].to("meta")]
    wire = Wire(
        CompressionOptions(activations="none", gradients="none"),
        WireOptions(timeout=60.0),
        seed=5,
        slots=SlotCounts(positions=8, samples=8, evaluation_samples=8),
    )
    stages = [
        CompressedStage(
            module,
            index,
            2,
            torch.device("cpu"),
            input_args=examples[index],
            output_args=examples[index + 1],
            wire=wire,
            first_layer=index,
        )
        for index, module in enumerate(modules)
    ]
    order = merge(actions(name, 2, 2, len(MICROBATCHES)))
    schedule = build_merged(order, stages, len(MICROBATCHES), lambda output, target: (output * target).sum())
    schedule.step(torch.cat(MICROBATCHES), target=torch.cat(GRADIENTS))
    for microbatch in MICROBATCHES:
        whole(microbatch)
    torch.testing.assert_close(state_of(modules), dict(whole.state_dict()), **IDENTICAL)


def test_and_not_those_of_the_whole_batch():
    stages, whole = stages_of(2), unsplit()
    outputs = run(stages, MICROBATCHES, GRADIENTS)
    expected = whole(torch.cat(MICROBATCHES))
    assert (torch.cat(outputs) - expected).abs().max() > 0.1
    state = state_of(stages)
    assert whole.norm.num_batches_tracked == 1
    # four steps of momentum 0.1 go further than one
    ratio = state["norm.running_mean"].norm() / whole.norm.running_mean.norm()
    assert ratio > 2, ratio


def test_evaluation_uses_running_statistics_whatever_the_micro_batch():
    stages = stages_of(2)
    run(stages, MICROBATCHES, GRADIENTS)
    before = {name: tensor.clone() for name, tensor in state_of(stages).items()}
    for stage in stages:
        stage.eval()
    with torch.no_grad():
        one_by_one = [stages[1](stages[0](image[None])) for image in MICROBATCHES[0]]
        together = stages[1](stages[0](MICROBATCHES[0]))
    # convolutions of other batch sizes may round otherwise
    torch.testing.assert_close(torch.cat(one_by_one), together, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state_of(stages), before, **IDENTICAL)


class InEvaluation(Layer):
    """A factory that leaves a norm in evaluation mode, and one that never trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm1d(2).eval(), Frozen(2)
        self.parts = {"norm": self.norm, "frozen": self.frozen}


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


def test_a_norm_that_will_train_is_found_whatever_its_mode_was():
    """Training puts all modules into its mode in the first step; until then nobody knew of this norm."""
    stage = build_stage(Blueprint((LayerSpec("both", InEvaluation),), reset), range(1), seed=0)
    assert batch_norms(stage) == ("norm",)
    assert list(running_statistics(stage)) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_a_small_micro_batch_is_warned_about():
    [stage] = stages_of(1)
    assert batch_norms(stage) == ("block.0", "norm")
    warning = batch_norm_warning(["block.0", "norm"], 7)
    assert "block.0 and 1 more: statistics over fewer than 8 samples" in warning
    assert "got microbatch_size 7; raise pipeline.microbatch_size" in warning
    assert batch_norm_warning(["norm"], 8) is None
    assert batch_norm_warning([], 1) is None
    # no batch norm in the last stage, or none that looks at micro-batches
    assert batch_norms(stages_of(4)[3]) == ()
    assert batch_norms(stage.eval()) == ()
