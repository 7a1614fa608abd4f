"""What may be written in place: real vLLM classes, and vLLM's own post-load processing."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import get_current_vllm_config, set_current_vllm_config
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import modular_kernel, unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.experts import (
    flashinfer_cutlass_moe,
    triton_moe,
    trtllm_bf16_moe,
)
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear, _GateLinearMethod
from vllm.model_executor.layers.linear import QKVParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
from vllm.utils.torch_utils import set_default_torch_dtype

from m2ncompile.engine import vllm_meta
from m2ncompile.engine.expert_kernels import backend_of, read_as_loaded
from m2ncompile.engine.kernels import planning_kernels
from m2ncompile.engine.postload import HARMFUL, HARMLESS, METHODS, not_direct
from m2ncompile.engine.vllm_meta import MetaEngine
from m2ncompile.errors import EngineError
from m2ncompile.spec import TARGETS, EngineSpec

pytestmark = pytest.mark.engine

MODELS = Path(__file__).parents[2] / "plans" / "models"
SM90, SM100 = "cuda-sm90", "cuda-sm100"
CUDA = [target for target in TARGETS if target.startswith("cuda")]
DENSE = [
    "Llama-3.1-8B",
    "Llama-3.2-1B",
    "Mistral-7B-v0.3",
    "Phi-3.5-mini-instruct",
    "Qwen2.5-7B",
    "Qwen3-0.6B",
    "gemma-3-1b-it",
    "gpt2",
]
MLA = ["DeepSeek-V2-Lite", "DeepSeek-V3"]
MOE = [*MLA, "GLM-4.5-Air", "Mixtral-8x7B-v0.1", "Qwen3-30B-A3B", "Qwen3-Next-80B-A3B"]
EVERY = [*DENSE, *MOE, "gpt-oss-20b"]
#: Phi-3.5's long rope fits no other head size.
REAL = ["phi-4" if name.startswith("Phi") else name for name in DENSE]

#: Owners of what may be written in place on a CPU, but for two vectors of Qwen3-Next.
KEPT_ON_CPU = {"Embedding", "GemmaRMSNorm", "LayerNorm", "RMSNorm", "RMSNormGated"}

#: Changes that make a model small enough to hold its weights; keys it has not are left out.
TINY = {
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_embd": 64,
    "n_group": 1,
    "n_head": 4,
    "n_positions": 64,
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "q_lora_rank": 64,
    "shared_expert_intermediate_size": 32,
    "topk_group": 1,
    "vocab_size": 128,
}


def engine(
    name: str, *, quantized: bool = False, tp: int = 1, dtype: str = "auto", **change: Any
) -> MetaEngine:
    """Four layers of a model, of every kind that it has, unquantized unless asked."""
    config = json.loads((MODELS / name / "config.json").read_text())
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = 4
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:4]
    if not quantized:
        config.pop("quantization_config", None)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config | change))
        spec = EngineSpec(version="0.33.0", target=SM90, tp=tp, dtype=dtype)
        return MetaEngine(spec, Path(folder))


@functools.cache
def meta_model(name: str) -> nn.Module:
    """Shared between tests: put back what you change."""
    with engine(name, tp=2).worker(0) as model:
        return model


@contextmanager
def real_weights(name: str, target: str) -> Iterator[tuple[nn.Module, Any]]:
    """A tiny model on the CPU with random weights, and vLLM's config of it."""
    config = json.loads((MODELS / name / "config.json").read_text())
    # In bfloat16 some CPUs take kernels that an installation for CUDA lacks.
    dtype = "float32" if target == "cpu" else "auto"
    changes = {key: value for key, value in TINY.items() if key in config}
    tiny = engine(name, dtype=dtype, **changes)
    vllm_config = tiny._config
    with (
        set_current_vllm_config(vllm_config),
        vllm_meta.stand_in_groups(tiny.spec, 0),
        set_default_torch_dtype(vllm_config.model_config.dtype),
    ):
        with planning_kernels(target), torch.device("cpu"):
            model = initialize_model(vllm_config)
        for param in model.parameters():
            param.data.normal_()
        yield model, vllm_config.model_config


def modules_of(model: nn.Module, kind: type) -> list[nn.Module]:
    return [module for module in model.modules() if type(module) is kind]


