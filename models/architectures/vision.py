"""Torchvision's image classifiers in layers: stem, residual or transformer blocks, head.

Each layer holds modules that torchvision built, under their names in the unsplit model. So its `load_state_dict` takes
the states of all stages together. torchvision's pretrained weights become a folder with a safetensors file, of which
each stage reads only its own tensors.

Tensor names end in their shape: B samples, C channels, H and W pixels, P patches and the class token, D hidden_dim.
"""

from __future__ import annotations

import inspect
import math
import os
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from thinwire.errors.calls import first_line
from thinwire.models.checkpoint import open_checkpoint
from thinwire.models.errors import ModelError, require
from thinwire.models.file_mode import follow_umask
from thinwire.models.layers import Blueprint, Chain, Initialize, Layer, LayerSpec, parameters_on_meta
from thinwire.models.options import FRESH, PRETRAINED
from thinwire.models.source import ModelSource, Use, with_weights
from thinwire.models.tensors import holds_parameters

_RESNETS = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
)
# torchvision's builders fix these sizes, its VisionTransformer leaves them open
_VITS: dict[str, dict[str, int]] = {
    f"vit_{size}_{patch_size}": {
        "image_size": 224,
        "patch_size": patch_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "hidden_dim": hidden_dim,
        "mlp_dim": 4 * hidden_dim,
    }
    for size, patch_size, num_layers, num_heads, hidden_dim in (
        ("b", 16, 12, 12, 768),
        ("b", 32, 12, 12, 768),
        ("l", 16, 24, 16, 1024),
        ("l", 32, 24, 16, 1024),
        ("h", 14, 32, 16, 1280),
    )
}
VISION = (*_RESNETS, *_VITS)
"""The names of all models here, which are torchvision's."""

HEADS = ("fc.", "heads.")
"""The prefixes of tensors that depend on the number of classes."""

TORCHVISION_CLASSES = 1000
"""The classes of torchvision's pretrained weights."""

_STEMS = ("imagenet", "cifar")

WIDTH = 64
"""The channels of a ResNet's stem, as published."""


class VisionSource(ModelSource):
    """A classifier of images that torchvision makes."""

    reads = "images"

    @property
    def parameters(self) -> int | None:
        """The parameters of the whole model; None where torchvision refuses it, which is told when it is built."""
        with suppress(Exception), torch.device("meta"):
            return sum(each.numel() for each in make_vision(self.options.name, self.options.config).parameters())
        return None

    def code(self, num_labels: int | None) -> str:
        """The lines of Python that make the unsplit model, `model`, by torchvision alone."""
        name = self.options.name
        options = ({} if num_labels is None else {"num_classes": num_labels}) | self.options.config
        cifar, width = options.pop("stem", "imagenet") == "cifar", options.pop("width", WIDTH)
        sizes = _VITS.get(name, {}) | options
        given = ", ".join(f"{key}={value!r}" for key, value in sizes.items())
        if name in _VITS:
            return f"from torchvision.models import VisionTransformer\n\nmodel = VisionTransformer({given})"
        lines = ["from torchvision.models import get_model", "", f"model = get_model({', '.join([repr(name), given])})"]
        if cifar:
            lines.insert(0, "from torch import nn")
            lines.append("model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)")
            lines.append("model.maxpool = nn.Identity()")
        if width != WIDTH:
            lines[:0] = [] if cifar else ["from torch import nn"]
            lines += ["", "", inspect.getsource(narrow).replace("new: Any", "new"), "", f"narrow(model, {width})"]
        return "\n".join(lines)

    def _layers(self, use: Use) -> Blueprint:
        name, weights = self.options.name, self.options.weights
        made = vision_blueprint(name, self.options.config, use.num_labels)
        if weights == FRESH or Path(weights).is_dir():
            return with_weights(made, self.options)
        folder = weights_folder(name, "DEFAULT" if weights == PRETRAINED else weights)
        checkpoint = open_checkpoint(str(folder))
        same_classes = use.num_labels in (None, TORCHVISION_CLASSES)
        return replace(made, checkpoint=checkpoint if same_classes else checkpoint.without(HEADS))


