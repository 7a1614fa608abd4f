"""The recorder against the loaders themselves: what it saw, done again, is what they do."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from torch import nn
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from m2ncompile.engine import recorder
from m2ncompile.engine.boxes import UnevenError, through
from m2ncompile.engine.recorder import record, record_load
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
    "gpt-oss mxfp4": (
        "gpt-oss-20b",
        DENSE
        | dict(head_dim=64, num_local_experts=8, pad_token_id=0, intermediate_size=256)
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
    "gpt-oss mxfp4": ["tp2", "ep2"],
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


def test_a_change_of_dtype_is_in_the_record(models: Path, tmp_path: Path) -> None:
    """DeepSeek-V3's router bias is float32 in the worker, and bfloat16 in some checkpoints."""
    folder = folder_of(models, tmp_path, "deepseek-v3")
    tensors = tuple(
        TensorInfo(info.name, "bfloat16", info.shape) for info in read_inventory(folder).tensors
    )
    recording = record(engine_of(folder, "tp2"), 0, tensors, nothing_forbidden)
    changed = {
        (tensors[copy.tensor].name, recording.params[copy.param].dtype)
        for copy in recording.copies
        if recording.params[copy.param].dtype != "bfloat16"
    }
    assert changed == {("model.layers.1.mlp.gate.e_score_correction_bias", "float32")}
    assert recording.refusals == ()


def test_padding_is_what_no_copy_fills(models: Path, tmp_path: Path) -> None:
    """101 rows of an embedding over two ranks, in 64s: the second has 37 of its 64."""
    folder = folder_of(models, tmp_path, "llama")
    tensors = read_inventory(folder).tensors
    recording = record(engine_of(folder, "tp2"), 1, tensors, nothing_forbidden)
    index = [p.name for p in recording.params].index("lm_head.weight")
    assert recording.params[index].view.shape == (64, 128)
    (copy,) = [copy for copy in recording.copies if copy.param == index]
    assert (copy.source.offset, copy.source.shape) == (64 * 128, (37, 128))
    assert copy.target == View(0, (37, 128), (128, 1))


def test_other_ranks_experts_are_not_read(models: Path, tmp_path: Path) -> None:
    folder = folder_of(models, tmp_path, "qwen3-moe")
    tensors = read_inventory(folder).tensors
    recording = record(engine_of(folder, "ep4"), 1, tensors, nothing_forbidden)
    read = {tensors[copy.tensor].name for copy in recording.copies}
    assert {
        int(info.name.split(".")[5])
        for info in tensors
        if ".experts." in info.name and info.name in read
    } == {2, 3}
    assert {info.name for info in tensors if ".experts." not in info.name} <= read


def test_reasons_and_owners_come_with_the_parameters(models: Path, tmp_path: Path) -> None:
    folder = folder_of(models, tmp_path, "llama")

    def forbids(model: nn.Module) -> Mapping[str, str]:
        assert "model.layers.0.mlp.down_proj.weight" in live(model)
        return {"model.layers.0.mlp.down_proj.weight": "packed"}

    recording = record(engine_of(folder, "tp2"), 0, read_inventory(folder).tensors, forbids)
    by_name = {param.name: param for param in recording.params}
    down = by_name["model.layers.0.mlp.down_proj.weight"]
    assert (down.owner, down.not_direct) == ("RowParallelLinear", "packed")
    assert down.loader.startswith("RowParallelLinear.weight_loader")
    assert [p.name for p in recording.params if p.not_direct] == [down.name]


def test_names_that_the_model_does_not_have(models: Path, tmp_path: Path) -> None:
    """vLLM's own words; all else is recorded as if they were not there."""
    folder = folder_of(models, tmp_path, "qwen3-moe")
    tensors = read_inventory(folder).tensors
    engine = engine_of(folder, "tp4")
    strangers = (
        TensorInfo("model.layers.0.mlp.extra.weight", "bfloat16", (3,)),
        TensorInfo("other.weight", "bfloat16", (3,)),
    )
    plain = record(engine, 0, tensors, nothing_forbidden)
    mixed = record(engine, 0, (*tensors, *strangers), nothing_forbidden)
    assert [index for index, _ in mixed.unknown] == [len(tensors), len(tensors) + 1]
    assert "extra" in mixed.unknown[0][1]
    assert msgspec.structs.replace(mixed, unknown=()) == plain


def test_a_wrong_shape_is_the_tensors_fault(models: Path, tmp_path: Path) -> None:
    folder = folder_of(models, tmp_path, "llama")
    tensors = list(read_inventory(folder).tensors)
    wrong = [info.name for info in tensors].index("model.layers.1.input_layernorm.weight")
    tensors[wrong] = TensorInfo(tensors[wrong].name, "bfloat16", (7,))
    recording = record(engine_of(folder, "tp1"), 0, tensors, nothing_forbidden)
    ((index, words),) = recording.unknown
    assert index == wrong
    assert "7" in words and "128" in words


# Toy models, for what the real ones do not do.

Body = Callable[[Any, dict[str, torch.Tensor]], None]


