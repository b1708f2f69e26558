"""Images as tensors of one size. Random crops and flips are the same for every cut into stages.

Crop and flip depend only on (seed, epoch, sample id), not on the order of requests. An image is decoded at its first
request and kept as uint8, C * H * W bytes. The training images of CIFAR-10 take 154 MB, in the first stage's process
only.

Tensor names end in their shape: B samples, C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from thinwire.models.data.parts import Labelled, Picture
from thinwire.models.data.samples import Samples
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.models.errors import ModelError, require
from thinwire.models.seed import derive_seed

if TYPE_CHECKING:
    from PIL.Image import Image

PILLOW_MODES = {1: "L", 3: "RGB"}
"""Pillow's name of an image's mode, by its number of channels."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "TGA")
"""The formats of image files that are read, by Pillow's names. Some others run programs, as EPS does."""
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N", "I")
"""Pillow's modes of grey images with 16 bits; "I" is one of these formats only:"""
_SIXTEEN_BITS_AS_I = ("PNG", "PPM")
_ORIENTATION = 0x0112
"""The field of EXIF that says how an image is turned."""
_SIDEWAYS = (5, 6, 7, 8)
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


class ImageSamples(Samples):
    """Images, each with a label. The id of a sample is its position in the source."""

    def __init__(
        self, source: Labelled, form: Format, normalization: Normalization, augmentation: Augmentation | None = None
    ) -> None:
        self.format, self.normalization, self.augmentation = form, normalization, augmentation
        self.labels = source.labels
        self._source = source
        shape = (len(source), form.channels, form.height, form.width)
        try:
            # the system gives memory at the first write, so memory grows as images are decoded
            self._pixels = torch.empty(shape, dtype=torch.uint8)
        except RuntimeError as error:
            raise ModelError(
                f"decoded images must fit into memory, got {math.prod(shape)} bytes for {len(source)} images; lower "
                f"data.image_size or data.limit"
            ) from error
        self._decoded = torch.zeros(len(source), dtype=torch.bool)
        self.digest = _digest(source, form, normalization)

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, ids: Tensor, epoch: int = 0) -> Tensor:
        """Pixels of samples `ids` [B]: float32 [B, C, H, W], normalised, with the random changes of `epoch`."""
        for index in ids[~self._decoded[ids]].tolist():
            self._pixels[index] = decode(self._source.examples[index], self.format, self._source.place(index))
            self._decoded[index] = True
        pixels = self._pixels[ids]
        if self.augmentation is not None:
            pixels = self.augmentation.apply(pixels, ids, epoch)
        return self.normalization.apply(pixels)

    def targets(self, ids: Tensor) -> Tensor:
        """The labels, int64 [B]."""
        return self.labels[ids]

    def example(self, batch: int) -> Tensor:
        """The inputs of `batch` samples without data: float32 [batch, C, H, W] on the meta device."""
        return torch.empty(batch, *self._pixels.shape[1:], dtype=torch.float32, device="meta")


