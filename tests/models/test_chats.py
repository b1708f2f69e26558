"""Conversations: how they are read, which tokens count, and how they share samples."""

import json

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from support.data_files import CHAT, ROLES, WORDS, write_json, write_rows, write_tokenizer
from support.own_code import add_module
from support.parts import read
from thinwire.models.data.chats import (
    ChatSamples,
    ChatTokens,
    conversation_of,
    in_words,
    pack,
    require_positions,
    visible,
)
from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions
from thinwire.models.data.parts import Columns, Conversation, Part
from thinwire.models.data.tokenizer import Pretrained
from thinwire.models.errors import ModelError
from thinwire.models.tasks import IGNORE, LanguageModeling

uses_datasets = pytest.mark.usefixtures("hub_cache")


def said(*texts, roles=("user", "assistant")):
    """A conversation of these texts, by turns."""
    return [{"role": roles[index % len(roles)], "content": text} for index, text in enumerate(texts)]


ASKED = said("why did it", "the cat sat")
TWICE = said("why", "a mat", "did it", "on the mat")


@uses_datasets
@pytest.mark.parametrize(
    ("row", "first"),
    [
        ({"messages": ASKED, "id": 3}, 0),
        ({"conversations": [{"from": "human", "value": "why did it"}, {"from": "gpt", "value": "the cat sat"}]}, 0),
        ({"prompt": "why did it", "completion": "the cat sat"}, 1),
        ({"prompt": ASKED[:1], "completion": ASKED[1:]}, 1),
        ({"instruction": "why did it", "input": "", "output": "the cat sat"}, 1),
        ({"output": "the cat sat", "instruction": "why did it"}, 1),
    ],
)
def test_a_table_of_each_layout_is_the_same_conversation(tmp_path, row, first):
    for name in ("a.jsonl", "a.parquet"):
        path = write_rows(tmp_path / name, [row, row])
        assert read("chat", Part(str(path))) == [Conversation(ASKED, first)] * 2
    (tmp_path / "a.json").write_text(json.dumps([row]))
    assert read("chat", Part(str(tmp_path / "a.json"))) == [Conversation(ASKED, first)]


def test_questions_in_several_columns_are_one_message():
    chat = conversation_of(["why", None, "did it", "the cat"], "here")
    assert chat == Conversation(said("why\ndid it", "the cat"), 1)


@uses_datasets
def test_what_is_no_conversation_is_told_with_its_row(tmp_path):
    path = write_json(tmp_path / "a.jsonl", [{"messages": ASKED}, {"messages": [{"role": "user", "content": None}]}])
    with pytest.raises(ModelError, match=r"must be a list of messages, each with role and content .* in row 1 of"):
        read("chat", Part(str(path)))
    path = write_json(tmp_path / "b.jsonl", [{"question": "why", "text": "did"}])
    with pytest.raises(ModelError, match=r"columns must name those of .* that hold conversations, got none; it has"):
        read("chat", Part(str(path)))
    with pytest.raises(ModelError, match=r"got 2 in here; digits of CSV are read as numbers: write the rows as JSON"):
        conversation_of(["1 + 1?", 2], "here")
    with pytest.raises(ModelError, match=r"from must be one of .*, got 'me' in here"):
        conversation_of([[{"from": "me", "value": "hello"}]], "here")
    with pytest.raises(ModelError, match=r"from must be one of .*, got \['human'\] in here"):
        conversation_of([[{"from": ["human"], "value": "hello"}]], "here")


def test_the_mark_of_an_answer_says_whether_it_counts():
    """OpenAI's format has a weight of 0 or 1 for each answer, axolotl's `train`: both were refused unless all count."""
    asked, answer = ASKED
    for mark, value in (("weight", 0), ("weight", 1), ("train", False), ("train", True)):
        chat = [asked, {**answer, mark: value}]
        assert conversation_of([chat], "here") == Conversation(chat)
    for mark, value in (("weight", 0.5), ("train", "no")):
        told = f"^weight of an answer must be 0 or 1, and train true or false, got {value!r} in here"
        with pytest.raises(ModelError, match=told):
            conversation_of([[asked, {**answer, mark: value}]], "here")
    assert conversation_of([[asked, {**answer, "weight": 0}, asked], "a mat"], "here").first == 3, "none of them counts"


