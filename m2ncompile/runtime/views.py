"""Where a range of a tensor lies in the memory of a rank that holds a shard of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

from m2ncompile.layout import Layout, local_shape, shard_box

__all__ = ["View", "contiguous", "sent_view"]


class View(msgspec.Struct, frozen=True):
    """A strided box of a storage, in elements; `strides` as torch counts them."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def contiguous(view: View) -> bool:
    """Whether its elements follow each other without gaps, in its order."""
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def sent_view(
    shape: Sequence[int],
    held: Layout,
    base: int,
    wire_shape: Sequence[int],
    sent: Layout,
    rank: int,
) -> View | None:
    """What `rank` sends of a tensor of `shape`, in its own row-major shard of it.

    The wire is the range from element `base` on, seen as `wire_shape`, that lies
    as `sent`; the tensor lies as `held`. None when the rank is no sender of it.

    Raises ValueError when the rank does not hold what it is to send.
    """
    box = shard_box(sent, wire_shape, rank)
    if box is None:
        return None
    mine = shard_box(held, shape, rank)
    if mine is None:
        raise ValueError("it holds nothing of the tensor")
    steps = [prod(wire_shape[dim + 1 :]) for dim in range(len(wire_shape))]
    start = base + sum(a * step for (a, _), step in zip(box, steps, strict=True))
    sizes = tuple(b - a for a, b in box)
    if held.split is None or held.split[1] == 1:
        return View(start, sizes, tuple(steps))
    # A shard is one interval of every period along its dim.
    dim, shards = held.split
    inner = prod(shape[dim + 1 :])
    period, length = shape[dim] * inner, shape[dim] * inner // shards
    turn, within = divmod(start, period)
    within -= mine[dim][0] * inner
    reach = sum((n - 1) * step for n, step in zip(sizes, steps, strict=True) if step % period)
    if within < 0 or within + reach >= length:
        raise ValueError("it does not hold all of what it is to send")
    strides = tuple(step // shards if step % period == 0 else step for step in steps)
    view = View(turn * length + within, sizes, strides)
    last = view.offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if last >= prod(local_shape(held, shape)):
        raise ValueError("it does not hold all of what it is to send")
    return view
