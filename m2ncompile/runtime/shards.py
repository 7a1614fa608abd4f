"""A trainer's weights, as this rank holds them: what they are, and their memory each sync."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from m2ncompile.layout import REPLICATE, Layout, Mesh
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of

if TYPE_CHECKING:
    import torch
    from vllm.distributed.weight_transfer.base import WeightSource

__all__ = [
    "Held",
    "ModuleShards",
    "Shards",
    "SourceShards",
    "held_as_planned",
    "saved",
    "shards_of",
]


class Held(msgspec.Struct, frozen=True):
    """One tensor on the trainer: torch's dtype name, global shape, layout over trainer ranks.

    `layout` is words where it is none that a plan can have. `gathers` says
    whether every rank can be given the whole tensor too. `flaw` is what keeps
    this rank's shard from being sent as it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout | str
    gathers: bool = False
    flaw: str | None = None


class Shards(Protocol):
    """In an order of its own, which stays the same."""

    def describe(self) -> Sequence[Held]: ...

    def items(self, whole: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's shard of every tensor, in the order of `describe`; all of it of `whole`.

        May run collectives among the trainer ranks.
        """
        ...


def held_as_planned(plan: Plan) -> list[Held]:
    """What a plan assumes of its trainer, for sources that follow it."""
    layouts = layouts_of(plan)
    return [
        Held(
            tensor.name,
            plan.dtypes[plan.geometries[tensor.geometry].dtype],
            plan.geometries[tensor.geometry].shape,
            layouts[tensor.source],
        )
        for tensor in plan.tensors
    ]


def shards_of(source: Any, ranks: int, device: torch.device | None = None) -> Shards:
    """From a module, a WeightSource of vLLM's, or what is Shards already.

    `ranks` is the number of trainer ranks, `device` what a shard must be on.
    Raises TypeError for anything else.
    """
    import torch

    if isinstance(source, torch.nn.Module):
        return ModuleShards(source, ranks, device)
    if hasattr(source, "describe") and hasattr(source, "items"):
        shards: Shards = source
        return shards
    if hasattr(source, "metadata") and hasattr(source, "iter_local"):
        return SourceShards(source, ranks)
    raise TypeError(
        f"a trainer sends a torch module, or a source with `metadata` and `iter_local`; "
        f"got {type(source).__name__}"
    )


def saved(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters and persistent buffers (a router's bias), each under its first name alone."""
    seen = set()
    for path, owner in module.named_modules():
        passing = owner._non_persistent_buffers_set
        for leaf, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and leaf not in passing and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{leaf}".lstrip("."), tensor


class ModuleShards:
    """What a module would save: DTensors (FSDP2, tensor parallel), or plain on every rank."""

    def __init__(
        self, module: torch.nn.Module, ranks: int, device: torch.device | None = None
    ) -> None:
        self._module, self._ranks, self._device = module, ranks, device
        #: FSDP2's modules, by what they can do.
        self._gathering: list[Any] = [
            one for one in module.modules() if hasattr(one, "reshard") and hasattr(one, "unshard")
        ]

    def _reshard(self) -> None:
        """FSDP2 leaves its root whole after a forward without a backward."""
        for one in self._gathering:
            one.reshard()

    def describe(self) -> Sequence[Held]:
        self._reshard()
        return [
            Held(
                name,
                str(parameter.dtype).removeprefix("torch."),
                tuple(parameter.shape),
                _layout(parameter, self._ranks),
                gathers=hasattr(parameter, "full_tensor"),
                flaw=self._flaw(parameter),
            )
            for name, parameter in saved(self._module)
        ]

    def _flaw(self, parameter: Any) -> str | None:
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not local.is_contiguous():
            return f"its shard has strides {list(local.stride())}, which are not row-major"
        if self._device is not None and local.device.type != self._device.type:
            return f"its shard is on {local.device}, the transport sends from {self._device}"
        return None

    def items(self, whole: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        self._reshard()
        for name, parameter in saved(self._module):
            local: Any = parameter
            if hasattr(local, "to_local"):
                local = local.full_tensor() if name in whole else local.to_local()
            yield name, local.detach()  # of a DTensor itself it takes the host five times as long


def _layout(tensor: Any, ranks: int) -> Layout | str:
    """Where a DTensor's shards lie, over all trainer ranks in order, or why no plan can say it."""
    if not hasattr(tensor, "device_mesh"):
        return Layout(Mesh((ranks, 1), 0), None)
    grid = tensor.device_mesh.mesh
    if grid.flatten().tolist() != list(range(ranks)):
        return f"a device mesh over ranks {grid.flatten().tolist()}, not all {ranks} in order"
    return _over_mesh(
        tuple(grid.shape),
        [
            placement.dim if placement.is_shard() else None if placement.is_replicate() else "no"
            for placement in tensor.placements
        ],
        f"placements {tuple(tensor.placements)}",
    )


def _over_mesh(
    dims: tuple[int, ...], sharded: Sequence[int | str | None], words: str
) -> Layout | str:
    """`sharded` has the tensor dim that each axis shards, None where it replicates.

    Axes of one rank say nothing, and neighbours that do the same are one.
    """
    axes: list[list[Any]] = []
    for size, dim in zip(dims, sharded, strict=True):
        if size == 1:
            continue
        if isinstance(dim, str):
            return words
        if axes and axes[-1][1] == dim:
            axes[-1][0] *= size
        else:
            axes.append([size, dim])
    total = 1
    for size in dims:
        total *= size
    held = [axis for axis in axes if axis[1] is not None]
    if not held:
        # All ranks of one dim sharded over one rank is whole, too.
        return Layout(Mesh((total, 1), 0), None)
    if len(held) > 1 or len(axes) > 2:
        return words
    if len(axes) == 1:
        return Layout(Mesh((total, 1), 0), (held[0][1], REPLICATE))
    (a, first), (b, second) = axes
    codes = tuple(REPLICATE if dim is None else dim for dim in (first, second))
    return Layout(Mesh((a, b), 0), (codes[0], codes[1]))


class SourceShards:
    """A WeightSource of vLLM's that yields local shards."""

    def __init__(self, source: WeightSource, ranks: int) -> None:
        self._source, self._ranks = source, ranks

    def describe(self) -> Sequence[Held]:
        return [
            Held(
                meta.name,
                str(meta.dtype).removeprefix("torch."),
                tuple(meta.shape),
                self._layout(meta),
            )
            for meta in self._source.metadata
        ]

    def _layout(self, meta: Any) -> Layout | str:
        # vLLM before 0.33 has no owners: every rank yields the whole tensor.
        owners = getattr(meta, "owners", None)
        if owners is None:
            return Layout(Mesh((self._ranks, 1), 0), None)
        if list(owners) != list(range(self._ranks)):
            return f"owners {list(owners)}, not all {self._ranks} ranks in order"
        placements = meta.placements or (None,) * len(meta.mesh_shape)
        return _over_mesh(
            tuple(meta.mesh_shape),
            [getattr(placement, "dim", None) for placement in placements],
            f"mesh {list(meta.mesh_shape)} with placements {placements}",
        )

    def items(self, whole: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source.iter_local():
            yield name, tensor.detach()
