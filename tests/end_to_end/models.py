"""Tiny models with weights that tell greedy tokens apart, and transformers' tokens for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

PROMPTS = [[5, 6, 7, 8], [17, 3, 99, 42, 64, 11, 120], [90]]
NEW_TOKENS = 12

_COMMON: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # the smallest of vLLM's attention on CPUs
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    initializer_range=0.5,
    dtype="float32",
)


def build(kind: str, seed: int) -> Any:
    """The same weights for a seed in every process."""
    torch.manual_seed(seed)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_COMMON))
    else:
        config = Qwen3MoeConfig(
            moe_intermediate_size=64,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
            **_COMMON,
        )
        model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def greedy(model: Any) -> list[list[int]]:
    # No EOS: vLLM is told to ignore it, and a minimum of new tokens would forbid it.
    model.generation_config.eos_token_id = None
    tokens = []
    for prompt in PROMPTS:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens
