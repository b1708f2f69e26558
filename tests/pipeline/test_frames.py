import struct

import pytest
import torch

from thinwire.pipeline.errors import WireError
from thinwire.pipeline.frames import CHANNELS, HEADER_BYTES, PHASES, Header, check, checksum

PLANNED = Header(phase="train", channel="gradients", boundary=2, microbatch=3, step=70_000_000_000, length=40)


def frame_of(header, payload=None):
    frame = torch.arange(HEADER_BYTES + 40, dtype=torch.uint8)
    if payload is not None:
        frame[HEADER_BYTES:] = payload
    header.write(frame)
    return frame


def changed(**fields):
    return Header(**{**vars(PLANNED), **fields})


def test_the_header_is_these_bytes():
    frame = frame_of(changed(nones=5, crc32=0xDEADBEEF))
    expected = b"TWIR" + struct.pack("<HBBIIQQQI", 1, 0, 1, 2, 3, 70_000_000_000, 5, 40, 0xDEADBEEF)
    assert bytes(frame[:HEADER_BYTES].numpy()) == expected + bytes(HEADER_BYTES - len(expected))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("channel", CHANNELS)
def test_reading_is_the_inverse_of_writing(phase, channel):
    header = changed(phase=phase, channel=channel, nones=2**63)
    assert Header.read(frame_of(header)) == header


def test_the_planned_frame_passes_whatever_the_buffers_tail_holds():
    frame = torch.cat([frame_of(changed(nones=1)), torch.full((100,), 7, dtype=torch.uint8)])
    assert check(PLANNED, frame) == changed(nones=1)


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
        check(PLANNED, frame_of(changed(**fields)))


def test_a_foreign_message_is_refused():
    with pytest.raises(WireError, match="must begin with b'TWIR'"):
        check(PLANNED, torch.zeros(HEADER_BYTES + 40, dtype=torch.uint8))


def test_another_version_is_refused():
    frame = frame_of(PLANNED)
    frame[4] = 9
    with pytest.raises(WireError, match="version 1 are understood here, got version 9"):
        check(PLANNED, frame)


def test_a_damaged_header_is_refused():
    frame = frame_of(PLANNED)
    frame[6] = 200
    with pytest.raises(WireError, match="unknown phase 200"):
        check(PLANNED, frame)


@pytest.mark.parametrize("position", [0, 17, 39])
def test_one_flipped_bit_anywhere_in_the_payload_is_noticed(position):
    frame = frame_of(PLANNED)
    changed(crc32=checksum(frame)).write(frame)
    check(PLANNED, frame)
    frame[HEADER_BYTES + position] ^= 1
    with pytest.raises(WireError, match="CRC-32"):
        check(PLANNED, frame)


def test_a_frame_cut_short_leaves_a_stale_tail_that_the_checksum_notices():
    sent = frame_of(PLANNED)
    changed(crc32=checksum(sent)).write(sent)
    buffer = torch.full_like(sent, 99)
    buffer[:80] = sent[:80]
    with pytest.raises(WireError, match="cut short"):
        check(PLANNED, buffer)


def test_without_a_checksum_the_payload_is_not_looked_at():
    frame = frame_of(PLANNED)
    frame[-1] ^= 1
    assert check(PLANNED, frame).crc32 == 0
