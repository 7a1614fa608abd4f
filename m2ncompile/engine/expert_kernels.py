"""Which kernel a MoE layer's unquantized experts have, and whether it reads them as loaded.

Read in vLLM 0.33.0 and 0.32.0, `model_executor/layers/fused_moe`: after loading,
`UnquantizedFusedMoEMethod` pads on ROCm alone and hands both weights to
`convert_to_unquantized_kernel_format` (`oracle/unquantized.py`), which gives those of
the two Triton backends back as they are, in their memory; other backends swap, pad or
shuffle them. The Triton kernels take weights with each call, and keep nothing made
from them.

vLLM takes the backend that `--moe-backend` names. Left alone, it takes the first that
runs: on compute capability 9.0 it puts Triton before FlashInfer, which runs on no
earlier one. On 10.x and 12.x FlashInfer comes first where it is installed, which a plan
can't know. Triton's is the batched one where tokens come in batches (DeepEP).
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["EXPERTS", "backend_of", "is_that_class", "read_as_loaded"]

_LAYERS = "vllm.model_executor.layers.fused_moe"
#: Module and name of the class that holds experts, and of the method that processes them.
EXPERTS = (f"{_LAYERS}.routed_experts", "RoutedExperts")
_METHOD = (f"{_LAYERS}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod")

_AS_LOADED = ("triton", "batched_triton")
_TRITON_FIRST = ("cuda-sm80", "cuda-sm86", "cuda-sm89", "cuda-sm90")
_WEIGHTS = {"w13_weight", "w2_weight"}
#: The router's, which only refers to it here: what chooses experts reads it as it is.
_ROUTERS = {"e_score_correction_bias"}


def read_as_loaded(experts: Any, target: str, moe_backend: str) -> bool:
    """Whether workers on `target` that run with `moe_backend` do nothing to these weights.

    `experts` is a module of the class `EXPERTS`. Never with biases: no model was seen with them.
    """
    own = experts._parameters.keys() - _ROUTERS
    known = _is(type(experts.quant_method), _METHOD) and own == _WEIGHTS
    if moe_backend == "auto":
        return known and target in _TRITON_FIRST
    return known and target.startswith("cuda-") and moe_backend in _AS_LOADED


def backend_of(experts: Any) -> tuple[str, bool]:
    """What runs the experts of a worker's module, in vLLM's words, and whether as loaded."""
    method: Any = getattr(experts, "quant_method", None)
    if not _is(type(experts), EXPERTS) or not _is(type(method), _METHOD):
        return f"{type(experts).__qualname__} with {type(method).__qualname__}", False
    name = getattr(getattr(method, "unquantized_backend", None), "name", None)
    if not isinstance(name, str):
        return "a kernel that it does not name", False
    return name.lower(), name.lower() in _AS_LOADED


def is_that_class(kind: type) -> bool:
    """Whether `kind` is what its name says: the one class of that name in that module."""
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def _is(kind: type, known: tuple[str, str]) -> bool:
    """A subclass or a replacement is not known."""
    return (kind.__module__, kind.__qualname__) == known and is_that_class(kind)
