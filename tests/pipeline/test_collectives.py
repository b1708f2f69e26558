"""What processes tell each other: JSON, whatever a peer sends."""

import pickle
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support import processes
from thinwire.pipeline.errors import PeerError, WireError
from thinwire.pipeline.measuring.clocks import NeighbourClocks
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.collectives import (
    HEADER_BYTES,
    LARGEST,
    AsyncNotes,
    NoteKind,
    StageNumbers,
    all_gather_json,
    gather_json,
    seal,
)
from thinwire.pipeline.processes.placement import Placement

pytestmark = pytest.mark.processes


class Bomb:
    """What runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def gathered(rank):
    mine = {"rank": rank, "numbers": [0.1, float("inf")], "text": "é" * (10 * rank)}
    return all_gather_json(mine, "all"), gather_json(mine, 1, "one")


def test_values_of_any_length_come_in_the_order_of_processes():
    wanted = [{"rank": rank, "numbers": [0.1, float("inf")], "text": "é" * (10 * rank)} for rank in range(3)]
    assert processes.run(gathered, 3) == [(wanted, None), (wanted, wanted), (wanted, None)]


def by_stage(rank):
    where = Placement({0: 0, 1: 1, 2: 1, 3: 0})
    return collectives.gather(
        where, {stage: {"stage": stage} for stage in where.stages_of(rank)}
    ), collectives.everyone(where, rank)


def test_stages_report_to_the_last_one_in_their_order():
    assert processes.run(by_stage, 2) == [([{"stage": stage} for stage in range(4)], [0, 1]), (None, [0, 1])]


def saying(body, number, length=None):
    """Send other bytes than JSON where the others gather: as a peer might that runs another program."""
    body = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    said = torch.cat([torch.tensor([len(body) if length is None else length]).view(torch.uint8), body])
    note = torch.nn.functional.pad(seal(NoteKind.ALL, number, said), (0, 256 - 24 - len(said)))
    dist.all_gather([torch.empty_like(note) for _ in range(2)], note)


def trapped(rank, path):
    """Process 1 sends what `gather_object` and `all_gather_object` would unpickle; process 0 gathers."""
    if rank == 1:
        bomb = pickle.dumps(Bomb(Path(path)))
        saying(bomb, 1)
        saying(bomb, 2)
        return []
    placement, told = Placement({0: 1, 1: 0}), []
    for gather in (
        lambda: collectives.gather(placement, {1: "a report"}),
        lambda: collectives.everyone(placement, "word"),
    ):
        with pytest.raises(WireError) as caught:
            gather()
        told.append(str(caught.value))
    return told


def test_a_peer_cannot_run_code_here(tmp_path):
    """Reports were pickled: one stage executed what another one sent."""
    told, _ = processes.run(trapped, 2, str(tmp_path / "executed"))
    assert len(told) == 2 and all(line.startswith("process 1 must send JSON") for line in told), told
    assert not (tmp_path / "executed").exists()


def announcing(rank, lengths):
    told = []
    for number, length in enumerate(lengths, 1):
        if rank == 1:
            saying(b" ", number, length)
        else:
            with pytest.raises(WireError) as caught:
                all_gather_json("word", "waiting")
            told.append(str(caught.value))
    return told


def test_no_room_is_made_for_what_is_too_long():
    lengths = [0, LARGEST + 1, 1 << 62]
    said = [f"process 1 must send 1 to {LARGEST} bytes at a time, got {length}" for length in lengths]
    assert processes.run(announcing, 2, lengths)[0] == said


def deep(rank):
    if rank == 1:
        body = torch.full([100_000], ord("["), dtype=torch.uint8)
        saying(bytes(body[:224].numpy()), 1, len(body))
        rest = seal(NoteKind.ALL, 1, body[224:])
        dist.all_gather([torch.empty_like(rest) for _ in range(2)], rest)
        return ""
    with pytest.raises(WireError) as caught:
        all_gather_json("word", "waiting")
    return str(caught.value)


def test_values_too_deep_are_refused_in_a_sentence():
    assert processes.run(deep, 2)[0].startswith("process 1 must send JSON")


def in_words(process):
    return f"waiting for process {process}"


def saying_words(rank, words):
    to_last = AsyncNotes(None, NoteKind.LOSSES, in_words, timedelta(seconds=60), 2)
    for _ in words:
        to_last.expect()
    for word in words:
        to_last.send([rank, word])
    told = [to_last.receive() for _ in words]
    dist.barrier()
    return told


def test_words_reach_one_process_in_rank_order():
    """A short one comes whole behind a long one."""
    words = ["a" * 5000, "b"]
    *others, heard = processes.run(saying_words, 3, words)
    assert others == [[[], []]] * 2
    assert heard == [[[rank, word] for rank in range(2)] for word in words]


def interrupted(rank, body):
    to_last = AsyncNotes(None, NoteKind.LOSSES, in_words, timedelta(seconds=60), 1)
    if rank == 0:
        dist.send(
            seal(NoteKind.LOSSES, 1, torch.frombuffer(bytearray(body), dtype=torch.uint8)), 1, tag=NoteKind.LOSSES
        )
        dist.barrier()
        return ""
    to_last.expect()
    with pytest.raises(WireError) as caught:
        to_last.receive()
    dist.barrier()
    return str(caught.value)


def test_a_word_that_is_no_json_is_refused_in_a_sentence():
    assert processes.run(interrupted, 2, b"cos\nsystem")[1].startswith("process 0 must send JSON")


def left_without_a_word(rank):
    to_last = AsyncNotes(None, NoteKind.LOSSES, in_words, timedelta(seconds=60), 1)
    processes.left_by_the_first(rank)
    with pytest.raises(PeerError) as caught:
        to_last.expect()
        to_last.receive()
    return str(caught.value)


def test_a_process_that_is_gone_is_told_with_what_was_to_be_heard():
    returned, told = processes.outcomes_of(left_without_a_word, 2)[1]
    assert returned and told.startswith("waiting for process 0: "), told


FLIPPED = {
    "a value for all": lambda rank, where: collectives.everyone(where, ["a", rank]),
    "a long value for all": lambda rank, where: collectives.everyone(where, "a" * 5000),
    "numbers of stages": lambda rank, where: collectives.gather_numbers(where, {rank: 0.5}),
    "a word of all": lambda rank, where: collectives.anyone(where, False),
    "a report": lambda rank, where: collectives.gather(Placement({0: 1, 1: 0}), {1 - rank: "a" * 5000}),
    "the gradient norm": lambda rank, where: norm_of(rank, where),
    "losses": lambda rank, where: losses_of(rank),
    "a clock": lambda rank, where: NeighbourClocks().read([(0, 1)]),
}
"""What process 1 tells process 0, by name."""


def norm_of(rank, where):
    numbers = StageNumbers(where, "the number", timedelta(seconds=60))
    numbers.expect()
    numbers.send({rank: 0.5})
    return numbers.receive()


def losses_of(rank):
    words = AsyncNotes(None, NoteKind.LOSSES, in_words, timedelta(seconds=60), 0)
    words.expect()
    words.send([0.5])
    for sender in words._senders.values():
        sender.flush()
    return words.receive()


class Sent(Exception):
    """Process 1 has told something damaged, and waits for no answer."""


def damaged(note):
    """The note with another last bit."""
    end = HEADER_BYTES + int.from_bytes(bytes(note[16:24].numpy()), "little")
    note = note.clone()
    note[end - 1] ^= 1
    return note


def is_note(sent):
    """What a link is measured with is none."""
    return sent.dtype == torch.uint8 and len(sent) <= 1 << 13


def damaging(call, place):
    """A call of torch that damages the note at this place of its arguments."""

    def call_damaged(*given, **others):
        if not is_note(given[place]):
            return call(*given, **others)
        work = call(*given[:place], damaged(given[place]), *given[place + 1 :], **others)
        if work is not None:  # what sends it lives as long as this
            return work
        raise Sent

    return call_damaged


def damage_what_is_sent():
    """Damage each note that this process sends to one other; `dist.send` ends after one."""
    send, send_and_wait, sent = dist.ProcessGroup.send, dist.send, []

    def send_damaged(group, notes, *where):
        sent.append([damaged(note) if is_note(note) else note for note in notes])  # they live until the process ends
        return send(group, sent[-1], *where)

    def send_one(note, *where, **others):
        send_and_wait(note, *where, **others)
        if is_note(note):
            raise Sent

    dist.ProcessGroup.send, dist.send = send_damaged, send_one


def with_a_bit_flipped(rank, name):
    """What process 0 says of what process 1 tells."""
    if rank == 1:
        dist.all_gather, dist.gather = damaging(dist.all_gather, 1), damaging(dist.gather, 0)
        damage_what_is_sent()
    try:
        FLIPPED[name](rank, Placement({0: 0, 1: 1}))
    except (WireError, Sent) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FLIPPED)
def test_a_flipped_bit_in_anything_that_is_told_is_an_error(name):
    said = "what process 1 sends must match its CRC-32: it was damaged or cut short on the way"
    assert processes.run(with_a_bit_flipped, 2, name) == [said, ""]


@pytest.mark.parametrize("place", [0, 4, 8, 16, 23])
def test_a_flipped_bit_in_the_header_of_a_note_is_an_error(place):
    note = seal(NoteKind.NORM, 7, torch.arange(5, dtype=torch.uint8))
    assert collectives.opened(NoteKind.NORM, 7, note, 1).tolist() == [0, 1, 2, 3, 4]
    note[place] ^= 1
    with pytest.raises(WireError, match="what process 1 sends must match its CRC-32"):
        collectives.opened(NoteKind.NORM, 7, note, 1)


def test_a_note_of_another_kind_or_number_is_an_error():
    note = seal(NoteKind.NORM, 7, torch.arange(5, dtype=torch.uint8))
    for kind, number in ((NoteKind.LOSSES, 7), (NoteKind.NORM, 8)):
        with pytest.raises(WireError, match=f"must send {kind.name} {number} now, got kind 3, number 7"):
            collectives.opened(kind, number, note, 1)
