"""A merged export in llama.cpp: its converter takes the folder, and it says what transformers says with that.

LLAMA_CPP names a checkout, for the converter; xllamacpp is a build of llama.cpp that pip brings.
"""

import json
import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from support import real_model
from support.recipe_runs import simulate
from thinwire.launch import cli

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

RECIPE = """
model: {name: base, weights: pretrained, lora: {rank: 4}}
data: {name: text, tokenizer: base, block_size: 32, held_out: 0.2}
pipeline: {num_stages: 2, num_microbatches: 2, microbatch_size: 2}
optimizer: {name: adamw, lr: 0.05, schedule: constant}
training: {steps: 2}
"""
PROMPT = "Where did the cat sit?"
ASKS = """
import json, sys
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.cpuparams.n_threads = sys.argv[1], 128, 1
found = xllamacpp.Server(params).handle_completions({"prompt": sys.argv[2], "max_tokens": 8, "temperature": 0})
print("said", json.dumps(found["choices"][0]["text"]))
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A small llama with SmolLM2's tokenizer, because the converter knows only tokenizers by name: export and file."""
    converter = Path(os.environ.get("LLAMA_CPP", "llama.cpp"), "convert_hf_to_gguf.py")
    if not converter.is_file():
        pytest.skip("the converter of llama.cpp is not here: LLAMA_CPP must name a checkout")
    made = tmp_path_factory.mktemp("served")
    tokenizer = AutoTokenizer.from_pretrained(real_model.folder())
    tokenizer.save_pretrained(made / "base")
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 96}
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), **sizes, initializer_range=0.3, eos_token_id=2, tie_word_embeddings=True)
    ).save_pretrained(made / "base")
    (made / "lora.yaml").write_text(RECIPE)
    (made / "text").write_text("The cat sat on the mat, and the dog ran to the house. Why did it? " * 60)
    with chdir(made):
        simulate("lora.yaml", made / "run")
        assert cli.main(["export", "run", "--to", "tuned", "--merged"]) == 0
        given = ["tuned", "--outfile", "tuned.gguf", "--outtype", "f32"]
        subprocess.run([sys.executable, str(converter.resolve()), *given], check=True, capture_output=True)
    return made / "tuned", made / "tuned.gguf"


def test_what_the_converter_writes_is_whole(converted):
    reader = pytest.importorskip(
        "gguf", reason="gguf, which reads the files of llama.cpp, is not installed"
    ).GGUFReader(converted[1])
    tokenizer, model = AutoTokenizer.from_pretrained(converted[0]), AutoModelForCausalLM.from_pretrained(converted[0])
    fields = {name: reader.fields[f"tokenizer.{name}"].contents() for name in ("chat_template", "ggml.eos_token_id")}
    assert fields == {"chat_template": tokenizer.chat_template, "ggml.eos_token_id": tokenizer.eos_token_id}
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    assert len(tensors) == len(model.state_dict()) - 1, "the head is tied, and saved once"
    assert torch.equal(tensors["token_embd.weight"], model.get_input_embeddings().weight)


def test_llama_cpp_says_what_transformers_says(converted):
    pytest.importorskip("xllamacpp", reason="xllamacpp, a build of llama.cpp, is not installed")
    folder, file = converted
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    expected = tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :])
    asked = subprocess.run([sys.executable, "-c", ASKS, str(file), PROMPT], check=True, capture_output=True, text=True)
    [said] = [line.removeprefix("said ") for line in asked.stdout.splitlines() if line.startswith("said ")]
    assert json.loads(said) == expected and len(set(expected)) > 3
