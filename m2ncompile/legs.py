"""What a transport needs to know of each transfer, and nothing else of the plan."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from m2ncompile.layout import Layout, local_shape
from m2ncompile.plan import Plan, PlanPart
from m2ncompile.plan_check import layouts_of
from m2ncompile.stacking import stacked

__all__ = ["Leg", "legs_of"]


class Leg(msgspec.Struct, frozen=True):
    """One transfer: a tensor of `shape` from its layout on trainers to its layout on workers.

    `stack` tensors travel in it (`stacking.py`), 1 where it is one as it is. Ranks are the
    communicator's. `dtype` is torch's name.
    """

    dtype: str
    stack: int
    shape: tuple[int, ...]
    source: Layout
    destination: Layout

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """What each rank of the source mesh gives, row-major."""
        return local_shape(self.source, self.shape)

    @property
    def received_shape(self) -> tuple[int, ...]:
        """What each rank of the destination mesh gets, row-major."""
        return local_shape(self.destination, self.shape)


def legs_of(plan: Plan) -> Sequence[Leg]:
    """In the order in which all ranks run them. Equal ones are one object."""
    layouts = layouts_of(plan)
    known: dict[tuple[int, int, tuple[int, ...], PlanPart | None, bool], Leg] = {}
    legs = []
    for transfer in plan.transfers:
        carried = [plan.destinations[index] for index in transfer.destinations]
        wire, where = plan.wires[carried[0].wire], tuple(d.layout for d in carried)
        # Parts of one size are alike.
        part = transfer.part and msgspec.structs.replace(transfer.part, start=0)
        key = wire.geometry, wire.source, where, part, transfer.by_rows
        if key not in known:
            form = plan.geometries[wire.geometry]
            shape = form.shape
            if part is not None:
                shape = (*shape[: part.dim], part.size, *shape[part.dim + 1 :])
            destinations = [layouts[index] for index in where]
            stack = stacked(shape, layouts[wire.source], destinations, transfer.by_rows)
            known[key] = Leg(
                plan.dtypes[form.dtype],
                len(carried),
                stack.shape,
                stack.source,
                stack.destination,
            )
        legs.append(known[key])
    return legs