@uses_datasets
def test_columns_that_no_template_sees_are_named(tmp_path):
    path, notes = write_json(tmp_path / "a.jsonl", [{"id": "be kind", "messages": ASKED, "source": "[]"}]), []
    read("chat", Part(str(path)), Columns(report=notes.append))
    assert notes == [f"of {path}, column messages is read; not read: id, source"]


@uses_datasets
def test_messages_of_unlike_fields_are_read_as_they_are(tmp_path):
    parts = said([{"type": "text", "text": "why"}], "the cat")
    path = write_json(tmp_path / "a.jsonl", [{"messages": ASKED}, {"messages": parts}])
    assert read("chat", Part(str(path))) == [Conversation(ASKED), Conversation(parts)]


@uses_datasets
def test_an_object_of_parquet_has_no_fields_that_others_have(tmp_path):
    """A call of a tool would have the arguments of all other tools, and the template would write them as null."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": given}} for given in ({"a": 1}, {"b": "x"})]
    rows = [{"messages": [ASKED[0], {"role": "assistant", "tool_calls": [call]}]} for call in calls]
    parts = [{"type": "text", "text": "why"}], [{"type": "image", "image": "a.png"}, {"type": "text", "text": "it"}]
    asked = [{"prompt": said(part), "completion": "the cat"} for part in parts]
    for name in ("a.parquet", "a.jsonl"):
        write = write_rows if name == "a.parquet" else write_json
        chats = read("chat", Part(str(write(tmp_path / "calls" / name, rows))))
        assert [chat.messages for chat in chats] == [row["messages"] for row in rows]
        chats = read("chat", Part(str(write(tmp_path / "parts" / name, asked))))
        assert [chat.messages[0]["content"] for chat in chats] == list(parts)


OWN = f"""
def messages(split):
    return [{ASKED!r}]


def pairs(split):
    return [("why did it", "the cat sat")]


def texts(split):
    return ["why"]