def vision_blueprint(name: str, config: Mapping[str, Any], num_labels: int | None = None) -> Blueprint:
    """The model: images [B, 3, H, W] in, logits [B, num_classes] out.

    The layers of a ResNet are "stem", every block ("layer1.0") and "head"; those of a ViT "stem", "encoder_layer_0" and
    so on, "head". Fresh weights follow torchvision's rules. Costs are the floating-point operations of one image's
    forward pass: of image_size pixels for a ViT, of 224 x 224 for a ResNet, 32 x 32 with the CIFAR stem.

    Args:
        name: one of `VISION`.
        config: what torchvision's ResNet or VisionTransformer takes, by its names: num_classes, zero_init_residual;
            image_size, patch_size, num_layers, num_heads, hidden_dim, mlp_dim, dropout... For a ResNet `stem` too:
            "imagenet", or "cifar" for small images: conv1 is 3 x 3 with stride 1 and padding 1 in place of 7 x 7 with
            stride 2 and padding 3, and maxpool passes everything on. And `width`, 64 if left out: the channels of the
            stem; all others are scaled with it. All else stays, names too.
        num_labels: the labels of the data, the default of num_classes.

    Raises:
        ModelError: its configuration is wrong.
    """
    options = ({} if num_labels is None else {"num_classes": num_labels}) | dict(config)
    _check(name, options, num_labels)
    is_vit = name in _VITS
    take_apart = _take_vit_apart if is_vit else _take_resnet_apart
    try:
        with torch.device("cpu"), parameters_on_meta():
            layers = take_apart(make_vision(name, options))
    except (TypeError, ValueError, AssertionError, ArithmeticError, RuntimeError) as error:
        raise ModelError(f"torchvision cannot build {name} with {dict(config)}: {first_line(error)}") from error
    if is_vit:
        initialize: Initialize = _initialize_vit
        image_size = {**_VITS[name], **options}["image_size"]
    else:
        initialize = partial(_initialize_resnet, bool(options.get("zero_init_residual")))
        image_size = 32 if options.get("stem") == "cifar" else 224
    costs = _count_operations(layers, image_size)
    return Blueprint(
        tuple(LayerSpec(name, partial(deepcopy, layer), costs[name]) for name, layer in layers.items()), initialize
    )


class _ViTStem(Layer):
    """Images [B, C, H, W] to patches and class token [B, P, D], their positions added: a ViT without its blocks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.parts = {"": model}

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """The hidden states [B, P, D] of images with `image_size` pixels each way; ModelError for any other size."""
        size, given = self.model.image_size, list(images_BCHW.shape[2:])
        require((given == [size, size], f"images must have image_size = {size} pixels each way, got {given}"))
        patches_BPD = self.model._process_input(images_BCHW)
        class_token_B1D = self.model.class_token.expand(len(images_BCHW), -1, -1)
        hidden_BPD: Tensor = self.model.encoder(torch.cat([class_token_B1D, patches_BPD], dim=1))
        return hidden_BPD


class _ClassToken(nn.Module):
    """Hidden states [B, P, D] to that of the class token, [B, D]."""

    def forward(self, hidden_BPD: Tensor) -> Tensor:
        """The hidden state [B, D] at the first of the positions [B, P, D]."""
        return hidden_BPD[:, 0]


def _check(name: str, options: Mapping[str, Any], num_labels: int | None) -> None:
    from torchvision.models import resnet, vision_transformer

    model: Any = vision_transformer.VisionTransformer if name in _VITS else resnet.ResNet
    # those that no recipe can write down, and those that a ResNet's name stands for
    hidden = {"block", "layers", "norm_layer", "conv_stem_configs"}
    own = [] if name in _VITS else ["stem", "width"]
    known = sorted(inspect.signature(model).parameters.keys() - hidden) + own
    unknown = sorted(options.keys() - set(known))
    num_classes, stem = options.get("num_classes", 1000), options.get("stem", "imagenet")
    width = options.get("width", WIDTH)
    require(
        (not unknown, f"the config of {name} takes {', '.join(known)}, got {', '.join(unknown)}"),
        (stem in _STEMS, f"stem must be one of {', '.join(_STEMS)}, got {stem!r}"),
        (type(width) is int and width >= 1, f"width must be a whole number of at least 1, got {width!r}"),
        (isinstance(num_classes, int), f"num_classes must be a whole number, got {num_classes!r}"),
        (
            not isinstance(num_classes, int) or num_classes >= (num_labels or 1),
            f"num_classes must be at least {num_labels or 1}, the labels of the data, got {num_classes}",
        ),
    )


def make_vision(name: str, options: Mapping[str, Any]) -> nn.Module:
    """The unsplit model, as torchvision builds it."""
    # importing torchvision takes seconds, so only building a model does it
    from torchvision.models import VisionTransformer, get_model

    model: nn.Module
    if name in _VITS:
        model = VisionTransformer(**{**_VITS[name], **options})
        return model
    config = dict(options)
    stem, width = config.pop("stem", "imagenet"), config.pop("width", WIDTH)
    model = get_model(name, weights=None, **config)
    if stem == "cifar":
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        model.maxpool = nn.Identity()
    if width != WIDTH:
        narrow(model, width)
    return model


def narrow(model: nn.Module, width: int) -> None:
    """Scale the channels of every layer of a ResNet, so that `width` of them take the place of 64."""

    def scaled(channels: int) -> int:
        return channels if channels == 3 else channels * width // 64  # an image has three

    for owner in list(model.modules()):
        for name, part in owner.named_children():
            new: Any = None
            if isinstance(part, nn.Conv2d):
                kept = {key: getattr(part, key) for key in ("kernel_size", "stride", "padding", "dilation", "groups")}
                new = nn.Conv2d(scaled(part.in_channels), scaled(part.out_channels), **kept, bias=False)
            elif isinstance(part, nn.BatchNorm2d):
                new = nn.BatchNorm2d(scaled(part.num_features))
            elif isinstance(part, nn.Linear):
                new = nn.Linear(scaled(part.in_features), part.out_features)
            if new is not None:
                setattr(owner, name, new)


def _take_resnet_apart(model: Any) -> dict[str, Layer]:
    blocks = {
        f"{group}.{index}": block
        for group in ("layer1", "layer2", "layer3", "layer4")
        for index, block in getattr(model, group).named_children()
    }
    return {
        "stem": Chain({name: getattr(model, name) for name in ("conv1", "bn1", "relu", "maxpool")}),
        **{name: Chain({name: block}) for name, block in blocks.items()},
        "head": Chain({"avgpool": model.avgpool, "flatten": nn.Flatten(), "fc": model.fc}),
    }


def _take_vit_apart(model: Any) -> dict[str, Layer]:
    blocks = {name: Chain({f"encoder.layers.{name}": block}) for name, block in model.encoder.layers.named_children()}
    head = Chain({"encoder.ln": model.encoder.ln, "class_token": _ClassToken(), "heads": model.heads})
    # the rest of the model is its stem
    model.encoder.layers, model.encoder.ln, model.heads = nn.Sequential(), nn.Identity(), nn.Identity()
    return {"stem": _ViTStem(model), **blocks, "head": head}


def _count_operations(layers: Mapping[str, Layer], image_size: int) -> dict[str, float]:
    from torch.utils.flop_counter import FlopCounterMode

    result: Any = torch.empty(1, 3, image_size, image_size, device="meta")
    operations = {}
    for name, layer in layers.items():
        # one image may leave one value a channel, with which batch norm refuses to train
        without_data = deepcopy(layer).to("meta").eval()
        with FlopCounterMode(display=False) as counter:
            result = without_data(result)
        operations[name] = float(counter.get_total_flops())
    return operations


def _initialize_resnet(zero_residual: bool, full_name: str, module: Any) -> None:
    """Fill one module as torchvision's ResNet does: He et al. by fan-out, norms 1 and 0, the head by default."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif holds_parameters(module):
        module.reset_parameters()
    elif zero_residual and hasattr(module, "bn2"):  # a block, whose last norm starts at 0
        nn.init.zeros_(getattr(module, "bn3", module.bn2).weight)


