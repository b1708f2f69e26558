"""A tiny model of each family, as transformers builds it whole, and the same in stages."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from support.models import blueprint
from thinwire.models.layers import Blueprint, Stage, build_stage
from thinwire.models.options import ModelOptions
from thinwire.models.partition import partition

VOCABULARY, LENGTH, BATCH, LABELS = 61, 9, 3, 3

_ROTARY = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
_GROUPED = {**_ROTARY, "num_key_value_heads": 2, "pad_token_id": None}
_WIDE_HEADS = {**_GROUPED, "head_dim": 8}
_ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}


@dataclass(frozen=True)
class Case:
    family: str
    task: str
    config: dict[str, Any] = field(default_factory=dict)


def _causal(family: str, **config: Any) -> Case:
    return Case(family, "causal-lm", {"vocab_size": VOCABULARY, **config})


def _classifier(family: str, **config: Any) -> Case:
    return Case(family, "classification", {"vocab_size": VOCABULARY, **config})


_GPT2 = {"n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": 16}
_OPT = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 24}
_DEBERTA = {
    "relative_attention": True,
    "position_buckets": 4,
    "pos_att_type": "p2c|c2p",
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

CASES = {
    "gpt2": _causal("gpt2", **_GPT2),
    "llama": _causal("llama", **_GROUPED),
    "qwen2": _causal("qwen2", **{**_GROUPED, "use_sliding_window": True, **_SLIDING}),
    "qwen3": _causal("qwen3", **_WIDE_HEADS),
    "mistral": _causal("mistral", **{**_GROUPED, "sliding_window": 4}),
    "gemma": _causal("gemma", **_WIDE_HEADS),
    "gemma2": _causal("gemma2", **{**_WIDE_HEADS, **_SLIDING}),
    "gemma3_text": _causal("gemma3_text", **{**_WIDE_HEADS, **_SLIDING}),
    "gpt_neox": _causal("gpt_neox", **_ROTARY),
    "opt": _causal("opt", **_OPT, max_position_embeddings=16, word_embed_proj_dim=12),
    "bert": _classifier("bert", **_ENCODER),
    "roberta": _classifier("roberta", **_ENCODER),
    "deberta-v2": _classifier("deberta-v2", **_ENCODER, **_DEBERTA, type_vocab_size=2, conv_kernel_size=3),
    "distilbert": _classifier("distilbert", dim=16, n_layers=3, n_heads=4, hidden_dim=24, max_position_embeddings=16),
}
_SMALL = {**_GROUPED, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_EXPERTS = {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LOCAL_EXPERTS = {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
MORE = {
    "afmoe": _causal("afmoe", **_EXPERTS, num_dense_layers=1, head_dim=8, sliding_window=4),
    "arcee": _causal("arcee", **_SMALL),
    "bloom": _causal("bloom", hidden_size=16, n_layer=3, n_head=4),
    "codegen": _causal("codegen", n_embd=32, n_layer=3, n_head=4, n_positions=16, rotary_dim=4),
    "cohere": _causal("cohere", **_SMALL, logit_scale=0.3),
    "cohere2": _causal("cohere2", **_SMALL, sliding_window=4),
    "deepseek_v3": _causal(
        "deepseek_v3", **{**_SMALL, **_LATENT, **_GROUPS, "moe_intermediate_size": 8, "num_key_value_heads": 4}
    ),
    "ernie4_5": _causal("ernie4_5", **_SMALL, head_dim=4),
    "exaone4": _causal("exaone4", **_SMALL, sliding_window=4),
    "falcon": _causal("falcon", hidden_size=16, num_hidden_layers=3, num_attention_heads=4),
    "glm": _causal("glm", **_SMALL, head_dim=8),
    "glm4": _causal("glm4", **_SMALL, head_dim=8),
    "gpt_bigcode": _causal("gpt_bigcode", n_embd=16, n_layer=3, n_head=4, n_positions=16),
    "gpt_neo": _causal(
        "gpt_neo", hidden_size=16, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4
    ),
    "gpt_oss": _causal("gpt_oss", **_LOCAL_EXPERTS, head_dim=8, sliding_window=4),
    "gptj": _causal("gptj", n_embd=16, n_layer=3, n_head=2, n_positions=16, rotary_dim=4),
    "granite": _causal(
        "granite",
        **_SMALL,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=16.0,
        attention_multiplier=0.1,
    ),
    "granitemoe": _causal("granitemoe", **_LOCAL_EXPERTS, embedding_multiplier=12.0, logits_scaling=16.0),
    "helium": _causal("helium", **_SMALL, head_dim=4),
    "hunyuan_v1_dense": _causal("hunyuan_v1_dense", **_SMALL, head_dim=8),
    "lfm2": _causal("lfm2", **_SMALL, layer_types=["conv", "full_attention", "conv"]),
    "mamba": _causal("mamba", hidden_size=16, num_hidden_layers=3, state_size=4),
    "mixtral": _causal("mixtral", **_LOCAL_EXPERTS),
    "mpt": _causal("mpt", d_model=16, n_layers=3, n_heads=4, max_seq_len=16),
    "nemotron": _causal("nemotron", **_SMALL, head_dim=8),
    "olmo": _causal("olmo", **_SMALL),
    "olmo2": _causal("olmo2", **_SMALL),
    "olmo3": _causal("olmo3", **_SMALL, sliding_window=4),
    "olmoe": _causal("olmoe", **_SMALL, num_experts=4, num_experts_per_tok=2),
    "persimmon": _causal("persimmon", **_ROTARY),
    "phi": _causal("phi", **{**_SMALL, "num_key_value_heads": 4}),
    "phi3": _causal("phi3", **_SMALL, sliding_window=4),
    "phimoe": _causal("phimoe", **_LOCAL_EXPERTS),
    "qwen2_moe": _causal("qwen2_moe", **_EXPERTS, shared_expert_intermediate_size=8),
    "qwen3_moe": _causal("qwen3_moe", **_EXPERTS),
    "seed_oss": _causal("seed_oss", **_SMALL, head_dim=8),
    "smollm3": _causal("smollm3", **_SMALL),
    "stablelm": _causal("stablelm", **_SMALL),
    "starcoder2": _causal("starcoder2", **_SMALL, sliding_window=4),
    "electra": _classifier("electra", **_ENCODER, embedding_size=8),
    "modernbert": _classifier(
        "modernbert", **_ENCODER, local_attention=4, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    ),
    "mpnet": _classifier("mpnet", **_ENCODER),
    "xlm-roberta": _classifier("xlm-roberta", **_ENCODER),
    "llama, classifier": _classifier("llama", **_SMALL),
    "qwen3, classifier": _classifier("qwen3", **_SMALL, head_dim=8),
}
"""Others, whose stages are compared with the unsplit model."""
ALL = CASES | MORE
TYPED = ("bert", "roberta", "deberta-v2")
"""Of the first, those that read types of tokens."""
NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"dropout": 0.0},
    "distilbert": {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    **{
        name: {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        for name in ("bert", "roberta", "deberta-v2")
    },
}


def options(name: str, **changes: Any) -> ModelOptions:
    case = ALL[name]
    return ModelOptions(name=case.family, config={**case.config, **NO_DROPOUT.get(name, {}), **changes})


def split(model: Blueprint, num_stages: int, seed: int = 11) -> list[Stage]:
    return [build_stage(model, cut, seed=seed) for cut in partition([layer.cost for layer in model.layers], num_stages)]


def apart(name: str, **changes: Any) -> Blueprint:
    return blueprint(options(name, **changes), task=ALL[name].task, num_labels=LABELS, block_size=LENGTH)


def whole(name: str, **changes: Any) -> Any:
    """The unsplit model of transformers."""
    import transformers

    given = options(name, **changes)
    config = transformers.AutoConfig.for_model(given.name, **given.config)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (getattr(config, token, None) or 0) >= VOCABULARY:
            setattr(config, token, None)
    config.tie_word_embeddings = changes.get("tie_word_embeddings", False)
    if ALL[name].task == "causal-lm":
        return transformers.AutoModelForCausalLM.from_config(config).train()
    config.num_labels = LABELS
    return transformers.AutoModelForSequenceClassification.from_config(config).train()


def inputs(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Token ids and side inputs; a classifier's samples are padded but for the first."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    if ALL[name].task == "causal-lm":
        return ids, {}
    lengths = torch.tensor([LENGTH, LENGTH - 3, LENGTH - 5])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    # 0 pads for BERT's kin, 1 for RoBERTa
    ids = ids.masked_fill(mask == 0, 1 if name == "roberta" else 0)
    types = (torch.arange(LENGTH) > 3).long().expand(BATCH, LENGTH) * mask
    return ids, {"attention_mask": mask, "token_type_ids": types}


def library_side(name: str, side: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the unsplit model takes: some read no token types."""
    return {key: value for key, value in side.items() if key == "attention_mask" or name in TYPED}


def state_of(stages: list[Stage]) -> dict[str, Tensor]:
    return {name: tensor for stage in stages for name, tensor in stage.full_state().items()}


def gradients_of(stages: list[Stage]) -> dict[str, Tensor]:
    """Gradients by full name; those of a part that several stages hold are summed."""
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        own = {}
        for layer in stage.layers:
            for full_name, part in layer.parts.items():
                for name, parameter in part.named_parameters():
                    own[f"{full_name}.{name}"] = parameter.grad
        for name, gradient in own.items():
            if gradient is not None:
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return gradients


def run_pipeline(stages: list[Stage], ids: Tensor, side: dict[str, Tensor], output_gradient: Tensor) -> Tensor:
    """Forward and backward as stages do it: each output leaves the graph and comes back as a leaf."""
    leaves, outputs = [ids], []
    for stage in stages:
        outputs.append(stage(leaves[-1], **side))
        leaves.append(outputs[-1].detach().requires_grad_())
    gradient = output_gradient
    for leaf, output in zip(reversed(leaves[:-1]), reversed(outputs), strict=True):
        output.backward(gradient)
        gradient = leaf.grad
    return outputs[-1].detach()
