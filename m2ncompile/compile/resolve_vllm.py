"""The `vllm` resolver: what vLLM 0.33's own `nccl_m2n` backend decides, with reasons.

vLLM decides in `resolve_parameter_destinations` (weight_transfer/m2n_layout.py),
on every worker, from the live module. Here the same rules run on recorded
facts. A stock worker must agree by digest, so the rules are reproduced even
where better ones are known; `tests/differential` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from m2ncompile.engine.facts import ModelFacts, ParamFacts
from m2ncompile.errors import EngineError, Problem
from m2ncompile.inventory.records import TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Mesh, Placements
from m2ncompile.routes import Destination, Landing, Param, Reason, Wire

__all__ = ["agreed_destinations", "forbids_direct", "resolve"]


def forbids_direct(quantization: str | None, pp: int) -> Reason | None:
    """Why no tensor at all may be direct, or None when some may."""
    if quantization is not None:
        return Reason(
            "quantized",
            f"the engine runs quantization {quantization}, whose loaders may repack weights; "
            "vLLM then resolves nothing directly",
        )
    if pp > 1:
        return Reason(
            "pipeline-parallel",
            f"with pp {pp} a worker holds only its stage's layers; vLLM then resolves "
            "nothing directly",
        )
    return None


def resolve(
    tensors: Sequence[TensorInfo],
    sources: Sequence[Layout],
    facts: ModelFacts | None,
    mesh: Mesh,
    forbidden: Reason | None,
) -> tuple[Destination, ...]:
    """One destination per tensor for one worker, over `mesh` (axis 0 replicates, axis 1 shards).

    `facts` may be None only when `forbidden` says that nothing is direct.
    """
    replicated = Layout(mesh, None)
    wires = [Wire(0, t.shape, source) for t, source in zip(tensors, sources, strict=True)]
    if forbidden is not None or facts is None:
        assert forbidden is not None
        return tuple(
            Destination(i, wire, "fallback", replicated, None, forbidden)
            for i, wire in enumerate(wires)
        )
    params = {param.name: param for param in facts.params}
    decided: list[Placements | Reason | None] = [
        _decide(tensor, params.get(tensor.name), mesh) for tensor in tensors
    ]
    # vLLM finalises a module as a unit: one parameter that goes through
    # load_weights would overwrite its directly written siblings.
    fallen: dict[str, str] = {}
    for tensor, decision in zip(tensors, decided, strict=True):
        if isinstance(decision, Reason) and tensor.name in params:
            module, _, leaf = tensor.name.rpartition(".")
            fallen.setdefault(module, leaf)
    destinations = []
    for index, (tensor, decision) in enumerate(zip(tensors, decided, strict=True)):
        sibling = fallen.get(tensor.name.rpartition(".")[0])
        if not isinstance(decision, Reason) and sibling is not None:
            decision = Reason(
                "sibling",
                f"`{sibling}` of the same module falls back, and vLLM reloads a module as a unit",
            )
        if isinstance(decision, Reason):
            destinations.append(
                Destination(index, wires[index], "fallback", replicated, None, decision)
            )
        else:
            layout = replicated if decision is None else Layout(mesh, decision)
            param = params[tensor.name]
            landing = Landing(
                Param(param.name, param.dtype, param.shape), (0,), ((prod(param.shape), 1),)
            )
            destinations.append(Destination(index, wires[index], "direct", layout, landing, None))
    return tuple(destinations)


def agreed_destinations(
    tensors: Sequence[TensorInfo],
    sources: Sequence[Layout],
    ranks: Sequence[int],
    facts_of: Callable[[int], ModelFacts],
    mesh: Mesh,
) -> tuple[Destination, ...]:
    """What every worker resolves; vLLM refuses a run whose workers differ.

    Raises EngineError naming the ranks and tensors that differ.
    """
    first = resolve(tensors, sources, facts_of(ranks[0]), mesh, None)
    for rank in ranks[1:]:
        other = resolve(tensors, sources, facts_of(rank), mesh, None)
        if other != first:
            raise EngineError(
                "vLLM's workers would resolve different destinations and refuse to run",
                [
                    Problem(
                        tensors[a.tensor].name,
                        f"rank {ranks[0]}: {a.route} {a.layout.placements}, "
                        f"rank {rank}: {b.route} {b.layout.placements}",
                    )
                    for a, b in zip(first, other, strict=True)
                    if a != b
                ],
            )
    return first


def _decide(tensor: TensorInfo, param: ParamFacts | None, mesh: Mesh) -> Placements | Reason | None:
    """Placements of a direct write (None: replicated), or why there is none."""
    if param is None:
        return Reason(
            "no-parameter",
            "no live parameter has this name: the model fuses or renames it, so only "
            "load_weights knows where it goes",
        )
    if param.blocked_by is not None:
        return Reason(
            "model-transforms",
            f"{param.blocked_by} transforms checkpoint tensors before its parameters see them",
        )
    if param.dtype != tensor.dtype:
        return Reason(
            "dtype",
            f"the checkpoint has {tensor.dtype}, the live parameter {param.dtype}; a direct "
            "write can't convert",
        )
    if not param.contiguous:
        return Reason("not-contiguous", "the live parameter is not contiguous")
    if param.loader == "none":
        return Reason(
            "no-loader",
            "the live parameter has no loader of its own, so the model's load_weights may "
            "transform it",
        )
    if param.loader == "partial":
        return Reason(
            "wrapped-loader",
            f"its loader wraps {param.loader_name}; what the wrapper does is unknown",
        )
    if param.storage_marks:
        return Reason(
            "storage",
            f"its storage is packed, transposed or pre-sharded ({', '.join(param.storage_marks)})",
        )
    if param.loader == "unknown":
        return Reason(
            "loader", f"its loader {param.loader_name} is none that vLLM's backend recognises"
        )
    if param.loader == "replicated":
        if param.shape != tensor.shape:
            return Reason(
                "shape",
                f"its loader copies whole tensors, but the checkpoint has {list(tensor.shape)} "
                f"and the live parameter {list(param.shape)}",
            )
        return None
    shards = mesh.dims[1]
    if param.owner_tp != shards:
        return Reason(
            "tp",
            f"its layer shards over {param.owner_tp} ranks, the destination mesh over {shards}",
        )
    if param.shard_dim is None:
        return Reason("no-dim", f"its loader {param.loader_name} declares no dim that it shards")
    expected = tuple(
        size * shards if dim == param.shard_dim else size for dim, size in enumerate(param.shape)
    )
    if len(param.shape) <= param.shard_dim or expected != tensor.shape:
        return Reason(
            "shape",
            f"{shards} shards of {list(param.shape)} along dim {param.shard_dim} do not make the "
            f"checkpoint's {list(tensor.shape)}",
        )
    return (REPLICATE, param.shard_dim)
