"""Transfers to transfers by rows, where that gives any two ranks one run of memory to move."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from m2ncompile.layout import Layout, local_shape
from m2ncompile.plan import PlanTransfer
from m2ncompile.routes import Destination
from m2ncompile.stacking import rows_of, stacked
from m2ncompile.views import cut

__all__ = ["by_rows"]


def by_rows(
    destinations: Sequence[Destination], transfers: Sequence[PlanTransfer]
) -> tuple[PlanTransfer, ...]:
    """`transfers` of indices of `destinations`, in their order."""
    return tuple(
        msgspec.structs.replace(transfer, by_rows=True)
        if transfer.part is None
        and _gains([destinations[index] for index in transfer.destinations])
        else transfer
        for transfer in transfers
    )


def _gains(carried: Sequence[Destination]) -> bool:
    first = carried[0]
    if first.route == "fallback":
        return False
    shape, source, where = first.wire.shape, first.wire.source, [d.layout for d in carried]
    stack = stacked(shape, source, where)
    if not any(_inside(layout) for layout in (stack.source, stack.destination)):
        return False  # it is one as it is
    try:
        rows_of(shape, source, where)
        for d in carried:
            assert d.landing is not None
            cut(d.landing.dims, local_shape(d.layout, shape)[0])
    except ValueError:  # its form, or its place in the parameter, has no rows
        return False
    return True


def _inside(layout: Layout) -> bool:
    """Whether a shard is not one run of the whole."""
    return layout.split is not None and layout.split[0] > 0 and layout.split[1] > 1
