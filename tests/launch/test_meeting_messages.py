"""What a replica with the keys may say wrongly: it is told so and lost, and the meeting place serves the others."""

import json
import struct

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from support.meeting_world import LARGEST, in_world
from thinwire.launch.run.crews.remote.stream import LAUNCHER, PIECE, PIECE_BYTES, REFUSAL, pack
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.replicas.membership.fields import ANSWERED, LAUNCHED, SAID, check, kind_of
from thinwire.pipeline.replicas.membership.messages import LONGEST_WORDS

WELL = {
    "begin": ({"held": 0, "digest": "x"}, []),
    "end": ({"held": 9, "digest": "x", "step": 9, "passes": {"0": {"train": 7, "eval-on": -1}}}, [b"weights"]),
    "deliver": ({"step": 3, "samples": 4, "last": False}, [b"frame"]),
    "applied": ({"step": 3, "digest": "x", "passes": {"0": {"train": 7}}, "last": False}, []),
    "comes": ({"replica": 0}, []),
    "loses": ({"replica": 0, "for_good": False}, []),
    "stop": ({}, []),
    "go": ({"stop": False}, []),
    "take": ({"stop": False, "step": 3, "giver": 1, "passes": {"0": {"train": 7}}}, [b"weights"]),
    "exchange": ({"stop": False, "samples": {"0": 4, "1": 4}, "others": [1], "gives": False}, [b"frame"]),
    "stopped": ({"stop": False}, []),
    "failed": ({"text": "x"}, []),
}
"""A good message of each kind."""
ALL = {**SAID, **LAUNCHED, **ANSWERED}
FIELDS = [(kind, name) for kind, fields in ALL.items() for name in fields]


def test_there_is_a_good_message_of_each_kind():
    for kind, (words, blobs) in WELL.items():
        assert words.keys() == ALL[kind].keys()
        check(({"kind": kind, **words}, blobs), ALL)
    assert WELL.keys() == ALL.keys()


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_field_that_is_missing_or_wrong_is_named(kind, name):
    words, blobs = WELL[kind]
    message = {"kind": kind, **words}
    del message[name]
    with pytest.raises(WireError, match=f"of the kind {kind} must have the field {name}, "):
        check((message, blobs), ALL)
    for wrong in (None, 1.5, -2, 1 << 63, {"0": None}, {"0": {"train": 1 << 63}}, {"x": 1}, {"1" * 5000: 1}, [None]):
        with pytest.raises(WireError, match=f"{name} of a message of the kind {kind} must be .*, got "):
            check(({**message, name: wrong}, blobs), ALL)


@pytest.mark.parametrize(("kind", "none"), [("deliver", 0), ("exchange", {"0": 4, "1": 0})])
def test_a_replica_without_samples_has_nothing_to_deliver(kind, none):
    """A weight of nothing counted as one, and if no replica had samples the others ended with a traceback."""
    words, blobs = WELL[kind]
    with pytest.raises(WireError, match=r"samples of a message of the kind .* must be .* from 1 on"):
        check(({"kind": kind, **words, "samples": none}, blobs), ALL)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (({}, []), "must be one of begin, end, .*, got None"),
        (({"kind": ["begin"]}, []), "must be one of begin, end"),
        (({"kind": "begin", "held": 0, "digest": "x"}, [b""]), "must not have 1 blobs"),
        (({"kind": "take", **WELL["take"][0]}, []), "must not have 0 blobs"),
    ],
)
def test_a_message_of_another_shape_is_a_sentence(message, said):
    with pytest.raises(WireError, match=said):
        check(message, ALL)


def test_a_field_of_another_kind_is_not_looked_at():
    words, blobs = WELL["begin"]
    assert kind_of({0: ({"kind": "begin", **words, "step": [1], "last": {}}, blobs)}) == "begin"


async def lost_alone(world, said):
    """Replica 0 is told what is wrong and lost, and replica 1 is served."""
    world.enter(b"b", 1)
    await world.wait(1, b"b")
    assert any(text.startswith("replica 0 is lost: it said what is no message") and said in text for text in world.told)
    refusals = [json.loads(data) for kind, _, data in world.sent[b"a"] if kind == REFUSAL]
    assert [each["lasting"] for each in refusals] == [True] and said in refusals[0]["text"]
    assert world.told[-1] == "replica 1 has come" and not world.server.is_over


@pytest.mark.parametrize("kind", SAID)
def test_a_message_without_its_fields_loses_its_replica_alone(kind):
    async def scene(world):
        stream, _ = world.enter(b"a", 0)
        stream.write(0, {"kind": kind}, WELL[kind][1])
        await lost_alone(world, f"a message of the kind {kind} must have the field")

    in_world(scene)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([(0, "begin"), (1, "deliver")], "all processes of a replica must say a message of the same kind"),
        ([(0, "begin"), (2, "begin")], "a replica has processes 0 to 1, and it names 2"),
        ([(LAUNCHER, "loses"), (0, "begin")], "a replica must come before its processes say anything"),
        ([(LAUNCHER, "begin")], "must be one of comes, loses, stop, got 'begin'"),
    ],
)
def test_messages_that_do_not_fit_together_lose_their_replica_alone(messages, said):
    async def scene(world):
        stream, _ = world.enter(b"a", 0)
        for process, kind in messages:
            words, blobs = WELL[kind]
            stream.write(process, {"kind": kind, **words}, blobs)
        await lost_alone(world, said)

    in_world(scene, processes=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"7", "a message must say the sizes of its blobs"),
        (b"[]", "a message must say the sizes of its blobs"),
        (b"{}", "a message must say the sizes of its blobs"),
        (b"[" * 100_000, "the words of a message must be JSON"),
        (b'{"sizes": [-1]}', "a message must say the sizes of its blobs"),
        (b'{"sizes": [], "kind": []}', "a message must be one of begin"),
    ],
)
def test_bytes_that_are_no_message_lose_their_replica_alone(text, said):
    async def scene(world):
        world.enter(b"a", 0)
        head = struct.pack("!iQQ", 0, len(text), 0)
        for number, piece in enumerate([head, text[:PIECE_BYTES], text[PIECE_BYTES:]], start=3):
            world.server.take(b"a", pack(PIECE, number, piece))
        await lost_alone(world, said)

    in_world(scene)


@pytest.mark.parametrize(("words", "blobs"), [(LONGEST_WORDS + 1, 0), (10, LARGEST + 1), (1 << 63, 1 << 63)])
def test_a_message_that_is_too_long_is_refused_before_it_arrives(words, blobs):
    async def scene(world):
        world.enter(b"a", 0)
        world.server.take(b"a", pack(PIECE, 3, struct.pack("!iQQ", 0, words, blobs)))
        await lost_alone(world, f"{LARGEST} bytes of blobs, got {words} and {blobs}")

    in_world(scene)
