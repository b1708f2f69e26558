import os
import random
import struct
import zlib
from itertools import product

import pytest
import torch
from isal import isal_zlib

from thinwire.pipeline.errors import WireError
from thinwire.pipeline.frames import CHANNELS, HEADER_BYTES, PHASES, Header, check, checksum, seal

FRAMES = int(os.environ.get("THINWIRE_FRAMES", "3000"))
"""How many frames are mutated; `make fuzz` asks for more."""
PLANNED = Header(phase="train", channel="gradients", boundary=2, microbatch=3, step=70_000_000_000, length=40)


def frame_of(header, payload=None):
    frame = torch.arange(HEADER_BYTES + 40, dtype=torch.uint8)
    if payload is not None:
        frame[HEADER_BYTES:] = payload
    header.write(frame.numpy().data)
    return frame


def changed(**fields):
    return PLANNED._replace(**fields)


def sealed(*, payload=True, **fields):
    """A frame as it is sent."""
    frame = frame_of(PLANNED)
    seal(changed(**fields), frame.numpy().data, payload=payload)
    return frame


def test_the_header_is_these_bytes():
    frame = frame_of(changed(nones=5, departed=2**50 + 1, crc32=0xDEADBEEF))
    expected = b"TWIR" + struct.pack("<HBBIIQQQIIQ", 3, 0, 1, 2, 3, 70_000_000_000, 5, 40, 0xDEADBEEF, 0, 2**50 + 1)
    assert bytes(frame[:HEADER_BYTES].numpy()) == expected + bytes(HEADER_BYTES - len(expected))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("channel", CHANNELS)
def test_reading_is_the_inverse_of_writing(phase, channel):
    header = changed(phase=phase, channel=channel, nones=2**63)
    assert Header.read(frame_of(header).numpy().data) == header


def test_the_planned_frame_passes_whatever_the_buffers_tail_holds():
    sent = sealed(nones=1)
    frame = torch.cat([sent, torch.full((100,), 7, dtype=torch.uint8)])
    assert check(PLANNED, frame.numpy().data, payload=True) == changed(
        nones=1, crc32=checksum(sent.numpy().data, payload=True)
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"phase": "eval-on"}, "phase eval-on where train was planned"),
        ({"channel": "activations"}, "channel activations where gradients was planned"),
        ({"boundary": 1}, "boundary 1 where 2 was planned"),
        ({"microbatch": 0}, "microbatch 0 where 3 was planned"),
        ({"step": 4, "length": 12}, "step 4 where 70000000000 was planned, length 12 where 40 was planned"),
    ],
)
def test_another_frame_is_refused_field_by_field(fields, said):
    with pytest.raises(WireError, match=said):
        check(PLANNED, frame_of(changed(**fields)).numpy().data, payload=True)


def test_a_foreign_message_is_refused():
    with pytest.raises(WireError, match="must begin with b'TWIR'"):
        check(PLANNED, torch.zeros(HEADER_BYTES + 40, dtype=torch.uint8).numpy().data, payload=True)


def test_another_version_is_refused():
    frame = frame_of(PLANNED)
    frame[4] = 9
    with pytest.raises(WireError, match="must have version 3, got version 9"):
        check(PLANNED, frame.numpy().data, payload=True)


def test_a_damaged_header_is_refused():
    frame = frame_of(PLANNED)
    frame[6] = 200
    with pytest.raises(WireError, match="unknown phase 200"):
        check(PLANNED, frame.numpy().data, payload=True)


def test_one_flipped_bit_anywhere_in_a_frame_is_noticed():
    frame = sealed()
    check(PLANNED, frame.numpy().data, payload=True)
    for position, bit in product(range(HEADER_BYTES + 40), range(8)):
        damaged = frame.clone()
        damaged[position] ^= 1 << bit
        with pytest.raises(WireError):
            check(PLANNED, damaged.numpy().data, payload=True)


def test_a_flipped_bit_does_not_drop_a_tensor():
    """`nones` was trusted: one flipped bit of byte 24 trained on zeros, without a word."""
    for payload in (True, False):
        frame = sealed(payload=payload)
        frame[24] ^= 1
        with pytest.raises(WireError, match="CRC-32"):
            check(PLANNED, frame.numpy().data, payload=payload)


