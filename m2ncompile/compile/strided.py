"""Copies between two memories as strided maps, joined where they continue each other.

A `Piece` maps a box of elements of one memory (a row-major checkpoint tensor)
to as many of another (a live parameter's storage). Loaders copy in many small
steps; what they do as a whole is often one box: 256 copies of stacked experts,
or a gate and an up half that lie one behind the other on both sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

__all__ = ["Dim", "Piece", "canonical", "merged", "piece_of"]


class Dim(NamedTuple):
    """`size` steps, each `source` elements further in one memory and `target` in the other."""

    size: int
    source: int
    target: int


class Piece(NamedTuple):
    """One box. `dims` are canonical: longest source stride first, joined where they can be."""

    source: int
    target: int
    dims: tuple[Dim, ...]

    @property
    def numel(self) -> int:
        return prod(dim.size for dim in self.dims)

    @property
    def dense(self) -> bool:
        """Whether the target is one contiguous run in the source's order."""
        expected = 1
        for dim in reversed(self.dims):
            if dim.target != expected:
                return False
            expected *= dim.size
        return True


def canonical(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """The same map with as few dims as it takes; a single element has none.

    Unique for maps that step forward and do not repeat elements.
    """
    ordered = sorted(
        (dim for dim in dims if dim.size != 1), key=lambda dim: (-dim.source, -dim.target)
    )
    joined: list[Dim] = []
    for dim in ordered:
        if joined:
            outer = joined[-1]
            if (outer.source, outer.target) == (dim.size * dim.source, dim.size * dim.target):
                joined[-1] = Dim(outer.size * dim.size, dim.source, dim.target)
                continue
        joined.append(dim)
    return tuple(joined)


def piece_of(
    source: int,
    target: int,
    shape: Sequence[int],
    source_stride: Sequence[int],
    target_stride: Sequence[int],
) -> Piece:
    """The piece of one copy between two views of equal shape."""
    return Piece(source, target, _dims_of(tuple(shape), tuple(source_stride), tuple(target_stride)))


@lru_cache(maxsize=4096)  # a model's loaders copy few different boxes, at many offsets
def _dims_of(
    shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[Dim, ...]:
    return canonical(map(Dim, shape, source, target))


def merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same copies in as few pieces as equal steps allow, by place in the source."""
    current = sorted(pieces)
    while True:
        joined = sorted(_join_once(current))
        if len(joined) == len(current):
            return tuple(joined)
        current = joined


def _join_once(pieces: Sequence[Piece]) -> list[Piece]:
    by_dims: defaultdict[tuple[Dim, ...], list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_dims[piece.dims].append(piece)
    joined = []
    for dims, group in by_dims.items():
        start = 0
        while start < len(group):
            first = group[start]
            end = start + 1
            if end < len(group):
                step = _step(first, group[end])
                while end < len(group) and _step(group[end - 1], group[end]) == step:
                    end += 1
                # A run of equal steps is one more dim, outside of the others.
                joined.append(
                    Piece(first.source, first.target, canonical((Dim(end - start, *step), *dims)))
                )
            else:
                joined.append(first)
            start = end
    return joined


def _step(a: Piece, b: Piece) -> tuple[int, int]:
    return b.source - a.source, b.target - a.target
