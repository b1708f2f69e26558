"""The lane code: interleaved range coding (rANS, 1311.2540) of symbols whose tables both ends know; torch operations.

    | words of each chunk, uint16 | states, uint32: lane by lane, chunk by chunk | words, uint16, chunk by chunk |

Symbols come in chunks of 65,536, of which the last may be shorter. Symbol i of a chunk belongs to lane i % lanes. Each
lane is a state, which begins at 2**16 with the last symbol; the decoder ends there. With frequency f and start s of a
symbol, of 4096:

    encode      state >= f * 2**20: send its low 16 bits as a word, keep the rest
                state = (state // f) * 4096 + state % f + s
    decode      the symbol is the one of state % 4096
                state = f * (state // 4096) + state % 4096 - s
                state < 2**16: state = state * 2**16 + the next word

A chunk's words lie in the order in which the decoder needs them: symbol by symbol. So all chunks and lanes are coded at
once, and a step of all is a step of the loops below; step_kernels.py has the same in one kernel for a CPU, and
lane_kernels.py for a GPU.
"""

import torch
from torch import Tensor

from thinwire.compress.codec import CodecError, tensor_bytes
from thinwire.compress.codecs.coding.tables import PROBABILITY_BITS, SYMBOLS, TOTAL, Tables, tables

CHUNK = 1 << 16
MOST_LANES = 32
SYMBOLS_OF_LANE = 1024
"""So many symbols make up for the 24 bits or so that the end of a lane costs."""
WORD, STATE = 2, 4
"""Bytes."""
_LOWEST = 1 << 16


def lanes_of(n: int) -> int:
    """How many lanes the chunks of `n` symbols have: a power of two."""
    return min(MOST_LANES, 1 << max(0, (n - 1) // SYMBOLS_OF_LANE).bit_length())


def chunks_of(n: int) -> int:
    """How many chunks `n` symbols have."""
    return -(-n // CHUNK)


def encode_lanes(table: Tensor, symbols: Tensor, made: Tables | None = None) -> list[Tensor]:
    """The bytes of `symbols`, uint8 [n], by the tables of these numbers, uint8 [n]; in parts.

    Tables are those of classes, or others that the caller made.
    """
    made = made or tables()
    frequency, start, _ = made.tensors
    lanes, chunks = lanes_of(len(symbols)), chunks_of(len(symbols))
    which = _by_step(table, made.certain, lanes).long() * SYMBOLS + _by_step(symbols, 0, lanes)
    states = torch.full((chunks, lanes), _LOWEST, dtype=torch.int64)
    sends = torch.empty(which.shape, dtype=torch.bool)
    words = torch.empty(which.shape, dtype=torch.int16)
    for step in reversed(range(len(which))):
        f, s = frequency[which[step]], start[which[step]]
        full = states >> 20 >= f
        sends[step] = full
        words[step] = states
        states = torch.where(full, states >> 16, states)
        quotients = states // f
        states = (quotients << PROBABILITY_BITS) + (states - quotients * f) + s
    counts = sends.sum((0, 2))
    sent = words.transpose(0, 1)[sends.transpose(0, 1)]
    parts = counts.to(torch.int16), states.to(torch.int32).view(-1), sent
    return [tensor_bytes(part.contiguous()) for part in parts]


def decode_lanes(table: Tensor, coded: Tensor, made: Tables | None = None) -> tuple[Tensor, Tensor]:
    """The symbols, uint8 [n], that bytes code by the tables of these numbers, uint8 [n], and the bytes behind them.

    Raises CodecError if these bytes are no such code.
    """
    made = made or tables()
    slots = made.tensors[2]
    lanes, chunks = lanes_of(len(table)), chunks_of(len(table))
    counts, states, words, rest = split(coded, len(table))
    ends = counts.cumsum(0)
    at = (ends - counts).unsqueeze(1)
    which = _by_step(table, made.certain, lanes).long() * TOTAL
    symbols = torch.empty(which.shape, dtype=torch.uint8)
    states = states.view(chunks, lanes)
    for step in range(len(which)):
        found = slots[which[step] + (states & (TOTAL - 1))]
        symbols[step] = found  # its low byte
        states = ((found >> 8 & (TOTAL - 1)) + 1) * (states >> PROBABILITY_BITS) + (found >> 20)
        needs = states < _LOWEST
        places = (at + needs.cumsum(1) - 1).clamp_(0, len(words) - 1)
        states = torch.where(needs, states << 16 | words[places], states)
        at = at + needs.sum(1, keepdim=True)
    if not bool((at.squeeze(1) == ends).all() and (states == _LOWEST).all()):
        raise CodecError(DAMAGED)
    return symbols.transpose(0, 1).reshape(-1)[: len(table)], rest


DAMAGED = "a payload's coded symbols must end where its words end, in the states where they began"


def split(coded: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The counts, the states and the words of `n` symbols, int64, one word more than there are, and what is behind."""
    lanes, chunks = lanes_of(n), chunks_of(n)
    head = chunks * (WORD + lanes * STATE)
    require_bytes(coded, head)
    counts = integers(coded[: chunks * WORD], torch.int16) & 0xFFFF
    stop = head + WORD * int(counts.sum())
    require_bytes(coded, stop)
    states = integers(coded[chunks * WORD : head], torch.int32) & 0xFFFFFFFF
    words = integers(coded[head:stop], torch.int16) & 0xFFFF
    return counts, states, torch.nn.functional.pad(words, (0, 1)), coded[stop:]


def integers(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers of a dtype in bytes at any address, as int64."""
    return packed.clone().view(dtype).long()


def require_bytes(coded: Tensor, size: int) -> None:
    """Raise CodecError if there are fewer bytes."""
    if len(coded) < size:
        raise CodecError(f"a payload's coded symbols need {size} bytes here, and {len(coded)} are there")


def _by_step(values: Tensor, beyond: int, lanes: int) -> Tensor:
    """uint8 [n] as [steps, chunks, lanes], with something beyond the end."""
    chunks = chunks_of(len(values))
    steps = -(-min(len(values), CHUNK) // lanes)
    padded = torch.nn.functional.pad(values, (0, chunks * steps * lanes - len(values)), value=beyond)
    return padded.view(chunks, steps, lanes).transpose(0, 1).contiguous()