class Toy(nn.Module):
    """Parameters by name and dtype, a buffer, and a `load_weights` out of a function."""

    def __init__(self, body: Body, params: dict[str, Any], device: str) -> None:
        super().__init__()
        self.body = body
        for name, (dtype, *shape) in params.items():
            data = torch.empty(shape, dtype=dtype, device=device)
            if name.startswith("buffer"):
                self.register_buffer(name, data)
            else:
                setattr(self, name, nn.Parameter(data, requires_grad=False))

    def load_weights(self, weights: Pairs) -> None:
        self.body(self, dict(weights))


F32, BF16 = torch.float32, torch.bfloat16
#: What toys are given unless a test says otherwise.
GIVEN = (
    TensorInfo("a", "float32", (4, 6)),
    TensorInfo("b", "float32", (4, 6)),
    TensorInfo("c", "float32", ()),
    TensorInfo("h", "bfloat16", (4, 6)),
)
A, B, C, H = range(4)


def record_toy(
    body: Body, tensors: Iterable[TensorInfo] = GIVEN, **params: Any
) -> tuple[Recording, Toy]:
    toy = Toy(body, params, "meta")
    return record_load(toy, toy.load_weights, tuple(tensors)), toy


def check_toy(body: Body, **params: Any) -> tuple[Copy, ...]:
    """Nothing is refused, and what is recorded is what happens with data."""
    recording, _ = record_toy(body, **params)
    assert (recording.refusals, recording.unknown) == ((), ())

    def loaded(data: list[tuple[str, torch.Tensor]]) -> nn.Module:
        toy = Toy(body, params, "cpu")
        mark(toy)
        toy.load_weights((name, tensor.clone()) for name, tensor in data)
        return toy

    assert_does_the_same(recording, GIVEN, loaded)
    return recording.copies


def refused(body: Body, **params: Any) -> list[tuple[int, str]]:
    recording, _ = record_toy(body, **params or {"p": (F32, 4, 6)})
    assert recording.unknown == ()
    assert {refusal.loader for refusal in recording.refusals} <= {
        body.__qualname__,
        "Toy.load_weights",
    }
    return [(refusal.tensor, refusal.op) for refusal in recording.refusals]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "narrow": lambda t: t.narrow(1, 2, 3),
    "chunk": lambda t: t.chunk(3, dim=1)[1],
    "split": lambda t: t.split([1, 3])[1],
    "tensor_split": lambda t: t.tensor_split(4, dim=1)[2],
    "index": lambda t: t[2],
    "slice": lambda t: t[1:3, ::2],
    "ellipsis": lambda t: t[..., None, 1:],
    "select": lambda t: t.select(1, 4),
    "view": lambda t: t.view(2, 12),
    "reshape": lambda t: t.reshape(-1),
    "reshape that copies": lambda t: t.t().reshape(-1),
    "transpose": lambda t: t.transpose(0, 1),
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "permute": lambda t: t.view(4, 2, 3).permute(2, 0, 1),
    "movedim": lambda t: t.movedim(0, 1),
    "unbind": lambda t: t.unbind()[3],
    "iteration": lambda t: list(t)[3],
    "squeeze": lambda t: t[:1].squeeze(0),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "flatten": lambda t: t.flatten(),
    "flatten that copies": lambda t: t.t().flatten(),
    "unflatten": lambda t: t.unflatten(1, (2, 3)),
    "contiguous": lambda t: t.t().contiguous(),
    "contiguous, then a view": lambda t: t.t().contiguous().view(3, 8)[1:],
    "clone": lambda t: t.clone(),
    "clone of a part": lambda t: t[:, 1:3].clone()[1:],
    "to the dtype it has": lambda t: t.to(F32),
    "to a device": lambda t: t.t().to("cpu", copy=True),
    "detach": lambda t: t.detach(),
    "expand": lambda t: t[:1].expand(3, 6),
    "copy that is expanded": lambda t: t[:1].clone().expand(3, 6),
    "diagonal": lambda t: t.diagonal(),
    "in-place transpose": lambda t: t.t_(),
    "parameter": lambda t: nn.Parameter(t, requires_grad=False).data,
    "bits and back": lambda t: t.view(torch.int32).view(F32),
    "deepcopy": lambda t: nn.Parameter(t.clone(), requires_grad=False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_rearranging_one_tensor(name: str) -> None:
    change = VIEWS[name]
    shape = change(torch.empty(4, 6)).shape

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(change(given["a"]))

    copies = check_toy(body, p=(F32, *shape))
    assert {copy.tensor for copy in copies} == {A}
    assert sum(prod(copy.target.shape) for copy in copies) == prod(shape)


JOINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cat": lambda a, b: torch.cat([a, b]),
    "cat along dim 1": lambda a, b: torch.cat([a, b[:, :2]], dim=1),
    "cat along the last dim": lambda a, b: torch.cat((a.t(), b.t()), -1),
    "cat with nothing": lambda a, b: torch.cat([a, a.new_empty(0), b[:0], b]),
    "cat with nothing along dim 1": lambda a, b: torch.cat([a, a.new_empty(0), b], 1),
    "cat with a constant": lambda a, b: torch.cat([b, torch.zeros_like(a), a])[:, :3],
    "stack": lambda a, b: torch.stack([a, b]),
    "stack along dim 2": lambda a, b: torch.stack([a, b], dim=2),
    "stack, flattened": lambda a, b: torch.stack([a, b], 1).flatten(0, 1),
    "hstack": lambda a, b: torch.hstack([a, b]),
    "a part of a cat": lambda a, b: torch.cat([a, b])[3:6, 1:4],
    "a cat of a cat": lambda a, b: torch.cat([torch.cat([a, b], 1)[:, 4:9], a], 1).t(),
    "heads": lambda a, b: torch.cat([a.view(2, 2, 6), b.view(2, 2, 6)], 1).reshape(8, 6),
    "interleaved": lambda a, b: torch.stack([a, b], 1).view(8, 6)[::2],
}


