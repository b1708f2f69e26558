"""What goes wrong in a user's function is one sentence that names it."""

from functools import partial

import pytest

from thinwire.errors import ThinwireError
from thinwire.errors.calls import call, called, first_line


def divide(a, b):
    return a / b


def refuse(a):
    raise ThinwireError("a must be even, got 3")


def told(function, *arguments):
    with pytest.raises(ThinwireError) as caught:
        call(function, *arguments, name="my.divide", takes="(a, b)", error=ThinwireError, where="for two numbers")
    return str(caught.value)


def test_the_result_is_handed_on():
    assert call(divide, 6, 3, name="my.divide", takes="(a, b)", error=ThinwireError) == 2


def test_other_parameters_are_told():
    assert told(divide, 6) == "my.divide must take (a, b): missing a required argument: 'b'"
    assert told(divide, 6, 3, 1) == "my.divide must take (a, b): too many positional arguments"


def test_a_failure_is_told_with_its_line():
    line = divide.__code__.co_firstlineno + 1
    said = told(divide, 6, 0)
    assert (
        said == f"my.divide failed for two numbers: ZeroDivisionError: division by zero (line {line} of test_calls.py)"
    )


def test_a_type_error_inside_is_no_wrong_parameter():
    assert told(divide, 6, "x").startswith("my.divide failed for two numbers: TypeError: unsupported operand")


def test_a_mistake_that_the_function_tells_itself_passes():
    assert told(refuse, 3) == "a must be even, got 3"


def test_a_function_without_a_signature_is_told_too():
    assert told(int, "x").startswith("my.divide failed for two numbers: ValueError: invalid literal")


def test_functions_are_called_by_their_path():
    assert called(divide) == called(partial(divide, 3)) == f"{__name__}.divide"


def test_a_heading_brings_the_line_below_it():
    """A configuration's error says what is wrong in its second line."""
    assert first_line(ValueError("Validation error for layer_types:\n    it has 3 entries\nmore")) == (
        "ValueError: Validation error for layer_types: it has 3 entries"
    )
    assert (first_line(ValueError("one\ntwo")), first_line(KeyError())) == ("ValueError: one", "KeyError")
