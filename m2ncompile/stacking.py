"""One transfer for several wires: stacked along a new first dim.

A call costs the host 60 to 110 us and the device more, however small the tensor
(NCCL M2N 0.1.0), so wires of equal shape and source travel together: to the same
shards of the same ranks, or each whole to one of consecutive ranks (experts), which
then share the stack evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec

from m2ncompile.layout import REPLICATE, Layout, Mesh

__all__ = ["Stack", "stacked"]


class Stack(msgspec.Struct, frozen=True):
    """What a transfer of several wires moves, as one tensor."""

    shape: tuple[int, ...]
    source: Layout
    destination: Layout


def stacked(shape: tuple[int, ...], source: Layout, destinations: Sequence[Layout]) -> Stack:
    """The one transfer of a wire of `shape` to each of `destinations`, in their order.

    Raises ValueError where one can't carry them.
    """
    if len(destinations) == 1:
        return Stack(shape, source, destinations[0])
    whole = (len(destinations), *shape)
    if len(set(destinations)) == 1:
        return Stack(whole, _deeper(source), _deeper(destinations[0]))
    if any(layout.mesh.size != 1 for layout in destinations):
        raise ValueError("its destinations lie differently on several ranks")
    runs = [
        (rank, len(list(run)))
        for rank, run in groupby(layout.mesh.start for layout in destinations)
    ]
    first = runs[0][0]
    if [rank for rank, _ in runs] != list(range(first, first + len(runs))):
        raise ValueError("its destinations are not on consecutive ranks, in order")
    if len({count for _, count in runs}) != 1:
        raise ValueError("its destinations are not the same number on each rank")
    mesh = Mesh((1, len(runs)), first)
    return Stack(whole, _deeper(source), Layout(mesh, (REPLICATE, 0)))


def _deeper(layout: Layout) -> Layout:
    if layout.placements is None:
        return layout
    a, b = (code if code == REPLICATE else code + 1 for code in layout.placements)
    return Layout(layout.mesh, (a, b))
