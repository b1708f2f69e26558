import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer, get_model

from support.pipelined import drawn, gradients_of, run, state_of
from thinwire.models.architectures.vision import VISION, VisionSource, vision_blueprint
from thinwire.models.errors import ModelError
from thinwire.models.layers import build_stage, stage_output_examples
from thinwire.models.options import ModelOptions
from thinwire.models.partition import cut_after

pytestmark = pytest.mark.slow

IDENTICAL = {"rtol": 0, "atol": 0}
RESNET_CONFIG = {"stem": "cifar"}
VIT_SIZES = {"image_size": 16, "patch_size": 8, "num_layers": 3, "num_heads": 2, "hidden_dim": 12, "mlp_dim": 20}
NUM_LABELS = 5


def unsplit_resnet():
    model = get_model("resnet18", num_classes=NUM_LABELS)
    model.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
    # as the rest of a ResNet
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def unsplit_vit():
    return VisionTransformer(**VIT_SIZES, num_classes=NUM_LABELS)


CASES = {
    "resnet18": (RESNET_CONFIG, unsplit_resnet, {1: [], 2: ["layer2"], 4: ["layer1", "layer2.1", "layer3"]}),
    "vit_b_16": (
        VIT_SIZES,
        unsplit_vit,
        {1: [], 2: ["encoder_layer_0"], 4: ["stem", "encoder_layer_0", "encoder_layer_1"]},
    ),
}


def names_of(blueprint):
    return [spec.name for spec in blueprint.layers]


def build(name, cuts, seed=3):
    blueprint = vision_blueprint(name, CASES[name][0], NUM_LABELS)
    return [build_stage(blueprint, layers, seed=seed) for layers in cut_after(cuts, names_of(blueprint))]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_pipelined_stages_equal_the_unsplit_model(name, num_stages):
    _, make_unsplit, cuts = CASES[name]
    stages = build(name, cuts[num_stages])
    assert len(stages) == num_stages
    if name == "vit_b_16":
        # torchvision starts the head at 0, through which no gradient passes
        with torch.no_grad():
            state_of(stages)["heads.head.weight"].copy_(drawn(NUM_LABELS, 12, seed=4))
    whole = make_unsplit().train()
    whole.load_state_dict({key: tensor.clone() for key, tensor in state_of(stages).items()})
    images, output_gradient = drawn(2, 3, 16, 16, seed=1), drawn(2, NUM_LABELS, seed=2)

    expected = whole(images)
    expected.backward(output_gradient)
    [got] = run(stages, [images], [output_gradient])

    torch.testing.assert_close(got, expected.detach(), **IDENTICAL)
    gradients = {key: parameter.grad for key, parameter in whole.named_parameters()}
    torch.testing.assert_close(gradients_of(stages), gradients, **IDENTICAL)
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values() if gradient.dim() > 1)
    # running statistics of batch norm among them
    torch.testing.assert_close(state_of(stages), dict(whole.state_dict()), **IDENTICAL)

    whole.eval()
    hidden = images
    for stage in stages:
        hidden = stage.eval()(hidden)
    torch.testing.assert_close(hidden, whole(images), **IDENTICAL)


