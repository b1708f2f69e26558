"""Words in the rendezvous store: none is read that is not as it was written."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from thinwire.pipeline.errors import ThinwireError, WireError
from thinwire.pipeline.processes import posts
from thinwire.pipeline.saving.checkpoint import _files_of
from thinwire.pipeline.wire.handshake import Handshake


@pytest.mark.parametrize("value", [{"codec": "q(4)", "ü": [1.5, None]}, True, "a b", []])
def test_a_word_is_what_was_written_and_with_any_bit_flipped_an_error_that_names_it(value):
    """torch sends what its store holds without a checksum: a setting, an address or a digest became another one."""
    word = posts.written(value).encode()
    assert posts.read(word, "") == value
    for bit in range(8 * len(word)):
        flipped = bytearray(word)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match=r"process 3 must send its address, and the rendezvous store .* CRC-32"):
            posts.read(bytes(flipped), "process 3 must send its address")


def test_json_that_is_none_or_nested_too_deep_is_one_sentence_although_its_checksum_is_right(monkeypatch):
    for text in ("{", "[" * 100_000):
        with monkeypatch.context() as patched:
            patched.setattr(posts.json, "dumps", lambda value: value)
            word = posts.written(text).encode()
        with pytest.raises(WireError, match="process 3 must send its address, and the rendezvous store"):
            posts.read(word, "process 3 must send its address")


def flipped(word):
    return word[:-1] + bytes([word[-1] ^ 1])


def test_what_stages_announce_and_post_is_checked(alone):
    handshake = Handshake(dist.distributed_c10d._get_default_group(), timedelta(seconds=30))
    handshake.announce("1", 0, 0, {"codec": "q(4)"})
    handshake.tell_training("1", True)
    for key in ("0/0/1", "trains/1"):
        handshake._store.set(key, flipped(handshake._store.get(key)))
    with pytest.raises(WireError, match="stage 1 must announce its settings"):
        handshake.compare("0", "1", 0, 0, {"codec": "q(4)"})
    with pytest.raises(WireError, match="stage 1 must report whether it trains"):
        handshake.trains("1")
    with pytest.raises(ThinwireError, match="stage 2 must post what it has written"):
        _files_of(flipped(posts.written({"files": {}}).encode()), 2)
