"""Several sources as one: their shares, their order, and what may be mixed."""

from pathlib import Path

import pytest
import torch

from support.data_files import CHAT, write_json, write_tokenizer
from thinwire.models.data import kinds
from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions
from thinwire.models.errors import ModelError


def tables(tmp_path, **rows):
    """A file of token ids for each name, with so many blocks of 2, and one token more."""
    tokens = {
        name: [[index * 100 + i for i in range(2 * count + 1)]] for index, (name, count) in enumerate(rows.items())
    }
    return {name: str(write_json(tmp_path / f"{name}.jsonl", [{"input_ids": ids[0]}])) for name, ids in tokens.items()}


@pytest.mark.usefixtures("hub_cache")
def test_each_source_gives_its_share_and_comes_once_at_least(tmp_path):
    files = tables(tmp_path, a=6, b=2, c=1)
    given = DataOptions(name=files["a"], mixture={files["b"]: 0.25, files["c"]: 0.25}, block_size=2, held_out=0)
    data = load(given)
    samples, ids = data.training, torch.arange(12)
    assert len(samples) == 12
    assert samples.inputs(ids)[:, 0].tolist() == [0, 100, 200, 2, 4, 102, 200, 6, 8, 100, 200, 10]
    assert torch.equal(samples.targets(ids), samples.inputs(ids) + 1)
    assert (
        data.notes[-1] == f"a pass has 12 samples: {files['a']} 1 times, {files['b']} 1.5 times, {files['c']} 3 times"
    )
    assert (data.vocab_size, data.held_out, samples.lengths) == (203, None, None)
    assert samples.example(3).shape == (3, 2) and samples.side(ids) == samples.side_example(3) == {}
    assert samples.digest == load(given).training.digest


@pytest.mark.usefixtures("hub_cache")
def test_what_is_held_out_comes_once_and_is_not_trained_on(tmp_path):
    files = tables(tmp_path, a=9, b=4)
    data = load(DataOptions(name=files["a"], mixture={files["b"]: 0.5}, block_size=2, held_out=0.3))
    held_out = set(data.held_out.inputs(torch.arange(len(data.held_out))).flatten().tolist())
    trained = set(data.training.inputs(torch.arange(len(data.training))).flatten().tolist())
    assert len(data.held_out) == 3 and not held_out & trained
    data = load(DataOptions(name=files["a"], mixture={files["b"]: 0.5}, block_size=2, evaluation=files["b"]))
    assert len(data.held_out) == 4


@pytest.mark.usefixtures("hub_cache")
def test_one_file_for_evaluation_is_read_once(tmp_path, monkeypatch):
    """It was read and made tokens again for each source."""
    files, opened, read = tables(tmp_path, a=9, b=4, c=2, d=1), [], kinds.read
    monkeypatch.setattr(kinds, "read", lambda kind, part, columns: opened.append(part) or read(kind, part, columns))
    mixture = {files["b"]: 0.2, files["c"]: 0.2}
    data = load(DataOptions(name=files["a"], mixture=mixture, block_size=2, evaluation=files["d"], evaluation_limit=3))
    assert sorted(part.name for part in opened) == sorted(files.values())
    assert len(data.held_out) == 1 and data.held_out.inputs(torch.tensor([0])).tolist() == [[300, 301]]


@pytest.mark.usefixtures("hub_cache")
def test_a_share_to_hold_out_beside_evaluation_is_said_to_do_nothing(tmp_path):
    files = tables(tmp_path, a=9, b=4)
    given = {"name": files["a"], "block_size": 2, "evaluation": files["b"]}
    for share, said in ((0.1, False), (0, False), (0.3, True)):
        notes = load(DataOptions(**given, held_out=share)).notes
        assert ("data.held_out, 0.3, does nothing, because data.evaluation names what is held out" in notes) == said
    assert "held_out" not in str(load(DataOptions(name=files["a"], block_size=2, held_out=0.4)).notes)


@pytest.mark.usefixtures("hub_cache")
def test_conversations_of_two_formats_mix_with_their_lengths_and_positions(tmp_path):
    words = write_tokenizer(tmp_path / "words", pairs=False, chat=CHAT)
    write_json(tmp_path / "a.jsonl", [{"prompt": "why", "completion": "the cat sat"}])
    write_json(tmp_path / "b.jsonl", [{"instruction": "why", "output": "a mat"}])
    (a, b), ids = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")), torch.arange(2)
    given = {"kind": "chat", "tokenizer": words, "block_size": 12, "held_out": 0}
    samples = load(DataOptions(name=a, mixture={b: 0.5}, **given)).training
    assert samples.lengths.tolist() == [8, 7]
    assert samples.side(ids) == {}
    packed = load(DataOptions(name=a, mixture={b: 0.5}, packing=True, **given)).training
    assert packed.side(ids)["position_ids"][:, 7].tolist() == [7, 0]
    assert packed.side_example(2)["position_ids"].shape == (2, 12)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"mixture": {"a": 0.5, "b": 0.5}},
            r"mixture must have shares above 0 and together below 1, because pydoc",
        ),
        ({"mixture": {"a": 0.0}}, r"mixture must have shares above 0"),
        (
            {"mixture": {"pydoc": 0.5}},
            "mixture must name other data than name, got pydoc in both",
        ),
        ({"mixture": {"a": 0.5}, "kind": "pairs"}, r"mixture must be left out for kind pairs"),
    ],
)
def test_what_cannot_be_mixed_is_told(options, told):
    with pytest.raises(ModelError, match=told):
        DataOptions(**options)


@pytest.mark.usefixtures("hub_cache")
def test_a_source_that_cannot_be_mixed_is_named(tmp_path):
    """A file that is missing was told as data.name, and one that is too short not by its name."""
    files = tables(tmp_path, a=6, short=0)
    mixture = {files["short"]: 0.2, "nowhere.jsonl": 0.2}
    with pytest.raises(ModelError) as caught:
        load(DataOptions(name=files["a"], mixture=mixture, block_size=2, held_out=0))
    short, nowhere = caught.value.mistakes
    assert short.startswith(f"the training text of {files['short']} must have 3 tokens or more, got 1")
    assert nowhere.startswith("data.name, and what evaluation and mixture name, must be 'pydoc'")
    assert nowhere.endswith(f"got 'nowhere.jsonl': no such file or folder in {Path.cwd()}")
