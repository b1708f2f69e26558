"""Tensors for the fused kernels, and the comparison with the eager code."""

import torch

from support.codec_helpers import KEY, gaussian
from thinwire.compress.codecs.indices import largest_magnitudes
from thinwire.compress.codecs.quantizer import GridQuantizer

CPU_CASES = [
    (expression, dtype)
    for expression, dtypes in {
        'q(2, grid="midrise")': (torch.float32, torch.bfloat16),
        'q(4, grid="midrise")': (torch.float32, torch.bfloat16, torch.float16),
        'q(8, grid="midrise")': (torch.float32, torch.float16),
        'q(4, per="tensor", grid="midrise")': (torch.bfloat16,),
        'q(2, group=24, grid="midrise")': (torch.float32,),
        'q(2, scale="minmax")': (torch.float32, torch.bfloat16),
        'q(8, scale="minmax", per="tensor")': (torch.float32, torch.float16),
        'q(4, scale="minmax", group=8)': (torch.bfloat16,),
        "q(1)": (torch.float32,),
        'q(3, grid="midrise")': (torch.float32,),
        'q(5, grid="midrise")': (torch.float32,),
        'q(6, group=8, grid="midrise")': (torch.float32,),
        'q(7, per="tensor", grid="midrise")': (torch.float32,),
        "q(4)": (torch.float32, torch.bfloat16),
        "q(4, group=20)": (torch.float32,),
    }.items()
    for dtype in dtypes
]
INF, NAN = float("inf"), float("nan")
SHAPES = {"one": (1,), "ragged": (13,), "rows": (3, 2, 40), "images": (2, 3, 4, 6), "long": (1, 20003)}
SPECIAL = {
    "zeros": lambda: torch.zeros(4, 8),
    "negative zeros": lambda: torch.full((4, 8), -0.0),
    "zeros of both signs": lambda: torch.tensor([[0.0, -0.0, 0, 1, 2, 3, -0.0, 4], [-0.0, 0, 1, 2, 3, 4, 5, 0]]),
    "only zeros, of both signs": lambda: torch.tensor([-0.0, 0.0]).repeat(4, 8),
    "constant": lambda: torch.full((4, 8), -1.75),
    "subnormal": lambda: gaussian(4, 8) * 1e-39,
    "tiny beside one": lambda: torch.tensor([[1.0, -1e-40, 1e-40, -1e-45, 0.0, -1.0, 1e-38, -1e-38]]),
    "huge": lambda: gaussian(4, 8).sign() * 3.38e38,
    "ties": lambda: torch.arange(-16.0, 16.0).view(4, 8) / 2,
    "infinities": lambda: torch.tensor([[1.0, INF, -2, 3, 4, 5, 6, 7], [1, -INF, -2, 3, 4, 5, 6, INF], [INF] * 8]),
    "nan": lambda: torch.tensor([[1.0, NAN, -2, 3, 4, 5, 6, 7], [NAN] * 8, [1, 2, 3, 4, 5, 6, 7, 8]]),
    "strided": lambda: gaussian(24, 5).t()[:, ::3],
}


SELECTED = {
    "few": ((3, 13), 0.3),
    "rows": ((5, 100), 0.1),
    "most": ((4, 33), 0.7),
    "one of two": ((2, 2), 0.5),
    "a power of two": ((2, 1024), 0.1),
}
"""Rows, and the share of each that is selected."""


def selected(name, how, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    """What differs between the places that `how` selects and those of a CPU, in words; "" if nothing does."""
    shape, share = SELECTED[name]
    plain = gaussian(*shape)
    kinds = {
        "all different": plain,
        "many equal": plain.mul(2).round(),
        "zeros": plain.relu(),
        "nothing but zeros": plain * 0,
        "with NaN and infinity": torch.where(plain > 1, NAN, torch.where(plain < -1, -INF, plain)),
    }
    for dtype in dtypes:
        for kind, x in kinds.items():
            k, integer = max(1, round(share * shape[1])), torch.int32 if dtype == torch.float32 else torch.int16
            wanted = largest_magnitudes(x.to(dtype), k)
            if not torch.equal(how(x.to(dtype).view(integer) & torch.iinfo(integer).max, k).cpu(), wanted):
                return f"{name}, {kind}, {dtype}"
    return ""


def tensor_of(name, dtype):
    return (SPECIAL[name]() if name in SPECIAL else gaussian(*SHAPES[name])).to(dtype)


def differing(codec, x, fused):
    """What differs between the fused and the eager way, in words; "" if nothing does, but for the bits of a NaN."""
    grid, eager = codec._grid, GridQuantizer(codec._grid, codec._blocks)
    wanted = torch.zeros(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8, device=x.device)
    eager.encode(x, wanted, KEY)
    payload, decode = fused(codec, x)
    size = grid.scales_size(codec._blocks(x.shape).count)
    scales, others = (part[:size].clone().view(grid.scale_dtype) for part in (payload, wanted))
    same = scales.view(torch.uint8) == others.view(torch.uint8)
    either = same.view(len(scales), -1).all(1) | (scales.isnan() & others.isnan())
    if not either.all():
        return f"scales {scales.tolist()[:4]}, not {others.tolist()[:4]}"
    if not torch.equal(payload[size:], wanted[size:]):
        return f"codes {payload[size:].tolist()[:16]}, not {wanted[size:].tolist()[:16]}"
    values, expected = (torch.full(x.shape, 77, dtype=x.dtype, device=x.device) for _ in range(2))
    decode(wanted, values)
    eager.decode(wanted, expected)
    zeros = (values == 0) & (values.signbit() != expected.signbit())
    if zeros.any() or not torch.equal(values.nan_to_num(123), expected.nan_to_num(123)):
        return f"values {values.flatten().tolist()[:8]}, not {expected.flatten().tolist()[:8]}"
    return ""