@pytest.mark.parametrize("name", JOINS)
def test_joining_tensors(name: str) -> None:
    join = JOINS[name]
    shape = join(torch.empty(4, 6), torch.empty(4, 6)).shape

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(join(given["a"], given["b"]))

    copies = check_toy(body, p=(F32, *shape))
    constant = 12 if name == "cat with a constant" else 0
    assert sum(prod(copy.target.shape) for copy in copies) == prod(shape) - constant


def test_scratch_memory() -> None:
    """Filled piece by piece, some of it with a constant, one piece over another."""

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        scratch = torch.zeros(10, 6, device=given["a"].device)
        scratch[4:8].copy_(given["b"])
        scratch[:4] = given["b"]
        scratch[:4] = given["a"]
        scratch[8:9, :] = given["a"][0]
        model.p.data.copy_(scratch)
        model.q.data.copy_(scratch.view(5, 2, 6)[1:4, 1].t())

    copies = check_toy(body, p=(F32, 10, 6), q=(F32, 6, 3))
    assert [(c.param, c.tensor, prod(c.target.shape)) for c in copies] == [
        (0, B, 24),
        (0, A, 24),
        (0, A, 6),
        (1, B, 12),
        (1, A, 6),
    ]


def test_scratch_memory_like_a_tensor() -> None:
    """Only the shape of `a` is read."""

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        scratch = torch.empty_like(given["a"])
        scratch.copy_(given["b"])
        model.p.data.copy_(scratch)
        model.q.data.copy_(given["a"].new_zeros(4, 6))

    assert [copy.tensor for copy in check_toy(body, p=(F32, 4, 6), q=(F32, 4, 6))] == [B]


def test_a_constant_over_scratch_memory() -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        scratch = torch.empty(8, 6, device=given["a"].device)
        scratch[:4] = given["a"]
        scratch[4:] = given["b"]
        scratch[4:].zero_()
        model.p.data.copy_(scratch)

    assert {copy.tensor for copy in check_toy(body, p=(F32, 8, 6))} == {A}


def test_parts_of_parameters() -> None:
    """Assignment, strided and transposed targets, a buffer, a scalar, padding."""

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.fill_(0)
        model.p.data[:4, ::2] = given["a"][:, :3]
        model.p.data[4:].fill_(1)
        model.q.data.t().copy_(given["b"])
        model.buffer.copy_(given["a"])
        model.s.data.copy_(given["c"].view(1))

    copies = check_toy(body, p=(F32, 6, 6), q=(F32, 6, 4), buffer=(F32, 4, 6), s=(F32, 1))
    assert [copy.target for copy in copies] == [
        View(0, (4, 3), (6, 2)),
        View(0, (4, 6), (1, 4)),
        View(0, (1,), (1,)),
        View(0, (4, 6), (6, 1)),
    ]


def test_broadcasting() -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(given["a"][0])
        model.q.data.copy_(given["c"])
        model.r.data.copy_(torch.cat([given["a"][:1], given["b"][:1]], 1))

    copies = check_toy(body, p=(F32, 5, 6), q=(F32, 2), r=(F32, 3, 12))
    assert copies[0].source == View(0, (5, 6), (0, 1))
    assert copies[1].source == View(0, (2,), (0,))
    assert all(0 in copy.source.stride for copy in copies)


def test_a_copy_to_another_dtype() -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(given["h"])
        model.q.data.copy_(given["a"])
        model.r.data.copy_(given["h"].t().contiguous())

    copies = check_toy(body, p=(F32, 4, 6), q=(BF16, 4, 6), r=(F32, 6, 4))
    assert [(copy.param, copy.tensor) for copy in copies] == [(0, H), (1, A), (2, H)]


def test_nothing_is_copied() -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data[:0].copy_(given["a"][:0])
        model.p.data[4:].copy_(given["a"].clone()[4:])

    assert check_toy(body, p=(F32, 4, 6)) == ()


def test_the_same_bits_under_another_name() -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.view(torch.int32).copy_(given["a"].view(torch.int32))

    assert len(check_toy(body, p=(F32, 4, 6))) == 1


