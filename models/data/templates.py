"""Chat templates: what they make of a conversation, and which of the text belongs to answers.

A template is a program. What it does with a message may depend on all others: many leave the thinking of earlier
answers out, or end the last one otherwise. So an answer is looked for in the text of the whole conversation. Where that
begins as the messages up to the answer do by themselves, the answer is what comes after them. Elsewhere its words are
replaced, and what changes is where they stand; around them the text of those messages is followed as far as it agrees.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.errors.calls import first_line
from thinwire.models.data.parts import ANSWERS, Conversation
from thinwire.models.errors import ModelError, require

Message = dict[str, Any]
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The fields of a message for what comes before its content, as transformers knows them."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What stands before an answer in a chat template that marks answers itself."""
_LETTERS = "QZ"
"""What takes the place of words. With two, one differs from any sign that it may stand for."""


class Template:
    """The chat template of a tokenizer of transformers.

    Attributes:
        marks: whether it marks answers itself.
    """

    def __init__(self, tokenizer: Any, name: str, cuts: Callable[[str], list[int]]) -> None:
        """`name` is that of the tokenizer; `cuts` says where the tokens of a text end.

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
        self.name, self._tokenizer, self._cuts = name, tokenizer, cuts
        self.marks = bool(_GENERATION.search(tokenizer.get_chat_template()))

    def render(self, messages: Sequence[Message], place: str, **options: Any) -> Any:
        """What the template makes of messages: a text, or what the options say. `place` names them in errors."""
        try:
            return self._tokenizer.apply_chat_template(list(messages), **{"tokenize": False, **options})
        except Exception as error:  # of the template, which says what it does not allow
            raise ModelError(
                f"the chat template of tokenizer {self.name!r} must take the messages of {place}: {first_line(error)}"
            ) from error

    def check(self, chat: Conversation, place: str) -> None:
        """Raise ModelError if the template leaves out what is to be learned, or writes it as Python shows it."""
        self._check_parts(chat.messages, place)
        self._check_calls(chat.messages, place)

    def _check_parts(self, messages: Sequence[Message], place: str) -> None:
        """Raise ModelError if the template writes a content of parts as Python shows a list."""
        if lists := [message["content"] for message in messages if isinstance(message.get("content"), list)]:
            text = self.render(messages, place)
            require(
                (
                    not any(str(parts) in text for parts in lists),
                    f"the chat template of tokenizer {self.name!r} must take contents that are lists of parts, as in "
                    f"{place}, and writes {str(lists[0])[:60]}; give each content as one text",
                )
            )

    def _check_calls(self, messages: Sequence[Message], place: str) -> None:
        """Raise ModelError if the template leaves calls of tools out: the answer to learn would be an empty one."""
        if not any(message.get("tool_calls") for message in messages):
            return
        bare = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
        try:
            written = self.render(messages, place) != self.render([{"content": "", **each} for each in bare], place)
        except ModelError:  # of the messages as they are it is told later
            return
        require(
            (
                written,
                f"the chat template of tokenizer {self.name!r} must write tool_calls, as in {place}, and leaves them "
                f"out; take the tokenizer of a model for tools, or write the calls into the content",
            )
        )

    def answers(self, chat: Conversation, text: str, place: str) -> list[tuple[int, int]]:
        """From where to where each answer that counts goes in the text of a conversation: what opens it not included.

        What ends an answer belongs to it as far as the answer ends alike where nothing follows it.
        """
        return [
            (self._begin(chat.messages, index, text, place), self._end(chat.messages, index, text, place))
            for index in counted(chat)
        ]

    def _begin(self, messages: Sequence[Message], index: int, text: str, place: str) -> int:
        """Where the answer with this index begins: behind what opens an answer."""
        opened = self.render(messages[:index], place, add_generation_prompt=True)
        if text.startswith(opened):
            return len(opened)
        words = self.words(messages, index, text, place)
        agrees = _alike(text, opened)
        opens = _alike(opened, self.render(messages[:index], place))
        if agrees < opens:  # messages before it are written otherwise
            before = self.words(messages, index - 1, text, place)[1]
            cuts, opening = {*self._cuts(text)}, opened[opens:]
            found = ((text.rfind(opening[:size], before, words[0]) + size, size) for size in range(len(opening), 0, -1))
            agrees = next((end for end, size in found if end >= before + size and end in cuts), -1)
            self._require(agrees >= 0, index, place)
        return self._cut(text, min(agrees, words[0]), least=0) if agrees < words[0] else words[0]

    def _end(self, messages: Sequence[Message], index: int, text: str, place: str) -> int:
        """Where the answer with this index ends."""
        last = index + 1 == len(messages)
        alone = text if last else self.render(messages[: index + 1], place)
        if text.startswith(alone):
            return len(alone)
        stop, behind = (
            self.words(messages[:size], index, of, place)[1] for size, of in ((None, text), (index + 1, alone))
        )
        return self._cut(text, stop + _alike(text[stop:], alone[behind:]), least=stop)

    def _cut(self, text: str, place: int, least: int) -> int:
        """The last place up to `place` where a token ends, or `least`."""
        return max((cut for cut in self._cuts(text) if least < cut <= place), default=least)

    def words(self, messages: Sequence[Message], index: int, text: str, place: str) -> tuple[int, int]:
        """From where to where the words of one message go in the text of all. ModelError if they are left out."""
        others = [
            self.render([*messages[:index], replaced(messages[index], letter), *messages[index + 1 :]], place)
            for letter in _LETTERS
        ]
        self._require(any(other != text for other in others), index, place)
        begin = min(_alike(text, other) for other in others)
        behind = min(_alike(text[begin:][::-1], other[begin:][::-1]) for other in others)
        return begin, len(text) - behind

    def _require(self, found: bool, index: int, place: str) -> None:
        require(
            (
                found,
                f"the chat template of tokenizer {self.name!r} must write message {index} of {place} where it can be "
                "found, and does not, so it is not known which of the text is an answer; put {% generation %} and "
                "{% endgeneration %} around answers in its chat_template.jinja",
            )
        )


def counted(chat: Conversation) -> list[int]:
    """The indices of the messages that are answers to learn. To begin with, nothing is asked."""
    begun = range(max(chat.first, 1), len(chat.messages))
    return [index for index in begun if chat.messages[index]["role"] == ANSWERS]


def followed(messages: Sequence[Message]) -> list[Message]:
    """Messages, and what would come next: the answer of a tool that was called, or a question."""
    role = "tool" if messages[-1].get("tool_calls") else "user"
    return [*messages, {"role": role, "content": _LETTERS[0]}]


def replaced(message: Message, letter: str) -> Message:
    """A message of one letter in place of its words: of its content, its thinking, and the arguments of its calls."""
    content = message.get("content")
    fields: Message = {name: letter for name in REASONING if isinstance(message.get(name), str)}
    if isinstance(content, list):
        fields["content"] = [{**part, "text": letter} if "text" in part else part for part in content]
    elif content or not message.get("tool_calls"):
        fields["content"] = letter
    if message.get("tool_calls"):
        fields["tool_calls"] = [_call_of(call, letter) for call in message["tool_calls"]]
    return message | fields


def _call_of(call: Message, letter: str) -> Message:
    function = call.get("function", call)
    given = function.get("arguments")
    other = {"arguments": dict.fromkeys(given, letter)} if isinstance(given, dict) and given else {"name": letter}
    return {**call, "function": {**function, **other}} if "function" in call else {**call, **other}


def _alike(text: str, other: str) -> int:
    """How many signs of two texts are alike from their beginnings on."""
    return next(
        (place for place, (one, two) in enumerate(zip(text, other, strict=False)) if one != two),
        min(len(text), len(other)),
    )