"""


def test_a_function_of_ones_own_gives_messages_or_tuples(monkeypatch):
    add_module(monkeypatch, "own_chats", OWN)
    assert read("chat", Part("own_chats:messages")) == [Conversation(ASKED)]
    assert read("chat", Part("own_chats:pairs")) == [Conversation(ASKED, 1)]
    with pytest.raises(ModelError, match=r"must be a list of messages.* got 'why' in index 0 of own_chats:texts"):
        read("chat", Part("own_chats:texts"))


GENERATION = CHAT.replace(
    "{{ message['role'] + ' ' + message['content'] + ' [SEP] ' }}",
    "{{ message['role'] + ' ' }}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{{ ' [SEP] ' }}{% endgeneration %}{% else %}{{ message['content'] + ' [SEP] ' }}{% endif %}",
)
FORGETS = CHAT.replace(
    "message['content'] +", "(message['content'] if loop.last or message['role'] == 'user' else 'it') +"
)


def counted_words(folder, chat, template):
    tokenizer = Pretrained(write_tokenizer(folder, chat=template, pairs=False))
    [encoded] = tokenizer.chats([chat], "a.jsonl")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\n", *WORDS, *ROLES]
    return " ".join(
        word.upper() if counts else word
        for word, counts in zip([words[token] for token in encoded.tokens], encoded.counted.tolist(), strict=True)
    )


@pytest.mark.parametrize("template", [CHAT, GENERATION])
def test_answers_count_and_what_ends_them(tmp_path, template):
    chat = Conversation([{"role": "system", "content": "the dog"}, *TWICE])
    assert counted_words(tmp_path, chat, template) == (
        "system the dog [SEP] user why [SEP] assistant A MAT [SEP] user did it [SEP] assistant ON THE MAT [SEP]"
    )
    for index, mark, told in (
        (1, {"weight": 0}, "user why [SEP] assistant a mat [SEP] user did it [SEP] assistant ON THE MAT [SEP]"),
        (3, {"train": False}, "user why [SEP] assistant A MAT [SEP] user did it [SEP] assistant on the mat [SEP]"),
    ):
        chat = Conversation([{**message, **mark} if index == place else message for place, message in enumerate(TWICE)])
        assert counted_words(tmp_path, chat, template) == told
    chat = Conversation(TWICE, 3)
    assert counted_words(tmp_path, chat, template) == (
        "user why [SEP] assistant a mat [SEP] user did it [SEP] assistant ON THE MAT [SEP]"
    )


DATED = "{{ 'cat ' if strftime_now('%d %b %Y, %H:%M') == '29 Nov 2026, 00:00' else 'dog ' }}" + CHAT
"""A template that asks for the date, as those of Llama 3.2, SmolLM3, gpt-oss and Mistral Small do."""


@uses_datasets
def test_a_template_writes_the_date_that_it_is_given(tmp_path, monkeypatch):
    path = write_json(tmp_path / "a.jsonl", [{"messages": ASKED}])
    words = write_tokenizer(tmp_path / "words", chat=DATED, pairs=False)
    given = {"name": str(path), "kind": "chat", "tokenizer": words, "block_size": 12, "held_out": 0}
    other = load(DataOptions(**given, date="2026-11-30"))
    monkeypatch.setattr("thinwire.models.data.tokenizer.today", lambda: "2026-11-29")
    today, known = load(DataOptions(**given)), load(DataOptions(**given, date="2026-11-29"))
    assert today.date == known.date == "2026-11-29" and other.date == "2026-11-30"
    assert today.training.digest == known.training.digest != other.training.digest
    assert Pretrained(words, "2026-11-30").prompt("why", chat=True)[0] == WORDS.index("dog") + 5
    asks_none = {**given, "tokenizer": write_tokenizer(tmp_path / "none", chat=CHAT, pairs=False)}
    undated = load(DataOptions(**asks_none, date="2026-11-29"))
    assert undated.date is None and "data.date, 2026-11-29, does nothing" in " ".join(undated.notes)


def test_a_template_must_say_which_form_of_the_date_it_wants(tmp_path):
    template = "{% set form = '%d' %}{{ strftime_now(form) }}" + CHAT
    told = r"must give strftime_now a format in quotes, .*; write it as in strftime_now\(\"%Y-%m-%d\"\)$"
    with pytest.raises(ModelError, match=told):
        Pretrained(write_tokenizer(tmp_path, chat=template, pairs=False)).prompt("why", chat=True)


def test_a_date_is_a_day_of_chats():
    for text in ("29 Nov 2026", "20261129", "2026-11-31"):
        with pytest.raises(ModelError, match=f"^date must be a day such as 2026-11-29, got {text}$"):
            DataOptions(name="a.jsonl", kind="chat", tokenizer="words", date=text)
    with pytest.raises(ModelError, match=r"^date must be left out for kind text, got 2026-11-29: it is for chat$"):
        DataOptions(date="2026-11-29")


@pytest.mark.parametrize("marks", ["{% generation %}", ""])
def test_the_first_token_of_an_answer_counts_where_it_begins_with_a_space_of_the_prompt(tmp_path, marks):
    """It did not, and a model never learned how its answers begin."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, " why": 1, "A:": 2, " a": 3, " mat": 4, "\n": 5}, "[UNK]"))
    split = pre_tokenizers.Split(" ", "merged_with_next"), pre_tokenizers.Split("\n", "isolated")
    words.pre_tokenizer = pre_tokenizers.Sequence(list(split))
    answer = "{{ m.content }}\n"
    template = "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\n{% else %}A: "
    template += f"{marks}{answer}{marks.replace('generation', 'endgeneration')}"
    template += "{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, eos_token="[SEP]").save_pretrained(
        str(tmp_path)
    )
    [found] = Pretrained(str(tmp_path)).chats([Conversation(said("why", "a mat"))], "a.jsonl")
    assert found.tokens[found.counted].tolist() == [3, 4, 5, 6] and not found.counted[:4].any()


