"""The recorder against the loaders themselves: what it saw, done again, is what they do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from m2ncompile.engine import recorder
from m2ncompile.engine.recorder import UnevenError, record, record_load, through
from m2ncompile.engine.recording import Copy, Recording, View
from m2ncompile.engine.vllm_meta import MetaEngine
from m2ncompile.errors import EngineError
from m2ncompile.inventory import TensorInfo, read_inventory
from m2ncompile.spec import EngineSpec

pytestmark = pytest.mark.engine

Pairs = Iterable[tuple[str, torch.Tensor]]


# Doing again what was recorded.


def values(tensors: Iterable[TensorInfo], seed: int) -> list[tuple[str, torch.Tensor]]:
    """Random checkpoint tensors; any bits that are numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            info.name,
            torch.randint(-99, 99, info.shape, generator=generator)
            .to(torch.float32)
            .div(8)
            .to(getattr(torch, info.dtype)),
        )
        for info in tensors
    ]


def live(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, flat."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


def place(flat: torch.Tensor, view: View) -> torch.Tensor:
    return flat.as_strided(view.shape, view.stride, view.offset)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()


def replayed(
    recording: Recording, data: list[tuple[str, torch.Tensor]], index: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameter `index` after the recorded copies, and which of its elements they fill."""
    flat, filled = like.clone(), torch.zeros(like.shape, dtype=torch.bool)
    for copy in recording.copies:
        if copy.param == index:
            place(flat, copy.target).copy_(place(data[copy.tensor][1].flatten(), copy.source))
            place(filled, copy.target).fill_(True)
    return flat, filled


SENTINEL = -77


def mark(model: nn.Module) -> None:
    """Fills everything that a loader may fill; integer buffers steer loaders."""
    for name, tensor in live(model).items():
        if tensor.is_meta:
            continue
        if tensor.is_floating_point() or name in dict(model.named_parameters()):
            memory(tensor).copy_(torch.full((1,), SENTINEL))


def assert_does_the_same(
    recording: Recording,
    tensors: Iterable[TensorInfo],
    loaded: Callable[[list[tuple[str, torch.Tensor]]], nn.Module],
) -> None:
    """`loaded` gives a marked module after the real loading of some data."""
    first, second = values(tensors, 1), values(tensors, 2)
    one, other = live(loaded(first)), live(loaded(second))
    assert {p.name for p in recording.params} | {
        alias for p in recording.params for alias in p.aliases
    } >= one.keys()
    for index, param in enumerate(recording.params):
        if one[param.name].is_meta:
            # vLLM shares rotary tables between models, the first of which was on meta.
            assert not any(copy.param == index for copy in recording.copies)
            continue
        real = memory(one[param.name])
        assert param.dtype == str(real.dtype).removeprefix("torch.")
        assert param.view == View(
            one[param.name].storage_offset(),
            tuple(one[param.name].shape),
            one[param.name].stride(),
        )
        start = torch.full_like(real, SENTINEL) if real.is_floating_point() else real
        again, filled = replayed(recording, first, index, start)
        assert bits(again[filled]) == bits(real[filled]), param.name
        # What no copy fills is as it was, or a constant of the loader's.
        rest = ~filled
        assert bits(real[rest]) == bits(memory(other[param.name])[rest]), param.name


# Real models, small, all ranks.

#: Dims that give every rank of four its own part of everything.
DENSE = dict(
    hidden_size=128,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=101,
    num_hidden_layers=2,
)
MLA = dict(
    hidden_size=128,
    intermediate_size=96,
    moe_intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    vocab_size=101,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama-3.1-8B", DENSE),
    "llama tied": ("Llama-3.2-1B", DENSE),
    "qwen2": ("Qwen2.5-7B", DENSE),
    "qwen3-moe": (
        "Qwen3-30B-A3B",
        DENSE | dict(num_experts=8, moe_intermediate_size=64, num_experts_per_tok=2),
    ),
    "qwen3-moe fp8": (
        "Qwen3-30B-A3B-FP8",
        DENSE
        | dict(hidden_size=256, num_attention_heads=16, num_key_value_heads=8, head_dim=32)
        | dict(num_experts=4, moe_intermediate_size=256, num_experts_per_tok=2)
        | dict(num_hidden_layers=1),
    ),
    "mixtral": ("Mixtral-8x7B-v0.1", DENSE | dict(num_local_experts=4)),
    "deepseek-v2": (
        "DeepSeek-V2-Lite",
        MLA | dict(num_hidden_layers=2, num_experts_per_tok=2),
    ),
    "deepseek-v3": (
        "DeepSeek-V3-bf16",
        MLA
        | dict(num_hidden_layers=2, first_k_dense_replace=1, q_lora_rank=64, n_group=2)
        | dict(topk_group=1, num_experts_per_tok=2),
    ),
    "gemma-3": ("gemma-3-1b-it", DENSE | dict(num_key_value_heads=1)),
    "gpt2": ("gpt2", dict(n_embd=128, n_head=4, n_layer=2, vocab_size=101, n_positions=64)),
    "gpt-oss": (
        "gpt-oss-20b",
        DENSE
        | dict(head_dim=64, num_local_experts=8, pad_token_id=0)
        | dict(layer_types=["sliding_attention", "full_attention"]),
    ),
    "phi-4": ("phi-4", DENSE | dict(pad_token_id=0)),
    "qwen3-next": (
        "Qwen3-Next-80B-A3B",
        DENSE
        | dict(num_hidden_layers=4, num_experts=8, moe_intermediate_size=64)
        | dict(num_experts_per_tok=2, shared_expert_intermediate_size=64)
        | dict(linear_num_key_heads=4, linear_num_value_heads=8)
        | dict(linear_key_head_dim=32, linear_value_head_dim=32),
    ),
}
LAYOUTS = {
    "llama": ["tp1", "tp2", "tp4"],
    "llama tied": ["tp2"],
    "qwen2": ["tp4"],
    "qwen3-moe": ["tp4", "ep4", "ep4 dp2"],
    "qwen3-moe fp8": ["tp2", "ep2"],
    "mixtral": ["tp2", "ep4"],
    "deepseek-v2": ["tp2", "ep4"],
    "deepseek-v3": ["tp2"],
    "gemma-3": ["tp2"],
    "gpt2": ["tp2"],
    "gpt-oss": ["tp2", "ep2"],
    "phi-4": ["tp2"],
    "qwen3-next": ["tp2", "ep2"],
}


def folder_of(models: Path, tmp_path: Path, model: str) -> Path:
    name, change = MODELS[model]
    config = json.loads((models / name / "config.json").read_text())
    if model == "gpt-oss":
        del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    return tmp_path


def engine_of(folder: Path, layout: str) -> MetaEngine:
    sizes = {part[:2]: int(part[2:]) for part in layout.split()}
    workers = sizes.get("ep", sizes.get("tp", 1))
    dp = sizes.get("dp", 1)
    return MetaEngine(
        EngineSpec(
            version="0.33.0",
            target="cuda-sm90",
            tp=workers // dp,
            dp=dp,
            ep=workers if "ep" in sizes else 1,
        ),
        folder,
    )


def nothing_forbidden(model: nn.Module) -> Mapping[str, str]:
    return {}


@pytest.mark.parametrize(
    ("model", "layout"), [(model, layout) for model, all_ in LAYOUTS.items() for layout in all_]
)
def test_real_loaders(models: Path, tmp_path: Path, model: str, layout: str) -> None:
    folder = folder_of(models, tmp_path, model)
    tensors = read_inventory(folder).tensors
    engine = engine_of(folder, layout)
    read: set[int] = set()
    for rank in range(engine.spec.workers):
        recording = record(engine, rank, tensors, nothing_forbidden)
        assert (recording.rank, recording.refusals, recording.unknown) == (rank, (), ())
        read |= {copy.tensor for copy in recording.copies}

        def loaded(data: list[tuple[str, torch.Tensor]], rank: int = rank) -> nn.Module:
            with engine.worker(rank, device="cpu") as module, disable_mtp_completeness_check():
                mark(module)
                # Copies, for gpt-oss zeroes what it is given.
                module.load_weights((name, tensor.clone()) for name, tensor in data)
                return module

        assert_does_the_same(recording, tensors, loaded)
    tied = {"lm_head.weight"} if model == "llama tied" else set()
    assert {tensors[i].name for i in range(len(tensors)) if i not in read} <= tied