def test_a_later_copy_wins() -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(given["a"])
        model.p.data[1:3].copy_(given["b"][:2])
        model.q.data.copy_(given["b"])
        model.q.data.copy_(given["a"])

    assert [copy.tensor for copy in check_toy(body, p=(F32, 4, 6), q=(F32, 4, 6))] == [A, B, B, A]


def test_from_one_parameter_to_another() -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(given["b"])
        model.p.data.copy_(given["a"])
        model.q.data.copy_(torch.cat([model.p.data[2:], given["b"]]))

    copies = check_toy(body, p=(F32, 4, 6), q=(F32, 6, 6))
    assert [(copy.tensor, copy.source.offset) for copy in copies if copy.param == 1] == [
        (A, 12),
        (B, 0),
    ]


def test_a_tensor_that_is_written_to() -> None:
    """Only what is left of it is recorded."""

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        given["a"].zero_()
        given["a"][1:3].copy_(given["b"][:2])
        model.p.data.copy_(given["a"])

    assert [copy.tensor for copy in check_toy(body, p=(F32, 4, 6))] == [B]


def test_tables_on_the_cpu_are_computed() -> None:
    """A loader may work out which slice to take."""

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        order = torch.arange(4).flip(0).cumsum(0) - 3
        for row, place in enumerate(order.tolist()):
            model.p.data[row].copy_(given["a"][place])
        if order.max().item() == 3:
            model.q.data.copy_(given["b"])

    assert [copy.source.offset for copy in check_toy(body, p=(F32, 4, 6), q=(F32, 4, 6))] == [
        0,
        12,
        18,
        18,
        0,
    ]


def test_tied_parameters_are_one() -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.q.data.copy_(given["a"])

    toy = Toy(body, {"p": (F32, 4, 6), "r": (F32, 2)}, "meta")
    toy.q = toy.p
    toy.register_buffer("part", toy.p.data[1:])
    recording = record_load(toy, toy.load_weights, GIVEN, not_direct={"q": "tied"})
    first = recording.params[0]
    assert (first.name, set(first.aliases), first.not_direct) == ("p", {"q", "part"}, "tied")
    assert (first.view, first.parameter) == (View(0, (4, 6), (6, 1)), True)
    assert [(p.name, p.aliases) for p in recording.params[1:]] == [("r", ())]
    assert [(copy.param, copy.tensor) for copy in recording.copies] == [(0, A)]


def test_buffers_are_no_parameters() -> None:
    recording, _ = record_toy(lambda model, given: None, p=(F32, 1), buffer=(BF16, 2))
    assert [(p.name, p.dtype, p.parameter) for p in recording.params] == [
        ("p", "float32", True),
        ("buffer", "bfloat16", False),
    ]


# What is refused.

COMPUTED: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "arithmetic": ("mul", lambda t: t * 2),
    "negative": ("neg", lambda t: -t),
    "exp": ("exp", lambda t: t.exp()),
    "the first of two": ("add", lambda t: (t + 1).exp()),
    "to a dtype and back": ("to(dtype)", lambda t: t.to(BF16).to(F32)),
    "half": ("to(dtype)", lambda t: t.half().view(4, 6)),
    "another device and dtype": ("to(dtype)", lambda t: t.to("cpu", BF16)),
    "index by a tensor": ("index", lambda t: t[torch.tensor([3, 2, 1, 0])]),
    "index by a list": ("index", lambda t: t[[3, 2, 1, 0]]),
    "index_select": ("index_select", lambda t: t.index_select(0, torch.tensor([3, 2, 1, 0]))),
    "where": ("gt", lambda t: torch.where(t > 0, t, 0)),
    "sort": ("sort", lambda t: t.sort(0)[0]),
    "flip": ("flip", lambda t: t.flip(0)),
    "repeat": ("repeat", lambda t: t[:1].repeat(4, 1)),
    "pad": ("constant_pad_nd", lambda t: nn.functional.pad(t[:3], (0, 0, 0, 1))),
    "sum": ("sum", lambda t: t.sum(0)),
    "a cat of something computed": ("mul", lambda t: torch.cat([t[:2], t[2:] * 2])),
    "a copy of something computed": ("mul", lambda t: (t * 2).t().contiguous().t()),
    "cat of two dtypes": ("cat", lambda t: torch.cat([t[:2].to(F32), t.new_zeros(2, 6).double()])),
    "in place": ("mul_", lambda t: t.mul_(2)),
    "in place, through a view": ("add_", lambda t: (t[0].add_(1), t)[1]),
    "in place, after a clone": ("clamp_", lambda t: t.clone().clamp_(0, 1)),
    "out=": ("mul", lambda t: torch.mul(t, 2, out=t.new_empty(4, 6))),
    "part of it overwritten": ("fill_", lambda t: (t[0].fill_(0), t)[1]),
    "view of bits": ("view(dtype)", lambda t: t.view(torch.int32)),
    "scratch of another dtype": (
        "to(dtype)",
        lambda t: torch.empty(4, 6, dtype=BF16, device=t.device).copy_(t),
    ),
    "no box": (
        "a rearrangement that is no box",
        lambda t: torch.cat([t.flatten()[:5], t.flatten()[5:]]).view(4, 6),
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_computes_is_refused(name: str) -> None:
    op, change = COMPUTED[name]

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.q.data.copy_(given["b"])
        model.p.data.copy_(change(given["a"]))

    recording, _ = record_toy(body, p=(F32, 4, 6), q=(F32, 4, 6))
    ((refusal),) = recording.refusals
    assert (refusal.tensor, refusal.op) == (A, op)
    assert "<lambda>" in refusal.loader or refusal.loader == body.__qualname__
    assert [copy.tensor for copy in recording.copies] == [B]


NEEDS_DATA: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "item": ("item", lambda t: t[0, 0].item()),
    "item of something computed": ("max", lambda t: t.max().item()),
    "float": ("item", lambda t: float(t[0, 0])),
    "bool": ("item", lambda t: bool(t[0, 0])),
    "in": ("eq", lambda t: 1.0 in t),
    "equal": ("equal", lambda t: torch.equal(t, torch.zeros_like(t))),
    "allclose": ("allclose", lambda t: torch.allclose(t, torch.zeros_like(t))),
    "nonzero": ("nonzero", lambda t: t.nonzero()),
    "mask": ("index", lambda t: t[t > 0]),
    "another device": ("add", lambda t: t + torch.ones(6)),
    "cat with another device": ("cat", lambda t: torch.cat([t, torch.ones(1, 6)])),
    "numpy": ("numpy", lambda t: t.numpy()),
    "numpy on the cpu": ("numpy", lambda t: t.t().cpu().numpy()),
    "tolist": ("tolist", lambda t: t.tolist()),
    "item that is caught": ("item", lambda t: caught(t)),
}