LAST = "loop.last and message['role'] == 'assistant'"
FIRST_THINKS = CHAT.replace("message['content'] +", f"('the dog ' if {LAST} else '') + message['content'] +")
ENDS_OTHERWISE = CHAT.replace("' [SEP] '", f"(' ran ' if {LAST} else ' dog ')")
ENDS_THE_WHOLE = CHAT.replace("{% endif %}", "{% else %}{{ '[PAD]' }}{% endif %}")
OPENS_WITH_MORE = CHAT.replace("'assistant '", "'assistant the '")
FORGETS_THINKING = (
    "{% set asked = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set asked.last = loop.index0 %}{% endif %}{% endfor %}"
    + CHAT.replace(
        "message['content']", "(message.thinking or '' if loop.index0 > asked.last else '') + message.content"
    )
)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (FIRST_THINKS, "user why [SEP] assistant A MAT [SEP] user did it [SEP] assistant THE DOG ON THE MAT [SEP]"),
        (ENDS_OTHERWISE, "user why dog assistant A MAT dog user did it dog assistant ON THE MAT RAN"),
        (ENDS_THE_WHOLE, "user why [SEP] assistant A MAT [SEP] user did it [SEP] assistant ON THE MAT [SEP] [PAD]"),
        (OPENS_WITH_MORE, "user why [SEP] assistant A MAT [SEP] user did it [SEP] assistant ON THE MAT [SEP]"),
    ],
    ids=["Qwen3", "gpt-oss", "Phi-3", "DeepSeek"],
)
def test_answers_are_found_where_a_template_writes_earlier_turns_otherwise(tmp_path, template, told):
    """What these families do, in words. Conversations of several answers were refused."""
    assert counted_words(tmp_path, Conversation(TWICE), template) == told


def test_an_answer_is_found_behind_messages_that_are_written_otherwise_once_more_follow(tmp_path):
    chat = said("why", "a mat", "ran", "on", "did it", "the mat", roles=("user", "assistant", "system", "assistant"))
    chat[4]["role"], chat[1]["thinking"] = "user", "dog "
    assert counted_words(tmp_path, Conversation(chat), FORGETS_THINKING) == (
        "user why [SEP] assistant A MAT [SEP] system ran [SEP] assistant ON [SEP] user did it [SEP] assistant THE MAT "
        "[SEP]"
    )


def test_a_template_that_leaves_earlier_turns_out_is_refused(tmp_path):
    assert counted_words(tmp_path, Conversation(ASKED), FORGETS) == "user why did it [SEP] assistant THE CAT SAT [SEP]"
    with pytest.raises(ModelError, match=r"write the content of answers as it is given, as that of message 1 of row 0"):
        counted_words(tmp_path, Conversation(TWICE), FORGETS)


@pytest.mark.parametrize("template", [CHAT, GENERATION])
def test_contents_are_given_as_a_template_takes_them(tmp_path, template):
    """Llama 3's wrote lists as Python does; Idefics3's left texts out, and models learned to say nothing."""
    parts = [{"type": "text", "text": "why"}]
    told = "user why [SEP] assistant WHY [SEP]"
    trims = template.replace("message['content']", "message['content'] | trim")
    reads = template.replace("message['content']", "(message['content'] | map(attribute='text') | join)")
    for words in (parts, "why"):
        chat = Conversation([{"role": role, "content": words} for role in ("user", "assistant")])
        assert counted_words(tmp_path / "trims", chat, trims) == told
        assert counted_words(tmp_path / "reads", chat, reads) == told
    assert Pretrained(str(tmp_path / "reads")).prompt("why", chat=True).shape == (4,)
    call = {"type": "function", "function": {"name": "cat", "arguments": {}}}
    chat = Conversation([ASKED[0], {"role": "assistant", "tool_calls": [call]}, *ASKED])
    with pytest.raises(ModelError, match=r"must write tool_calls, as in row 0 of a\.jsonl, and leaves them out"):
        counted_words(tmp_path / "reads", chat, reads.replace("message['content'] |", "message['content'][:1] |"))
    pictured = [{"role": "user", "content": [{"type": "image"}, *parts]}, ASKED[1]]
    with pytest.raises(ModelError, match=r"must take contents that are lists of parts, as in row 0 of a\.jsonl, and"):
        counted_words(tmp_path, Conversation(pictured), trims)


@pytest.mark.parametrize("template", [CHAT, GENERATION])
def test_an_answer_that_a_template_leaves_out_or_rewrites_is_refused(tmp_path, template):
    for write in ("''", "message['content'] | reverse"):
        changed = template.replace("message['content']", write)
        with pytest.raises(
            ModelError, match=r"must write the content of answers as it is given, as that of message 1 of"
        ):
            counted_words(tmp_path, Conversation(ASKED), changed)


