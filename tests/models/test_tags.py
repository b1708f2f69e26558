"""Words with tags: how tokens get them, and that a model cut into stages learns them as the library's own does."""

from pathlib import Path

import pytest
import torch
import transformers

from support.data_files import write_json, write_tokenizer
from support.family_cases import gradients_of, run_pipeline, split, state_of
from support.models import blueprint
from thinwire.models.data.clients import divide
from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions
from thinwire.models.data.tokenizer import make_tokenizer
from thinwire.models.errors import ModelError
from thinwire.models.options import ModelOptions
from thinwire.models.tasks import IGNORE

ROWS = [
    {"tokens": ["the cat", "sat", "on"], "ner_tags": [2, 0, 1]},
    {"tokens": ["dog"], "ner_tags": [2]},
    {"tokens": ["a", "mat", "and", "a", "dog", "ran"], "ner_tags": [0, 1, 0, 1, 2, 0]},
]
ENCODER = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24}
SMALL = {"vocab_size": 32, **ENCODER, "max_position_embeddings": 16}


@pytest.fixture
def options(tmp_path, hub_cache):
    name = str(write_json(tmp_path / "rows.jsonl", ROWS))
    tokenizer = write_tokenizer(tmp_path / "words")
    return {"name": name, "kind": "tags", "tokenizer": tokenizer, "block_size": 7, "held_out": 0}


def test_the_first_token_of_each_word_has_its_tag(options):
    data, ids = load(DataOptions(**options)), torch.arange(3)
    _ = IGNORE
    assert data.training.targets(ids).tolist() == [
        [_, 2, _, 0, 1, _, _],  # [CLS] the cat sat on [SEP] [PAD]
        [_, 2, _, _, _, _, _],
        [_, 0, 1, 0, 1, 2, _],  # the last word is cut
    ]
    assert data.training.side(ids)["attention_mask"].sum(1).tolist() == [6, 3, 7]
    assert (data.num_labels, data.task.unit) == (3, "nats per word")
    assert data.notes[-1].endswith("column tokens is read, and the class from ner_tags")


def test_words_are_those_of_a_text_where_the_tokenizer_would_glue_them(options, tmp_path):
    """Tokenizers of bytes made one long word of all: NewYorkisbig."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa"]
    pairs = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, [("Ġ", "a")]))
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = tmp_path / "of bytes"
    PreTrainedTokenizerFast(tokenizer_object=pairs, pad_token="!").save_pretrained(str(folder))
    found = make_tokenizer(str(folder)).padded([(["a", "a", "b"],)], 5)
    assert [letters[token] for token in found.tokens[0].tolist()] == ["a", "Ġa", "Ġ", "b", "!"]
    assert found.words.tolist() == [[0, 1, 2, -1, -1]]


def test_accuracy_counts_words(options):
    data = load(DataOptions(**options))
    targets = data.training.targets(torch.arange(3))
    logits = torch.nn.functional.one_hot(torch.zeros_like(targets), 3).float()
    assert data.task.num_valid(targets) == 9
    assert data.task.metrics(0.0, data.task.observe(logits, targets))["accuracy"] == 3 / 9


def test_classes_are_matched_by_name_in_evaluation_data(options, tmp_path):
    from datasets import ClassLabel, Dataset, Features, Sequence, Value

    for file, names, tags in (("a", ["O", "PER", "LOC"], [1, 2]), ("b", ["LOC", "O"], [0, 1])):
        features = Features({"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=names))})
        rows = {"tokens": [["cat", "dog"], ["mat"]], "ner_tags": [tags, tags[:1]]}
        Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / f"{file}.parquet"))
    given = {**options, "name": str(tmp_path / "a.parquet"), "evaluation": str(tmp_path / "b.parquet")}
    data = load(DataOptions(**given))
    assert data.classes == ("O", "PER", "LOC")
    assert data.held_out.targets(torch.arange(2))[:, 1:3].tolist() == [[2, 0], [2, IGNORE]]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"tokens": ["a", "cat"], "ner_tags": [1]}, "row 3 of .* must have words, and a tag for each of them"),
        ({"tokens": ["a"], "ner_tags": [-1]}, "column ner_tags must hold integers from 0 on, got .-1"),
        ({"tokens": ["a"], "ner_tags": [None]}, "column ner_tags must hold a list of integers in every row"),
    ],
)
def test_rows_that_fit_no_words_are_refused(options, row, told):
    write_json(Path(options["name"]), [*ROWS, row])
    with pytest.raises(ModelError, match=told):
        load(DataOptions(**options))


def test_columns_of_other_names_are_to_be_named(options, tmp_path):
    rows = [{"words": row["tokens"], "tags": row["ner_tags"]} for row in ROWS]
    options["name"] = str(write_json(tmp_path / "other.jsonl", rows))
    with pytest.raises(ModelError, match=r"got tokens and label; it has words, tags, and of lists words, tags"):
        load(DataOptions(**options))
    assert len(load(DataOptions(**options, columns=["words"], label="tags")).training) == 3


def test_clients_cannot_be_divided_by_the_tags_of_words(options):
    with pytest.raises(ModelError, match=r"clients.division label needs the label of each sample"):
        divide(load(DataOptions(**options)), 2, "label", 0)


def test_bytes_have_no_words():
    with pytest.raises(ModelError, match="tokenizer must be that of a model for kind tags, got 'bytes'"):
        DataOptions(kind="tags")


@pytest.mark.parametrize(("name", "heads"), [("bert", {}), ("qwen3", {"num_key_value_heads": 2, "head_dim": 8})])
def test_three_stages_learn_tags_as_the_unsplit_model(name, heads, options):
    given = ModelOptions(name=name, config={**SMALL, "pad_token_id": 0, **heads})
    model = blueprint(given, task="token-classification", num_labels=3, block_size=7)
    assert model.compare().startswith(f"a tiny copy of {name} computes the same")
    data, ids = load(DataOptions(**options)), torch.arange(3)
    stages = [stage.eval() for stage in split(model, 3)]
    config = transformers.AutoConfig.for_model(name, **given.config, num_labels=3, bos_token_id=None, eos_token_id=None)
    unsplit = transformers.AutoModelForTokenClassification.from_config(config).eval()
    unsplit.load_state_dict(state_of(stages))
    side, targets = data.training.side(ids), data.training.targets(ids)
    taken = {key: value for key, value in side.items() if name == "bert" or key == "attention_mask"}
    found = unsplit(input_ids=data.training.inputs(ids), **taken, labels=targets)
    found.loss.backward()
    logits = found.logits.detach().requires_grad_()
    loss = data.task.loss_sum(logits, targets) / data.task.num_valid(targets)
    torch.testing.assert_close(loss, found.loss)
    loss.backward()
    assert torch.equal(run_pipeline(stages, data.training.inputs(ids), side, logits.grad), logits)
    wanted = {key: p.grad for key, p in unsplit.named_parameters() if p.grad is not None}
    torch.testing.assert_close(gradients_of(stages), wanted, rtol=1e-5, atol=1e-6)
