"""Tiny data as people have it: tables, folders, images and tokenizers, written where a test wants them."""

import io
import json

import numpy as np

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "house", "why", "did", "it"]
ROLES = ["user", "assistant", "system"]


def write_rows(path, rows):
    """Write rows as the suffix says: parquet, jsonl or csv."""
    from datasets import Dataset

    table = Dataset.from_list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    {".parquet": table.to_parquet, ".jsonl": table.to_json, ".csv": table.to_csv}[path.suffix](str(path))
    return path


def write_json(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CHAT = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' [SEP] ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
"""A chat template: `user why did it [SEP] assistant the cat [SEP]`."""


def write_tokenizer(folder, *, pad="[PAD]", pairs=True, chat=None):
    """Write a tokenizer of words as `AutoTokenizer` loads it: [CLS] a b [SEP] c d [SEP], if `pairs`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: index
        for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\n", *WORDS, *(ROLES if chat else ())])
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    if pairs:
        words.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    names = ["input_ids", "token_type_ids", "attention_mask"] if pairs else ["input_ids", "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token=pad, model_input_names=names, chat_template=chat
    ).save_pretrained(str(folder))
    return str(folder)


def png(pixels) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def random_pixels(count, shape=(8, 8, 3), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_images(path, pixels, labels, names=("cat", "dog")):
    """Write a parquet file as CIFAR-10 comes on the hub: img, encoded, and label, of classes with names."""
    from datasets import ClassLabel, Dataset, Features, Image

    features = Features({"img": Image(), "label": ClassLabel(names=list(names))})
    rows = {"img": [{"bytes": png(image), "path": None} for image in pixels], "label": list(labels)}
    Dataset.from_dict(rows, features=features).to_parquet(str(path))
    return path


def write_reviews(path, names=()):
    """Write a parquet file of 20 sentences with labels 0 and 1, of classes with names if there are any."""
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"sentence": Value("string"), "label": ClassLabel(names=[*names]) if names else Value("int64")})
    rows = {"sentence": [f"the cat sat {number}" for number in range(20)], "label": [0, 1] * 10}
    Dataset.from_dict(rows, features=features).to_parquet(str(path))
    return path
