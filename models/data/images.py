"""Images as tensors of one size, with the same random crops and flips for every layout of stages.

Crop and flip depend on (seed, epoch, sample id) alone, never on the order in which samples are asked for. Images are
decoded when first asked for and kept as uint8, C * H * W bytes each: all of CIFAR-10's training images take 154 MB, in
the first stage's process only.

Tensor names end in their shape: B samples, C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from thinwire.models.data.parts import Labelled, Picture
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.models.errors import ModelError, require
from thinwire.models.seed import derive_seed

if TYPE_CHECKING:
    from PIL.Image import Image

PILLOW_MODES = {1: "L", 3: "RGB"}
"""Channels -> Pillow's name for such images."""
_MEASURED = 1000


@dataclass(frozen=True)
class Format:
    """The one shape that all images are brought to."""

    channels: int
    """1 (grey) or 3 (red, green, blue)."""
    height: int
    width: int
    resized: bool
    """Whether images are scaled to it, the middle kept where the shape differs; else they have it already."""


@dataclass(frozen=True)
class Normalization:
    """Pixels in [0, 1] become (pixel - mean) / std, by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, pixels_BCHW: Tensor) -> Tensor:
        """The uint8 pixels as float32, normalised."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return pixels_BCHW.float().div_(255).sub_(mean).div_(std)


@dataclass(frozen=True)
class Augmentation:
    """A crop of the original size out of the image with `crop` black pixels around it, then a flip every other time."""

    crop: int
    flip: bool
    seed: int

    def choose(self, ids: Tensor, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each id the first row and column of its crop, int64 [B], and whether it is flipped, bool [B]."""
        drawn = [derive_seed(self.seed, "augmentation", epoch, sample) for sample in ids.tolist()]
        side = 2 * self.crop + 1
        rows = torch.tensor([number % side for number in drawn], dtype=torch.int64)
        columns = torch.tensor([number // side % side for number in drawn], dtype=torch.int64)
        flipped = torch.tensor([self.flip and number // side**2 % 2 == 1 for number in drawn], dtype=torch.bool)
        return rows, columns, flipped

    def apply(self, pixels_BCHW: Tensor, ids: Tensor, epoch: int) -> Tensor:
        """The pixels of samples `ids` as this epoch sees them."""
        batch, channels, height, width = pixels_BCHW.shape
        first_row, first_column, flipped = self.choose(ids, epoch)
        rows_BH = first_row[:, None] + torch.arange(height)
        columns_BW = first_column[:, None] + torch.arange(width)
        columns_BW = torch.where(flipped[:, None], columns_BW.flip(1), columns_BW)
        padded = functional.pad(pixels_BCHW, [self.crop] * 4)
        samples, planes = torch.arange(batch)[:, None, None, None], torch.arange(channels)[:, None, None]
        return padded[samples, planes, rows_BH[:, None, :, None], columns_BW[:, None, None, :]]


class ImageSamples:
    """Images with a label each; the id of a sample is its place in the source."""

    def __init__(
        self,
        source: Labelled,
        form: Format,
        normalization: Normalization,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.format, self.normalization, self.augmentation = form, normalization, augmentation
        self.labels = source.labels
        self._pictures = source.examples
        # memory that was never written to is not taken, so pages come as images are decoded
        self._pixels = torch.empty(len(source), form.channels, form.height, form.width, dtype=torch.uint8)
        self._decoded = torch.zeros(len(source), dtype=torch.bool)
        self.digest = _digest(source, form, normalization)

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, ids: Tensor, epoch: int = 0) -> Tensor:
        """Pixels [B, C, H, W] of samples `ids` [B], float32 and normalised, as `epoch` sees them."""
        for index in ids[~self._decoded[ids]].tolist():
            self._pixels[index] = decode(self._pictures[index], self.format)
            self._decoded[index] = True
        pixels = self._pixels[ids]
        if self.augmentation is not None:
            pixels = self.augmentation.apply(pixels, ids, epoch)
        return self.normalization.apply(pixels)

    def targets(self, ids: Tensor) -> Tensor:
        """The labels [B], as int64."""
        return self.labels[ids]

    def side(self, ids: Tensor) -> dict[str, Tensor]:
        """Nothing: an image is its pixels."""
        return {}

    def example(self, batch: int) -> Tensor:
        """The inputs of `batch` samples without data: float32 [batch, C, H, W] on the meta device."""
        return torch.empty(batch, *self._pixels.shape[1:], dtype=torch.float32, device="meta")

    def side_example(self, batch: int) -> dict[str, Tensor]:
        """Nothing, as `side`."""
        return {}


def decode(picture: Picture, form: Format) -> Tensor:
    """An image as uint8 [C, H, W]."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    try:
        image = _open(picture).convert(PILLOW_MODES[form.channels])
    except OSError as error:
        raise ModelError(f"each image must be one that Pillow can decode: {error}") from error
    if form.resized:
        image = ImageOps.fit(image, (form.width, form.height), Resampling.BILINEAR)
    pixels = np.array(image, dtype=np.uint8).reshape(form.height, form.width, form.channels)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def find_format(pictures: Iterable[Picture], channels: int | None, size: int | None) -> Format:
    """The shape for images: the one they all have, or squares of `size`; grey if all are, unless told.

    Only headers are read.

    Raises:
        ModelError: if sizes differ and none is asked for, or something is no image.
    """
    shapes: dict[tuple[int, int], int] = {}
    modes = set()
    for row, picture in enumerate(pictures):
        try:
            image = _open(picture)
        except OSError as error:
            raise ModelError(f"each image must be one that Pillow can read, got another in row {row}") from error
        shapes.setdefault((image.height, image.width), row)
        modes.add(image.mode)
    if channels is None:
        channels = 1 if modes <= {"L", "1"} else 3
    if size is not None:
        return Format(channels, size, size, resized=True)
    told = ", ".join(f"{height} x {width} in row {row}" for (height, width), row in list(shapes.items())[:3])
    require((len(shapes) == 1, f"images must have one size, got {told}; set image_size to scale them"))
    [(height, width)] = shapes
    return Format(channels, height, width, resized=False)


def measure(pictures: Sequence[Picture], form: Format) -> Normalization:
    """Mean and standard deviation by channel of a thousand images, evenly spaced, rounded to 4 decimals."""
    chosen = range(0, len(pictures), -(-len(pictures) // _MEASURED))
    pixels = torch.stack([decode(pictures[index], form) for index in chosen]).double().div_(255)
    mean = pixels.mean(dim=(0, 2, 3))
    std = pixels.std(dim=(0, 2, 3), correction=0)
    return Normalization(
        tuple(round(value, 4) for value in mean.tolist()),
        tuple(round(value, 4) or 1.0 for value in std.tolist()),
    )


def _open(picture: Picture) -> Image:
    """An image whose header is read, and whose pixels are not yet."""
    from PIL import Image

    return Image.open(io.BytesIO(picture)) if isinstance(picture, bytes) else Image.fromarray(picture)


def _digest(source: Labelled, form: Format, normalization: Normalization) -> str:
    """Hash the images as they are stored: decoding all would take seconds, and decoders may differ in the last bit."""
    hashed = hashlib.sha256()
    for picture in source.examples:
        hashed.update(picture if isinstance(picture, bytes) else np.ascontiguousarray(picture).data)
    lines = tensor_lines({"labels": source.labels})
    return weights_digest([*lines, hashed.hexdigest(), repr(form), repr(normalization)])
