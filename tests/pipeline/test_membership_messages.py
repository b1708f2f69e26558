"""What a process with the keys may send wrongly: it is told so, and the membership server serves the others."""

import json
import struct

import pytest

from support.membership_world import World
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.replicas.membership.messages import (
    ANSWERED,
    LAUNCHED,
    LONGEST_WORDS,
    SAID,
    WELCOMED,
    check,
    kind_of,
    pack,
    unpack,
)

SENDER = {"replica": 0, "process": 0, "life": "life 0"}
WELL = {
    "begin": ({**SENDER, "held": 0, "digest": "x"}, []),
    "end": (
        {**SENDER, "held": 9, "digest": "x", "step": 9, "passes": {"0": {"train": 7, "eval-on": -1}}},
        [b"weights"],
    ),
    "deliver": ({**SENDER, "step": 3, "samples": 4, "last": False}, [b"frame"]),
    "applied": ({**SENDER, "step": 3, "digest": "x", "passes": {"0": {"train": 7}}, "last": False}, []),
    "launcher": ({"replica": 0, "agreed": {"model.name": "x"}}, []),
    "comes": ({"replica": 0, "life": "life 0"}, []),
    "loses": ({"replica": 0, "life": "life 0", "for_good": False}, []),
    "stop": ({"replica": 0}, []),
    "go": ({"stop": False}, []),
    "take": ({"stop": False, "step": 3, "giver": 1, "passes": {"0": {"train": 7}}}, [b"weights"]),
    "exchange": ({"stop": False, "samples": {"0": 4, "1": 4}, "others": [1], "gives": False}, [b"frame"]),
    "stopped": ({"stop": False}, []),
    "failed": ({"text": "x"}, []),
    "welcome": ({"noted": ""}, []),
    "wait": ({"text": "x"}, []),
    "refused": ({"text": "x"}, []),
}
"""A good message of each kind."""
ALL = {**SAID, **LAUNCHED, **ANSWERED, **WELCOMED}
FIELDS = [(kind, name) for kind, fields in ALL.items() for name in fields]


def test_messages_are_read_as_they_were_written():
    words, blobs = {"kind": "deliver", "samples": {"1": 2}}, [b"a", b"", bytes(1000)]
    assert unpack(pack(words, blobs)) == (words, blobs)


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
        (({"kind": "begin", **WELL["begin"][0]}, [b""]), "must not have 1 blobs"),
        (({"kind": "take", **WELL["take"][0]}, []), "must not have 0 blobs"),
    ],
)
def test_a_message_of_another_shape_is_a_sentence(message, said):
    with pytest.raises(WireError, match=said):
        check(message, ALL)


def test_a_field_of_another_kind_is_not_looked_at():
    words, blobs = WELL["begin"]
    assert kind_of({0: ({"kind": "begin", **words, "step": [1], "last": {}}, blobs)}) == "begin"


def lost_alone(world, sender, said):
    """Replica 0 is lost, its sender and its launcher know why, and replica 1 is served."""
    world.enter(11, 1)
    assert any(text.startswith("replica 0 is lost: it sent an invalid message") and said in text for text in world.told)
    assert all(said in world.answers(peer)[1]["text"] for peer in (sender, 10))
    assert world.answers(10)[0] == "refused" and {sender, 10} <= world.forgotten
    assert world.told[-1] == "replica 1 has come" and not world.server.is_over


@pytest.mark.parametrize("kind", [kind for kind in SAID if kind != "begin"])
def test_a_message_without_its_fields_loses_its_replica_alone(kind):
    world = World()
    world.enter(10, 0)
    world.begin(0, 0)
    world.say(0, kind, WELL[kind][1])
    lost_alone(world, 0, f"a message of the kind {kind} must have the field")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([(0, "begin"), (1, "deliver")], "all processes of a replica must send a message of the same kind"),
        ([(0, "begin"), (0, "deliver", {"process": 2})], "there are replicas 0 to 1 of processes 0 to 1, got 0, 2"),
        ([(10, "stop", {"replica": 1})], "its launcher must be there before it speaks of replica 1"),
        ([(10, "welcome")], "must be one of launcher, comes, loses, stop, begin, end, deliver, applied"),
    ],
)
def test_messages_that_do_not_fit_together_lose_their_replica_alone(messages, said):
    world = World(processes=2)
    world.enter(10, 0)
    for sender, kind, *other in messages:
        words, blobs = WELL[kind]
        own = {"process": sender} if kind in SAID else {}
        world.say(sender, kind, blobs, **{**words, **own, **dict(*other)})
    lost_alone(world, messages[-1][0], said)


def test_a_process_of_no_replica_changes_nothing():
    world = World()
    world.enter(10, 0)
    world.say(5, "deliver")
    assert world.forgotten == {5} and world.told == ["replica 0 has come"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"7", "a message must say the sizes of its blobs"),
        (b"[]", "a message must say the sizes of its blobs"),
        (b"{}", "a message must say the sizes of its blobs"),
        (b"[" * 100_000, "the words of a message must be JSON"),
        (b'{"sizes": [-1]}', "a message must say the sizes of its blobs"),
        (json.dumps({"sizes": [], "kind": []}).encode(), "a message must be one of launcher"),
    ],
)
def test_bytes_that_are_no_message_lose_their_replica_alone(text, said):
    world = World()
    world.enter(10, 0)
    world.begin(0, 0)
    world.say_bytes(0, struct.pack("!I", len(text)) + text)
    lost_alone(world, 0, said)


@pytest.mark.parametrize("data", [b"", b"abc", struct.pack("!I", LONGEST_WORDS + 1)])
def test_words_that_are_too_long_are_refused(data):
    with pytest.raises(WireError, match=f"a message must have at most {LONGEST_WORDS} bytes of words"):
        unpack(data)
