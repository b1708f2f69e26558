"""Some hundred damaged and hostile tables, images, tokenizers and models: each is read, or refused in a sentence."""

import io
import json
import os
import random
import resource
import warnings
from itertools import pairwise

import pytest
import torch
from PIL import Image

from support.data_files import CHAT, png, random_pixels, write_tokenizer
from support.models import blueprint
from support.parts import read
from thinwire.models.data import trial
from thinwire.models.data.images import decode, find_format
from thinwire.models.data.parts import Labelled, Part
from thinwire.models.data.tokenizer import make_tokenizer
from thinwire.models.errors import ModelError
from thinwire.models.layers import build_stage, check_weights
from thinwire.models.options import ModelOptions

SEED = int(os.environ.get("THINWIRE_FUZZ_SEED", "0"))
MOST_BYTES = 2**30
ODD = [None, -1, 0, 1, 10**9, 2**63, 2**65, 1e308, "x", "", "\0", "../../x", [], {}, True, [[[]]], {"a": {"a": 1}}]


@pytest.fixture
def chance():
    """A generator for the test. What the test takes stays far below the memory of a training."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield random.Random(SEED)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES


def refused(read):
    """1 if reading is refused by one of our errors, 0 if it goes well; any other error is one of ours to mend."""
    try:
        read()
    except ModelError as error:
        assert 0 < len(str(error)) < 3000
        return 1
    return 0


def damaged(content, chance):
    """Bytes with a few others, without their end, with a part twice, or with something before them."""
    content = bytearray(content)
    place, length = chance.randrange(len(content)), chance.randrange(1, 40)
    match chance.randrange(5):
        case 0:
            for _ in range(chance.randrange(1, 6)):
                content[chance.randrange(len(content))] = chance.randrange(256)
        case 1:
            del content[place:]
        case 2:
            content[place:place] = content[place : place + length]
        case 3:
            content[place : place + length] = bytes(chance.choice((0, 255)) for _ in range(length))
        case 4:
            content[:0] = chance.choice((b"\xff\xfe", b"\x1f\x8b", b"\n\n", b"\xef\xbb\xbf", b"["))
    return bytes(content)


def changed(value, chance):
    """A JSON object with an odd value in a random place."""
    value = json.loads(json.dumps(value))
    inside = value
    while True:
        name = chance.choice(list(inside))
        if isinstance(inside[name], dict) and inside[name] and chance.random() < 0.7:
            inside = inside[name]
            continue
        inside[name] = chance.choice(ODD)
        return value


def tables():
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"text": f"words {n}", "label": n % 2, "image": png(random_pixels(1)[0]).hex()} for n in range(4)]
    jsonl = "".join(json.dumps(row) + "\n" for row in rows).encode()
    csv = b"text,label\n" + b"".join(b"words %d,%d\n" % (n, n % 2) for n in range(4))
    file = io.BytesIO()
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]}), file)
    return {"jsonl": jsonl, "csv": csv, "parquet": file.getvalue()}


def told_features(kind, **fields):
    """A parquet file whose features are of this kind, as `datasets` keeps them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = {"text": {"dtype": "string", "_type": "Value"}, "label": {"_type": kind, **fields}}
    schema = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["a", "b"], "label": [0, 1]}).replace_schema_metadata(schema), file)
    return file.getvalue()


SPECIAL_TABLES = {
    "long.csv": b"text,label\n" + b'"' + b"x" * 2_000_000 + b"\n",
    "wide.csv": b",".join(b"c%d" % n for n in range(3000)) + b"\n" + b",".join([b"1"] * 3000) + b"\n",
    "nul.csv": b"text,label\n\0\0\0,1\n",
    "mixed.jsonl": b'{"text": "a", "label": 1}\n{"text": 3, "label": "x"}\n{"text": {"a": 1}}\n',
    "large.jsonl": b'{"text": "a", "label": 123456789012345678901234567890}\n',
    "label.jsonl": b'{"text": "a", "label": 90000000}\n{"text": "a", "label": 90000001}\n',
    "nan.csv": b"text,label\na,nan\nb,inf\n",
    "twice.csv": b"text,text,label\na,b,1\n",
    "surrogate.jsonl": b'{"text": "\\ud800", "label": 0}\n',
    "scalar.json": b"3",
    "list.json": b"[1, 2, 3]",
    "null.json": b"null",
}


@pytest.mark.slow
@pytest.mark.usefixtures("hub_cache")
def test_tables(tmp_path, chance):
    hostile = dict(SPECIAL_TABLES)
    for kind, fields in (("Nowhere", {}), ("ClassLabel", {"names": "x"}), ("Image", {}), ("Value", {"dtype": "odd"})):
        hostile[f"{kind}.parquet"] = told_features(kind, **fields)
    for suffix, content in tables().items():
        hostile |= {f"{n}.{suffix}": damaged(content, chance) for n in range(8)}
    bad = 0
    for name, content in hostile.items():
        (tmp_path / name).write_bytes(content)
        part = Part(str(tmp_path / name))
        refusals = [refused(lambda part=part: read("text", part))]
        refusals += [refused(lambda part=part, kind=kind: read(kind, part)) for kind in ("pairs", "images")]
        bad += all(refusals)
    assert len(hostile) > 35 and bad > 10


