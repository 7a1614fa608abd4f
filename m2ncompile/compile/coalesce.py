"""Destinations to transfers: what can travel together does.

Large tensors go as they are, since packing costs two copies of local memory;
smaller ones of equal geometry are stacked. What takes staging memory until its layer is complete
is stacked within that. What is written directly takes none, and is stacked across layers where
a layer has little of it: only as much as moves at a good rate, since a trainer may hold it until
the last of it is there.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain

from m2ncompile.dtypes import nbytes
from m2ncompile.inventory.records import TensorInfo
from m2ncompile.layout import Layout, Limits
from m2ncompile.routes import Destination, Route

__all__ = ["coalesce"]

#: What a rank packs or unpacks at most of a stack across layers, as a part of what it may.
_ACROSS = 4
_NUMBER = re.compile(r"\.(\d+)\.")


def coalesce(
    tensors: Sequence[TensorInfo], destinations: Sequence[Destination], limits: Limits
) -> tuple[tuple[int, ...], ...]:
    """Groups of indices of `destinations`, one a transfer, in the order in which they run."""
    found: list[tuple[int, tuple[int, ...]]] = []
    #: By what must be alike, the layers that have it.
    alike: defaultdict[tuple[Route, Hashable], defaultdict[str, list[int]]]
    alike = defaultdict(lambda: defaultdict(list))
    for index, d in enumerate(destinations):
        tensor = tensors[d.tensor]
        size = nbytes(tensor.dtype, d.wire.shape)
        if len(d.wire.shape) >= limits.max_dims or size >= limits.stack_bytes:
            found.append((index, (index,)))
            continue
        one_rank = d.layout.mesh.size == 1 and d.layout.split is None
        where = "one rank" if one_rank else d.layout
        key = (d.route, (tensor.dtype, d.wire.shape, d.wire.source, where))
        alike[key][_layer(tensor.name)].append(index)
    for (route, _), layers in alike.items():
        groups, most, across = list(layers.values()), limits.stage_bytes, False
        if route == "direct":
            little = most // _ACROSS
            across = all(2 * _staged(tensors, destinations, one) <= little for one in groups)
            if across:
                groups, most = [list(chain.from_iterable(groups))], little
        for group in groups:
            for part in _parts(tensors, destinations, _as_they_land(destinations, group), most):
                found.append((max(part) if across else min(part), part))
    return tuple(part for _, part in sorted(found))


def _as_they_land(destinations: Sequence[Destination], group: Sequence[int]) -> list[int]:
    """Parameter by parameter, in the order of their places there.

    What follows each other there is received there, without a copy.
    """
    seen: dict[str, int] = {}

    def place(index: int) -> tuple[int, tuple[int, ...]]:
        landing = destinations[index].landing
        if landing is None:
            return index, ()
        return seen.setdefault(landing.param.name, index), landing.offsets

    return sorted(group, key=place)


def _layer(name: str) -> str:
    """A tensor's name up to its first number, which is its layer's."""
    match = _NUMBER.search(name)
    return name[: match.end()] if match else name


def _parts(
    tensors: Sequence[TensorInfo],
    destinations: Sequence[Destination],
    group: Sequence[int],
    most: int,
) -> Iterator[tuple[int, ...]]:
    """A group, cut evenly so that no rank stages more than `most` bytes."""
    if len(group) == 1:
        yield (group[0],)
        return
    by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for index in group:
        by_rank[destinations[index].layout.mesh.start].append(index)
    ranks = sorted(by_rank)
    even = len({len(one) for one in by_rank.values()}) == 1
    if not even or ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        for rank in ranks:
            yield from _parts(tensors, destinations, by_rank[rank], most)
        return
    each = _staged(tensors, destinations, [one[0] for one in by_rank.values()])
    for start, end in _even(len(by_rank[ranks[0]]), most // each):
        yield tuple(i for rank in ranks for i in by_rank[rank][start:end])


def _staged(
    tensors: Sequence[TensorInfo], destinations: Sequence[Destination], group: Sequence[int]
) -> int:
    """Bytes that a rank packs or unpacks at most of a group that travels as one."""
    first = destinations[group[0]]
    size = nbytes(tensors[first.tensor].dtype, first.wire.shape)
    ranks = Counter(destinations[index].layout.mesh.start for index in group)
    sent, received = size // _shards(first.wire.source), size // _shards(first.layout)
    return max(sent * len(group), received * max(ranks.values()))


def _even(length: int, most: int) -> Iterator[tuple[int, int]]:
    """Intervals of `length`, as few as have at most `most` each, of about one size."""
    pieces = -(-length // max(1, most))
    for piece in range(pieces):
        yield length * piece // pieces, length * (piece + 1) // pieces


def _shards(layout: Layout) -> int:
    return 1 if layout.split is None else layout.split[1]
