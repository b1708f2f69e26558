"""A trial of what loaded files compute, before they compute it here: a tokenizer or a chat template is a program.

    echo '{"template": ..., "messages": [..]}' | python -m thinwire.models.data.trial
    echo '{"tokenizer": "/path/tokenizer.json"}' | python -m thinwire.models.data.trial

It runs in a process of its own with a limit of time and, on Linux, of memory. What a file computes for texts other than
those of the trial has no limit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from thinwire.models.errors import ModelError

SECONDS = 60.0
"""The most time that a trial may take; a usual one takes a tenth of a second, and 3 with the largest tokenizers."""
MEMORY = 2**31
"""The most memory that it may take beside its libraries."""
CHARACTERS = 2**23
"""The most characters that a chat template may make of a conversation."""
_SHOWN = 200
_GROWTH = 16
"""The most tokens for each character beside a few; bytes of a sign, or of its parts in Unicode, are fewer."""


@cache
def tried(given: str, rule: str) -> None:
    """Try a tokenizer or a chat template.

    Args:
        given: JSON as above; a tokenizer may have a `mark` that changes with its file.
        rule: what it must be, to begin the sentence.

    Raises:
        ModelError: it takes too much time, memory or output, or ends the process. Its other errors are left to the use.
    """
    command = [sys.executable, "-P", "-m", "thinwire.models.data.trial"]
    try:
        ended = subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{rule}, and in a trial it takes more than {SECONDS:g} s; take another one") from None
    if ended.returncode:
        said = ended.stdout or f"it takes more than {MEMORY >> 30} GiB of memory, or fails"
        raise ModelError(f"{rule}, and in a trial {said}; take another one")


def is_error(raised: BaseException) -> bool:
    """Whether it is an error of a library; libraries in Rust have one that is no Exception."""
    return isinstance(raised, Exception) or type(raised).__name__ == "PanicException"


def _limit() -> None:
    """Give this process no more memory than it may take."""
    import resource

    taken = Path("/proc/self/statm")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if taken.exists():
        most = int(taken.read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _try_tokenizer(path: str) -> str | None:
    """Read a tokenizer.json and go there and back with all signs, runs of signs, and what the file replaces."""
    from tokenizers import Tokenizer

    _limit()
    content = Path(path).read_text()
    try:
        tokenizer = Tokenizer.from_file(path)
        with suppress(Exception):
            tokenizer.decode(tokenizer.encode("a", "a").ids)
    except BaseException as raised:
        return None if isinstance(raised, Exception) else f"it fails with {' '.join(str(raised).split())[:_SHOWN]}"
    replaced = [json.loads(f'"{text}"') for text in re.findall(r'"String"\s*:\s*"((?:[^"\\]|\\.)*)"', content)]
    signs = [chr(number) for number in range(32, 0x3000)]
    for text in ["".join(signs), *(sign * 50 + "!" for sign in signs[:95]), *replaced]:
        tokens = tokenizer.encode(text).ids
        tokenizer.decode(tokens)
        if len(tokens) > _GROWTH * (len(text) + _GROWTH):
            return f"it makes {len(tokens)} tokens of {len(text)} characters"
    return None


def _try_template(template: str, messages: list[Any], tools: list[Any]) -> str | None:
    """Let a chat template write a conversation, as transformers does."""
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    _limit()
    options: Any = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [Generation, "jinja2.ext.loopcontrols"]}
    environment = ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, indent=indent)
    size, given = 0, {"messages": messages, "tools": tools or None, "add_generation_prompt": True}
    for piece in environment.from_string(template).generate(**given, bos_token="", eos_token=""):
        if (size := size + len(piece)) > CHARACTERS:
            return f"it writes more than {CHARACTERS} characters of a conversation"
    return None


def _main() -> int:
    given = json.load(sys.stdin)
    try:
        said = _try_tokenizer(given["tokenizer"]) if "tokenizer" in given else _try_template(**given)
    except MemoryError:
        return 1
    except BaseException:
        return 0
    sys.stdout.write(said or "")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(_main())
