"""A run on words with tags, and what it exports."""

import json

import pytest
import torch
from transformers import AutoModelForTokenClassification

from support.data_files import write_json, write_tokenizer
from thinwire.launch import cli

RECIPE = """
model:
  name: bert
  config: {vocab_size: 32, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 16}
data: {name: rows.jsonl, kind: tags, tokenizer: words, block_size: 8, held_out: 0.5}
pipeline: {num_stages: 2, num_microbatches: 1, microbatch_size: 2}
training: {steps: 2}
"""


@pytest.mark.slow
def test_a_run_learns_tags_and_its_export_is_a_model_of_transformers(tmp_path, monkeypatch, hub_cache, capsys):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "words")
    write_json(tmp_path / "rows.jsonl", [{"tokens": ["the", "cat"], "ner_tags": [0, 2]}] * 8)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert cli.main(["simulate", "recipe.yaml", "--output", "run"]) == 0
    assert "accuracy" in json.loads((tmp_path / "run" / "summary.json").read_text())["held_out"]["off"]
    assert cli.main(["export", "run", "--to", "exported"]) == 0
    assert "AutoModelForTokenClassification.from_pretrained" in (tmp_path / "exported" / "README.md").read_text()
    loaded, report = AutoModelForTokenClassification.from_pretrained("exported", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.shape == (1, 4, 3)