def caught(tensor: torch.Tensor) -> object:
    try:
        return tensor[0, 0].item()
    except Exception:
        return 0


@pytest.mark.parametrize("name", NEEDS_DATA)
def test_what_needs_data_is_refused_and_the_rest_is_recorded(name: str) -> None:
    op, read = NEEDS_DATA[name]
    calls = []

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        calls.append(sorted(given))
        model.q.data.copy_(given["b"])
        if "a" in given:
            read(given["a"])
        model.r.data.copy_(given["h"])

    recording, _ = record_toy(body, p=(F32, 4, 6), q=(F32, 4, 6), r=(BF16, 4, 6))
    ((refusal),) = recording.refusals
    assert (refusal.tensor, refusal.op) == (A, op)
    assert "<lambda>" in refusal.loader or refusal.loader == "caught"
    assert [copy.tensor for copy in recording.copies] == [B, H]
    assert calls == [["a", "b", "c", "h"], ["b", "c", "h"]]


def test_tensors_that_are_computed_with_together_are_refused_together() -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(given["a"] + given["b"])

    assert refused(body) == [(A, "add"), (B, "add")]


def test_computing_without_a_consequence() -> None:
    """What never reaches a parameter refuses nothing."""

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        given["a"].float().sum()
        _ = (given["a"] * 2).to(BF16)
        model.p.data.copy_(given["a"])

    assert [copy.tensor for copy in check_toy(body, p=(F32, 4, 6))] == [A]


@pytest.mark.parametrize(
    ("op", "after"),
    [
        ("mul_", lambda p: p.mul_(2)),
        ("add_", lambda p: p[1].add_(1)),
        ("zero_", lambda p: p[:, 2].zero_()),
        ("fill_", lambda p: p.fill_(1)),
        ("copy_", lambda p: p[2:].copy_(torch.ones(6))),
        ("copy_", lambda p: p.__setitem__(0, 0.5)),
        ("index_put_", lambda p: p.__setitem__(torch.tensor([1]), 0.5)),
        ("exp", lambda p: p.copy_(p.exp())),
        ("normal_", lambda p: p.normal_()),
        ("copy_", lambda p: p.copy_(padded(p))),
    ],
)
def test_changing_a_parameter_after_it_was_loaded(
    op: str, after: Callable[[torch.Tensor], object]
) -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.q.data.copy_(given["b"])
        model.p.data[:4].copy_(given["a"])
        after(model.p.data)

    recording, _ = record_toy(body, p=(F32, 4, 6), q=(F32, 4, 6))
    assert [(refusal.tensor, refusal.op) for refusal in recording.refusals] == [(A, op)]


def padded(param: torch.Tensor) -> torch.Tensor:
    """Zeros, and as much of what was loaded as leaves a row of them."""
    scratch = torch.zeros_like(param)
    scratch[1:].copy_(param[1:])
    return scratch


def test_changing_a_parameter_before_it_is_loaded_or_beside() -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.normal_().mul_(2).zero_()
        model.p.data[:4, :6].copy_(given["a"])
        model.p.data[4:].fill_(3).add_(1)
        model.p.data[:, 6:].zero_()

    check_toy(body, p=(F32, 5, 7))