def names_of(model: nn.Module, *modules: nn.Module) -> set[str]:
    """All names, in `model`, of the parameters in and below `modules`."""
    inside = {id(param) for module in modules for param in module.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, param in named if id(param) in inside}


def find(path: str, name: str) -> tuple[nn.Module, nn.Module]:
    """A model and a module of that very class with something direct in or below it."""
    for model in map(meta_model, EVERY):
        refused = not_direct(model, SM90)
        for module in model.modules():
            kind = type(module)
            if (kind.__module__, kind.__qualname__) == (path, name) and (
                names_of(model, module) - refused.keys()
            ):
                return model, module
    raise AssertionError(f"no model with a direct parameter under {path}.{name}")


def double(kind: type) -> type:
    """A subclass that differs from `kind` in nothing but identity."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)


def entries(table: dict[str, tuple[str, ...]]) -> list[Any]:
    return [pytest.param(path, name, id=name) for path, names in table.items() for name in names]


# --- the tables, entry by entry ---


@pytest.mark.parametrize("path, name", entries(HARMLESS))
def test_harmless_class_and_not_its_subclass(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, module = find(path, name)
    before = not_direct(model, SM90)
    assert names_of(model, module) - before.keys()

    monkeypatch.setattr(module, "__class__", double(type(module)))
    after = not_direct(model, SM90)
    assert names_of(model, module) <= after.keys()
    others = {n for n, _ in model.named_parameters()} - names_of(model, module)
    if name != "SharedExperts":  # refers to the runner above it
        assert others & after.keys() == others & before.keys()
    assert f"{path}.{name} is not known" in " ".join(after.values())


@pytest.mark.parametrize("path, name", entries(HARMLESS))
def test_harmless_class_has_no_hook_of_its_own(path: str, name: str) -> None:
    _, module = find(path, name)
    assert not hasattr(module, "process_weights_after_loading")
    assert not is_deferred_attention_layer(module)


@pytest.mark.parametrize("path, name", entries(METHODS))
@pytest.mark.parametrize("target", CUDA)
def test_method_and_not_its_subclass(
    path: str, name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = meta_model("Qwen3-0.6B")
    module = next(
        m for m in model.modules() if type(getattr(m, "quant_method", None)).__qualname__ == name
    )
    own = names_of(model, module)
    assert own
    assert not own & not_direct(model, target).keys()

    method = object.__new__(double(type(module.quant_method)))
    monkeypatch.setattr(module, "quant_method", method)
    reasons = not_direct(model, target)
    assert own <= reasons.keys()
    assert all(f"{path}.{name}, is not known" in reasons[n] for n in own)


@pytest.mark.parametrize("path, name", [pytest.param(*key, id=key[1]) for key in HARMFUL])
def test_harmful_class_and_its_subclass(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tensors(module: nn.Module) -> set[str]:
        inside = {id(t) for t in (*module.parameters(), *module.buffers())}
        named = (*model.named_parameters(), *model.named_buffers())
        return {n for n, tensor in named if id(tensor) in inside}

    model, module = next(
        (model, module)
        for model in map(meta_model, EVERY)
        for module in model.modules()
        if (type(module).__module__, type(module).__qualname__) == (path, name)
    )
    reasons = not_direct(model, SM100)
    assert tensors(module)
    assert {reasons[n] for n in tensors(module)} == {f"{name}: {HARMFUL[path, name]}"}
    monkeypatch.setattr(module, "__class__", double(type(module)))
    for target in (SM90, SM100):
        assert tensors(module) <= not_direct(model, target).keys()


# --- whole models ---


@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("name", DENSE)
def test_every_parameter_of_a_dense_decoder_is_direct(name: str, target: str) -> None:
    model = meta_model(name)
    assert not {n for n, _ in model.named_parameters()} & not_direct(model, target).keys()


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize(
    ("target", "moe_backend", "as_loaded"),
    [
        (SM90, "auto", True),
        (SM100, "auto", False),
        (SM100, "triton", True),
        (SM90, "flashinfer_cutlass", False),
    ],
)
def test_of_a_moe_model_absorbed_weights_reload_and_experts_by_their_kernel(
    name: str, target: str, moe_backend: str, as_loaded: bool
) -> None:
    model = meta_model(name)
    reasons = not_direct(model, target, moe_backend)
    refused = {n for n, _ in model.named_parameters()} & reasons.keys()
    kinds = {n.split(".layers.")[-1].split(".", 1)[1].split(".experts.")[-1] for n in refused}
    expected = set()
    if not as_loaded:
        expected |= {"routed_experts.w13_weight", "routed_experts.w2_weight"}
    if name in MLA:
        expected.add("self_attn.kv_b_proj.weight")
    if not as_loaded and name in ("DeepSeek-V3", "GLM-4.5-Air"):
        expected.add("mlp.gate.e_score_correction_bias")
    assert kinds == expected
    assert all("shuffle or pad" in reasons[n] for n in refused if ".experts." in n)


def test_experts_with_more_than_two_weights_reload() -> None:
    model = meta_model("Qwen3-30B-A3B")
    experts = modules_of(model, RoutedExperts)[1]
    experts.register_parameter("w2_bias", nn.Parameter(torch.empty(4, device="meta")))
    try:
        reasons = not_direct(model, SM90)
        assert names_of(model, experts) <= reasons.keys()
        assert names_of(model, modules_of(model, RoutedExperts)[0]).isdisjoint(reasons)
    finally:
        del experts.w2_bias


def test_experts_of_another_method_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta_model("Qwen3-30B-A3B")
    experts = modules_of(model, RoutedExperts)[1]
    monkeypatch.setattr(experts.quant_method, "__class__", double(type(experts.quant_method)))
    assert names_of(model, experts) <= not_direct(model, SM90).keys()


def test_mla_reloads_kv_b_proj_under_all_its_names() -> None:
    model = meta_model("DeepSeek-V2-Lite")
    reasons = not_direct(model, SM90)
    attention = model.model.layers[1].self_attn
    names = names_of(model, attention.kv_b_proj)
    assert "model.layers.1.self_attn.kv_b_proj.weight" in names
    assert len(names) > 1
    assert all("W_UK_T" in reasons[n] for n in names)
    for neighbour in (attention.q_proj, attention.kv_a_proj_with_mqa, attention.o_proj):
        assert not names_of(model, neighbour) & reasons.keys()


def test_moe_biases_reload_with_their_experts_and_the_router_does_not() -> None:
    model = meta_model("gpt-oss-20b")
    reasons = not_direct(model, SM90)
    assert names_of(model, *modules_of(model, GateLinear)).isdisjoint(reasons)
    experts = {n for n in reasons if ".experts." in n}
    kinds = {n.rsplit(".", 1)[1] for n in experts}
    assert kinds == {"w13_weight", "w13_bias", "w2_weight", "w2_bias"}
    assert all("shuffle or pad" in reasons[n] for n in experts)


def test_attention_sinks_reload() -> None:
    """The model owns them, the attention backend may keep a converted copy."""
    reasons = not_direct(meta_model("gpt-oss-20b"), SM90)
    assert "attention sinks" in reasons["model.layers.0.attn.sinks"]


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B-FP8", "DeepSeek-V3"])
def test_quantized_layers_reload_and_norms_do_not(name: str) -> None:
    with engine(name, quantized=True, tp=2).worker(0) as model:
        reasons = not_direct(model, SM90)
    quantized = [
        module
        for module in model.modules()
        if type(getattr(module, "quant_method", None)).__name__ == "Fp8LinearMethod"
    ]
    assert len(quantized) >= 8
    names = names_of(model, *quantized)
    assert {n.rsplit(".", 1)[1] for n in names} == {"weight", "weight_scale_inv"}
    assert names <= reasons.keys()
    absorbed = {n for n in names if "kv_b_proj" in n}
    assert all("Fp8LinearMethod" in reasons[n] for n in names - absorbed)
    assert not any(n.endswith("norm.weight") for n in reasons)


def test_two_gates_that_the_runner_joins() -> None:
    """Qwen3-Next without a shared expert still has its gate."""
    changes = {"shared_expert_intermediate_size": 0}
    with engine("Qwen3-Next-80B-A3B", **changes).worker(0) as model:
        reasons = not_direct(model, SM90)
    block = model.model.layers[0].mlp
    gates = names_of(model, block.gate, block.shared_expert_gate)
    assert {n.rsplit(".", 2)[1] for n in gates} >= {"gate", "shared_expert_gate"}
    assert gates <= reasons.keys()
    assert all("joins the weights" in reasons[n] for n in gates)
    # What the reason says is what vLLM does.
    block.experts._maybe_fuse_gate_weights()
    assert block.experts._combined_gate_weight.shape[0] == block.gate.weight.shape[0] + 1


def test_gate_that_is_split_for_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own subclass of a known method, which derives a buffer from the weight."""
    model = meta_model("Mixtral-8x7B-v0.1")
    gate, other = modules_of(model, GateLinear)[:2]
    monkeypatch.setattr(gate, "quant_method", object.__new__(_GateLinearMethod))
    reasons = not_direct(model, SM90)
    assert names_of(model, gate) <= reasons.keys()
    assert names_of(model, other).isdisjoint(reasons)


