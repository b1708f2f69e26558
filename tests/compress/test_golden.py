"""Payloads as files of known bytes, golden/*.bin: the formats in docs/ cannot drift unnoticed.

golden/cases.json has, for each, the codec, the tensor sent and the values decoded. A payload that a machine may
choose otherwise, by chance or by the order of its sums, is only decoded.
"""

import json
from pathlib import Path

import pytest
import torch

from support.codec_helpers import KEY, assert_identical
from thinwire.compress import parse
from thinwire.compress.expression import CODECS

FOLDER = Path(__file__).parent / "golden"
CASES = json.loads((FOLDER / "cases.json").read_text())
cases = pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])


def prepared(case):
    """The codec, what both ends know beside the payload, the payload, the tensor sent and the values decoded."""
    codec, shared = parse(case["codec"]), None
    if "indices" in case:
        codec, shared = codec.bound_to(parse(case["activations"])), torch.tensor(case["indices"])
    payload = torch.frombuffer(bytearray((FOLDER / f"{case['name']}.bin").read_bytes()), dtype=torch.uint8)
    dtype = getattr(torch, case["dtype"])
    sent, values = (torch.tensor(case[which], dtype=dtype).view(case["shape"]) for which in ("input", "decoded"))
    return codec, shared, payload, sent, values


@cases
def test_a_payload_decodes_to_the_known_values(case):
    codec, shared, payload, sent, values = prepared(case)
    assert len(payload) == codec.nbytes(sent.shape, sent.dtype)
    decoded = torch.full_like(sent, 77)
    codec.decode(payload, decoded, KEY, shared)
    assert_identical(decoded, values)


@pytest.mark.parametrize("case", [case for case in CASES if not case.get("decode_only")], ids=lambda case: case["name"])
def test_a_tensor_is_encoded_as_the_known_bytes(case):
    codec, shared, payload, sent, _ = prepared(case)
    encoded = torch.full_like(payload, 0xA5)
    codec.encode(sent, encoded, KEY, shared)
    assert bytes(encoded.tolist()).hex() == bytes(payload.tolist()).hex()


def test_every_codec_has_a_file_and_every_file_a_case():
    assert {parse(case["codec"]).name for case in CASES} == {
        *CODECS,
        "auto_grid.Auto",
        "normal.Normal",
        "short_scales.ByteScales",
        "short_scales.ShortRanges",
        "rotated.Rotated",
    }
    assert {path.stem for path in FOLDER.glob("*.bin")} == {case["name"] for case in CASES}
    assert len(CASES) == len({case["name"] for case in CASES})
    assert all(str(parse(case["codec"])) == case["codec"] for case in CASES)