@pytest.mark.parametrize(
    "write",
    [
        lambda p, t: p.data.add_(t),
        lambda p, t: p.data.__setitem__(torch.tensor([0, 1, 2, 3]), t),
        lambda p, t: torch._foreach_copy_([p.data], [t]),
        lambda p, t: p.data.masked_scatter_(torch.ones(4, 6, dtype=torch.bool), t),
        lambda p, t: torch.mul(t, 2, out=p.data),
        lambda p, t: p.data.copy_(t.expand(2, 4, 6).sum(0)),
    ],
)
def test_other_ways_into_a_parameter(write: Callable[[Any, torch.Tensor], object]) -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        write(model.p, given["a"])

    recording, _ = record_toy(body, p=(F32, 4, 6))
    assert [refusal.tensor for refusal in recording.refusals] == [A]
    assert recording.copies == ()


def replace_data(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.p.data = given["a"]


def replace_data_with_a_copy(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.p.data = given["a"].t().contiguous()


def replace_parameter(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.p = nn.Parameter(given["a"] * 2, requires_grad=False)


def replace_loaded_data(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.p.data.copy_(given["a"])
    model.p.data = torch.zeros_like(model.p)


def replace_by_set(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.p.data.copy_(given["a"])
    model.p.set_(torch.zeros_like(model.p))


def transpose_loaded_data(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.p.data.copy_(given["a"])
    model.p.data = model.p.data.t()


def delete_loaded_parameter(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.p.data.copy_(given["a"])
    del model.p


@pytest.mark.parametrize(
    "body",
    [
        replace_data,
        replace_data_with_a_copy,
        replace_parameter,
        replace_loaded_data,
        replace_by_set,
        transpose_loaded_data,
        delete_loaded_parameter,
    ],
)
def test_parameters_that_are_replaced(body: Body) -> None:
    def both(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.q.data.copy_(given["b"])
        body(model, given)

    recording, _ = record_toy(both, p=(F32, 4, 6), q=(F32, 4, 6))
    ((refusal),) = recording.refusals
    assert refusal.tensor == A
    assert refusal.op in ("replacing p", "mul")


def keep_tensor(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.kept = given["a"][1:]


def keep_copy(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.kept = [given["a"].clone()]


def fill_attribute(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.other.copy_(given["a"])


def new_parameter(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.new = nn.Parameter(given["a"].t(), requires_grad=False)


def keep_computed(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.kept = given["a"] * 2


@pytest.mark.parametrize(
    "body", [keep_tensor, keep_copy, fill_attribute, new_parameter, keep_computed]
)
def test_tensors_that_are_kept_elsewhere(body: Body) -> None:
    """What no parameter shows would never be updated."""

    def both(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.q.data.copy_(given["b"])
        body(model, given)

    toy = Toy(both, {"q": (F32, 4, 6)}, "meta")
    toy.other = torch.empty(4, 6, device="meta")
    ((refusal),) = record_load(toy, toy.load_weights, GIVEN).refusals
    assert refusal.tensor == A
    assert refusal.op in ("keeping it outside the parameters", "mul")


def test_a_refused_dtype_change_does_not_hide_in_a_parameter() -> None:
    """Two changes on the way, through a parameter of another dtype."""

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(given["a"])
        model.q.data.copy_(model.p.data)

    assert refused(body, p=(BF16, 4, 6), q=(F32, 4, 6)) == [(A, "to(dtype)")]


def test_bits_under_another_name_on_one_side() -> None:
    def target(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.view(F32).copy_(given["a"])

    def smaller(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.view(torch.int16).copy_(given["a"].view(torch.int16))

    def copied(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(given["a"].view(torch.int32).clone().view(F32))

    assert refused(target, p=(BF16, 4, 12)) == [(A, "view(dtype)")]
    assert refused(smaller, p=(F32, 4, 6)) == [(A, "view(dtype)")]
    assert refused(copied, p=(F32, 4, 6)) == [(A, "view(dtype)")]


def test_views_that_change_values() -> None:
    def conjugate(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(given["z"].conj())

    def negative(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(torch._neg_view(given["z"]))

    given = [TensorInfo("z", "complex64", (4,))]
    for body, op in [(conjugate, "_conj"), (negative, "_neg_view")]:
        recording, _ = record_toy(body, given, p=(torch.complex64, 4))
        assert [refusal.op for refusal in recording.refusals] == [op]


def test_a_cycle_keeps_nothing() -> None:
    """What only the garbage collector would free is not kept by the model."""

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        given["self"] = given  # type: ignore[assignment]
        model.p.data.copy_(given["a"])

    gc.disable()
    try:
        assert len(record_toy(body, p=(F32, 4, 6))[0].copies) == 1
        assert refused(body, p=(F32, 4, 6)) == []
    finally:
        gc.enable()


def test_an_expanded_target() -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.expand(4, 6).copy_(given["a"])

    assert refused(body, p=(F32, 6)) == [(A, "copy_ to an expanded view")]


# What is unknown.


def loop(model: Any, weights: Pairs) -> None:
    params = dict(model.named_parameters())
    for name, tensor in weights:
        param = params[name]
        if param.shape != tensor.shape:
            raise ValueError(f"{name}: {tuple(tensor.shape)} into {tuple(param.shape)}")
        param.data.copy_(tensor)


def looked_ahead(model: Any, weights: Pairs) -> None:
    """Holds the next tensor before it loads one."""
    waiting = None
    for item in weights:
        if waiting is not None:
            loop(model, [waiting])
        waiting = item
    loop(model, [waiting] if waiting else [])


def all_at_once(model: Any, weights: Pairs) -> None:
    loop(model, sorted(weights, reverse=True))


@pytest.mark.parametrize("load", [loop, looked_ahead, all_at_once])
def test_unknown_tensors(load: Callable[[Any, Pairs], None]) -> None:
    toy = Toy(lambda model, given: None, {"a": (F32, 4, 6), "c": (F32,), "h": (BF16, 2)}, "meta")
    recording = record_load(toy, lambda weights: load(toy, weights), GIVEN)
    assert recording.unknown == (
        (B, "KeyError: 'b'"),
        (H, "ValueError: h: (4, 6) into (2,)"),
    )
    assert [copy.tensor for copy in recording.copies] == [A, C]
    assert recording.refusals == ()


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, NotImplementedError, IndexError])
def test_any_exception_is_the_tensors_fault(kind: type[Exception]) -> None:
    def load(weights: Pairs) -> None:
        for name, tensor in weights:
            if name == "b":
                raise kind("no\n  way")
            toy.a.data.copy_(tensor.view(-1)[:1])

    toy = Toy(lambda model, given: None, {"a": (F32, 1)}, "meta")
    recording = record_load(toy, load, GIVEN)
    assert recording.unknown == ((B, f"{kind.__name__}: no way"),)


def test_a_loader_that_fails_for_no_tensor_in_particular() -> None:
    def load(weights: Pairs) -> None:
        loop(toy, weights)
        raise ValueError("layers are missing")

    toy = Toy(lambda model, given: None, {"a": (F32, 4, 6)}, "meta")
    with pytest.raises(EngineError) as caught:
        record_load(toy, load, GIVEN[:2], rank=3)
    assert "worker rank 3: ValueError: layers are missing" in str(caught.value)
    assert [(p.where, p.message) for p in caught.value.problems] == [("b", "KeyError: 'b'")]


def test_restarts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_RESTARTS", 2)
    toy = Toy(lambda model, given: None, {"a": (F32, 4, 6)}, "meta")
    recording = record_load(toy, lambda weights: loop(toy, weights), GIVEN[:3])
    assert len(recording.unknown) == 2
    with pytest.raises(EngineError) as caught:
        record_load(toy, lambda weights: loop(toy, weights), GIVEN)
    assert [p.where for p in caught.value.problems] == ["b", "c", "h"]


def test_our_own_errors_pass() -> None:
    def load(weights: Pairs) -> None:
        next(iter(weights))
        raise EngineError("no")

    with pytest.raises(EngineError, match=r"^no$"):
        record_load(nn.Module(), load, GIVEN)


def test_a_loader_that_stops_early() -> None:
    def load(weights: Pairs) -> None:
        _, tensor = next(iter(weights))
        toy.a.data.copy_(tensor)

    toy = Toy(lambda model, given: None, {"a": (F32, 4, 6)}, "meta")
    recording = record_load(toy, load, GIVEN)
    assert [copy.tensor for copy in recording.copies] == [A]
    assert (recording.refusals, recording.unknown) == ((), ())


def test_a_recording_is_records_alone() -> None:
    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(given["a"].t().contiguous().t())
        model.q.data.copy_(given["b"] * 2)

    recording, _ = record_toy(body, p=(F32, 4, 6), q=(F32, 4, 6))
    encoded = msgspec.json.encode(recording)
    assert msgspec.json.decode(encoded, type=Recording) == recording


# Boxes through boxes.


def addresses(view: View) -> list[int]:
    found = [view.offset]
    for size, step in zip(view.shape, view.stride, strict=True):
        found = [a + k * step for a in found for k in range(size)]
    return found


@st.composite
def boxes(draw: st.DrawFn, repeats: bool) -> View:
    """A view of 72 elements, made as loaders make them."""
    tensor = torch.empty(72, device="meta")
    for _ in range(draw(st.integers(0, 5))):
        dim = draw(st.integers(0, tensor.dim() - 1)) if tensor.dim() else 0
        match draw(st.sampled_from(["narrow", "step", "unflatten", "flatten", "t", "expand"])):
            case "narrow" if tensor.dim() and tensor.shape[dim]:
                start = draw(st.integers(0, tensor.shape[dim] - 1))
                count = draw(st.integers(1, tensor.shape[dim] - start))
                tensor = tensor.narrow(dim, start, count)
            case "step" if tensor.dim():
                tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
            case "unflatten" if tensor.dim() and tensor.shape[dim] > 1:
                size = tensor.shape[dim]
                inner = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
                tensor = tensor.unflatten(dim, (size // inner, inner))
            case "flatten" if tensor.dim() and tensor.is_contiguous():
                tensor = tensor.flatten()
            case "t" if tensor.dim() > 1:
                tensor = tensor.transpose(dim, 0)
            case "expand" if repeats and tensor.dim() < 4:
                tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    return View(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def dense(view: View, start: int) -> View:
    strides = [prod(view.shape[dim + 1 :]) for dim in range(len(view.shape))]
    return View(start, view.shape, tuple(strides))


@settings(max_examples=1000)
@given(read=boxes(repeats=True), held=boxes(repeats=False))
@example(read=View(40, (2, 8), (8, 1)), held=View(26, (8,), (2,)))
def test_through(read: View, held: View) -> None:
    target, source = dense(read, 5), dense(held, 7)
    came_from = dict(zip(addresses(held), addresses(source), strict=True))
    expected = {
        (came_from[address], into)
        for address, into in zip(addresses(read), addresses(target), strict=True)
        if address in came_from
    }
    try:
        found = through(read, target, held, source)
    except UnevenError:
        event("uneven")
        return
    if found is None:
        event("apart")
        assert not expected
        return
    event("common")
    assert found[0].shape == found[1].shape
    assert len(set(addresses(found[1]))) == prod(found[1].shape)
    assert set(zip(*map(addresses, found), strict=True)) == expected


def test_through_is_not_afraid() -> None:
    """The cases that loaders make are no reason to give up."""
    rows = View(0, (8, 6), (6, 1))
    whole = View(0, (48,), (1,))
    for read, held in [
        (rows, rows),
        (rows, whole),
        (whole, rows),
        (View(0, (6, 8), (1, 6)), rows),
        (View(12, (24,), (1,)), rows),
        (View(0, (4, 6), (12, 1)), rows),
        (View(3, (8, 3), (6, 1)), rows),
        (View(0, (2, 3, 8), (3, 1, 6)), whole),
        (rows, View(0, (8, 2), (6, 1))),
        (rows, View(2, (8, 4), (6, 1))),
    ]:
        assert through(read, dense(read, 0), held, dense(held, 0)) is not None


@pytest.mark.parametrize(
    ("read", "held"),
    [
        # Windows that overlap.
        (View(0, (2, 3), (1, 1)), View(0, (8,), (1,))),
        # No address scheme has both strides, 6 and 4.
        (View(0, (3, 4), (4, 1)), View(0, (2, 6), (6, 1))),
        # The end of one row and the start of the next.
        (View(4, (4,), (1,)), View(0, (2, 6), (6, 1))),
        # A box that repeats itself holds nothing in particular.
        (View(0, (4,), (1,)), View(0, (2, 4), (0, 1))),
    ],
)
def test_through_gives_up(read: View, held: View) -> None:
    with pytest.raises(UnevenError):
        through(read, dense(read, 0), held, dense(held, 0))


# Whole programs.

STEPS = ["narrow", "t", "unflatten", "flatten", "clone", "contiguous", "cat", "stack", "scratch"]


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from(STEPS), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)
            ),
            min_size=1,
            max_size=7,
        )
    )


def run_program(
    program: list[tuple[str, int, int, int]], given: dict[str, torch.Tensor]
) -> torch.Tensor:
    """What a program makes of two tensors; each step is fitted to what is there."""
    have = [given["a"], given["b"]]
    for step, which, x, y in program:
        tensor = have[which % len(have)]
        other = have[(which + 1) % len(have)]
        dim = x % tensor.dim()
        size = tensor.shape[dim]
        match step:
            case "narrow":
                start = y % size
                tensor = tensor.narrow(dim, start, max(1, (size - start) // 2))
            case "t":
                tensor = tensor.transpose(dim, y % tensor.dim())
            case "unflatten" if size % 2 == 0 and tensor.dim() < 5:
                tensor = tensor.unflatten(dim, (2, size // 2))
            case "flatten":
                tensor = tensor.flatten(max(0, tensor.dim() - 2))
            case "clone":
                tensor = tensor.clone()
            case "contiguous":
                tensor = tensor.transpose(0, dim).contiguous()
            case "cat" if tensor.shape == other.shape:
                tensor = torch.cat([tensor, other], dim)
            case "stack" if tensor.shape == other.shape and tensor.dim() < 5:
                tensor = torch.stack([tensor, other], dim)
            case "scratch" if tensor.dim() < 5:
                scratch = tensor.new_zeros(3, *tensor.shape)
                scratch[y % 3].copy_(tensor)
                if tensor.shape == other.shape:
                    scratch[x % 3].copy_(other)
                tensor = scratch[1:]
        have.append(tensor)
    return have[-1]


@settings(max_examples=300)
@given(program=programs())
def test_programs(program: list[tuple[str, int, int, int]]) -> None:
    """Whatever a loader puts together is recorded as it is, or refused."""
    shape = run_program(program, {"a": torch.empty(4, 6), "b": torch.empty(4, 6)}).shape

    def body(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.p.data.copy_(run_program(program, given))

    recording, _ = record_toy(body, p=(F32, *shape))
    if recording.refusals:
        event("refused")
        assert {refusal.op for refusal in recording.refusals} == {"a rearrangement that is no box"}
    else:
        event("recorded")
        check_toy(body, p=(F32, *shape))
