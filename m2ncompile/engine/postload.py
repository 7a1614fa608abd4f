"""Which live parameters can't be written in place, by what vLLM does after loading.

When the loaders have run, vLLM (0.33.0) gives every module's quantization method,
then attention layers, then the model itself a chance to process weights, on the
platform it runs on; and a class may keep tensors made from its weights at any other
time. Writing a parameter in place is all there is to do only where none of this
changes it or derives anything from it. That is known by reading, class by class: a
parameter may be written only if every module that holds it, from its owner up to the
model, is of a class in the tables below. Classes are told apart by identity, so a
subclass or a replacement is not known. What is known of the listed ones:

* `HARMLESS`: neither they nor their `load_weights` or `forward` keep anything made
  from a weight. Three need a word. `MoERunner` does when it is given two gates (one
  for the shared expert); that is checked. Qwen3-Next's `conv1d.weight` gets its third
  dim while the module is built. A tied head and its embedding hold one parameter,
  which one write updates; nothing happens to it unless to one of its owners.
* `HARMFUL`: what they make of what they hold, as the message says; but unquantized
  experts where it is known that their kernel reads them as loaded (`expert_kernels.py`).
* `METHODS`: empty off CPU (and ROCm and XPU, which are no targets). On a CPU both
  hand the weight to a matrix kernel that may pack it. An embedding's copy is used
  only by a head that shares it, but the method does not know.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from m2ncompile.engine.expert_kernels import EXPERTS, is_that_class, read_as_loaded
from m2ncompile.errors import EngineError
from m2ncompile.spec import TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

__all__ = ["HARMFUL", "HARMLESS", "METHODS", "not_direct"]

_LAYERS = "vllm.model_executor.layers"
_MODELS = "vllm.model_executor.models"

#: Module -> classes that leave weights alone once loaded, on every target.
HARMLESS = {
    "torch.nn.modules.container": ("ModuleList",),
    "torch.nn.modules.sparse": ("Embedding",),
    f"{_LAYERS}.layernorm": ("GemmaRMSNorm", "LayerNorm", "RMSNorm", "RMSNormGated"),
    f"{_LAYERS}.linear": (
        "ColumnParallelLinear",
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
        "ReplicatedLinear",
        "RowParallelLinear",
    ),
    f"{_LAYERS}.vocab_parallel_embedding": ("ParallelLMHead", "VocabParallelEmbedding"),
    f"{_LAYERS}.mla": ("MultiHeadLatentAttentionWrapper",),
    f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn": ("QwenGatedDeltaNetAttention",),
    f"{_LAYERS}.fused_moe.router.gate_linear": ("GateLinear",),
    f"{_LAYERS}.fused_moe.runner.moe_runner": ("MoERunner",),
    f"{_LAYERS}.fused_moe.runner.shared_experts": ("SharedExperts",),
    f"{_MODELS}.deepseek_v2": (
        "DeepSeekV2FusedQkvAProjLinear",
        "DeepseekV2DecoderLayer",
        "DeepseekV2ForCausalLM",
        "DeepseekV2MLAAttention",
        "DeepseekV2MLP",
        "DeepseekV2MoE",
        "DeepseekV2Model",
        "DeepseekV3ForCausalLM",
    ),
    f"{_MODELS}.gemma3": (
        "Gemma3Attention",
        "Gemma3DecoderLayer",
        "Gemma3ForCausalLM",
        "Gemma3MLP",
        "Gemma3Model",
    ),
    f"{_MODELS}.glm4_moe": (
        "Glm4MoE",
        "Glm4MoeAttention",
        "Glm4MoeDecoderLayer",
        "Glm4MoeForCausalLM",
        "Glm4MoeMLP",
        "Glm4MoeModel",
    ),
    f"{_MODELS}.gpt2": ("GPT2Attention", "GPT2Block", "GPT2LMHeadModel", "GPT2MLP", "GPT2Model"),
    f"{_MODELS}.gpt_oss": (
        "GptOssForCausalLM",
        "GptOssModel",
        "MLPBlock",
        "OAIAttention",
        "TransformerBlock",
    ),
    f"{_MODELS}.llama": (
        "LlamaAttention",
        "LlamaDecoderLayer",
        "LlamaForCausalLM",
        "LlamaMLP",
        "LlamaModel",
    ),
    f"{_MODELS}.mistral": (
        "MistralAttention",
        "MistralDecoderLayer",
        "MistralForCausalLM",
        "MistralModel",
    ),
    f"{_MODELS}.mixtral": (
        "MixtralAttention",
        "MixtralDecoderLayer",
        "MixtralForCausalLM",
        "MixtralMoE",
        "MixtralModel",
    ),
    f"{_MODELS}.phi3": ("Phi3ForCausalLM",),
    f"{_MODELS}.qwen2": (
        "Qwen2Attention",
        "Qwen2DecoderLayer",
        "Qwen2ForCausalLM",
        "Qwen2MLP",
        "Qwen2Model",
    ),
    f"{_MODELS}.qwen2_moe": ("Qwen2MoeMLP",),
    f"{_MODELS}.qwen3": (
        "Qwen3Attention",
        "Qwen3DecoderLayer",
        "Qwen3ForCausalLM",
        "Qwen3Model",
    ),
    f"{_MODELS}.qwen3_moe": (
        "Qwen3MoeAttention",
        "Qwen3MoeDecoderLayer",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeModel",
        "Qwen3MoeSparseMoeBlock",
    ),
    f"{_MODELS}.qwen3_next": (
        "Qwen3NextAttention",
        "Qwen3NextDecoderLayer",
        "Qwen3NextForCausalLM",
        "Qwen3NextModel",
        "Qwen3NextSparseMoeBlock",
    ),
}

_EXPERTS = "the MoE kernel that the worker chooses may shuffle or pad expert weights"

#: Class -> what it makes of the tensors that it holds or refers to.
HARMFUL = {
    (f"{_LAYERS}.attention.attention", "Attention"): (
        "it resets its scales, and its backend may keep a float32 copy of attention sinks"
    ),
    (f"{_LAYERS}.attention.mla_attention", "MLAAttention"): (
        "it derives the absorbed matrices W_UK_T and W_UV from kv_b_proj, and resets its scales"
    ),
    EXPERTS: _EXPERTS,
    (f"{_MODELS}.gpt_oss", "GptOssRoutedExperts"): _EXPERTS,
}

#: Quantization methods that do nothing after loading, except on a CPU.
METHODS = {
    f"{_LAYERS}.linear": ("UnquantizedLinearMethod",),
    f"{_LAYERS}.vocab_parallel_embedding": ("UnquantizedEmbeddingMethod",),
}


def not_direct(model: torch.nn.Module, target: str, moe_backend: str = "auto") -> dict[str, str]:
    """Why named parameters and buffers must not be written in place on `target`; absent: safe.

    `model` is a vLLM 0.33.0 module in load format (before any post-load
    processing), `target` one of `m2ncompile.spec.TARGETS`; EngineError for
    another, `moe_backend` what the workers run with. A tensor is listed under each of
    its names, and one reason to refuse a storage refuses every tensor in it.
    """
    if target not in TARGETS:
        raise EngineError(f'unknown target "{target}"; known: {", ".join(TARGETS)}')
    reasons: dict[int, str] = {}
    # Parents first: where several modules object, the innermost one's reason stands.
    for module in model.modules():
        if (reason := _objection(module, target, moe_backend)) is not None:
            reasons.update((_storage(tensor), reason) for tensor in _tensors(module))
    named = chain(
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    return {
        name: reasons[storage] for name, tensor in named if (storage := _storage(tensor)) in reasons
    }


def _objection(module: torch.nn.Module, target: str, moe_backend: str) -> str | None:
    kind = type(module)
    known = (kind.__module__, kind.__qualname__)
    if (harm := HARMFUL.get(known)) and is_that_class(kind):
        harmless = known == EXPERTS and read_as_loaded(module, target, moe_backend)
        return None if harmless else f"{kind.__qualname__}: {harm}"
    if not _listed(kind, HARMLESS):
        return f"{_full_name(kind)} is not known to leave loaded weights alone"
    if getattr(module, "_fse_fuse_gate", False):
        return (
            f"{kind.__qualname__}: it joins the weights of its two gates at the first forward "
            "and never again"
        )
    method = getattr(module, "quant_method", None)
    if method is None:
        return None
    if not _listed(type(method), METHODS):
        return (
            f"{kind.__qualname__}: its quantization method, {_full_name(type(method))}, is not "
            "known to leave loaded weights alone"
        )
    if target == "cpu":
        return (
            f"{kind.__qualname__}: {type(method).__qualname__} packs weights for the CPU's kernels"
        )
    return None


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _listed(kind: type, table: Mapping[str, tuple[str, ...]]) -> bool:
    return kind.__qualname__ in table.get(kind.__module__, ()) and is_that_class(kind)


def _storage(tensor: torch.Tensor) -> int:
    # Not data_ptr(), which is 0 for every meta tensor.
    return int(tensor.untyped_storage()._cdata)


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """All that `module` can get at: its own, those of modules below, and those it refers to.

    References that torch does not register are followed through containers,
    plain objects, bound methods and closures, but not through vLLM's config, which
    lists layers of every kind and is known to most classes.
    """
    import torch
    from vllm.config import CompilationConfig

    dead_ends = (type, ModuleType, CompilationConfig)
    pending: list[Any] = [module]
    seen: set[int] = set()
    while pending:
        thing = pending.pop()
        if id(thing) in seen or isinstance(thing, dead_ends):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, dict):
            pending.extend(thing.values())
        elif isinstance(thing, (list, tuple, set, frozenset)):
            pending.extend(thing)
        elif isinstance(thing, MethodType):
            pending += [thing.__self__, thing.__func__]
        elif isinstance(thing, partial):
            pending += [thing.func, thing.args, thing.keywords]
        elif isinstance(thing, FunctionType):
            pending.extend(cell.cell_contents for cell in thing.__closure__ or () if _filled(cell))
        else:
            pending.extend(getattr(thing, "__dict__", {}).values())


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
