"""What ends an answer counts, and is known: a model that never learned it answers and goes on."""

import pytest
from transformers import AutoTokenizer

from support.data_files import CHAT, write_tokenizer
from thinwire.models.data.endings import missing
from thinwire.models.data.parts import Conversation
from thinwire.models.data.tokenizer import Pretrained
from thinwire.models.errors import ModelError

TURNS = (("user", "why"), ("assistant", "a mat"), ("user", "did it"), ("assistant", "on"))
TWICE = [{"role": role, "content": text} for role, text in TURNS]
NEXT_ROLE_ENDS = CHAT.replace("' [SEP] '", "' '").replace("message['role'] +", "'[' + message['role'] + ']' +")
NEXT_ROLE_ENDS = NEXT_ROLE_ENDS.replace("'assistant '", "'[assistant] '")
PLAIN = CHAT.replace("' [SEP] '", "' '").replace("'assistant '", "'the '").replace("message['role'] +", "'the' +")
MARKS_WORDS_ONLY = NEXT_ROLE_ENDS.replace(
    "message['content'] + ' '",
    "'' }}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ ' '",
)


def read(folder, template, chat, **names):
    """The words of a conversation, in capitals where they count, and the words that end its answers."""
    given = AutoTokenizer.from_pretrained(write_tokenizer(folder, chat=template, pairs=False))
    for name, value in names.items():
        setattr(given, name, value)
    given.add_special_tokens({"extra_special_tokens": ["[user]", "[assistant]"]})
    given.save_pretrained(folder)
    [found] = Pretrained(str(folder)).chats([Conversation(chat)], "a.jsonl")
    words = given.convert_ids_to_tokens(found.tokens.tolist())
    shown = " ".join(
        word.upper() if counts else word for word, counts in zip(words, found.counted.tolist(), strict=True)
    )
    return shown, {tuple(given.convert_ids_to_tokens(list(end))) for end in found.ends}


def test_what_ends_an_answer_is_found(tmp_path):
    told = "user why [SEP] assistant A MAT [SEP] user did it [SEP] assistant ON [SEP]"
    assert read(tmp_path / "unmarked", CHAT, TWICE) == (told, {("[SEP]",)})
    assert read(tmp_path / "special", CHAT, TWICE, eos_token="[SEP]") == (told, {("[SEP]",)})
    twice = CHAT.replace("{% endif %}", "{% else %}{{ '[CLS]' }}{% endif %}")
    assert read(tmp_path / "two", twice, TWICE, sep_token="[SEP]", cls_token="[CLS]")[1] == {
        ("[SEP]",),
        ("[SEP]", "[CLS]"),
    }


@pytest.mark.parametrize("template", [NEXT_ROLE_ENDS, MARKS_WORDS_ONLY])
def test_the_token_of_the_next_role_ends_an_answer_where_nothing_else_does(tmp_path, template):
    """GLM's turns: the model answered right, and never stopped."""
    shown, ends = read(tmp_path, template, TWICE)
    assert shown == "[user] why [assistant] A MAT [USER] did it [assistant] ON [USER]"
    assert ends == {("[user]",)}


def test_a_text_token_ends_an_answer_where_a_template_has_no_other(tmp_path):
    shown, ends = read(tmp_path / "eos", PLAIN, TWICE, eos_token="[SEP]")
    assert (shown, ends) == ("the why the A MAT the did it the ON [SEP]", {("[SEP]",)})
    with pytest.raises(
        ModelError, match=r"must end an answer by a token, and does not, as in row 0 of a\.jsonl; name an"
    ):
        read(tmp_path / "none", PLAIN, TWICE)


def test_a_model_must_know_one_token_of_each_end():
    assert missing([7], [(7,), (3, 7), (7, 3)]) == []
    assert missing([7], [(3, 4), (5,), (7,)]) == [3, 5]