def test_layers_of_a_resnet():
    blueprint = vision_blueprint("resnet18", RESNET_CONFIG, NUM_LABELS)
    blocks = [f"layer{group}.{index}" for group in (1, 2, 3, 4) for index in (0, 1)]
    assert names_of(blueprint) == ["stem", *blocks, "head"]
    assert cut_after(["layer1", "layer2", "layer3"], names_of(blueprint)) == (
        range(0, 3),
        range(3, 5),
        range(5, 7),
        range(7, 10),
    )
    examples = stage_output_examples(
        blueprint,
        [range(0, 1), range(1, 4), range(4, 10)],
        torch.empty(2, 3, 32, 32, device="meta"),
        "fp32",
    )
    assert [tuple(example.shape) for [example] in examples] == [(2, 64, 32, 32), (2, 128, 16, 16), (2, NUM_LABELS)]


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_the_width_of_a_resnet_scales_all_its_channels(stem):
    config = {"stem": stem, "width": 16}
    shapes, whole = ({}, {})
    for width, found in ((16, shapes), (64, whole)):
        blueprint = vision_blueprint("resnet18", config | {"width": width}, NUM_LABELS)
        stage = build_stage(blueprint, range(len(blueprint.layers)), seed=0)
        found |= {name: list(tensor.shape) for name, tensor in stage.full_state().items()}
        if width == 16:
            state = stage.full_state()
    assert shapes.keys() == whole.keys()
    for name, shape in whole.items():
        scaled = [count if count in (1, 3, 7, NUM_LABELS) else count // 4 for count in shape]
        assert shapes[name] == scaled, name
    # as an export says how to build it
    known = {}
    exec(VisionSource(ModelOptions(name="resnet18", config=config)).code(NUM_LABELS), known)
    known["model"].load_state_dict(state)


def test_costs_are_operations():
    head_of = {"resnet18": 2 * 512 * NUM_LABELS, "vit_b_16": 2 * 12 * NUM_LABELS}
    for name, (config, _, _) in CASES.items():
        costs = {spec.name: spec.cost for spec in vision_blueprint(name, config, NUM_LABELS).layers}
        assert costs["head"] == head_of[name]
    resnet = {spec.name: spec.cost for spec in vision_blueprint("resnet18", RESNET_CONFIG).layers}
    assert resnet["stem"] == 2 * 3 * 9 * 64 * 32 * 32
    assert resnet["layer1.0"] == 2 * (2 * 64 * 9 * 64 * 32 * 32)


@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d", "vit_b_32", "vit_l_16", "vit_h_14"])
def test_the_presets_are_those_of_torchvision(name):
    with torch.device("meta"):
        reference = get_model(name).state_dict()
        layers = [spec.build() for spec in vision_blueprint(name, {}).layers]
    state = {key: tensor for layer in layers for key, tensor in layer.full_state().items()}
    assert {key: tensor.shape for key, tensor in state.items()} == {key: t.shape for key, t in reference.items()}


@pytest.mark.parametrize("name", CASES)
def test_fresh_weights_follow_torchvision_and_not_the_cut(name):
    _, make_unsplit, cuts = CASES[name]
    state = state_of(build(name, cuts[4]))
    torch.testing.assert_close(state, state_of(build(name, [])), **IDENTICAL)
    torch.manual_seed(0)
    for key, reference in make_unsplit().state_dict().items():
        got = state[key]
        if reference.unique().numel() <= 1:
            torch.testing.assert_close(got, reference, **IDENTICAL)
            continue
        # five standard errors of a standard deviation, for the two draws
        spread = 5 / reference.numel() ** 0.5
        assert abs(got.std() / reference.std() - 1) < spread, f"{key}: {got.std()}, torchvision {reference.std()}"


def test_zero_init_residual():
    for name, norm in (("resnet18", "bn2"), ("resnet50", "bn3")):
        blueprint = vision_blueprint(name, {"zero_init_residual": True})
        state = build_stage(blueprint, range(1, 2), seed=0).full_state()
        zeros = [key for key, tensor in state.items() if key.endswith("weight") and not tensor.any()]
        assert zeros == [f"layer1.0.{norm}.weight"]


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("resnet18", {"stm": 1}, "takes .*num_classes.*, stem, width, got stm"),
        ("vit_b_16", {"stem": "cifar"}, "takes .*image_size.*, got stem"),
        ("resnet18", {"stem": "tiny"}, "one of imagenet, cifar, got 'tiny'"),
        ("resnet18", {"groups": 2}, r"cannot build resnet18 with \{'groups': 2\}"),
        ("vit_b_16", {"image_size": 9}, "indivisible by patch size"),
        ("vit_b_16", {"hidden_dim": 7}, "divisible by num_heads"),
        ("vit_b_16", {"hidden_dim": -12}, "negative dimension"),
        ("resnet18", {"num_classes": "ten"}, "a whole number, got 'ten'"),
        ("resnet18", {"num_classes": 4}, "at least 5, the labels of the data, got 4"),
    ],
)
def test_impossible_models(name, config, message):
    with pytest.raises(ModelError, match=message):
        vision_blueprint(name, config, NUM_LABELS)


def test_a_width_must_be_a_whole_number():
    with pytest.raises(ModelError, match="width must be a whole number of at least 1, got 0"):
        vision_blueprint("resnet18", {"width": 0})


def test_images_of_another_size_are_an_error():
    stem = build("vit_b_16", ["stem"])[0]
    with pytest.raises(ModelError, match=r"image_size = 16 pixels each way, got \[16, 12\]"):
        stem(torch.zeros(1, 3, 16, 12))


def test_names_are_those_of_torchvision():
    assert {"resnet18", "resnet152", "wide_resnet50_2", "vit_b_16"} <= set(VISION)