def test_images(chance):
    sizes = {"JPEG": (16, 8), "PNG": (16, 8), "WEBP": (16, 8), "GIF": (16, 8), "BMP": (16, 8), "TIFF": (16, 8)}
    bad = 0
    for form, size in sizes.items():
        file = io.BytesIO()
        Image.fromarray(random_pixels(1, (*size, 3))[0]).save(file, form)
        for _ in range(50):
            content = damaged(file.getvalue(), chance)
            part = Labelled([content], torch.zeros(1, dtype=torch.int64), 2)
            bad += refused(lambda part=part, content=content: decode(content, find_format([part], None, 32)))
    assert bad > 60


@pytest.mark.slow
def test_tokenizers(tmp_path, chance):
    folder = write_tokenizer(tmp_path / "words")
    files = {name: (tmp_path / "words" / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    bad = 0
    for turn in range(80):
        name = chance.choice(list(files))
        odd = json.dumps(changed(json.loads(files[name]), chance)).encode()
        (tmp_path / "words" / name).write_bytes(damaged(files[name], chance) if turn % 4 == 0 else odd)
        bad += refused(lambda: make_tokenizer(folder).tokens(["the cat sat"]))
        (tmp_path / "words" / name).write_bytes(files[name])
    assert bad > 10


BOMBS = {
    "{{ 'x' * 8000000000 }}": "takes more than 2 GiB of memory, or fails",
    "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}": "writes more than 8388608 characters of a conversation",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "takes more than 4 s",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", BOMBS)
def test_a_chat_template_that_computes_without_bound(tmp_path, chance, monkeypatch, text):
    monkeypatch.setattr(trial, "SECONDS", 4.0)
    folder = write_tokenizer(tmp_path, pairs=False, chat=text + CHAT)
    told = f"^the chat template of tokenizer '.*' must write a conversation, and in a trial it {BOMBS[text]}; take"
    with pytest.raises(ModelError, match=told):
        make_tokenizer(folder).prompt("why", chat=True)


def test_a_chat_template_that_writes_too_much_of_one_conversation(tmp_path, monkeypatch):
    tokenizer = make_tokenizer(write_tokenizer(tmp_path, pairs=False, chat=CHAT))
    tokenizer.prompt("why", chat=True)
    monkeypatch.setattr("thinwire.models.data.templates.CHARACTERS", 60)
    with pytest.raises(ModelError, match="must write at most 60 characters of a conversation, got 92 of the prompt"):
        tokenizer.prompt("why " * 20, chat=True)


def with_replacing(folder, *pairs):
    """A tokenizer that replaces signs before it looks for words."""
    write_tokenizer(folder)
    known = json.loads((folder / "tokenizer.json").read_text())
    steps = [{"type": "Replace", "pattern": {"String": sign}, "content": other} for sign, other in pairs]
    steps = {"normalizer": {"type": "Sequence", "normalizers": steps}}
    (folder / "tokenizer.json").write_text(json.dumps(known | steps))
    return str(folder)


@pytest.mark.slow
def test_a_tokenizer_that_makes_much_of_little(tmp_path, chance):
    six = [(one, other * 1000) for one, other in pairwise("xyzuvwq")]
    with pytest.raises(ModelError, match=r"in a trial it takes more than 2 GiB of memory, or fails; take another one$"):
        make_tokenizer(with_replacing(tmp_path / "six", *six))
    with pytest.raises(ModelError, match=r"in a trial it makes [0-9]+ tokens of [0-9]+ characters; take another one$"):
        make_tokenizer(with_replacing(tmp_path / "one", ("x", "on " * 1000)))
    assert len(make_tokenizer(with_replacing(tmp_path / "none", ("x", "on "))).tokens(["x cat"])) > 2


@pytest.mark.slow
def test_a_tokenizer_that_panics(tmp_path, capfd):
    """Rust's panics are no Exception, and print their own account."""
    folder = write_tokenizer(tmp_path)
    known = json.loads((tmp_path / "tokenizer.json").read_text())
    wrong = {
        "post_processor": known["post_processor"] | {"special_tokens": {}},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
        | {"continuing_subword_prefix": "../x"},
    }
    for name, value in wrong.items():
        (tmp_path / "tokenizer.json").write_text(json.dumps(known | {name: value}))
        with pytest.raises(ModelError, match=r"in a trial it fails with .*; take another one$"):
            make_tokenizer(folder)
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    made = make_tokenizer(folder)

    class PanicException(BaseException):
        pass

    def panics(*_, **__):
        raise PanicException("no entry")

    made._tokenizer = panics
    with pytest.raises(ModelError, match=r"it fails with PanicException: no entry$"):
        made.tokens(["the cat"])
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_models(tmp_path, chance, kind):
    import transformers

    small = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 8} if kind != "gpt2" else {}
    config = transformers.AutoConfig.for_model(kind, **small, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    task, auto = ("classification", "SequenceClassification") if kind == "bert" else ("causal-lm", "CausalLM")
    getattr(transformers, f"AutoModelFor{auto}").from_config(config).save_pretrained(tmp_path)
    files = {name: (tmp_path / name).read_bytes() for name in ("config.json", "model.safetensors")}
    options = ModelOptions(name=str(tmp_path), weights="pretrained")

    def build():
        made = blueprint(options, task=task, num_labels=2 if kind == "bert" else None, block_size=4)
        check_weights(made)
        build_stage(made, range(len(made.layers)), seed=0)

    assert not refused(build)
    bad = 0
    for turn in range(40):
        odd = json.dumps(changed(json.loads(files["config.json"]), chance)).encode()
        name = "model.safetensors" if turn % 4 == 0 else "config.json"
        (tmp_path / name).write_bytes(damaged(files[name], chance) if turn % 4 == 0 else odd)
        bad += refused(build)
        (tmp_path / name).write_bytes(files[name])
    assert bad > 10