# --- the target ---


@pytest.mark.parametrize("name", EVERY)
def test_on_a_cpu_matrices_reload(name: str) -> None:
    model = meta_model(name)
    on_cpu, on_cuda = not_direct(model, "cpu"), not_direct(model, SM90)
    assert on_cuda.keys() < on_cpu.keys()
    packed = [m for m in model.modules() if getattr(m, "quant_method", None) is not None]
    assert names_of(model, *packed) <= on_cpu.keys()
    for n in {n for n, _ in model.named_parameters()} - on_cpu.keys():
        owner, own = n.rsplit(".", 1)
        kind = type(model.get_submodule(owner)).__name__
        assert kind in KEPT_ON_CPU or own in ("A_log", "dt_bias"), n
    linears = modules_of(model, QKVParallelLinear)
    assert all("packs" in on_cpu[n] for n in names_of(model, *linears))


def test_unknown_target() -> None:
    with pytest.raises(EngineError, match='unknown target "cuda-sm70"'):
        not_direct(meta_model("Qwen3-0.6B"), "cuda-sm70")


# --- what is not known ---


class Unknown(nn.Module):
    """Holds what it is given outside of torch's registries."""

    def __init__(self, hold: Any) -> None:
        super().__init__()
        self.hold = hold


def held(how: str, module: nn.Module) -> Any:
    return {
        "parameter": [module.weight],
        "detached": {"key": (module.weight.detach(),)},
        "module": [{"key": (module,)}],
        "object": SimpleNamespace(impl=SimpleNamespace(linear=module)),
        "method": module.forward,
        "partial": functools.partial(print, module),
        "partial keyword": functools.partial(print, end=module),
        "closure": lambda: module,
    }[how]


