"""Live parameters of a vLLM module as records."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from m2ncompile.engine.facts import LoaderKind, ModelFacts, ParamFacts

if TYPE_CHECKING:
    import torch

    from m2ncompile.engine.vllm_meta import MetaEngine

__all__ = ["param_facts", "worker_facts"]

#: Attributes by which vLLM marks a parameter whose stored form is not the
#: checkpoint's (vLLM 0.33.0, `m2n_layout`): set at all, or set and true.
_MARKS_WHEN_SET = ("packed_dim", "packed_factor", "marlin_tile_size")
_MARKS_WHEN_TRUE = ("needs_scalar_to_array", "is_sharded_weight", "is_transposed")


def worker_facts(engine: MetaEngine, rank: int) -> ModelFacts:
    """Builds worker `rank` and records every named parameter, in module order."""
    with engine.worker(rank) as model:
        return ModelFacts(
            engine=engine.spec.name,
            engine_version=engine.spec.version,
            architecture=engine.architecture,
            quantization=engine.quantization,
            rank=rank,
            params=param_facts(model),
        )


def param_facts(model: torch.nn.Module) -> tuple[ParamFacts, ...]:
    """The named parameters of a vLLM module."""
    from vllm.distributed.weight_transfer.m2n_layout import _DIRECT_WEIGHT_LOADING_BLOCKLIST

    loaders = _known_loaders()
    blocked: dict[int, str] = {}
    for module in model.modules():
        kind = type(module)
        if f"{kind.__module__}.{kind.__name__}" in _DIRECT_WEIGHT_LOADING_BLOCKLIST:
            blocked.update((id(param), kind.__name__) for param in module.parameters())
    return tuple(
        _param_facts(name, param, loaders, blocked.get(id(param)))
        for name, param in model.named_parameters()
    )


def _known_loaders() -> dict[Any, LoaderKind]:
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    return {
        default_weight_loader: "replicated",
        ReplicatedLinear.weight_loader: "replicated",
        ColumnParallelLinear.weight_loader: "column",
        ColumnParallelLinear.weight_loader_v2: "column",
        RowParallelLinear.weight_loader: "row",
        RowParallelLinear.weight_loader_v2: "row",
    }


def _param_facts(
    name: str, param: torch.nn.Parameter, loaders: dict[Any, LoaderKind], blocked_by: str | None
) -> ParamFacts:
    loader = getattr(param, "weight_loader", None)
    kind: LoaderKind
    owner = None
    if loader is None:
        kind, loader_name = "none", ""
    elif isinstance(loader, partial):
        kind, loader_name = "partial", _qualname(loader.func)
    else:
        owner = loader.__self__ if inspect.ismethod(loader) else None
        function = loader.__func__ if inspect.ismethod(loader) else loader
        kind, loader_name = loaders.get(function, "unknown"), _qualname(function)
    declared = getattr(
        param, {"column": "output_dim", "row": "input_dim"}.get(kind, "no such"), None
    )
    marks = [m for m in _MARKS_WHEN_SET if getattr(param, m, None) is not None]
    marks += [m for m in _MARKS_WHEN_TRUE if bool(getattr(param, m, False))]
    return ParamFacts(
        name=name,
        dtype=str(param.dtype).removeprefix("torch."),
        shape=tuple(param.shape),
        contiguous=param.data.is_contiguous(),
        loader=kind,
        loader_name=loader_name,
        shard_dim=declared if isinstance(declared, int) and declared >= 0 else None,
        owner_tp=getattr(owner, "tp_size", None),
        storage_marks=tuple(marks),
        blocked_by=blocked_by,
    )


def _qualname(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
