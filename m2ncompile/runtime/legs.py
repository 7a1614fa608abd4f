"""What a transport needs to know of each transfer, and nothing else of the plan."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from m2ncompile.layout import Layout, local_shape
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of

__all__ = ["Leg", "legs_of"]


class Leg(msgspec.Struct, frozen=True):
    """One transfer: a tensor of `shape` from its layout on trainers to its layout on workers.

    Ranks are the communicator's. `dtype` is torch's name.
    """

    dtype: str
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
    known: dict[tuple[int, int], Leg] = {}
    legs = []
    for transfer in plan.transfers:
        (index,) = transfer.destinations
        d = plan.destinations[index]
        if (d.wire, d.layout) not in known:
            wire = plan.wires[d.wire]
            geometry = plan.geometries[wire.geometry]
            known[d.wire, d.layout] = Leg(
                plan.dtypes[geometry.dtype],
                geometry.shape,
                layouts[wire.source],
                layouts[d.layout],
            )
        legs.append(known[d.wire, d.layout])
    return legs