def _initialize_vit(full_name: str, module: Any) -> None:
    """Fill one module as torchvision's VisionTransformer does."""
    if full_name == "":
        nn.init.zeros_(module.class_token)
    elif full_name == "encoder":
        nn.init.normal_(module.pos_embedding, std=0.02)
    elif full_name == "heads.head":
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)
    elif full_name in ("conv_proj", "heads.pre_logits"):
        nn.init.trunc_normal_(module.weight, std=math.sqrt(1 / module.weight[0].numel()))
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.MultiheadAttention):
        nn.init.xavier_uniform_(module.in_proj_weight)
        nn.init.zeros_(module.in_proj_bias)
    elif full_name.endswith(".self_attention.out_proj"):
        module.reset_parameters()
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.normal_(module.bias, std=1e-6)
    elif holds_parameters(module):
        module.reset_parameters()


_FILE = "model.safetensors"
_SILENCE = 10.0
"""Time-out in seconds of a silent server. The system would wait minutes for one that cannot be reached."""


def weights_folder(name: str, weights: str) -> Path:
    """A folder with model.safetensors. Its tensors have the names of torchvision's model.

    They are downloaded once, and written beside torch's own downloads. Only this first run holds the whole model in
    memory. `weights` is torchvision's name: "IMAGENET1K_V1".

    Raises:
        ModelError: there is no such name, or the download fails.
    """
    from torchvision.models import get_model, get_model_weights

    known = get_model_weights(name)
    names = ", ".join(known.__members__)
    require(
        (weights in known.__members__, f"weights of {name} must be a folder with {_FILE} or {names}, got {weights!r}")
    )
    # DEFAULT is an alias, and torchvision may point it at other weights later: use the weights' own name
    folder = Path(torch.hub.get_dir(), "checkpoints", f"{name}-{known[weights].name}")
    path = folder / _FILE
    if path.is_file():
        return folder
    watched = sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"  # a terminal, the first of its host
    try:
        # load through the model: it renames the tensors of old files
        with _impatient():
            # an earlier download is not hashed again, and a pickle could run code
            stored = known[weights].get_state_dict(progress=watched, check_hash=True, weights_only=True)
        model = get_model(name)
        model.load_state_dict(stored)
        state = model.state_dict()
    except OSError as error:
        raise ModelError(
            f"{known[weights].url} cannot be downloaded: {error}; give a folder with {_FILE} that holds these tensors"
        ) from error
    except UnpicklingError as error:
        raise ModelError(
            f"{known[weights].url} must hold weights alone, and the file in {folder.parent} holds something else: "
            f"remove it"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    # several stages may write at the same time; each writes its own file, so no stage reads half a file
    unfinished = folder / f"{_FILE}.{uuid.uuid4().hex}"
    save_file(state, unfinished)
    follow_umask(unfinished)
    unfinished.replace(path)
    return folder


@contextmanager
def _impatient() -> Iterator[None]:
    """Inside, a connection that is silent for too long raises an OSError."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SILENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
