"""The rules that codecs and feedback keep: `check` tries all of them on one, of Thinwire or of your own.

Both ends of a boundary trust a codec. The receiver posts a buffer of exactly `nbytes`, both ends write buffers of
feedback from the decoded payload, and a run can be repeated from its seed. A codec that breaks a rule trains something
else, or stops a run hours after its start.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, CodecError, ContractError, Described, Key, call_method, size_of
from thinwire.compress.feedback import Feedback, Method
from thinwire.compress.stores.store import Loan
from thinwire.errors.calls import first_line

_KEY = Key(seed=1, boundary=0, channel="activations", phase="train", step=2, microbatch=3)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
_SHAPES = ((), (1,), (7,), (64,), (3, 5), (2, 4, 8), (3, 5, 7), (2, 3, 4, 5), (64, 128), (0,), (3, 0))
_SPECIAL: Mapping[str, Callable[[Tensor], Tensor]] = {
    "all 0": torch.zeros_like,
    "all 1": torch.ones_like,
    "times 1000": lambda x: 1000 * x,
    "times 0.001": lambda x: 0.001 * x,
    "with a NaN": lambda x: _with(x, torch.nan),
    "with an infinity": lambda x: _with(x, torch.inf),
}
_LEAST_REACHED = 0.01
"""Of an error bound: less, for the worst element of all tensors, and the bound says nothing."""
_NEAR = 8
"""Bytes by which a codec may miss the size of its payload, and be told by how many."""
_MESSAGES = 3
_TRIAL = ((3, 5, 7), (2, 4, 8))
"""Shapes whose number of elements is odd, and a multiple of 8."""


def check(method: Method) -> None:
    """Try every rule of codecs on tensors of many shapes, dtypes and values; of feedback, on the two ends of a slot.

    A tensor that the codec refuses by a CodecError is left out, but it must take some of float32. A codec that needs
    the indices of another one (`reuse`) cannot be checked alone.

    Raises:
        ContractError: with a sentence for each rule that is broken, and the first tensor that showed it.
    """
    given: object = method
    if isinstance(given, Feedback):
        check_feedback(given)
        return
    if not isinstance(given, Codec):
        made = f"{given.__name__}()" if isinstance(given, type) else "parse(text)"
        raise ContractError([f"check takes a codec or a feedback rule, such as {made}, got {given!r}"])
    codec = given
    require_hashable(codec)
    found = defaultdict[str, list[str]](list)  # by rule, a sentence for each tensor that showed it
    for sentence in _described(codec):
        found[sentence].append(sentence)
    taken, reached = set(), list[float]()
    for words, x in _tensors():
        try:
            carried = _carry(codec, x)
            taken.add(x.dtype)
            for rule, broken in _RULES.items() if x.numel() else [(_NOTHING, _size)]:
                if detail := broken(carried):
                    found[rule].append(f"{codec.name} {rule}: {detail} for {words}")
            reached += _reached(carried)
        except ContractError as error:
            found[re.split(" for |, got", str(error))[0]].append(str(error))
        except CodecError:
            continue
    if torch.float32 not in taken and not found:
        found[""].append(f"{codec.name} must take a float32 tensor of some shape, and refused all")
    if reached and max(reached) < _LEAST_REACHED:
        share = f"the largest error is {max(reached):.2g} of it"
        found[""].append(f"{codec.name} must keep its error_bound near its errors: {share}")
    if found:
        raise ContractError([_counted(*sentences) for sentences in found.values()])


def check_feedback(rule: Feedback) -> None:
    """Send some messages of one slot, and compare the buffers of both ends.

    Raises:
        ContractError: with a sentence for each rule that is broken.
    """
    require_hashable(rule)
    with torch.no_grad():
        broken = dict.fromkeys(sentence for number in range(_MESSAGES) for sentence in _kept_apart(rule, number))
    if broken:
        raise ContractError(list(broken))


def _kept_apart(rule: Feedback, number: int) -> Iterator[str]:
    """What is wrong with a rule where a slot holds the buffer `number`, and a message of other numbers comes."""
    shape = (1, 64)
    x, before = _gaussian(shape, torch.float32).roll(number + 1), number * _gaussian(shape, torch.float32)
    loan = Loan(torch.zeros(1, dtype=torch.int64), (before.clone(),))
    try:
        payload = torch.zeros(size_of(rule.inner, x.shape, x.dtype), dtype=torch.uint8)
        message = rule.encode(x.clone(), loan, payload, _KEY)
        decoded = _decoded(rule.inner, payload, x)
    except ContractError:
        raise
    except CodecError:  # the codec refuses such a tensor, as it may
        return
    if not torch.equal(loan.parts[0], before):
        yield f"{rule.name}'s write_message and encode must leave the buffer as it is"
    kept, received, in_place = before.clone(), decoded.clone(), decoded.clone()
    rule.advance(message.clone(), decoded.clone(), kept)
    rule.receive(received, before.clone())
    if rule.receiver_keeps and not torch.equal(received, kept):
        yield (
            f"{rule.name}'s receive must make of a message what advance makes of the sender's buffer, or the ends part"
            f"; write both, or set receiver_keeps to False"
        )
    if rule.forgets:
        rule.advance(message.clone(), in_place, in_place)
        if not torch.equal(in_place, kept):
            yield f"{rule.name}'s advance must not read the buffer, because forgets is True; set it to False"


def require_hashable(described: Described) -> None:
    """Raise ContractError if an argument is a list, or anything else that cannot be the key of a table."""
    try:
        hash(described)
    except TypeError as error:
        raise ContractError(
            f"{described.name}'s arguments must be hashable, such as a tuple in place of a list, got {error}"
        ) from None


def try_out(codec: Codec) -> None:
    """Encode and decode two tensors, as a quick check; ContractError if a method of the codec fails."""
    for shape in _TRIAL:
        try:
            _carry(codec, _gaussian(shape, torch.float32))
        except ContractError:
            raise
        except CodecError:  # the codec refuses such a tensor, as it may
            continue


@dataclass(frozen=True)
class _Carried:
    """A tensor, and what it became."""

    codec: Codec
    x: Tensor
    payload: Tensor
    decoded: Tensor


def _counted(first: str, *others: str) -> str:
    return f"{first} (and for {len(others)} other tensors)" if others else first


def _described(codec: Codec) -> Iterator[str]:
    """What is wrong with the class."""
    parameters = getattr(codec, "__dataclass_params__", None)
    if not (
        parameters and parameters.frozen and repr(codec) == str(codec) and "__dataclass_params__" in vars(type(codec))
    ):
        yield f"{codec.name} must have the decorator @dataclass(frozen=True, repr=False)"
    elif dataclasses.replace(codec) != codec:  # type: ignore[type-var]
        yield f"{codec.name} must equal another one of the same arguments"


def _size(carried: _Carried) -> str | None:
    return f"{len(carried.payload)} bytes" if len(carried.payload) else None


def _filling(carried: _Carried) -> str | None:
    size, x = len(carried.payload), carried.x
    for fill in (0x00, 0xFF):
        buffer = torch.full((size + 16,), fill, dtype=torch.uint8)
        carried.codec.encode(x.clone(), buffer[3 : 3 + size], _KEY)
        if not ((buffer[:3] == fill).all() and (buffer[3 + size :] == fill).all()):
            return "bytes beside the payload were written"
        if not torch.equal(buffer[3 : 3 + size], carried.payload):
            return "another payload where the buffer held other bytes, or lay elsewhere"
    return None


def _input(carried: _Carried) -> str | None:
    given = carried.x.clone()
    carried.codec.encode(given, carried.payload.clone(), _KEY)
    return None if _same(given, carried.x) else "it was changed"


def _strides(carried: _Carried) -> str | None:
    x = carried.x
    if x.numel() < 2 or not x.isfinite().all():  # there are many NaNs, and torch may turn one into another
        return None
    spread = torch.stack([x, x], -1)[..., 0]
    turned = x.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1) if x.dim() else x.clone()
    same = all(torch.equal(_encoded(carried.codec, view), carried.payload) for view in (spread, turned))
    return None if same else "another payload from other strides"


def _randomness(carried: _Carried) -> str | None:
    state = torch.get_rng_state()
    again = _carry(carried.codec, carried.x)
    if not torch.equal(torch.get_rng_state(), state):
        return "torch's own generator was moved"
    same = torch.equal(again.payload, carried.payload) and _same(again.decoded, carried.decoded)
    return None if same else "another result with the same key"


def _output(carried: _Carried) -> str | None:
    x, payload = carried.x, carried.payload.clone()
    out = torch.full(x.shape, 77, dtype=x.dtype)
    carried.codec.decode(payload, out, _KEY)
    if not torch.equal(payload, carried.payload):
        return "the payload was changed"
    return None if _same(out, carried.decoded) else "another tensor where the memory held other values"


def _unused(carried: _Carried) -> str | None:
    used = carried.codec.used(carried.payload)
    if used != len(carried.payload) and not (carried.codec.varies and 0 <= used < len(carried.payload)):
        return f"{used} of {len(carried.payload)} bytes are used"
    payload = carried.payload.clone()
    payload[used:] = 0xA5
    again = _decoded(carried.codec, payload, carried.x)
    return None if _same(again, carried.decoded) else "other bytes are read"


def _error(carried: _Carried) -> str | None:
    x, decoded = carried.x, carried.decoded
    bound = call_method(carried.codec, "error_bound", x)
    if not isinstance(bound, Tensor):
        return f"error_bound must return a tensor, got {type(bound).__name__}"
    try:
        bound = bound.double().broadcast_to(x.shape)
    except RuntimeError:
        return f"error_bound of shape {list(bound.shape)} does not broadcast"
    if x.isfinite().all() and not bound.isfinite().all():
        return "error_bound is not finite where every value is"
    error, bounded = (decoded.double() - x.double()).abs(), bound.isfinite()
    lost = x.isfinite().logical_not() & decoded.isfinite() & bounded
    if lost.any():
        return "NaN or infinity became a finite number"
    beyond = x.isfinite() & bounded & ~(error <= bound)
    if not beyond.any():
        return None
    index = int(beyond.flatten().nonzero()[0])
    got, most = (values.flatten()[index].item() for values in (error, bound))
    return f"an error of {got:.3g} where error_bound says {most:.3g}"


def _reached(carried: _Carried) -> list[float]:
    """The largest error of float32 over its bound; none where the bound is broken, or 0."""
    x = carried.x
    if x.dtype != torch.float32 or _error(carried):
        return []
    bound = carried.codec.error_bound(x).double().broadcast_to(x.shape)
    shares = ((carried.decoded.double() - x.double()).abs() / bound)[x.isfinite() & bound.isfinite() & (bound > 0)]
    return [shares.max().item()] if shares.numel() else []


def _damage(carried: _Carried) -> str | None:
    size, generator = len(carried.payload), torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    for damaged in (torch.zeros_like(noise), torch.full_like(noise, 255), noise):
        try:
            _decoded(carried.codec, damaged, carried.x)
        except ContractError as error:
            return str(error).partition(": ")[2]
        except CodecError:
            continue
    return None


def _length(carried: _Carried) -> str | None:
    size = len(carried.payload)
    for other in {max(0, size - 1), size + 1} - {size}:
        try:
            _decoded(carried.codec, torch.zeros(other, dtype=torch.uint8), carried.x)
            return f"{other} bytes in place of {size} were decoded"
        except (AssertionError, CodecError):
            continue
        except Exception as error:
            return f"{other} bytes in place of {size} ended with {first_line(error)}"
    return None


_RULES: Mapping[str, Callable[[_Carried], str | None]] = {
    "must write its whole payload and nothing else": _filling,
    "must leave the tensor that it encodes as it is": _input,
    "must encode a tensor of any strides alike": _strides,
    "must draw random numbers from the key alone": _randomness,
    "must fill the decoded tensor from the payload alone": _output,
    "must decode from the bytes that are used": _unused,
    "must keep its error_bound": _error,
    "must decode damaged bytes to something, or raise CodecError": _damage,
    "must refuse a payload of another length": _length,
}
"""What a codec must do with a tensor, and what finds that it does not: the detail, or None."""

_NOTHING = "must send 0 bytes of a tensor without elements"


def _tensors() -> Iterator[tuple[str, Tensor]]:
    """Tensors, and what they are called."""
    for dtype in _DTYPES:
        for shape in _SHAPES:
            yield _name(shape, dtype), _gaussian(shape, dtype)
        for what, change in _SPECIAL.items() if dtype.is_floating_point else ():
            yield f"{_name((4, 33), dtype)}, {what}", change(_gaussian((4, 33), dtype))


def _name(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    refused = "" if dtype.is_floating_point else ", which nbytes may refuse by a CodecError"
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}{refused}"


def _gaussian(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)).to(dtype)


def _with(x: Tensor, value: float) -> Tensor:
    changed = x.clone()
    changed[1, 5] = value
    return changed


def _carry(codec: Codec, x: Tensor) -> _Carried:
    payload = _encoded(codec, x.clone())  # a codec may break the rule that it leaves its input as it is
    return _Carried(codec, x, payload, _decoded(codec, payload, x))


def _encoded(codec: Codec, x: Tensor) -> Tensor:
    size = size_of(codec, x.shape, x.dtype)
    payload = torch.zeros(size, dtype=torch.uint8)
    try:
        codec.encode(x, payload, _KEY)
    except ContractError:
        if (written := _written(codec, x, size)) is None:
            raise
        wrong = f"got {size} for {_name(tuple(x.shape), x.dtype)}, where it writes {written}"
        raise ContractError(f"{codec.name}'s nbytes must be the number of bytes that _encode writes, {wrong}") from None
    return payload


def _written(codec: Codec, x: Tensor, size: int) -> int | None:
    """The bytes that a codec fills, if they are a few more or less than `size`, which it failed to fill."""
    for other in range(max(0, size - _NEAR), size + _NEAR + 1):
        try:
            call_method(codec, "_encode", x, torch.zeros(other, dtype=torch.uint8), _KEY, None)
            return other
        except CodecError:
            continue
    return None


def _decoded(codec: Codec, payload: Tensor, like: Tensor) -> Tensor:
    out = torch.zeros(like.shape, dtype=like.dtype)
    codec.decode(payload, out, _KEY)
    return out


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=0.5), other.nan_to_num(nan=0.5)) and torch.equal(one.isnan(), other.isnan())
