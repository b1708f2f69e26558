"""Images as tensors of one size. Random crops and flips are the same for every cut into stages.

Crop and flip depend only on (seed, epoch, sample id), not on the order of requests. An image is decoded at its first
request and kept as uint8, C * H * W bytes. The training images of CIFAR-10 take 154 MB, in the first stage's process
only.

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
"""Pillow's name of an image's mode, by its number of channels."""
_MEASURED = 1000


@dataclass(frozen=True)
class Format:
    """The shape that all images get."""

    channels: int
    """1 (grey) or 3 (red, green, blue)."""
    height: int
    width: int
    resized: bool
    """Whether images are scaled to this size; if their shape differs, the middle is kept. If false, all images have
    this size already."""


@dataclass(frozen=True)
class Normalization:
    """Each pixel, a value in [0, 1], becomes (pixel - mean) / std, by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, pixels_BCHW: Tensor) -> Tensor:
        """Normalised pixels, float32 [B, C, H, W], from uint8 pixels of the same shape."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return pixels_BCHW.float().div_(255).sub_(mean).div_(std)


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images.

    Each image gets `crop` black pixels on every side, and a random part of the original size is cut out. If `flip` is
    true, half of the images, chosen at random, are mirrored.
    """

    crop: int
    flip: bool
    seed: int

    def choose(self, ids: Tensor, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first row and the first column of each sample's crop, int64 [B], and whether it is flipped, bool [B]."""
        drawn = _hashed(ids, derive_seed(self.seed, "augmentation", epoch))
        side = 2 * self.crop + 1
        rows, columns, mirrored = drawn % side, drawn // side % side, drawn // side**2 % 2 == 1
        return rows, columns, mirrored & self.flip

    def apply(self, pixels_BCHW: Tensor, ids: Tensor, epoch: int) -> Tensor:
        """The pixels of samples `ids` [B] after the changes of this epoch, uint8 [B, C, H, W]."""
        batch, _, height, width = pixels_BCHW.shape
        first_row, first_column, flipped = self.choose(ids, epoch)
        padded = functional.pad(pixels_BCHW, [self.crop] * 4)
        crops = padded.unfold(2, height, 1).unfold(3, width, 1)  # [B, C, rows, columns, H, W], a view
        cropped_BCHW = crops[torch.arange(batch), :, first_row, first_column]
        return torch.where(flipped[:, None, None, None], cropped_BCHW.flip(3), cropped_BCHW)


def _hashed(ids: Tensor, seed: int) -> Tensor:
    """A number in [0, 2**63) for each id, by the finalizer of SplitMix64: all ids at once, each on its own."""
    mixed = ids.numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)  # wraps, as it should
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed = (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)
    return torch.from_numpy(mixed.astype(np.int64))


class ImageSamples:
    """Images, each with a label. The id of a sample is its position in the source."""

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
        # the system gives memory at the first write, so memory grows as images are decoded
        self._pixels = torch.empty(len(source), form.channels, form.height, form.width, dtype=torch.uint8)
        self._decoded = torch.zeros(len(source), dtype=torch.bool)
        self.digest = _digest(source, form, normalization)

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, ids: Tensor, epoch: int = 0) -> Tensor:
        """Pixels of samples `ids` [B]: float32 [B, C, H, W], normalised, with the random changes of `epoch`."""
        for index in ids[~self._decoded[ids]].tolist():
            self._pixels[index] = decode(self._pictures[index], self.format)
            self._decoded[index] = True
        pixels = self._pixels[ids]
        if self.augmentation is not None:
            pixels = self.augmentation.apply(pixels, ids, epoch)
        return self.normalization.apply(pixels)

    def targets(self, ids: Tensor) -> Tensor:
        """The labels, int64 [B]."""
        return self.labels[ids]

    def side(self, ids: Tensor) -> dict[str, Tensor]:
        """Nothing: images need no side inputs."""
        return {}

    def example(self, batch: int) -> Tensor:
        """The inputs of `batch` samples without data: float32 [batch, C, H, W] on the meta device."""
        return torch.empty(batch, *self._pixels.shape[1:], dtype=torch.float32, device="meta")

    def side_example(self, batch: int) -> dict[str, Tensor]:
        """Nothing, as `side`."""
        return {}


def decode(picture: Picture, form: Format) -> Tensor:
    """Decode one image to uint8 [C, H, W]. ModelError if Pillow cannot."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    try:
        image = _open(picture).convert(PILLOW_MODES[form.channels])
    except OSError as error:
        raise ModelError(f"Pillow must be able to decode each image, and cannot: {error}") from error
    if form.resized:
        image = ImageOps.fit(image, (form.width, form.height), Resampling.BILINEAR)
    pixels = np.array(image, dtype=np.uint8).reshape(form.height, form.width, form.channels)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def find_format(pictures: Iterable[Picture], channels: int | None, size: int | None) -> Format:
    """The format for these images. Only the headers of images are read.

    Args:
        pictures: all images.
        channels: 1 or 3; None gives 1 if all images are grey, else 3.
        size: height and width in pixels; None takes the size that all images have.

    Raises:
        ModelError: sizes differ and `size` is None, or Pillow cannot read an image.
    """
    shapes: dict[tuple[int, int], int] = {}
    modes = set()
    for row, picture in enumerate(pictures):
        try:
            image = _open(picture)
        except OSError as error:
            raise ModelError(f"Pillow must be able to read each image, and cannot read row {row}: {error}") from error
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
    """The mean and standard deviation of each channel over a thousand evenly spaced images, rounded to 4 decimals."""
    chosen = range(0, len(pictures), -(-len(pictures) // _MEASURED))
    pixels = torch.stack([decode(pictures[index], form) for index in chosen]).double().div_(255)
    mean = pixels.mean(dim=(0, 2, 3))
    std = pixels.std(dim=(0, 2, 3), correction=0)
    return Normalization(
        tuple(round(value, 4) for value in mean.tolist()),
        tuple(round(value, 4) or 1.0 for value in std.tolist()),
    )


def _open(picture: Picture) -> Image:
    """Open an image and read its header, but not its pixels."""
    from PIL import Image

    if isinstance(picture, bytes):
        return Image.open(io.BytesIO(picture))
    return Image.fromarray(picture[..., 0] if picture.shape[2:] == (1,) else picture)


def _digest(source: Labelled, form: Format, normalization: Normalization) -> str:
    """Hash the stored images. Decoding all would take seconds, and decoders may differ in the last bit."""
    hashed = hashlib.sha256()
    for picture in source.examples:
        hashed.update(picture if isinstance(picture, bytes) else np.ascontiguousarray(picture).data)
    lines = tensor_lines({"labels": source.labels})
    return weights_digest([*lines, hashed.hexdigest(), repr(form), repr(normalization)])
