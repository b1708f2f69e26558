"""Words in the rendezvous store: none is read that is not as it was written."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from support.relay import Relay
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


@pytest.mark.slow
def test_a_store_that_falls_silent_ends_a_call_in_time():
    """Where bytes of a question or an answer were lost, torch waited for ever, beyond every time-out."""
    limit = timedelta(seconds=0.5)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay = Relay(f"tcp://127.0.0.1:{server.port}")
    store = dist.TCPStore("127.0.0.1", int(relay.endpoint.rpartition(":")[2]), timeout=limit)
    hanging = threading.Timer(30, relay.close)
    hanging.start()
    try:
        posts.limit_answers(dist.PrefixStore("a", dist.PrefixStore("b", store)), limit)
        store.set("word", "")
        relay.hush()
        for call in (lambda: store.get("word"), lambda: store.check(["word"]), lambda: store.wait(["word"], limit)):
            with pytest.raises(dist.DistNetworkError, match="Socket Timeout"):
                call()
    finally:
        hanging.cancel()
        relay.close()
