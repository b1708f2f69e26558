"""What processes tell each other: JSON, whatever a peer sends."""

import pickle
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support import processes
from thinwire.pipeline.errors import PeerError, WireError
from thinwire.pipeline.exchange import LARGEST, Words, all_gather_json, gather_json
from thinwire.pipeline.process import Placement

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
    return where.gather({stage: {"stage": stage} for stage in where.stages_of(rank)}), where.everyone(rank)


def test_stages_report_to_the_last_one_in_their_order():
    assert processes.run(by_stage, 2) == [([{"stage": stage} for stage in range(4)], [0, 1]), (None, [0, 1])]


def saying(body):
    """Send other bytes than JSON where the others gather: as a peer might that runs another program."""
    body = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    announced = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(announced, torch.tensor([len(body)]))
    return torch.nn.functional.pad(body, (0, max(map(int, announced)) - len(body)))


def trapped(rank, path):
    """Process 1 sends what `gather_object` and `all_gather_object` would unpickle; process 0 gathers."""
    if rank == 1:
        bomb = pickle.dumps(Bomb(Path(path)))
        dist.gather(saying(bomb), None, dst=0)
        sent = saying(bomb)
        dist.all_gather([torch.empty_like(sent) for _ in range(2)], sent)
        return []
    placement, told = Placement({0: 1, 1: 0}), []
    for gather in (lambda: placement.gather({1: "a report"}), lambda: placement.everyone("word")):
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
    for length in lengths:
        if rank == 1:
            dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([length]))
        else:
            with pytest.raises(WireError) as caught:
                all_gather_json("word", "waiting")
            told.append(str(caught.value))
    return told


def test_no_room_is_made_for_what_is_too_long():
    lengths = [-1, 0, LARGEST + 1, 1 << 62]
    said = [f"process 1 must send 1 to {LARGEST} bytes at a time, got {length}" for length in lengths]
    assert processes.run(announcing, 2, lengths)[0] == said


def deep(rank):
    if rank == 1:
        sent = saying(b"[" * 100_000)
        dist.all_gather([torch.empty_like(sent) for _ in range(2)], sent)
        return ""
    with pytest.raises(WireError) as caught:
        all_gather_json("word", "waiting")
    return str(caught.value)


def test_values_too_deep_are_refused_in_a_sentence():
    assert processes.run(deep, 2)[0].startswith("process 1 must send JSON")


def in_words(process):
    return f"waiting for process {process}"


def saying_words(rank, words):
    to_last = Words(None, 2, in_words, timedelta(seconds=60))
    for _ in words:
        to_last.expect()
    for word in words:
        to_last.say([rank, word])
    told = [to_last.hear() for _ in words]
    dist.barrier()
    return told


def test_words_reach_one_process_in_rank_order():
    """A short one comes whole behind a long one."""
    words = ["a" * 5000, "b"]
    *others, heard = processes.run(saying_words, 3, words)
    assert others == [[[], []]] * 2
    assert heard == [[[rank, word] for rank in range(2)] for word in words]


def interrupted(rank, body):
    to_last = Words(None, 1, in_words, timedelta(seconds=60))
    if rank == 0:
        sent = torch.frombuffer(bytearray(len(body).to_bytes(8, "little") + body), dtype=torch.uint8)
        dist.send(sent, 1, tag=1)
        dist.barrier()
        return ""
    to_last.expect()
    with pytest.raises(WireError) as caught:
        to_last.hear()
    dist.barrier()
    return str(caught.value)


def test_a_word_that_is_no_json_is_refused_in_a_sentence():
    assert processes.run(interrupted, 2, b"cos\nsystem")[1].startswith("process 0 must send JSON")


def left_without_a_word(rank):
    to_last = Words(None, 1, in_words, timedelta(seconds=60))
    processes.left_by_the_first(rank)
    with pytest.raises(PeerError) as caught:
        to_last.expect()
        to_last.hear()
    return str(caught.value)


def test_a_process_that_is_gone_is_told_with_what_was_to_be_heard():
    returned, told = processes.outcomes_of(left_without_a_word, 2)[1]
    assert returned and told.startswith("waiting for process 0: "), told
