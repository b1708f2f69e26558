"""Chat templates: what they make of a conversation, and which of the text belongs to answers.

A template is a program. What it does with a message may depend on all others: many leave the thinking of earlier
answers out, or end the last one otherwise. So an answer is looked for in the text of the whole conversation. Where that
begins as the messages up to the answer do by themselves, the answer is what comes after them. Elsewhere its words are
replaced, and what changes is where they stand; around them the text of those messages is followed as far as it agrees.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from typing import Any

from thinwire.errors.calls import first_line
from thinwire.models.data.parts import ANSWERS, MARKS, Conversation
from thinwire.models.data.trial import CHARACTERS, is_error, tried
from thinwire.models.errors import ModelError, require

Message = dict[str, Any]
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The fields of a message for what comes before its content, as transformers knows them."""
THOUGHT = "</think>"
"""What ends the thinking in a content. Templates put it elsewhere, or leave it out of earlier turns."""
_SHOWN = 60
_FOR_TOOLS = (
    "take the tokenizer of a model for tools, or write calls and what tools answer into contents of the other roles"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What stands before an answer in a chat template that marks answers itself."""
_NOW = "strftime_now"
"""What a chat template calls for the date."""
_NOW_CALL = re.compile(_NOW + r"""\(\s*(["'])([^"'\\]*)\1\s*\)""")
_LETTERS = "QZ"
"""What takes the place of words. With two, one differs from any sign that it may stand for."""


class Template:
    """The chat template of a tokenizer of transformers.

    Attributes:
        marks: whether it marks answers itself.
    """

    def __init__(self, tokenizer: Any, name: str, cuts: Callable[[str], list[int]], day: str = "") -> None:
        """`name` is that of the tokenizer; `cuts` says where the tokens of a text end; `day` is its date, else today.

        Raises:
            ModelError: there is no template, or several of which none is the default.
        """
        known = tokenizer.chat_template
        require(
            (
                not isinstance(known, dict) or "default" in known,
                f"tokenizer {name!r} must have one chat template, or one of them as the default, got "
                f"{', '.join(sorted(known or ()))}; put one of them into its folder as chat_template.jinja",
            ),
            (
                bool(known),
                f"tokenizer {name!r} must have a chat template, got none; take the tokenizer of a chat model, or put "
                "a chat_template.jinja into its folder",
            ),
            (
                tokenizer.is_fast,
                f"tokenizer {name!r} must be one of the library tokenizers for chats, with a tokenizer.json",
            ),
        )
        self._rule = f"the chat template of tokenizer {name!r} must"
        self._tokenizer, self._cuts = tokenizer, cuts
        self.marks = bool(_GENERATION.search(tokenizer.get_chat_template()))
        each: tuple[Any, Any] = (None, [{}])
        self._texts = [self._on(day, tokenizer.get_chat_template(tools=tools)) for tools in each]
        self._tried = False

    def _on(self, day: str, template: str) -> str:
        """A chat template as on a day: the libraries give each call the time at which it is made."""
        now = datetime.fromisoformat(day or today())
        dated = _NOW_CALL.sub(lambda call: json.dumps(now.strftime(call[2])), template)
        if f"{_NOW}(" in dated:
            raise ModelError(
                f"{self._rule} give {_NOW} a format in quotes, so that all conversations of a run have one date; write "
                f'it as in {_NOW}("%Y-%m-%d")'
            )
        return dated

    def render(self, chat: Conversation, **options: Any) -> Any:
        """What the template makes of a conversation: a text, or what the options say."""
        given = {"tokenize": False, "tools": list(chat.tools) or None, **options}
        given["chat_template"] = self._texts[bool(chat.tools)]
        try:
            found = self._tokenizer.apply_chat_template(list(chat.messages), **given)
        except BaseException as error:  # of the template, which says what it does not allow
            if not is_error(error):
                raise
            raise ModelError(
                f"{self._rule} take the messages of {chat.place}: {first_line(error)}; leave out of the rows what it "
                "does not know, or put one that does into the tokenizer's folder as chat_template.jinja"
            ) from error
        if isinstance(found, str) and len(found) > CHARACTERS:
            raise ModelError(
                f"{self._rule} write at most {CHARACTERS} characters of a conversation, got {len(found)} of "
                f"{chat.place}; leave it out, or take another tokenizer"
            )
        return found

    def _try(self, chat: Conversation) -> None:
        """Try the template on the first conversation that it gets. ModelError if that takes too much."""
        said = {"template": self._texts[bool(chat.tools)], "messages": list(chat.messages), "tools": list(chat.tools)}
        tried(json.dumps(said, default=str), f"{self._rule} write a conversation")
        self._tried = True

    def fitted(self, chat: Conversation) -> Conversation:
        """A conversation in the form of which the template writes most: as it is, or with contents and calls otherwise.

        Raises:
            ModelError: it takes no form, or leaves out an answer to learn.
        """
        best, least, refused = None, 0, None
        if not self._tried:
            self._try(chat)
        for form in _forms(chat):
            try:
                text = self.render(form)
            except ModelError as error:
                refused = refused or error
                continue
            lost = sum(len(self._lost(form, index, text)) for index in range(len(form.messages)))
            if best is None or lost < least:
                best, least = form, lost
            if not lost:
                break
        if best is None:
            assert refused is not None, "a form without a text has a reason"
            without = [each for each in chat.messages if not each.get("tool_calls") and each["role"] != "tool"]
            bare = _forms(replace(chat, messages=without))
            if len(without) < len(chat.messages) and any(self._takes(form) for form in bare):
                raise ModelError(f"{self._rule} take tool_calls, as in {chat.place}, and does not; {_FOR_TOOLS}")
            raise refused
        if least:
            self._check(best)
        return best

    def _check(self, chat: Conversation) -> None:
        """Raise ModelError if an answer to learn is left out, or is written as Python shows it."""
        text = self.render(chat)
        for index in counted(chat):
            message = chat.messages[index]
            lost, content = self._lost(chat, index, text), message.get("content")
            require(
                (
                    "tool_calls" not in lost or "content" in lost,
                    f"{self._rule} write tool_calls, as in {chat.place}, and leaves them out; {_FOR_TOOLS}",
                ),
                (
                    "content" not in lost or "tool_calls" in message,
                    f"{self._rule} write the content of answers as it is given, as that of message {index} of "
                    f"{chat.place}, and does not, {_shown(content)}; write it otherwise, or put a template that does "
                    "into the tokenizer's folder as chat_template.jinja",
                ),
            )
        lists = [message["content"] for message in chat.messages if isinstance(message.get("content"), list)]
        if shown := next((str(parts)[:60] for parts in lists if str(parts) in text), ""):
            raise ModelError(
                f"{self._rule} take contents that are lists of parts, as in {chat.place}, and writes {shown}; give "
                "each content as one text"
            )

    def left_out(self, chat: Conversation) -> Iterator[tuple[str, bool]]:
        """What a conversation has beside its answers' contents, in words, and whether the template leaves it out."""
        text = self.render(chat)
        if chat.tools:
            yield "tools", text == self.render(replace(chat, tools=()))
        for index, message in enumerate(chat.messages):
            lost = self._lost(chat, index, text)
            for name in _named(message):
                other = {**message, **_changed(message, name)}
                found = replace(chat, messages=[*chat.messages[:index], other, *chat.messages[index + 1 :]])
                yield f"{name} of {message['role']}", name in lost and self._same(found, text)
            thought, ends, _ = str(message.get("content")).partition(THOUGHT)
            if ends:
                yield (
                    f"thinking in the content of {message['role']}",
                    not _stands(text, thought.rpartition(">")[2].strip()),
                )

    def _lost(self, chat: Conversation, index: int, text: str) -> list[str]:
        """The fields of a message that the text of its conversation does not have."""
        message = chat.messages[index]
        bare = {"content": "", **{name: value for name, value in message.items() if name != "tool_calls"}}
        without = replace(chat, messages=[*chat.messages[:index], bare, *chat.messages[index + 1 :]])
        lost = _lost(message, text)
        # the description of a tool may have the words of a call
        return [*lost, "tool_calls"] if message.get("tool_calls") and self._same(without, text) else lost

    def _same(self, chat: Conversation, text: str) -> bool:
        return self._takes(chat) and bool(self.render(chat) == text)  # one that fails heeds it

    def _takes(self, chat: Conversation) -> bool:
        try:
            return bool(self.render(chat))
        except ModelError:
            return False

    def answers(self, chat: Conversation, text: str) -> list[tuple[int, int]]:
        """From where to where each answer that counts goes in the text of a conversation: what opens it not included.

        What ends an answer belongs to it as far as the answer ends alike where nothing follows it.
        """
        return [(self._begin(chat, index, text), self._end(chat, index, text)) for index in counted(chat)]

    def _begin(self, chat: Conversation, index: int, text: str) -> int:
        """Where the answer with this index begins: behind what opens an answer."""
        before = replace(chat, messages=chat.messages[:index])
        opened = self.render(before, add_generation_prompt=True)
        if text.startswith(opened):
            return len(opened)
        words = self.words(chat, index, text)
        agrees = _alike(text, opened)
        opens = _alike(opened, self.render(before))
        if agrees < opens:  # messages before it are written otherwise
            least = self.words(chat, index - 1, text)[1]
            cuts, opening = {*self._cuts(text)}, opened[opens:]
            found = ((text.rfind(opening[:size], least, words[0]) + size, size) for size in range(len(opening), 0, -1))
            agrees = next((end for end, size in found if end >= least + size and end in cuts), -1)
            self._require(agrees >= 0, chat, index)
        return self._cut(text, min(agrees, words[0]), least=0) if agrees < words[0] else words[0]

    def _end(self, chat: Conversation, index: int, text: str) -> int:
        """Where the answer with this index ends."""
        short = replace(chat, messages=chat.messages[: index + 1])
        alone = text if index + 1 == len(chat.messages) else self.render(short)
        if text.startswith(alone):
            return len(alone)
        stop, behind = (self.words(one, index, of)[1] for one, of in ((chat, text), (short, alone)))
        return self._cut(text, stop + _alike(text[stop:], alone[behind:]), least=stop)

    def _cut(self, text: str, place: int, least: int) -> int:
        """The last place up to `place` where a token ends, or `least`."""
        return max((cut for cut in self._cuts(text) if least < cut <= place), default=least)

    def words(self, chat: Conversation, index: int, text: str) -> tuple[int, int]:
        """From where to where the words of one message go in the text of all. ModelError if they are left out."""
        around = chat.messages[:index], chat.messages[index + 1 :]
        changed = (replaced(chat.messages[index], letter) for letter in _LETTERS)
        others = [self.render(replace(chat, messages=[*around[0], each, *around[1]])) for each in changed]
        self._require(any(other != text for other in others), chat, index)
        begin = min(_alike(text, other) for other in others)
        behind = min(_alike(text[begin:][::-1], other[begin:][::-1]) for other in others)
        return begin, len(text) - behind

    def _require(self, found: bool, chat: Conversation, index: int) -> None:
        if not found:
            raise ModelError(
                f"{self._rule} write message {index} of {chat.place} where it can be found, and does not, so it is not "
                "known which of the text is an answer; put {% generation %} and {% endgeneration %} around answers in "
                "its chat_template.jinja"
            )


def _forms(chat: Conversation) -> Iterator[Conversation]:
    """Forms of a conversation that say the same, as it is first; arguments of calls are objects, not JSON in a text."""
    seen: list[Sequence[Message]] = []
    for arguments, content, nothing in product((_objects, _json), (_same, _joined, _split), (_same, _filled)):
        messages = [content(nothing(_with_arguments(message, arguments))) for message in chat.messages]
        if messages not in seen:
            seen.append(messages)
            yield replace(chat, messages=messages)


def _same(message: Message) -> Message:
    return message


def _joined(message: Message) -> Message:
    """A message with its parts as one text, if all are text."""
    parts = message.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else [None]
    whole = isinstance(parts, list) and len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
    return {**message, "content": "".join(map(str, texts))} if whole else message


def _split(message: Message) -> Message:
    """A message with its text as a part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _filled(message: Message) -> Message:
    """A message with an empty content if it has none."""
    return message if "content" in message else {**message, "content": ""}


def _with_arguments(message: Message, form: Callable[[Any], Any]) -> Message:
    """A message whose calls have arguments of this form."""
    if not message.get("tool_calls"):
        return message
    return {
        **message,
        "tool_calls": [_call(call, lambda one: {"arguments": form(one)}) for call in message["tool_calls"]],
    }


def _call(call: Message, change: Callable[[Any], Message]) -> Message:
    """A call of a tool with other fields, made of its arguments."""
    function = call.get("function", call)
    other = {**function, **(change(function["arguments"]) if "arguments" in function else {})}
    return {**call, "function": other} if "function" in call else other


def _objects(arguments: Any) -> Any:
    """Arguments as an object, also where they are its JSON, as OpenAI writes them."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _named(message: Message) -> list[str]:
    """The fields of a message that say something."""
    return [name for name in ("content", *REASONING, "tool_calls") if message.get(name)]


def _lost(message: Message, text: str) -> list[str]:
    """The fields of a message, but for calls, that do not stand in a text, or stand there as Python shows them.

    Of contents that think, what is thought is not looked for.
    """
    named = [name for name in _named(message) if name != "tool_calls"]
    shown = [name for name in named if isinstance(message[name], list) and str(message[name]) in text]
    return [name for name in named if name in shown or not all(map(partial(_stands, text), _texts(message[name])))]


def _stands(text: str, words: str) -> bool:
    """Whether words stand in a text, as they are or as JSON."""
    return words in text or json.dumps(words)[1:-1] in text or json.dumps(words, ensure_ascii=False)[1:-1] in text


def _texts(value: Any) -> list[str]:
    """The words of a field that are looked for."""
    parts = [part.get("text") or "" for part in value if isinstance(part, dict)] if isinstance(value, list) else [value]
    return [str(part).rpartition(THOUGHT)[2].strip() for part in parts]


def _changed(message: Message, name: str) -> Message:
    """The field of a message with other words in it."""
    return (
        {name: []} if name == "tool_calls" else {name: replaced({"role": "", name: message[name]}, _LETTERS[0])[name]}
    )


def _shown(content: Any) -> str:
    said = repr(content)
    return said if len(said) <= _SHOWN else f"{said[:_SHOWN]}.."


def today() -> str:
    """The date in UTC, as in 2026-11-29: alike on hosts in all zones."""
    return datetime.now(UTC).date().isoformat()


def asks_date(tokenizer: Any) -> bool:
    """Whether a chat template of a tokenizer of transformers asks for the date."""
    return _NOW in str(tokenizer.chat_template)


def counted(chat: Conversation) -> list[int]:
    """The indices of the messages that are answers to learn. To begin with, nothing is asked."""
    begun = range(max(chat.first, 1), len(chat.messages))
    return [index for index in begun if chat.messages[index]["role"] == ANSWERS and not is_muted(chat.messages[index])]


def is_muted(message: Message) -> bool:
    """Whether an answer says, as in OpenAI's format or axolotl's, that it does not count."""
    return any(message.get(name, 1) == 0 for name in MARKS)


def followed(chat: Conversation) -> Conversation:
    """A conversation, and what would come next: the answer of a tool that was called, or a question."""
    role = "tool" if chat.messages[-1].get("tool_calls") else "user"
    content: Any = [{"type": "text", "text": "Q"}] if isinstance(chat.messages[0].get("content"), list) else "Q"
    return replace(chat, messages=[*chat.messages, {"role": role, "content": content}])


def replaced(message: Message, letter: str) -> Message:
    """A message of one letter in place of its words: of its content, its thinking, and the arguments of its calls."""
    content = message.get("content")
    fields: Message = {name: letter for name in REASONING if isinstance(message.get(name), str)}
    if isinstance(content, list):
        fields["content"] = [{**part, "text": letter} if "text" in part else part for part in content]
    elif content or not message.get("tool_calls"):
        fields["content"] = letter
    if message.get("tool_calls"):
        fields["tool_calls"] = [_call(call, partial(_without_words, letter=letter)) for call in message["tool_calls"]]
    return message | fields


def _without_words(arguments: Any, letter: str) -> Message:
    given = _objects(arguments)
    if not isinstance(given, dict) or not given:
        return {"name": letter}
    changed = dict.fromkeys(given, letter)
    return {"arguments": _json(changed) if isinstance(arguments, str) else changed}


def _alike(text: str, other: str) -> int:
    """How many signs of two texts are alike from their beginnings on."""
    return next(
        (place for place, (one, two) in enumerate(zip(text, other, strict=False)) if one != two),
        min(len(text), len(other)),
    )
