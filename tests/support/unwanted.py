"""Which files of tests need not be imported, as none of their tests is wanted."""

import re


def nothing_wanted(path, expression):
    """Whether a file marks all its tests, in `pytestmark`, with what an expression like `not a and not b` excludes."""
    if path.suffix != ".py" or not re.fullmatch(r"not \w+( and not \w+)*", expression):
        return False
    [marked] = re.findall(r"^pytestmark = .*\n(?:    .*\n)*", path.read_text(), re.MULTILINE) or [""]
    return not {*re.findall(r"mark\.(\w+)", marked)}.isdisjoint(expression.split())
