"""One transfer for several wires: stacked along a new first dim, or by rows.

A call costs the host 60 to 150 us and the device more, however small the tensor
(NCCL M2N 0.1.0), so wires of equal shape and source travel together: to the same
shards of the same ranks, or each whole to one of consecutive ranks (experts), which
then share the stack evenly.

Where what one rank has for another is one run of memory on both sides, NCCL M2N
moves it up to twice as fast as where it must gather it. A stack whose members are sharded is
no such run, so matrices that are sent by rows are packed row by row instead: the first row of
each, the second of each; and first by columns, or by rank, where workers differ in those. So is
a large one alone that goes from rows to columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec

from m2ncompile.layout import REPLICATE, Layout, Mesh

__all__ = ["Rows", "Stack", "rows_of", "stacked"]


class Stack(msgspec.Struct, frozen=True):
    """What a transfer of several wires moves, as one tensor."""

    shape: tuple[int, ...]
    source: Layout
    destination: Layout


class Rows(msgspec.Struct, frozen=True):
    """How matrices that go by rows are packed: `blocks`, and in each the rows of its members.

    A block has a share of the columns of all, where they are `cut`, or an even share of the
    matrices. Workers get whole blocks: what arrives is `[rows, members, columns]`.
    """

    blocks: int = 1
    cut: bool = False


def stacked(
    shape: tuple[int, ...],
    source: Layout,
    destinations: Sequence[Layout],
    by_rows: bool = False,
) -> Stack:
    """The one transfer of a wire of `shape` to each of `destinations`, in their order.

    Raises ValueError where one can't carry them.
    """
    if by_rows:
        return _by_rows(shape, source, destinations)
    if len(destinations) == 1:
        return Stack(shape, source, destinations[0])
    whole = (len(destinations), *shape)
    if len(set(destinations)) == 1:
        return Stack(whole, _deeper(source), _deeper(destinations[0]))
    return Stack(whole, _deeper(source), _over_ranks(destinations))


def rows_of(shape: tuple[int, ...], source: Layout, destinations: Sequence[Layout]) -> Rows:
    """Raises ValueError where wires of `shape` can't go by rows."""
    if len(shape) != 2:
        raise ValueError("only matrices go by rows")
    if _dim(source) not in (None, 0):
        raise ValueError("its wires are not sent by rows")
    if len(set(destinations)) > 1:
        return Rows(blocks=_over_ranks(destinations).mesh.size)
    layout = destinations[0]
    if _dim(layout) != 1:
        if len(destinations) == 1:
            raise ValueError("one matrix goes by rows only where its columns are sharded")
        return Rows()
    assert layout.split is not None
    return Rows(layout.split[1], cut=True)


def _by_rows(shape: tuple[int, ...], source: Layout, destinations: Sequence[Layout]) -> Stack:
    form = rows_of(shape, source, destinations)
    rows, columns = shape
    together = len(destinations) * columns
    if form.cut:
        first = _along(destinations[0], 0)
    elif len(set(destinations)) > 1:
        first = _over_ranks(destinations)
    else:
        return Stack((rows, together), _along(source, 0), _along(destinations[0], 0))
    if together % form.blocks:
        raise ValueError(f"its columns are not {form.blocks} even shares")
    return Stack((form.blocks, rows, together // form.blocks), _along(source, 1), first)


def _over_ranks(destinations: Sequence[Layout]) -> Layout:
    """A stack's first dim over consecutive ranks, of which each gets as many of it whole."""
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
    return Layout(Mesh((1, len(runs)), first), (REPLICATE, 0))


def _dim(layout: Layout) -> int | None:
    """The dim that is sharded, if any is cut."""
    return layout.split[0] if layout.split is not None and layout.split[1] > 1 else None


def _along(layout: Layout, dim: int) -> Layout:
    """The same shards along another dim, or the same copies.

    One shard is said as a copy: NCCL M2N takes the slower way for what is sharded.
    """
    if layout.placements is None or _dim(layout) is None:
        return Layout(layout.mesh, None)
    a, b = (code if code == REPLICATE else dim for code in layout.placements)
    return Layout(layout.mesh, (a, b))


def _deeper(layout: Layout) -> Layout:
    return _along(layout, 1 + (_dim(layout) or 0))
