"""What becomes of conversations under the chat templates that TRL ships, as docs/reference/chat-templates.md.

    pip install --no-deps trl
    python docs/measured/chat_templates.py > docs/reference/chat-templates.md

Each template gets a tokenizer of bytes with its own special tokens, and ten conversations in which every word tells
whose it is. Right means: all words of the answers count, no word of others does, and they end by a special token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from thinwire.models.data.parts import Conversation
from thinwire.models.data.tokenizer import Pretrained
from thinwire.models.errors import ModelError

_SPECIAL = re.compile(r"<[|\uff5c]?[\w▁/:-]+[|\uff5c]?>|</?s>|\[/?[A-Za-z_]+\]|<\|[^|<>{}' ]+\|>|<\w+\|>")
_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|return|>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<|end|>")
_NO_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tools>", "</tools>")


def _user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def _called(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "fcall", "arguments": arguments}}
    told = {"role": "tool", "name": "fcall", "content": "utool"}
    return [_user("uone"), {"role": "assistant", "tool_calls": [call], **fields}, told, _answer("aone")]


_TURNS = [_user("uone"), _answer("aone"), _user("utwo"), _answer("atwo"), _user("uthree"), _answer("athree")]
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
_TOOLS = [{"type": "function", "function": {"name": "fcall", "description": "utool", "parameters": _SCHEMA}}]
CONVERSATIONS = {
    "1 turn": Conversation(_TURNS[:2]),
    "2 turns": Conversation(_TURNS[:4]),
    "3 turns": Conversation(_TURNS),
    "in a question": Conversation(_TURNS, 5),
    "system": Conversation([{"role": "system", "content": "usys"}, *_TURNS[:4]]),
    "reasoning": Conversation(
        [*_TURNS[:1], _answer("aone", reasoning_content="xone"), _TURNS[2], _answer("atwo", reasoning_content="xtwo")]
    ),
    "thinking inside": Conversation([*_TURNS[:3], _answer("<think>\nxtwo\n</think>\n\natwo")]),
    "parts": Conversation([{**each, "content": [{"type": "text", "text": each["content"]}]} for each in _TURNS[:4]]),
    "tools": Conversation([*_called({"city": "acity"}, content=""), *_TURNS[2:4]], tools=_TOOLS),
    "tools as JSON": Conversation(_called('{"city": "acity"}'), tools=_TOOLS),
}


def templates() -> dict[str, str]:
    """The templates by names. ImportError without TRL, of which nothing else is imported."""
    folder = Path(str(metadata.distribution("trl").locate_file("trl/chat_templates")))
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def tokenizer_of(template: str, folder: Path) -> Pretrained:
    """A tokenizer of bytes with a template and the special tokens that stand in it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    end = next((each for each in _ENDS if each in template), "</s>")
    found = dict.fromkeys([*_SPECIAL.findall(template), end, "</s>", "<s>"])
    made.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in found if each not in _NO_TOKENS]
    )
    end = "</s>" if "eos_token" in template else end
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token=end, chat_template=template
    ).save_pretrained(str(folder))
    return Pretrained(str(folder))


def outcome(tokenizer: Pretrained, chat: Conversation, notes: list[str]) -> str:
    """The word "right", the sentence of a refusal, or what is wrong."""
    try:
        [found] = tokenizer.chats([chat], "it", notes.append)
    except ModelError as error:
        return str(error).replace(repr(tokenizer.name), "T")
    count = tokenizer.decode(found.tokens[found.counted].tolist())
    of_others = "uone|utwo|uthree|usys|utool" + ("|aone|atwo" if chat.first else "")
    wanted = [word for word in re.findall(r"\ba(?:one|two|three|city)\b", str(chat.messages)) if word not in of_others]
    lacking = [word for word in wanted if word not in count]
    wrong = [f"{word} does not count" for word in lacking] + [f"{word} counts" for word in re.findall(of_others, count)]
    return ", ".join(wrong) or ("right" if found.ends else "no end")


def outcomes(template: str) -> Iterator[tuple[str, str, list[str]]]:
    """Of each conversation its name, what becomes of it, and what a run says."""
    with TemporaryDirectory() as folder:
        tokenizer = tokenizer_of(template, Path(folder))
        for name, chat in CONVERSATIONS.items():
            notes: list[str] = []
            yield name, outcome(tokenizer, chat, notes).replace(folder, "T"), notes


def page() -> str:
    """The page."""
    rows, reasons = [], dict[str, int]()
    for name, template in templates().items():
        cells = []
        for _, told, notes in outcomes(template):
            if told in ("right", "no end") or "count" in told.partition(" must ")[0]:
                cells.append(told + " \\*" * bool(notes))
            else:
                reason = told.removeprefix("the chat template of tokenizer T must ").replace("|", "\\|")
                cells.append(f"({reasons.setdefault(reason, len(reasons) + 1)})")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    heads = ["template", *CONVERSATIONS]
    return "\n".join(
        [
            "# Chat templates",
            "",
            f"What becomes of conversations under the templates that TRL {metadata.version('trl')} ships: right, or",
            "refused for the reason below. Right means that all words of the answers count, that no others do, and",
            "that each ends. A star: a run says what the template leaves out, such as the thinking. Written by",
            "`python docs/measured/chat_templates.py`.",
            "",
            f"| {' | '.join(heads)} |",
            f"|{'---|' * len(heads)}",
            *rows,
            "",
            "The chat template must",
            "",
            *(f"{number}. {reason}" for reason, number in reasons.items()),
            "",
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
