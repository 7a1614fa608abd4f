"""Strided boxes of one storage, composed with what is known of another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from m2ncompile.engine.recording import View

__all__ = ["UnevenError", "disjoint", "through"]


class UnevenError(Exception):
    """The common part of two boxes is no box, or can't be shown to be one."""


def through(read: View, target: View, held: View, source: View) -> tuple[View, View] | None:
    """What reading `read` of a storage finds of `held` in it, as (source, target) boxes.

    What is in `held` came from `source`, what is in `read` goes to `target`,
    each of one shape with its other. None where `read` and `held` have no
    address in common; `held` has none twice. Raises UnevenError.
    """
    if disjoint(read, held):
        return None
    reads, holds = _axes(read, target), _axes(held, source)
    repeats = [axis for axis in reads if axis[0] == 0]
    reads = [axis for axis in reads if axis[0]]
    # An address is a sum of digits, one a level, if each level divides the one above.
    levels = sorted({1, *(axis[0] for axis in (*reads, *holds))}, reverse=True)
    if levels[-1] == 0 or any(upper % lower for upper, lower in pairwise(levels)):
        raise UnevenError
    read_at, held_at = _by_level(reads, levels), _by_level(holds, levels)

    read_rest, held_rest = read.offset, held.offset
    offset, target_offset = source.offset, target.offset
    dims: list[tuple[int, int, int]] = []
    apart = False
    for upper, level in zip((None, *levels), levels, strict=False):
        size, target_step = read_at.get(level, (1, 0))
        held_size, step = held_at.get(level, (1, 0))
        start, read_rest = divmod(read_rest, level)
        held_start, held_rest = divmod(held_rest, level)
        end, held_end = start + size, held_start + held_size
        if upper is not None and max(end, held_end) > upper // level:
            raise UnevenError
        low, high = max(start, held_start), min(end, held_end)
        apart |= low >= high
        offset += (low - held_start) * step
        target_offset += (low - start) * target_step
        if high - low > 1:
            dims.append((high - low, step, target_step))
    # Not before every level is known to carry nothing over into the next.
    if apart:
        return None
    dims += [(size, 0, step) for _, size, step in repeats]
    shape = tuple(dim[0] for dim in dims)
    return (
        View(offset, shape, tuple(dim[1] for dim in dims)),
        View(target_offset, shape, tuple(dim[2] for dim in dims)),
    )


def _axes(box: View, other: View) -> list[tuple[int, int, int]]:
    """(stride, size, stride in the other box) of the dims along which there is more than one."""
    return [axis for axis in zip(box.stride, box.shape, other.stride, strict=True) if axis[1] != 1]


def _by_level(
    axes: Iterable[tuple[int, int, int]], levels: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """(size, stride in the other box) at each level, an axis that spans several cut up."""
    found: dict[int, tuple[int, int]] = {}

    def put(level: int, size: int, step: int) -> None:
        if level in found:
            raise UnevenError
        found[level] = size, step

    for level, size, step in axes:
        for upper in reversed(levels[: levels.index(level)]):
            radix = upper // level
            if size <= radix:
                break
            if size % radix:
                raise UnevenError
            put(level, radix, step)
            level, size, step = upper, size // radix, step * radix
        put(level, size, step)
    return found


def disjoint(one: View, other: View) -> bool:
    """Whether the addresses of one box all come before the other's; true of an empty one."""
    return (
        0 in one.shape or 0 in other.shape or _last(one) < other.offset or _last(other) < one.offset
    )


def _last(box: View) -> int:
    return box.offset + sum(
        (size - 1) * stride for size, stride in zip(box.shape, box.stride, strict=True)
    )
