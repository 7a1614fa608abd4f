"""Where a range of a tensor lies in the memory of a rank that holds a shard of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

from m2ncompile.layout import Layout, local_shape, shard_box
from m2ncompile.plan import PlanPart

__all__ = ["View", "contiguous", "cut", "narrowed", "sent_view"]


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
    part: PlanPart | None = None,
) -> View | None:
    """What `rank` sends of a tensor of `shape`, in its own row-major shard of it.

    The wire is the range from element `base` on, seen as `wire_shape`, that lies
    as `sent`, or `part` of it; the tensor lies as `held`. None when the rank is no
    sender of it.

    Raises ValueError when the rank does not hold what it is to send.
    """
    box = shard_box(sent, wire_shape, rank)
    if box is None:
        return None
    if part is not None:
        taken = (part.start, part.start + part.size)
        box = (*box[: part.dim], taken, *box[part.dim + 1 :])
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


def narrowed(
    offset: int,
    dims: Sequence[tuple[int, int]],
    shape: Sequence[int],
    dim: int,
    start: int,
    size: int,
) -> View:
    """`[start, start + size)` along `dim` of what lies at `offset` by (size, stride) `dims`.

    `shape` is how the elements are seen, in the order of `dims`, which may be grouped
    otherwise. Raises ValueError where `dim` is no one dim of them.
    """
    before, rest = cut(dims, prod(shape[:dim]))
    along, after = cut(rest, shape[dim])
    along = [(n, step) for n, step in along if n > 1]
    while len(along) > 1 and along[-2][1] == along[-1][0] * along[-1][1]:
        (a, _), (b, step) = along[-2:]
        along[-2:] = [(a * b, step)]
    if len(along) > 1:
        raise ValueError(f"it does not lie evenly along dim {dim}")
    step = along[0][1] if along else 0
    kept = [*before, (size, step), *after]
    return View(offset + start * step, tuple(n for n, _ in kept), tuple(s for _, s in kept))


def cut(
    dims: Sequence[tuple[int, int]], count: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(size, stride) dims in two: the first step through `count` runs of what the others hold.

    Raises ValueError where no such two are there.
    """
    outer: list[tuple[int, int]] = []
    inner = list(dims)
    while count > 1:
        if not inner:
            raise ValueError("its dims hold too little")
        n, step = inner.pop(0)
        if n < 1:
            raise ValueError(f"a dim has {n} elements")
        if count % n == 0:
            outer.append((n, step))
            count //= n
        elif n % count == 0:
            outer.append((count, step * (n // count)))
            inner.insert(0, (n // count, step))
            count = 1
        else:
            raise ValueError("its dims are cut elsewhere")
    return outer, inner
