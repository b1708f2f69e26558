"""Huffman coding of bytes, by zstandard: what is frequent takes fewer bits.

Measured on packed codes of q(2), q(4) and q(8), a core of a Xeon that copies 4.3 GB/s, in MB/s of codes:

    library                         codes         decodes       size over entropy
    zstandard                       410 to 500    530 to 640    1.01 to 1.02
    python-isal, level 1            190 to 440    180 to 250    1.01 to 1.02
    zlib, Huffman only              50 to 58      106 to 113    1.01
"""

import threading

import torch
import zstandard
from torch import Tensor

from thinwire.compress.codec import CodecError


def huffman(symbols: Tensor) -> Tensor:
    """The coded bytes, uint8 [any length], of symbols: uint8, on a CPU."""
    coded = _own.compressor.compress(symbols.contiguous().numpy().data)
    return torch.frombuffer(bytearray(coded), dtype=torch.uint8)


def unhuffman(coded: Tensor, most: int) -> Tensor:
    """The symbols, uint8 [at most `most`], that `huffman` coded; CodecError if these bytes are no such code."""
    data = coded.contiguous().numpy().data
    try:
        # A size in the frame's header is not ours, and would be allocated unseen.
        if zstandard.frame_content_size(data) != -1:
            raise CodecError("a payload's coded symbols must not give their own size")
        symbols = _own.decompressor.decompress(data, max_output_size=most)
    except zstandard.ZstdError as error:
        raise CodecError(f"a payload's coded symbols cannot be decoded: {error}") from None
    if not symbols:
        raise CodecError("a payload must hold coded symbols, got none")
    return torch.frombuffer(bytearray(symbols), dtype=torch.uint8)


def unhuffman_exactly(coded: Tensor, n: int) -> Tensor:
    """The `n` symbols that `huffman` coded; CodecError if there are fewer."""
    symbols = unhuffman(coded, n)
    if len(symbols) != n:
        raise CodecError(f"a payload must hold {n} coded symbols, got {len(symbols)}")
    return symbols


_WINDOW_LOG = 17
"""The window that frames have at most, as a power of two; of a larger one memory would be taken unseen."""


def _parameters() -> zstandard.ZstdCompressionParameters:
    # Equal strings are not looked for: codes are close to random, and Huffman's stage is what counts.
    return zstandard.ZstdCompressionParameters(
        window_log=_WINDOW_LOG,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        strategy=zstandard.STRATEGY_FAST,
        write_content_size=0,
    )


class _Own(threading.local):
    """What each thread codes with; making them takes longer than coding a short tensor."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_parameters())
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)


_own = _Own()
