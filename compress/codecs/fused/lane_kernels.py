"""Triton kernels of the lane code (coding/lanes.py): a program is a chunk, and its lanes are those of one warp.

Imported only where a tensor is on a GPU. 16.8 M symbols have 256 chunks of 32 lanes: 8,192 lanes are coded at once, in
2,048 steps. The words of a chunk are written from the end of its own room, and copied from there into the payload.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.compress.codecs.coding.lanes import CHUNK

_PART = 1024
"""Words that a program copies."""


def encode(table: Tensor, symbols: Tensor, packed: Tensor, lanes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The room of all chunks' words, int16 [chunks, 65536], how many each has, and the states, int32.

    `table` and `symbols` are uint8 [n], and `packed` has frequencies, and starts from bit 16 on.
    """
    n, device = len(symbols), symbols.device
    chunks = -(-n // CHUNK)
    room = torch.empty(chunks, CHUNK, dtype=torch.int16, device=device)
    counts = torch.empty(chunks, dtype=torch.int32, device=device)
    states = torch.empty(chunks, lanes, dtype=torch.int32, device=device)
    _encode[(chunks,)](table, symbols, packed, room, counts, states, n, CHUNK, lanes, num_warps=1)
    return room, counts, states


def gather(room: Tensor, counts: Tensor, ends: Tensor, total: int) -> Tensor:
    """The words of all chunks, one behind another, int16 [total]."""
    words = torch.empty(total, dtype=torch.int16, device=room.device)
    _gather[(len(counts), CHUNK // _PART)](room, counts, ends, words, CHUNK, _PART)
    return words


def decode(table: Tensor, slots: Tensor, counts: Tensor, ends: Tensor, states: Tensor, words: Tensor) -> Tensor:
    """The symbols, uint8 [n], and behind them whether each chunk ends as it must, uint8 [chunks].

    `counts`, `ends`, `states` and `words`, of which there is one more than are counted, are int32.
    """
    n, chunks = len(table), len(counts)
    found = torch.empty(n + chunks, dtype=torch.uint8, device=table.device)
    lanes = len(states) // chunks
    _decode[(chunks,)](table, slots, counts, ends, states, words, found, n, CHUNK, lanes, num_warps=1)
    return found


@triton.jit
def _encode(table, symbols, packed, room, counts, states, n, CHUNK: tl.constexpr, LANES: tl.constexpr):
    chunk, lane = tl.program_id(0), tl.arange(0, LANES)
    begin = chunk.to(tl.int64) * CHUNK
    stop = tl.minimum(n, begin + CHUNK)
    steps = (stop - begin + LANES - 1) // LANES
    state = tl.full((LANES,), 1 << 16, tl.int64)
    at = begin + CHUNK
    for back in range(steps):
        place = begin + (steps - 1 - back) * LANES + lane
        inside = place < stop
        number = tl.load(table + place, mask=inside, other=0).to(tl.int32) * 256
        entry = tl.load(packed + number + tl.load(symbols + place, mask=inside, other=0), mask=inside, other=4096)
        frequency = (entry & 0x1FFF).to(tl.int64)
        full = (state >> 20) >= frequency
        sent = full.to(tl.int32)
        total = tl.sum(sent, axis=0)
        to = at - total + tl.cumsum(sent, axis=0) - sent
        tl.store(room + to, (((state & 0xFFFF) ^ 0x8000) - 0x8000).to(tl.int16), mask=full)
        at -= total
        state = tl.where(full, state >> 16, state)
        # of 32 bits, because a division of 64 takes a GPU several times as long
        quotient = (state.to(tl.uint32) // frequency.to(tl.uint32)).to(tl.int64)
        state = (quotient << 12) + (state - quotient * frequency) + (entry >> 16)
    tl.store(counts + chunk, (begin + CHUNK - at).to(tl.int32))
    tl.store(states + chunk * LANES + lane, state.to(tl.uint32).to(tl.int32, bitcast=True))


@triton.jit
def _gather(room, counts, ends, words, CHUNK: tl.constexpr, PART: tl.constexpr):
    chunk = tl.program_id(0)
    count, end = tl.load(counts + chunk), tl.load(ends + chunk)
    place = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = place < count
    taken = tl.load(room + chunk.to(tl.int64) * CHUNK + CHUNK - count + place, mask=inside, other=0)
    tl.store(words + end - count + place, taken, mask=inside)


@triton.jit
def _decode(table, slots, counts, ends, states, words, found, n, CHUNK: tl.constexpr, LANES: tl.constexpr):
    chunk, lane = tl.program_id(0), tl.arange(0, LANES)
    begin = chunk.to(tl.int64) * CHUNK
    stop = tl.minimum(n, begin + CHUNK)
    steps = (stop - begin + LANES - 1) // LANES
    end = tl.load(ends + chunk)
    at = end - tl.load(counts + chunk)
    state = tl.load(states + chunk * LANES + lane).to(tl.int64) & 0xFFFFFFFF
    for step in range(steps):
        place = begin + step * LANES + lane
        inside = place < stop
        # beyond the end is table 36, whose one symbol leaves a state as it is
        number = tl.load(table + place, mask=inside, other=36).to(tl.int32) * 4096
        slot = tl.load(slots + number + (state & 4095).to(tl.int32)).to(tl.int64) & 0xFFFFFFFF
        tl.store(found + place, (slot & 255).to(tl.uint8), mask=inside)
        state = (((slot >> 8) & 4095) + 1) * (state >> 12) + (slot >> 20)
        needs = state < 65536
        taken = needs.to(tl.int32)
        # damaged bytes may want more words than there are
        word = tl.load(words + tl.minimum(at + tl.cumsum(taken, axis=0) - taken, end)).to(tl.int64) & 0xFFFF
        state = tl.where(needs, (state << 16) | word, state)
        at += tl.sum(taken, axis=0)
    wrong = tl.sum((state != 65536).to(tl.int32), axis=0)
    tl.store(found + n + chunk, ((at == end) & (wrong == 0)).to(tl.uint8))