WAYS = [
    "parameter",
    "detached",
    "module",
    "object",
    "method",
    "partial",
    "partial keyword",
    "closure",
]


@pytest.mark.parametrize("how", WAYS)
def test_unknown_class_taints_what_it_refers_to(how: str) -> None:
    model = meta_model("Qwen3-0.6B")
    linear = model.model.layers[0].mlp.down_proj
    model.add_module("unknown", Unknown(held(how, linear)))
    try:
        reasons = not_direct(model, SM90)
    finally:
        del model.unknown
    refused = {n for n, _ in model.named_parameters()} & reasons.keys()
    assert refused == {"model.layers.0.mlp.down_proj.weight"}
    assert f"{__name__}.Unknown is not known" in reasons["model.layers.0.mlp.down_proj.weight"]


def test_unknown_class_that_knows_the_config_taints_no_other_layer() -> None:
    with engine("Qwen3-Next-80B-A3B").worker(0) as model:
        before = not_direct(model, SM90)
        config = get_current_vllm_config()
        layer = model.model.layers[0].linear_attn
        assert layer in config.compilation_config.static_forward_context.values()
        assert not names_of(model, layer) & before.keys()
        model.add_module("unknown", Unknown(config))
        assert not_direct(model, SM90) == before


def test_unknown_model_has_nothing_direct() -> None:
    class Whole(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part
            self.register_buffer("scale", torch.ones(1, device="meta"))

    model = Whole(meta_model("Qwen3-0.6B"))
    named = (*model.named_parameters(), *model.named_buffers())
    reasons = not_direct(model, SM90)
    assert {n for n, _ in named} <= reasons.keys()
    assert "Whole is not known" in reasons["part.lm_head.weight"]


def test_class_from_the_transformers_library_is_not_known() -> None:
    model = meta_model("OLMo-2-1124-7B")
    reasons = not_direct(model, SM90)
    assert {n for n, _ in model.named_parameters()} <= reasons.keys()
    assert "olmo2" in reasons["model.layers.0.mlp.down_proj.weight"]


def test_parameter_of_its_own_in_an_unknown_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta_model("Qwen3-Next-80B-A3B")
    layer = model.model.layers[0].linear_attn
    own = {f"model.layers.0.linear_attn.{n}" for n in ("A_log", "dt_bias", "conv1d.weight")}
    assert own.isdisjoint(not_direct(model, SM90))
    monkeypatch.setattr(layer, "__class__", double(type(layer)))
    assert own <= not_direct(model, SM90).keys()


# --- tied weights ---


def tied() -> tuple[nn.Module, VocabParallelEmbedding, ParallelLMHead]:
    model = meta_model("Llama-3.2-1B")
    (embedding,) = modules_of(model, VocabParallelEmbedding)
    (head,) = modules_of(model, ParallelLMHead)
    assert head.weight is embedding.weight
    return model, embedding, head


@pytest.mark.parametrize("which", ["embedding", "head"])
@pytest.mark.parametrize("unsafe", ["class", "method"])
def test_tied_weight_is_direct_only_if_both_owners_allow(
    which: str, unsafe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, embedding, head = tied()
    names = {"model.embed_tokens.weight", "lm_head.weight"}
    assert names.isdisjoint(not_direct(model, SM90))
    owner = head if which == "head" else embedding
    if unsafe == "class":
        monkeypatch.setattr(owner, "__class__", double(type(owner)))
    else:
        monkeypatch.setattr(owner, "quant_method", object.__new__(double(UnquantizedLinearMethod)))
    reasons = not_direct(model, SM90)
    assert names <= reasons.keys()
    assert reasons["model.embed_tokens.weight"] == reasons["lm_head.weight"]


def test_view_of_a_refused_storage_is_refused() -> None:
    """Two parameters of one storage, not one object."""
    model = meta_model("Qwen3-0.6B")
    linear = model.model.layers[0].mlp.down_proj
    stranger = Unknown(None)
    stranger.register_parameter("part", nn.Parameter(linear.weight.data[1:], requires_grad=False))
    model.add_module("unknown", stranger)
    try:
        reasons = not_direct(model, SM90)
    finally:
        del model.unknown
    assert {"unknown.part", "model.layers.0.mlp.down_proj.weight"} <= reasons.keys()


# --- vLLM's own post-load processing, on real weights ---


class CudaStandIn(Platform):
    """Answers as CUDA does. The processing of known methods asks for nothing else."""

    _enum = PlatformEnum.CUDA
    target = SM90

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*divmod(int(cls.target.removeprefix("cuda-sm")), 10))


class Snapshot:
    """Storage, place and value of every named tensor, and what each module keeps."""

    def __init__(self, model: nn.Module) -> None:
        self.named = {
            n: (t.data_ptr(), t.shape, t.stride(), t.dtype, t.detach().clone())
            for n, t in (
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            )
        }
        self.kept = {
            n: {*vars(m), *m._parameters, *m._buffers, *m._modules}
            for n, m in model.named_modules()
        }


def leave_out_experts(model: nn.Module) -> None:
    """Their kernels need a GPU or vLLM's CPU extension."""
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method = None


def assert_untouched(before: Snapshot, after: Snapshot, names: set[str]) -> None:
    for name in names:
        *place, value = before.named[name]
        *new_place, new_value = after.named[name]
        assert new_place == place, name
        assert torch.equal(new_value, value), name


@pytest.mark.parametrize("name", [*REAL, *MOE, "gpt-oss-20b"])
def test_processing_for_cuda_leaves_direct_tensors_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (linear, vocab_parallel_embedding):
        monkeypatch.setattr(module, "current_platform", CudaStandIn())
    with real_weights(name, SM90) as (model, model_config):
        leave_out_experts(model)
        refused = not_direct(model, SM90)
        before = Snapshot(model)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
    after = Snapshot(model)
    direct = before.named.keys() - refused.keys()
    assert len(direct) > 10
    assert_untouched(before, after, direct)
    # Nor is anything derived, but by attention.
    changed = {n for n, kept in after.kept.items() if kept != before.kept.get(n)}
    kinds = {type(model.get_submodule(n)).__name__ for n in changed}
    assert kinds == ({"MLAAttention"} if name in MLA else set())
    if name in MLA:
        derived = model.model.layers[0].self_attn.mla_attn.mla_attn.W_UV
        assert derived.numel() < model.model.layers[0].self_attn.kv_b_proj.weight.numel()


@pytest.mark.parametrize("backend", list(UnquantizedMoeBackend), ids=lambda one: one.name.lower())
def test_only_kernels_that_are_known_to_leave_experts_as_loaded(
    backend: UnquantizedMoeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's processing as far as it runs without its kernels: whether it changes a weight."""
    for module in (unquantized, unquantized_fused_moe_method):
        monkeypatch.setattr(module, "current_platform", CudaStandIn())
    name = backend.name.lower()
    with real_weights("Qwen3-30B-A3B", SM90) as (model, _):
        experts = modules_of(model, RoutedExperts)[0]
        method = experts.quant_method
        method.unquantized_backend = backend
        # Stands in for the kernel's construction, which needs a GPU.
        kernel = SimpleNamespace(
            fused_experts=SimpleNamespace(process_weights_after_loading=lambda _: None)
        )
        monkeypatch.setattr(
            method, "_init_moe_kernel", lambda _: setattr(method, "moe_kernel", kernel)
        )
        before = Snapshot(experts)
        if backend_of(experts) == (name, True):
            for _ in range(2):  # as a reload does too
                method.process_weights_after_loading(experts)
            assert_untouched(before, Snapshot(experts), {"w13_weight", "w2_weight"})
            (kernels,) = unquantized.backend_to_kernel_cls(backend)
            base = modular_kernel.FusedMoEExperts.process_weights_after_loading
            assert kernels.process_weights_after_loading is base
            return
    assert name not in ("triton", "batched_triton")
    assert backend_of(experts) == (name, False)
    if name == "flashinfer_cutlass":
        method.process_weights_after_loading(experts)
        with pytest.raises(AssertionError, match="w13_weight"):
            assert_untouched(before, Snapshot(experts), {"w13_weight"})


@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("flashinfer", [True, False])
def test_where_vllm_takes_triton_by_itself(
    target: str, flashinfer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own choice for the platform, with FlashInfer installed or not."""
    platform = CudaStandIn()
    monkeypatch.setattr(CudaStandIn, "target", target)
    for module in (unquantized, flashinfer_cutlass_moe, trtllm_bf16_moe, triton_moe):
        monkeypatch.setattr(module, "current_platform", platform)
    for module, found in (
        (flashinfer_cutlass_moe, "has_flashinfer_cutlass_fused_moe"),
        (trtllm_bf16_moe, "has_flashinfer_trtllm_fused_moe"),
    ):
        monkeypatch.setattr(module, found, lambda: flashinfer)
    experts = modules_of(meta_model("Qwen3-30B-A3B"), RoutedExperts)[0]
    backend, _ = unquantized.select_unquantized_moe_backend(experts.moe_config)
    known = read_as_loaded(experts, target, "auto")
    assert (backend is UnquantizedMoeBackend.TRITON) == (known or not flashinfer)
    assert known == (target in ("cuda-sm80", "cuda-sm86", "cuda-sm89", "cuda-sm90"))


@pytest.mark.parametrize("name", [*REAL, "Qwen3-Next-80B-A3B"])
def test_processing_on_a_cpu_leaves_direct_tensors_alone(name: str) -> None:
    with real_weights(name, "cpu") as (model, model_config):
        leave_out_experts(model)
        refused = not_direct(model, "cpu")
        before = Snapshot(model)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
    after = Snapshot(model)
    direct = before.named.keys() - refused.keys()
    assert any("norm" in n or "ln_" in n for n in direct)
    assert_untouched(before, after, direct)
    # Every matrix got a kernel, which may hold a packed copy of it.
    given = [m for m in model.modules() if "cpu_linear" in vars(m)]
    assert {type(m.quant_method) for m in given} == {
        UnquantizedLinearMethod,
        UnquantizedEmbeddingMethod,
    }
    assert names_of(model, *given) <= refused.keys()
