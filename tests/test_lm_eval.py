"""lm-evaluation-harness on a cut model: without codecs the numbers of its own class for transformers."""

import importlib.util
from contextlib import chdir

import pytest
import yaml
from transformers import AutoTokenizer

from support.data_files import CHAT, WORDS, write_json, write_tokenizer
from support.pages import ROOT
from support.recipe_runs import export, simulate
from thinwire.errors import ThinwireError

pytestmark = pytest.mark.slow

RECIPE = """
model: {name: llama, config: {vocab_size: 22, hidden_size: 16, num_hidden_layers: 3, num_attention_heads: 2,
  intermediate_size: 24, initializer_range: 0.4, max_position_embeddings: 32, eos_token_id: 3}}
data: {name: text, tokenizer: words, block_size: 16, held_out: 0.1}
pipeline: {num_stages: 3, num_microbatches: 2, microbatch_size: 2}
compression: {activations: q(2), gradients: q(8)}
training: {steps: 2}
"""
ROWS = [
    {"asked": "why did the", "said": " cat ran", "label": 0},
    {"asked": "the dog", "said": " sat on it", "label": 1},
]
FORMS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{asked}}",
        "doc_to_target": "label",
        "doc_to_choice": [" cat sat on a mat", " house"],
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        # longer than the model's positions, so in several windows
        "doc_to_target": "{{asked}}{% for _ in range(20) %}{{said}}{% endfor %}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{asked}}",
        "doc_to_target": "{{said}}",
        "generation_kwargs": {"until": [" cat", "mat"], "max_gen_toks": 20},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def example():
    """The example as a module; its class has its name in the harness from then on."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    spec = importlib.util.spec_from_file_location("lm_eval_model", ROOT / "examples" / "lm_eval_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    module._OPEN.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, its export, and tasks of local files."""
    made = tmp_path_factory.mktemp("judged")
    (made / "tiny.yaml").write_text(RECIPE)
    (made / "text").write_text(f"{' '.join(WORDS)}\n" * 60)
    words = AutoTokenizer.from_pretrained(write_tokenizer(made / "words", pairs=False, chat=CHAT), eos_token="[SEP]")
    words.save_pretrained(made / "words")
    rows = write_json(made / "tasks" / "rows.jsonl", ROWS)
    for name, form in FORMS.items():
        local = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test"}
        (made / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **local, **form}))
    with chdir(made):
        export(simulate("tiny.yaml", made / "run"), made / "tuned")
    return made


def judged(folder, monkeypatch, model, **arguments):
    """What the harness found for each question of each task: answers, or numbers."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(folder)
    tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    found = lm_eval.simple_evaluate(model, arguments, tasks=[*FORMS], task_manager=tasks, bootstrap_iters=0)
    return {name: [line["filtered_resps"] for line in found["samples"][name]] for name in FORMS}


def test_it_gives_the_numbers_of_the_harness_without_codecs_and_others_with(example, folder, monkeypatch):
    theirs = judged(folder, monkeypatch, "hf", pretrained="tuned", device="cpu", dtype="float32")
    off, on = (judged(folder, monkeypatch, "thinwire", run="run", codecs=codecs) for codecs in ("off", "on"))
    assert off["written"] == theirs["written"] and any(answer.strip() for [answer] in off["written"])
    for name in ("choices", "rolling"):
        assert off[name] != on[name]
        assert _numbers(off[name]) == pytest.approx(_numbers(theirs[name]), rel=1e-5)
    assert judged(folder, monkeypatch, "thinwire", run="tuned", codecs="off") == off
    example._OPEN.close()


def _numbers(told):
    """The numbers of nested lists, one after the other."""
    return [number for each in told for number in _numbers(each)] if isinstance(told, list | tuple) else [float(told)]


def test_what_it_cannot_judge_is_one_sentence(example, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ThinwireError, match="codecs must be on or off, got maybe"):
        example.CutModel("run", codecs="maybe")
    simulate("tiny.yaml", folder / "bytes", "--data.tokenizer", "bytes", "--model.config.vocab_size", "256")
    with pytest.raises(ThinwireError, match="and a tokenizer of transformers, and bytes has none"):
        example.CutModel("bytes")