def test_a_frame_cannot_switch_its_checksum_off():
    frame = sealed()
    frame[HEADER_BYTES + 3] ^= 1
    changed(crc32=0).write(frame.numpy().data)
    with pytest.raises(WireError, match="CRC-32"):
        check(PLANNED, frame.numpy().data, payload=True)


@pytest.mark.parametrize("length", [0, 1, 15, 40, 64 * 1024 + 1, 1 << 20])
def test_the_checksum_is_the_crc32_of_zlib_with_its_own_field_as_zeros(length):
    frame = torch.randint(256, (HEADER_BYTES + length,), dtype=torch.uint8)
    zeroed = bytearray(frame.numpy())
    zeroed[40:44] = bytes(4)
    assert checksum(frame.numpy().data, payload=True) == zlib.crc32(zeroed)
    assert checksum(frame.numpy().data, payload=False) == zlib.crc32(zeroed[:HEADER_BYTES])


def test_a_checksum_is_never_0(monkeypatch):
    monkeypatch.setattr(isal_zlib, "crc32", lambda *_: 0)
    assert sealed().numpy()[40:44].tolist() == [1, 0, 0, 0]


def test_a_frame_cut_short_into_a_reused_buffer_is_noticed():
    """The buffer still holds the frame before, whose tail passed as this one's."""
    before, kept = changed(step=PLANNED.step - 1), frame_of(PLANNED, torch.arange(40, dtype=torch.uint8) + 100)
    seal(before, kept.numpy().data, payload=True)
    check(before, kept.numpy().data, payload=True)
    for length in range(HEADER_BYTES + 40):
        buffer = kept.clone()
        buffer[:length] = sealed()[:length]
        with pytest.raises(WireError):
            check(PLANNED, buffer.numpy().data, payload=True)


def test_mutated_frames_never_pass():
    draw = random.Random(0)
    sent = sealed(nones=2)
    same = 0
    for _ in range(FRAMES):
        frame = mutated(sent, draw)
        if torch.equal(frame, sent):
            same += 1
            continue
        with pytest.raises(WireError):
            check(PLANNED, frame.numpy().data, payload=True)
    assert same < FRAMES / 10
    print(f"{FRAMES - same} changed frames, all refused")


def mutated(sent, draw):
    """A frame with bytes flipped, replaced, zeroed, moved or cut, in a buffer that was used before."""
    frame = sent.clone()
    size = draw.randint(1, 40)
    start, other = draw.randrange(len(frame) - size), draw.randrange(len(frame) - size)
    kind = draw.choice(["bits", "bytes", "zeros", "moved", "cut"])
    if kind == "bits":
        for _ in range(draw.randint(1, 4)):
            frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
    elif kind == "bytes":
        frame[start : start + size] = torch.tensor(list(draw.randbytes(size)), dtype=torch.uint8)
    elif kind == "zeros":
        frame[start : start + size] = 0
    elif kind == "moved":
        frame[start : start + size] = sent[other : other + size]
    else:
        frame[start:] = torch.tensor(list(draw.randbytes(len(frame) - start)), dtype=torch.uint8)
    return frame


def test_without_protected_payloads_the_header_is_protected_still():
    frame = sealed(payload=False)
    frame[-1] ^= 1
    assert check(PLANNED, frame.numpy().data, payload=False) == changed(
        crc32=checksum(frame.numpy().data, payload=False)
    )
    frame[16] ^= 1
    with pytest.raises(WireError, match="step"):
        check(PLANNED, frame.numpy().data, payload=False)


def test_a_frame_may_be_shorter_only_where_its_codec_says_so():
    frame = sealed(length=PLANNED.length - 8)
    assert check(PLANNED, frame.numpy().data, payload=True, shorter=True).length == PLANNED.length - 8
    with pytest.raises(WireError, match=f"length {PLANNED.length - 8} where {PLANNED.length} was planned"):
        check(PLANNED, frame.numpy().data, payload=True)
    with pytest.raises(WireError, match=f"length {PLANNED.length + 8} where {PLANNED.length} was planned"):
        check(PLANNED, frame_of(changed(length=PLANNED.length + 8)).numpy().data, payload=True, shorter=True)
