import io
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from support.data_files import png, random_pixels
from thinwire.models.data.images import (
    Augmentation,
    Format,
    ImageSamples,
    Normalization,
    decode,
    find_format,
    measure,
)
from thinwire.models.data.parts import Labelled
from thinwire.models.errors import ModelError

COLOUR = Format(3, 8, 8, resized=False)
PLAIN = Normalization((0.0,) * 3, (1.0,) * 3)
PIXELS = random_pixels(20)


def samples(augmentation=None, normalization=PLAIN, pixels=PIXELS):
    source = Labelled([png(image) for image in pixels], torch.arange(len(pixels)) % 2, 2)
    return ImageSamples(source, COLOUR, normalization, augmentation)


def part(*pictures):
    return Labelled(list(pictures), torch.zeros(len(pictures), dtype=torch.int64), 2)


def test_pixels_are_those_of_torchvision():
    functional = pytest.importorskip("torchvision.transforms.functional")
    normalization = Normalization((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))
    got = samples(normalization=normalization).inputs(torch.tensor([3, 0]))
    images = torch.stack([functional.to_tensor(PIXELS[i]) for i in (3, 0)])
    expected = functional.normalize(images, normalization.mean, normalization.std)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert got.dtype == torch.float32


@pytest.mark.parametrize("epoch", [0, 1])
def test_crops_and_flips_are_those_of_torchvision(epoch):
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    augmentation = Augmentation(crop=2, flip=True, seed=5)
    ids = torch.arange(20)
    got = samples(augmentation).inputs(ids, epoch)
    seen = set()
    for i, (row, column, flipped) in enumerate(zip(*augmentation.choose(ids, epoch), strict=True)):
        image = functional.pad(torch.from_numpy(PIXELS[i]).permute(2, 0, 1), [2])
        image = functional.crop(image, int(row), int(column), 8, 8)
        image = functional.horizontal_flip(image) if flipped else image
        torch.testing.assert_close(got[i], image / 255, rtol=0, atol=0)
        seen.add((int(row), int(column), bool(flipped)))
    assert len(seen) > 10
    assert {flipped for _, _, flipped in seen} == {True, False}


def test_a_sample_looks_the_same_in_any_company():
    augmentation = Augmentation(crop=2, flip=True, seed=1)
    whole = samples(augmentation).inputs(torch.arange(20), 7)
    others = samples(augmentation)
    others.inputs(torch.tensor([4, 4, 9]), 3)
    order = torch.tensor([13, 2, 19])
    assert torch.equal(others.inputs(order, 7), whole[order])
    assert not torch.equal(others.inputs(order, 8), whole[order])
    assert not torch.equal(samples(Augmentation(2, True, seed=2)).inputs(order, 7), whole[order])


def test_every_offset_is_as_likely():
    rows, columns, flipped = Augmentation(crop=1, flip=True, seed=0).choose(torch.arange(9000), 0)
    for drawn in (rows, columns):
        assert torch.bincount(drawn).sub(3000).abs().max() < 200  # 4.5 standard deviations
    assert abs(int(flipped.sum()) - 4500) < 220
    pairs = torch.bincount(rows * 6 + columns * 2 + flipped)
    assert pairs.sub(500).abs().max() < 110, "rows, columns and flips hang together"


def test_a_choice_depends_on_seed_epoch_and_id_alone():
    augmentation = Augmentation(crop=4, flip=True, seed=3)
    whole = augmentation.choose(torch.arange(1000), 2)
    ids = torch.tensor([999, 0, 17])
    for part, of in zip(augmentation.choose(ids, 2), whole, strict=True):
        assert torch.equal(part, of[ids])
    for other in (augmentation.choose(torch.arange(1000), 3), Augmentation(4, True, 4).choose(torch.arange(1000), 2)):
        assert 50 < int((other[0] == whole[0]).sum()) < 180, "nine rows, so a ninth agree by chance"


def test_without_augmentation_epochs_are_alike():
    plain = samples()
    assert torch.equal(plain.inputs(torch.arange(5), 0), plain.inputs(torch.arange(5), 9))


def test_decoding_happens_when_asked_for():
    source = Labelled([png(PIXELS[0]), b"no image"], torch.tensor([0, 1]), 2)
    got = ImageSamples(source, COLOUR, PLAIN)
    assert got.inputs(torch.tensor([0, 0])).shape == (2, 3, 8, 8)
    with pytest.raises(ModelError, match="Pillow must be able to decode each image, and cannot"):
        got.inputs(torch.tensor([1]))


def test_examples_are_the_inputs_without_data():
    got = samples()
    example, inputs = got.example(2), got.inputs(torch.tensor([0, 1]))
    assert (example.shape, example.dtype, example.is_meta) == (inputs.shape, inputs.dtype, True)
    assert got.side(torch.tensor([0])) == got.side_example(1) == {}
    assert got.targets(torch.tensor([1, 2])).tolist() == [1, 0]


def test_formats():
    grey, colour, large = random_pixels(1, (8, 8))[0], PIXELS[0], random_pixels(1, (10, 12, 3))[0]
    assert find_format([part(png(grey), grey, grey[..., None])], None, None) == Format(1, 8, 8, resized=False)
    assert find_format([part(grey, png(colour))], None, None) == COLOUR
    assert find_format([part(grey)], 3, None) == COLOUR
    assert find_format([part(colour), part(png(large))], None, 6) == Format(3, 6, 6, resized=True)
    with pytest.raises(ModelError, match=r"one size, got 8 x 8 in row 0, 10 x 12 in row 1; set image_size"):
        find_format([part(colour, png(large))], None, None)
    with pytest.raises(ModelError, match="cannot read row 1"):
        find_format([part(colour, b"GIF?")], None, None)


