"""Routes to a plan: interned tables, one transfer per destination, digests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import msgspec

from m2ncompile.compile.routes import Destination, Reason
from m2ncompile.inventory.records import TensorInfo
from m2ncompile.layout import Layout, Mesh, check_transfers
from m2ncompile.plan import (
    FORMAT,
    Digests,
    Inputs,
    Plan,
    PlanDestination,
    PlanGeometry,
    PlanLayout,
    PlanTensor,
    PlanTransfer,
    program_digest,
)
from m2ncompile.plan_check import check, wire_digests

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
) -> Plan:
    """The finished plan, checked as a reader would check it.

    Raises LayoutError listing every tensor that no transfer can carry.
    """
    check_transfers(
        (
            (t.name, t.dtype, t.shape, sources[d.tensor], d.layout)
            for d in destinations
            for t in [tensors[d.tensor]]
        ),
        inputs.limits,
    )
    dtypes, meshes, layouts = _Table[str](), _Table[Mesh](), _Table[PlanLayout]()
    geometries, params, reasons = _Table[PlanGeometry](), _Table[str](), _Table[Reason]()

    def layout_index(layout: Layout) -> int:
        return layouts.index(PlanLayout(meshes.index(layout.mesh), layout.placements))

    plan_tensors = tuple(
        PlanTensor(
            tensor.name,
            geometries.index(PlanGeometry(dtypes.index(tensor.dtype), tensor.shape)),
            layout_index(source),
        )
        for tensor, source in zip(tensors, sources, strict=True)
    )
    plan_destinations = tuple(
        PlanDestination(
            d.tensor,
            d.route,
            layout_index(d.layout),
            None if d.param is None else params.index(d.param),
            None if d.reason is None else reasons.index(d.reason),
        )
        for d in destinations
    )
    plan = Plan(
        format=FORMAT,
        inputs=inputs,
        digests=Digests("", "", None),
        dtypes=dtypes.entries(),
        meshes=meshes.entries(),
        layouts=layouts.entries(),
        geometries=geometries.entries(),
        params=params.entries(),
        reasons=reasons.entries(),
        tensors=plan_tensors,
        destinations=plan_destinations,
        transfers=tuple(PlanTransfer((i,)) for i in range(len(plan_destinations))),
    )
    source, complete = wire_digests(plan)
    plan = msgspec.structs.replace(plan, digests=Digests(program_digest(plan), source, complete))
    check(plan)
    return plan