def test_what_a_template_leaves_out_is_told_once(tmp_path):
    heeds = CHAT.replace("message['role'] +", "(message['role'] if message['role'] != 'system' else 'the') +")
    deaf = heeds.replace("message['content']", "(message['content'] if message['role'] != 'tool' else '')")
    thinks = [{**TWICE[0]}, {**TWICE[1], "reasoning_content": "the dog"}, {"role": "tool", "content": "ran"}]
    chats = [Conversation([*thinks, *TWICE[2:]], tools=[{"type": "function"}]), Conversation(TWICE)]
    tokenizer, told = Pretrained(write_tokenizer(tmp_path, chat=deaf, pairs=False)), []
    tokenizer.chats(chats, "a.jsonl", told.append)
    assert [sentence.partition("leaves out ")[2] for sentence in told] == [
        "tools (1 of 1), reasoning_content of assistant (1 of 1), content of tool (1 of 1)"
    ]
    inside = [ASKED[0], {**ASKED[1], "content": "<think>dog</think>the cat"}]
    drops = CHAT.replace("message['content']", "message['content'].split('</think>')[-1]")
    Pretrained(write_tokenizer(tmp_path / "drops", chat=drops, pairs=False)).chats(
        [Conversation(inside)], "a", told.append
    )
    assert told[1].endswith("leaves out thinking in the content of assistant (1 of 1)")


def test_arguments_of_calls_reach_a_template_as_it_takes_them(tmp_path):
    """OpenAI writes them as JSON, which became a string in a string."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "mat", "arguments": '{"on": "house"}'}}]}
    write = "(message.content or '') + (message.tool_calls[0].function.arguments.%s if message.tool_calls else '')"
    for reads in ("on", "split('\"')[3]"):
        template = CHAT.replace("message['content']", write % reads)
        for arguments in ('{"on": "house"}', {"on": "house"}):
            call["tool_calls"][0]["function"]["arguments"] = arguments
            shown = counted_words(tmp_path, Conversation([ASKED[0], call]), template)
            assert shown.endswith("assistant HOUSE [SEP]"), (reads, arguments)


@uses_datasets
def test_columns_of_tools_and_of_a_system_are_read(tmp_path):
    tools = [{"type": "function", "function": {"name": "mat"}}]
    told = [{"role": "system", "content": "the dog"}, *ASKED]
    for name, written in (("a.jsonl", tools), ("b.jsonl", json.dumps(tools))):
        path = write_json(tmp_path / name, [{"system": "the dog", "messages": ASKED, "tools": written}])
        assert read("chat", Part(str(path))) == [Conversation(told, tools=tools)]
    path = write_json(
        tmp_path / "c.jsonl", [{"system": "the dog", "prompt": "why did it", "completion": "the cat sat"}]
    )
    for named in ([], ["system", "prompt", "completion"]):
        assert read("chat", Part(str(path)), Columns(named)) == [Conversation(told, 2)]
    with pytest.raises(ModelError, match="must be in column system or among the messages, got both in here"):
        conversation_of([told], "here", system="the dog")
    with pytest.raises(ModelError, match=r"tools must be a list of objects, or its JSON, got 'mat' in here"):
        conversation_of([ASKED], "here", tools="mat")
    lists = CHAT.replace("{% for", "{{ (tools[0].function.name + ' ') if tools else '' }}{% for", 1)
    assert counted_words(tmp_path, Conversation(ASKED, tools=tools), lists).startswith("mat user why did it [SEP]")


@pytest.mark.parametrize("template", [CHAT, GENERATION])
def test_a_template_that_leaves_calls_of_tools_out_is_refused(tmp_path, template):
    """A model learned to answer nothing where it should have called a tool."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "mat", "arguments": {}}}]}
    with pytest.raises(ModelError, match=r"must write tool_calls, as in row 0 of a\.jsonl, and leaves them out; take"):
        counted_words(tmp_path, Conversation([ASKED[0], call]), template)
    none = Conversation([ASKED[0], {**call, "content": "mat", "tool_calls": []}])
    assert counted_words(tmp_path, none, template) == "user why did it [SEP] assistant MAT [SEP]"
    writes = "message['content'] + (message.tool_calls or [{'function': {'name': ''}}])[0].function.name"
    chat = Conversation([ASKED[0], call])
    assert counted_words(tmp_path, chat, template.replace("message['content']", writes)) == (
        "user why did it [SEP] assistant MAT [SEP]"
    )