def test_images_are_scaled_and_made_grey():
    pixels = np.zeros((4, 8, 3), dtype=np.uint8)
    pixels[:, 2:6] = 100  # the square in the middle
    pixels[:, :2, 0] = 255
    for picture in (pixels, png(pixels)):
        middle = decode(picture, Format(3, 4, 4, resized=True))
        assert torch.equal(middle, torch.full((3, 4, 4), 100, dtype=torch.uint8))
        assert decode(picture, Format(1, 4, 8, resized=False))[0, 0].tolist() == [76, 76, 100, 100, 100, 100, 0, 0]
    assert torch.equal(
        decode(pixels[:, :, :1], Format(1, 4, 8, resized=False)), torch.from_numpy(pixels[None, :, :, 0])
    )
    assert torch.equal(decode(pixels[:, 2:6], Format(1, 9, 9, resized=True)), torch.full((1, 9, 9), 100).byte())


def test_measured_pixels_are_normal():
    normalization = measure(part(*map(png, PIXELS)), COLOUR)
    got = samples(normalization=normalization).inputs(torch.arange(20))
    torch.testing.assert_close(got.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-3)
    torch.testing.assert_close(got.std((0, 2, 3), correction=0), torch.ones(3), rtol=0, atol=1e-3)
    assert measure(part(np.full((8, 8, 3), 51, np.uint8)), COLOUR) == Normalization((0.2,) * 3, (1.0,) * 3)


def test_the_digest_covers_pixels_labels_and_normalization():
    base = samples()
    changed = PIXELS.copy()
    changed[3, 0, 0, 0] ^= 1
    others = [samples(pixels=changed), samples(normalization=Normalization((0.5,) * 3, (1.0,) * 3))]
    assert len({base.digest, *(other.digest for other in others)}) == 3
    assert samples(Augmentation(1, True, 0)).digest == base.digest


def saved(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_grey_images_of_16_bits_keep_their_levels(form):
    """Pillow cuts values off at 255: 64 levels of grey became 2."""
    levels = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1028  # 4 in 8 bits
    picture = saved(Image.fromarray(levels), form)
    assert find_format([part(picture)], None, None) == Format(1, 8, 8, resized=False)
    assert decode(picture, Format(1, 8, 8, resized=False)).flatten().tolist() == [4 * level for level in range(64)]


def test_images_of_32_bits_are_refused():
    for image in (Image.new("F", (8, 8)), Image.new("I", (8, 8))):
        with pytest.raises(ModelError, match="cannot read row 0: it has 32 bits a pixel"):
            find_format([part(saved(image, "TIFF"))], None, None)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_their_exif_says(form, orientation):
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:8, :16] = 255  # the upper left quarter
    image, exif = Image.fromarray(pixels), Image.Exif()
    exif[0x0112] = orientation
    picture = saved(image, form, exif=exif)
    found = find_format([part(picture)], None, None)
    assert (found.height, found.width) == ((16, 32) if orientation < 5 else (32, 16))
    decoded = decode(picture, found)
    white = [
        bool(corner) for corner in (decoded[0, ::31, ::15] if orientation > 4 else decoded[0, ::15, ::31]).flatten()
    ]
    place = {1: 0, 2: 1, 3: 3, 4: 2, 5: 0, 6: 1, 7: 3, 8: 2}[orientation]
    assert [index for index, lit in enumerate(white) if lit] == [place]


def bomb():
    """A PNG that says it has 30000 x 30000 pixels."""
    content = bytearray(png(PIXELS[0]))
    content[16:24] = (30_000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


def long_text():
    info = PngInfo()
    info.add_text("comment", "x" * 5_000_000, zip=True)
    return saved(Image.new("L", (8, 8)), pnginfo=info)


BROKEN = {
    "bomb": bomb,
    "a little bomb": lambda: saved(Image.new("1", (10_000, 9_000))),
    "text": long_text,
    "eps": lambda: saved(Image.new("L", (8, 8)), "EPS"),
    "half": lambda: saved(Image.new("L", (8, 8)))[:40],
    "avif": lambda: b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miafMA1B" + bytes(40),
    "dds": lambda: b"DDS " + bytes(124),
    "gif": lambda: b"GIF89a" + bytes(20),
    "webp": lambda: b"RIFF\x40\0\0\0WEBPVP8L" + bytes(40),
    "tiff": lambda: b"II*\0\x08\0\0\0\xff\xff" + bytes(40),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_images_that_cannot_be_decoded_are_one_sentence(kind, recwarn):
    with pytest.raises(ModelError, match=r"Pillow must be able to (read|decode) each image, and cannot .* row 0"):
        decode(BROKEN[kind](), find_format([part(BROKEN[kind]())], None, None), "row 0")
    assert not recwarn.list


def test_images_too_large_for_memory_are_told_before():
    with pytest.raises(ModelError, match="must fit into memory, got 3000000000000000 bytes for 1 images"):
        ImageSamples(part(PIXELS[0]), Format(3, 10**9, 10**6, resized=True), PLAIN)
