"""Recipes as files of a test, with the models and data that they name."""

import json

import torch

from support.data_files import CHAT, WORDS, write_json, write_tokenizer
from support.tiny_run import TEXT


def written(folder, text, name="mine.yaml"):
    """Write a recipe into a folder; its path."""
    path = folder / name
    path.write_text(text)
    return path


CHATS = """
model: {name: llama, config: {vocab_size: 22, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2,
  num_key_value_heads: 1, intermediate_size: 24, max_position_embeddings: 32}}
data: {name: chats.jsonl, kind: chat, tokenizer: words, block_size: 24, held_out: 0, shuffle: never}
pipeline: {num_stages: 2, num_microbatches: 3, microbatch_size: 2}
compression: {activations: none, gradients: none}
optimizer: {name: sgd, lr: 0.5, momentum: 0, schedule: constant}
training: {steps: 1}
"""


def write_chats(folder):
    """Write `chat.yaml`, a tokenizer and conversations of one to three answers, of unlike lengths."""
    written(folder, CHATS, "chat.yaml")
    write_tokenizer(folder / "words", pairs=False, chat=CHAT)
    draw = torch.Generator().manual_seed(0)

    def words(most):
        count = int(torch.randint(1, most, (), generator=draw))
        return " ".join(WORDS[index] for index in torch.randint(len(WORDS), (count,), generator=draw).tolist())

    rows = [
        [{"role": role, "content": words(6)} for _ in range(turns) for role in ("user", "assistant")]
        for turns in (1, 3, 1, 2, 2, 1)
    ]
    write_json(folder / "chats.jsonl", [{"messages": messages} for messages in rows])


EXPERTS = {
    **{"vocab_size": 22, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"intermediate_size": 24, "num_local_experts": 4, "output_router_logits": True, "initializer_range": 0.3},
}


def with_routers(weight):
    """Options of `chat.yaml` for a model in three stages whose routers have a loss of some weight."""
    config = json.dumps(EXPERTS | {"router_aux_loss_coef": weight})
    return ["--model.name", "mixtral", "--pipeline.num_stages", "3", "--model.config", config]


LORA = """
model: {name: tiny, weights: pretrained, lora: {rank: 4}}
data: {name: text, block_size: 16, held_out: 0.08}
pipeline: {num_stages: 3, num_microbatches: 2, microbatch_size: 2}
compression: {activations: none, gradients: none}
optimizer: {name: sgd, momentum: 0, weight_decay: 0, lr: 0.5, schedule: constant}
training: {steps: 4}
"""
WITH_DROPOUT = [
    *("--codec", "q(4)/q(8)", "--model.lora.dropout", "0.2", "--optimizer.name", "adamw", "--optimizer.lr", "0.01"),
]
"""Options of `lora.yaml` for a run with compression."""


def write_lora(folder):
    """Write `lora.yaml`, its text, and `tiny`, a model as Transformers saves one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    written(folder, LORA, "lora.yaml")
    (folder / "text").write_bytes(TEXT)
    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(folder / "tiny")