def test_a_template_that_fails_at_calls_of_tools_is_refused_by_what_to_do(tmp_path):
    """The sentence ended in the words of the library for templates: 'dict object' has no attribute 'content'."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "mat", "arguments": {}}}]}
    strict = CHAT.replace("message['content']", "message['content'][0] + message['content'][1:]")
    chat = Conversation([ASKED[0], call, {"role": "tool", "content": "ran"}, ASKED[1]])
    with pytest.raises(
        ModelError, match=r"must take tool_calls, as in row 0 of a\.jsonl, and does not; take the token"
    ):
        counted_words(tmp_path, chat, strict)


def test_what_is_shown_loses_signs_on_which_a_terminal_acts_and_no_others():
    """Spaces that do not break, and signs that join others, were replaced."""
    kept = "a\N{NO-BREAK SPACE}b\N{ZERO WIDTH JOINER}c\N{IDEOGRAPHIC SPACE}d\n\t\N{ZERO WIDTH NON-JOINER}e"
    assert visible(kept) == kept
    assert visible("\x1b[2J\x07\x9b\N{RIGHT-TO-LEFT OVERRIDE}\r\ud800") == "\ufffd[2J" + "\ufffd" * 5


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    with pytest.raises(ModelError, match="must have a chat template, got none"):
        Pretrained(write_tokenizer(tmp_path)).chats([Conversation(ASKED)], "a.jsonl")
    with pytest.raises(ModelError, match="tokenizer must be that of a model with a chat template"):
        DataOptions(kind="chat")
    several = Pretrained(write_tokenizer(tmp_path / "several", chat={"rag": CHAT, "tool_use": CHAT}))
    for of in (lambda: several.chats([Conversation(ASKED)], "a.jsonl"), lambda: several.prompt("why", chat=True)):
        with pytest.raises(ModelError, match=r"one chat template, or one of them as the default, got rag, tool_use; "):
            of()
    refuses = CHAT + "{{ raise_exception('no such turn') }}"
    with pytest.raises(ModelError, match=r"must take the messages of row 0 of a\.jsonl: .*no such turn"):
        counted_words(tmp_path, Conversation(ASKED), refuses)


def encoded(length, *answers):
    """A conversation of tokens 10, 11 ... of which those in the given ranges count."""
    counted = torch.zeros(length, dtype=torch.bool)
    for start, stop in answers:
        counted[start:stop] = True
    return ChatTokens(torch.arange(10, 10 + length, dtype=torch.int32), counted)


def test_packing_fills_rows_up_best():
    assert pack([2, 7, 3, 5, 4, 1], 8) == [[0, 4], [1, 5], [2, 3]]
    assert pack([8, 8], 8) == [[0], [1]]
    lengths = torch.randint(1, 33, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = pack(lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(200))
    assert max(sum(lengths[index] for index in row) for row in rows) <= 64
    assert len(rows) <= 1.05 * sum(lengths) / 64
    assert pack(lengths, 64) == rows


NO_ANSWER = "an answer is a message of the role assistant after another message, or tokens with labels"


def test_samples_hold_whole_conversations():
    chats = [encoded(3, (1, 3)), encoded(5, (4, 5)), encoded(9, (1, 2)), encoded(9, (8, 9)), encoded(1, (0, 1))]
    samples = ChatSamples(chats, 8, padding=0, packing=True)
    ids = torch.arange(len(samples))
    assert samples.inputs(ids).tolist() == [[10, 11, 12, 10, 11, 12, 13, 14], [10, 11, 12, 13, 14, 15, 16, 17]]
    x = IGNORE
    assert samples.targets(ids).tolist() == [[11, 12, x, x, x, x, 14, x], [11, x, x, x, x, x, x, x]]
    assert samples.side(ids)["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], list(range(8))]
    assert samples.notes() == [
        "3 conversations in 2 samples of 8 tokens; 0.0% of the tokens are padding; the loss counts 25.0% of the others",
        "conversations cut to 8 tokens: 2",
        "conversations left out, as no answer is in their first 8 tokens: 1",
        f"conversations left out, as they have no answer: 1; {NO_ANSWER}",
    ]
    example, side = samples.example(2), samples.side_example(2)
    assert (example.shape, example.dtype, example.is_meta) == ((2, 8), torch.int64, True)
    assert (side["position_ids"].shape, side["position_ids"].dtype) == ((2, 8), torch.int64)
    padded = ChatSamples(chats, 8, padding=7, packing=False)
    assert padded.inputs(torch.tensor([0])).tolist() == [[10, 11, 12, 7, 7, 7, 7, 7]]
    assert padded.targets(torch.tensor([0])).tolist() == [[11, 12, x, x, x, x, x, x]]
    assert (padded.side(ids), padded.side_example(2)) == ({}, {})
    assert len({samples.digest, padded.digest, ChatSamples(chats[:1], 8, padding=7, packing=False).digest}) == 3
    with pytest.raises(ModelError, match=r"within data\.block_size of 4 tokens, got none of 1; raise data\.block_size"):
        ChatSamples([encoded(9, (6, 9))], 4, padding=0, packing=True)
    with pytest.raises(ModelError, match=f"got none of 1; {NO_ANSWER}"):
        ChatSamples([encoded(9)], 4, padding=0, packing=True)


def test_packing_needs_a_model_that_reads_positions():
    samples = ChatSamples([encoded(4, (2, 3))], 8, padding=0, packing=True)
    require_positions(("position_ids",), samples.side_example(1))
    require_positions((), {})
    with pytest.raises(ModelError, match=r"one text for this model, as with .*: its layers do not read"):
        require_positions(("attention_mask",), samples.side_example(1))
    with pytest.raises(ModelError, match="packing must be left out for kind text, got True: it is for chat"):
        DataOptions(kind="text", packing=True)


def test_a_note_shows_what_counts():
    samples = ChatSamples([encoded(4, (2, 3)), encoded(4, (1, 4))], 8, padding=0, packing=True)
    pieces = [(tokens.tolist(), counts) for tokens, counts in samples.first()]
    assert pieces == [([10, 11], False), ([12], True), ([13], False)]
    assert in_words([("a\n", False), ("b\x1b", True)]) == "a\n[[b\N{REPLACEMENT CHARACTER}]]"


@uses_datasets
def test_conversations_of_a_file(tmp_path):
    words = write_tokenizer(tmp_path / "words", pairs=False, chat=CHAT)
    path = write_json(tmp_path / "a.jsonl", [{"messages": ASKED if index == 9 else TWICE} for index in range(10)])
    options = DataOptions(name=str(path), kind="chat", tokenizer=words, block_size=16, held_out=0.2)
    data = load(options)
    assert isinstance(data.task, LanguageModeling)
    assert (len(data.training), len(data.held_out), data.vocab_size) == (8, 2, 22)
    assert data.notes[0] == f"of {path}, column messages is read"
    assert data.notes[-1] == (
        "the first conversation, where the loss counts what is in [[ ]]:\n"
        "user why [SEP] assistant[[a mat [SEP]]]user did it [SEP] assistant[[on the mat [SEP]]]"
    )


def test_the_loss_is_that_of_transformers(tmp_path):
    """Two micro-batches with unlike counts of answers weigh as in the whole batch."""
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=40
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    samples = ChatSamples([encoded(7, (1, 2)), encoded(12, (3, 12))], 12, padding=0, packing=False)
    ids, task = torch.arange(2), LanguageModeling()
    targets = samples.targets(ids)
    sums = [
        task.loss_sum(model(samples.inputs(ids[i : i + 1])).logits, targets[i : i + 1]) / task.num_valid(targets)
        for i in range(2)
    ]
    labels = torch.where(targets != IGNORE, targets, -100).roll(1, 1)
    mask = torch.tensor([[1] * 7 + [0] * 5, [1] * 12])
    whole = model(samples.inputs(ids), attention_mask=mask, labels=labels).loss
    assert torch.allclose(sum(sums), whole, rtol=1e-6, atol=0)


def test_a_packed_conversation_is_computed_as_by_itself():
    """The library's own mask for positions that begin anew; padding is a conversation of its own."""
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=40
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    alone = [encoded(5, (2, 5)), encoded(4, (1, 4)), encoded(1 + 2, (1, 3))]
    samples = ChatSamples(alone, 14, padding=0, packing=True)
    ids = torch.tensor([0])
    assert len(samples) == 1
    packed = model(samples.inputs(ids), **samples.side(ids), use_cache=False).logits[0]
    expected = torch.cat([model(each.tokens[None].long()).logits[0] for each in alone])
    assert torch.allclose(packed[:12], expected, rtol=0, atol=1e-5)
    kept = samples.targets(ids)[0, :12]
    assert functional.cross_entropy(packed[:12], kept) > 0