def decode(picture: Picture, form: Format, place: str = "one") -> Tensor:
    """Decode one image to uint8 [C, H, W]. ModelError, which names `place`, if Pillow cannot."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    mode, size = PILLOW_MODES[form.channels], (form.width, form.height)
    with _pillow("decode", place):
        image = _open(picture)
        image = ImageOps.exif_transpose(image) if _orientation(image) > 1 else image
        image = _of_eight_bits(image) if image.mode in _SIXTEEN_BITS else image
        image = image if image.mode == mode else image.convert(mode)
        image = ImageOps.fit(image, size, Resampling.BILINEAR) if form.resized else image
        pixels = np.array(image, dtype=np.uint8).reshape(form.height, form.width, form.channels)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def find_format(parts: Sequence[Labelled], channels: int | None, size: int | None) -> Format:
    """The format for the images of these parts. Only the headers of images are read.

    None for `channels` gives 1 if all images are grey, else 3; None for `size`, in pixels, the size of all.

    Raises:
        ModelError: sizes differ and `size` is None, or Pillow cannot read an image.
    """
    shapes: dict[tuple[int, int], str] = {}
    modes = set()
    for part in parts:
        for index, picture in enumerate(part.examples):
            place = part.place(index)
            with _pillow("read", place):
                image = _open(picture)
                turned = _orientation(image) in _SIDEWAYS
            shapes.setdefault((image.width, image.height) if turned else (image.height, image.width), place)
            modes.add(image.mode)
    if channels is None:
        channels = 1 if modes <= {"L", "1", *_SIXTEEN_BITS} else 3
    if size is not None:
        return Format(channels, size, size, resized=True)
    told = ", ".join(f"{height} x {width} in {place}" for (height, width), place in list(shapes.items())[:3])
    require((len(shapes) == 1, f"images must have one size, got {told}; set image_size to scale them"))
    [(height, width)] = shapes
    return Format(channels, height, width, resized=False)


def measure(part: Labelled, form: Format) -> Normalization:
    """The mean and standard deviation of each channel over a thousand evenly spaced images, rounded to 4 decimals."""
    counts = torch.zeros(form.channels, 256, dtype=torch.int64)  # of each value a pixel may have
    for index in range(0, len(part), -(-len(part) // _MEASURED)):
        pixels_CHW = decode(part.examples[index], form, part.place(index))
        counts += torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in pixels_CHW])
    shares, values = counts / counts.sum(1, keepdim=True, dtype=torch.float64), torch.arange(256) / 255.0
    mean = (shares * values).sum(1)
    std = (shares * (values - mean[:, None]) ** 2).sum(1).sqrt()
    return Normalization(
        tuple(round(value, 4) for value in mean.tolist()), tuple(round(value, 4) or 1.0 for value in std.tolist())
    )


def _open(picture: Picture) -> Image:
    """Open an image and read its header, but not its pixels. The errors are Pillow's, and ValueError."""
    from PIL import Image

    if not isinstance(picture, bytes):
        return Image.fromarray(picture[..., 0] if picture.shape[2:] == (1,) else picture)
    image = Image.open(io.BytesIO(picture), formats=_known_formats())
    if image.mode == "F" or (image.mode == "I" and image.format not in _SIXTEEN_BITS_AS_I):
        raise ValueError(f"it has 32 bits a pixel (mode {image.mode}); store it with 8 or 16")
    return image


@contextmanager
def _pillow(does: str, place: str) -> Iterator[None]:
    """Inside, what Pillow cannot do with the image of this place is a ModelError.

    So is an image of more than 89 million pixels: Pillow warns, and refuses one of twice as many.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except Exception as error:  # each format raises its own
        raise ModelError(f"Pillow must be able to {does} each image, and cannot {does} {place}: {error}") from error


@cache
def _known_formats() -> list[str]:
    from PIL import Image

    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def _orientation(image: Image) -> int:
    """How an image is turned, by EXIF: 1 is upright. What a PNG holds behind its pixels does not count.

    Pillow turns a TIFF by itself.
    """
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    return int(image.getexif().get(_ORIENTATION, 1))


def _of_eight_bits(image: Image) -> Image:
    """A grey image of 16 bits with the nearest value of 8 bits for each pixel; Pillow would cut values off at 255."""
    from PIL import Image

    values = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((values * 255 + 32895) >> 16).astype(np.uint8))


def _digest(source: Labelled, form: Format, normalization: Normalization) -> str:
    """Hash the stored images. Decoding all would take seconds, and decoders may differ in the last bit."""
    hashed = hashlib.sha256()
    for picture in source.examples:
        hashed.update(picture if isinstance(picture, bytes) else np.ascontiguousarray(picture).data)
    lines = tensor_lines({"labels": source.labels})
    return weights_digest([*lines, hashed.hexdigest(), repr(form), repr(normalization)])
