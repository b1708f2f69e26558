"""Codec expressions: Python call syntax, the same on the command line, in recipes, in logs and in `repr`.

    expression = NAME | NAME(argument, ..)          none   q(4)   q(2, scale="minmax", per="tensor")   ef(topk(0.1))
    argument   = value | NAME=value                 value: a number, a quoted string, or an expression

    NAME       = the name of a codec or a feedback rule, or the path of your own class: my_codecs.Sign(2)

The text is parsed into a syntax tree and never evaluated. The dataclass of that name checks the arguments. The module
of a path is imported, from the current directory too, as for `module:factory` of models.
"""

import ast
import inspect
import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import get_type_hints

from thinwire.compress.codec import Codec, CodecError, ContractError
from thinwire.compress.codecs.cast import BFloat16, Float16, Uncompressed
from thinwire.compress.codecs.fp8 import Float8
from thinwire.compress.codecs.quantize import Quantize
from thinwire.compress.codecs.reuse import Reuse
from thinwire.compress.codecs.sparse import RandK, TopK
from thinwire.compress.feedback import (
    ActivationDifference,
    DifferenceFeedback,
    ErrorFeedback,
    Feedback,
    Method,
    MixedErrorFeedback,
)
from thinwire.compress.rules import check_feedback, require_hashable, try_out
from thinwire.errors import attempt
from thinwire.errors.calls import call
from thinwire.errors.imports import find_in
from thinwire.errors.names import did_you_mean

CODECS: Mapping[str, type[Codec]] = MappingProxyType(
    {codec.name: codec for codec in (Uncompressed, Float16, BFloat16, Float8, Quantize, TopK, RandK, Reuse)}
)
"""Every codec by its name in expressions."""

FEEDBACK: Mapping[str, type[Feedback]] = MappingProxyType(
    {rule.name: rule for rule in (ErrorFeedback, MixedErrorFeedback, DifferenceFeedback, ActivationDifference)}
)
"""Every feedback rule by its name in expressions."""

_NO_CODEC = " is not a codec: write a name or a call, such as none or q(4)"

_KNOWN: Mapping[str, type[Codec] | type[Feedback]] = MappingProxyType({**CODECS, **FEEDBACK})


_PLAIN: Mapping[object, tuple[str, tuple[type, ...]]] = MappingProxyType(
    {
        int: ("an integer", (int,)),
        float: ("a number", (int, float)),
        bool: ("True or False", (bool,)),
        str: ("a quoted string", (str,)),
    }
)
"""By the type that a field declares: the value in words, and the types that it may have."""

LONGEST = 500
"""The most characters of an expression, several times what a useful one needs."""


def parse(expression: str) -> Method:
    """The codec or feedback that `expression` describes; `parse(str(method)) == method` for all of them.

    Raises CodecError if the text is not a known name, alone or with arguments that it takes.
    """
    if not isinstance(expression, str):
        raise CodecError(f'a codec is written as text, such as "q(4)", got {expression!r}')
    if len(expression) > LONGEST:
        raise CodecError(
            f"an expression must have at most {LONGEST} characters, got {len(expression)}: {expression[:40]!r}..."
        )
    try:
        return _method(ast.parse(expression.strip(), mode="eval").body, expression)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"{expression!r}{_NO_CODEC}{_dot_hint(expression)}") from None


def _dot_hint(expression: str) -> str:
    """A hint for a path that is written as in other options, `my_codecs:Sign(2)`."""
    written = re.match(r"\s*([\w.]+):(\w+)", expression)
    return f"; a codec of your own is written with a dot: {written[1]}.{written[2]}" if written else ""


def _method(node: ast.expr, expression: str) -> Method:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = _path(call.func)
    if name is None:
        raise CodecError(f"{expression!r}{_NO_CODEC}")
    described = _described(name, expression)
    options = {option.arg: option.value for option in call.keywords if option.arg}
    if len(options) < len(call.keywords):
        raise CodecError(f"{expression!r} must name each argument, and only once")
    parameters = inspect.signature(described)
    given = attempt(*(partial(_value, node, expression) for node in (*call.args, *options.values())))
    arguments = given[: len(call.args)]
    try:
        bound = parameters.bind(*arguments, **dict(zip(options, given[len(arguments) :], strict=True)))
    except TypeError as error:
        usage = f"{name}({', '.join(parameters.parameters)})" if parameters.parameters else name
        raise CodecError(f"{expression!r}: {error}; write {usage}") from None
    if described.name in _KNOWN:
        return described(*bound.args, **bound.kwargs)
    return _made(described, bound)


def _made(described: type[Codec] | type[Feedback], bound: inspect.BoundArguments) -> Method:
    """The user's codec or feedback with these arguments, of the types it declares, tried out once."""
    kinds = call(get_type_hints, described, name=described.name, takes="such fields", error=ContractError)
    for argument, value in bound.arguments.items():
        meaning, allowed = _PLAIN.get(kinds.get(argument), ("", (type(value),)))
        if type(value) not in allowed:
            raise CodecError(f"{described.name}'s {argument} must be {meaning}, got {value!r}")
    made: Method = call(
        lambda: described(*bound.args, **bound.kwargs),
        name=described.name,
        takes="these arguments",
        error=ContractError,
    )
    require_hashable(made)
    if isinstance(made, Codec) and not made.reuses_indices:
        try_out(made)
    elif isinstance(made, Feedback) and described not in FEEDBACK.values():
        check_feedback(made)
    return made


def _path(node: ast.expr) -> str | None:
    """The name or dotted path of a node; None for other nodes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _path(node.value)):
        return f"{owner}.{node.attr}"
    return None


def _described(name: str, expression: str) -> type[Codec] | type[Feedback]:
    if "." in name:
        return _imported(name, expression)
    if name not in _KNOWN:
        raise CodecError(
            f"unknown codec {name!r}{did_you_mean(name, _KNOWN)} in {expression!r}; the codecs are "
            f"{', '.join(sorted(CODECS))}, and feedback around them {', '.join(sorted(FEEDBACK))}; a codec of your own "
            "is written as module.Class"
        )
    return _KNOWN[name]


def _imported(path: str, expression: str) -> type[Codec] | type[Feedback]:
    """The user's class at a path; its module is imported from the current directory too."""
    module_name, _, class_name = path.rpartition(".")
    found = find_in(module_name, class_name, expression, CodecError)
    if not isinstance(found, type):
        raise CodecError(f"{expression!r}{_NO_CODEC}")
    if not issubclass(found, Codec | Feedback):
        raise CodecError(f"{expression!r}: {path} must be a class that extends thinwire.compress.Codec or Feedback")
    if found.name != path:
        raise CodecError(f"{expression!r}: the name of {path} in expressions is {found.name}; write that")
    if inspect.isabstract(found):
        raise CodecError(f"{expression!r}: {path} must define {', '.join(sorted(found.__abstractmethods__))}")
    if not getattr(vars(found).get("__dataclass_params__"), "frozen", False):
        raise CodecError(f"{expression!r}: {path} must have the decorator @dataclass(frozen=True, repr=False)")
    return found


def _value(node: ast.expr, expression: str) -> object:
    """An argument's value: a literal or an expression."""
    named = node.func if isinstance(node, ast.Call) else node
    name = _path(named)
    if name is not None and (isinstance(node, ast.Call) or "." in name or name in _KNOWN):
        return _method(node, expression)
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError):
        raise CodecError(
            f"each argument of {expression!r} must be a number, a quoted string or an expression"
        ) from None
