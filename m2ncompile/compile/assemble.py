"""Routes and transfers to a plan: interned tables, digests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import msgspec

from m2ncompile.inventory.records import TensorInfo
from m2ncompile.layout import Layout, Mesh, check_transfers
from m2ncompile.plan import (
    FORMAT,
    Digests,
    Inputs,
    Plan,
    PlanDestination,
    PlanGeometry,
    PlanLanding,
    PlanLayout,
    PlanParam,
    PlanStaging,
    PlanTensor,
    PlanTransfer,
    PlanWire,
    program_digest,
)
from m2ncompile.plan_check import check, wire_digests
from m2ncompile.routes import Destination, Landing, Reason
from m2ncompile.staging import Reloading, staging_of

__all__ = ["assemble"]

T = TypeVar("T", bound=Hashable)


class _Table(Generic[T]):
    """Entries in order of first use."""

    def __init__(self) -> None:
        self._indices: dict[T, int] = {}

    def index(self, entry: T) -> int:
        return self._indices.setdefault(entry, len(self._indices))

    def entries(self) -> tuple[T, ...]:
        return tuple(self._indices)


def assemble(
    inputs: Inputs,
    tensors: Sequence[TensorInfo],
    sources: Sequence[Layout],
    destinations: Sequence[Destination],
    transfers: Sequence[PlanTransfer] | None = None,
    reloading: Reloading | None = None,
) -> Plan:
    """The finished plan, checked as a reader would check it.

    `transfers` are in the order in which they run; each destination has one of its own
    where there are none.

    Raises LayoutError listing every tensor that no transfer can carry.
    """
    check_transfers(
        (
            (tensors[d.tensor].name, tensors[d.tensor].dtype, d.wire.shape, d.wire.source, d.layout)
            for d in destinations
        ),
        inputs.limits,
    )
    dtypes, meshes, layouts = _Table[str](), _Table[Mesh](), _Table[PlanLayout]()
    geometries, params, reasons = _Table[PlanGeometry](), _Table[PlanParam](), _Table[Reason]()
    wires, landings = _Table[PlanWire](), _Table[PlanLanding]()

    def geometry_index(dtype: str, shape: tuple[int, ...]) -> int:
        return geometries.index(PlanGeometry(dtypes.index(dtype), shape))

    def layout_index(layout: Layout) -> int:
        return layouts.index(PlanLayout(meshes.index(layout.mesh), layout.placements))

    def landing_index(landing: Landing) -> int:
        param = landing.param
        index = params.index(
            PlanParam(param.name, geometry_index(param.dtype, param.shape), param.stride)
        )
        return landings.index(PlanLanding(index, landing.dims))

    def destination(d: Destination) -> PlanDestination:
        geometry = geometry_index(tensors[d.tensor].dtype, d.wire.shape)
        offsets = None if d.landing is None else d.landing.offsets
        return PlanDestination(
            tensor=d.tensor,
            wire=wires.index(PlanWire(d.wire.base, geometry, layout_index(d.wire.source))),
            route=d.route,
            layout=layout_index(d.layout),
            landing=None if d.landing is None else landing_index(d.landing),
            offset=offsets[0] if offsets and len(offsets) == 1 else offsets,
            reason=None if d.reason is None else reasons.index(d.reason),
        )

    plan_tensors = tuple(
        PlanTensor(tensor.name, geometry_index(tensor.dtype, tensor.shape), layout_index(source))
        for tensor, source in zip(tensors, sources, strict=True)
    )
    plan_destinations = tuple(map(destination, destinations))
    plan = Plan(
        format=FORMAT,
        inputs=inputs,
        digests=Digests("", "", None),
        dtypes=dtypes.entries(),
        meshes=meshes.entries(),
        layouts=layouts.entries(),
        geometries=geometries.entries(),
        params=params.entries(),
        wires=wires.entries(),
        landings=landings.entries(),
        reasons=reasons.entries(),
        tensors=plan_tensors,
        destinations=plan_destinations,
        transfers=tuple(
            transfers or (PlanTransfer((index,)) for index in range(len(destinations)))
        ),
        staging=(PlanStaging(0, 0, 0, 0, 0, 0),) * (inputs.trainer.ranks + inputs.engine.workers),
    )
    source, complete = wire_digests(plan)
    digests = Digests(program_digest(plan), source, complete)
    plan = msgspec.structs.replace(plan, digests=digests)
    check(plan)  # before the rest of it is relied on
    return msgspec.structs.replace(plan, staging=staging_of(plan, reloading or Reloading()))
