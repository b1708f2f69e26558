"""Codec expressions: Python call syntax, the same on the command line, in recipes, in logs and in ``repr``.

    expression = NAME | NAME(argument, ..)          none   q(4)   q(2, scale="minmax", per="tensor")   ef(topk(0.1))
    argument   = value | NAME=value                 value: a number, a quoted string, or an expression

The text is parsed into a syntax tree and never evaluated; the dataclass behind the name checks the arguments.
"""

import ast
import inspect
from collections.abc import Mapping
from types import MappingProxyType

from thinwire.compress.codec import Codec, CodecError
from thinwire.compress.codecs.cast import BFloat16, Float16, Uncompressed
from thinwire.compress.codecs.dither import Dither
from thinwire.compress.codecs.fp8 import Float8
from thinwire.compress.codecs.lowrank import LowRank
from thinwire.compress.codecs.quantize import Quantize
from thinwire.compress.codecs.sparse import RandK, Reuse, TopK
from thinwire.compress.feedback import (
    ActivationDifference,
    DifferenceFeedback,
    ErrorFeedback,
    Feedback,
    Method,
    MixedErrorFeedback,
)

CODECS: Mapping[str, type[Codec]] = MappingProxyType(
    {
        codec.name: codec
        for codec in (Uncompressed, Float16, BFloat16, Float8, Quantize, Dither, TopK, RandK, Reuse, LowRank)
    }
)
"""Every codec by its name in expressions."""

FEEDBACK: Mapping[str, type[Feedback]] = MappingProxyType(
    {rule.name: rule for rule in (ErrorFeedback, MixedErrorFeedback, DifferenceFeedback, ActivationDifference)}
)
"""Every feedback rule by its name in expressions."""

_KNOWN: Mapping[str, type[Codec] | type[Feedback]] = MappingProxyType({**CODECS, **FEEDBACK})


def parse(expression: str) -> Method:
    """Return the codec or feedback that ``expression`` describes; ``parse(str(method)) == method`` for all of them.

    Raises :class:`CodecError` for anything that is not such a name, alone or called with arguments it takes.
    """
    if not isinstance(expression, str):
        raise CodecError(f'a codec is written as text, such as "q(4)", got {expression!r}')
    try:
        node = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise CodecError(f"{expression!r} is no codec: write a name or a call, such as none or q(4)") from None
    return _method(node, expression)


def _method(node: ast.expr, expression: str) -> Method:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise CodecError(f"{expression!r} is no codec: write a name or a call, such as none or q(4)")
    name = call.func.id
    if name not in _KNOWN:
        raise CodecError(
            f"unknown codec {name!r} in {expression!r}; the codecs are {', '.join(sorted(CODECS))}, and feedback "
            f"around them {', '.join(sorted(FEEDBACK))}"
        )
    options = {option.arg: option.value for option in call.keywords if option.arg}
    if len(options) < len(call.keywords):
        raise CodecError(f"{expression!r} must name each argument, and only once")
    parameters = inspect.signature(_KNOWN[name])
    arguments = [_value(argument, expression) for argument in call.args]
    values = {option: _value(value, expression) for option, value in options.items()}
    try:
        bound = parameters.bind(*arguments, **values)
    except TypeError as error:
        usage = f"{name}({', '.join(parameters.parameters)})" if parameters.parameters else name
        raise CodecError(f"{expression!r}: {error}; it is {usage}") from None
    return _KNOWN[name](*bound.args, **bound.kwargs)


def _value(node: ast.expr, expression: str) -> object:
    """An argument's value: a literal, or an expression of its own."""
    named = node.func if isinstance(node, ast.Call) else node
    if isinstance(named, ast.Name) and (isinstance(node, ast.Call) or named.id in _KNOWN):
        return _method(node, expression)
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError):
        raise CodecError(f"an argument in {expression!r} is neither a number nor a quoted string") from None
