"""The shards of both sides, and which trainer shards feed which worker's."""

from __future__ import annotations

from m2ncompile.diff.layouts import layout_text
from m2ncompile.dtypes import nbytes
from m2ncompile.layout import Box, Layout, shard_box
from m2ncompile.pieces import pieces
from m2ncompile.report.records import Move, Shard

__all__ = ["move"]


def move(
    dtype: str, shape: tuple[int, ...], source: Layout, destination: Layout, ranks: tuple[int, int]
) -> Move:
    """`ranks` are the numbers of trainer ranks and of workers."""
    first = ranks[0]
    trainers, workers = _shards(source, shape, 0), _shards(destination, shape, first)
    place = {shard.ranks: index for index, shard in enumerate(trainers)}
    feeds: dict[int, tuple[int, ...]] = {}
    for piece in pieces(shape, source, destination):
        rank = piece.worker - first
        feeds[rank] = (*feeds.get(rank, ()), place[piece.trainers])
    return Move(
        dtype,
        shape,
        nbytes(dtype, shape),
        layout_text(source, ranks[0], "trainer rank"),
        layout_text(destination, ranks[1], "worker"),
        trainers,
        workers,
        tuple(feeds.get(shard.ranks[0], ()) for shard in workers),
    )


def _shards(layout: Layout, shape: tuple[int, ...], first: int) -> tuple[Shard, ...]:
    held: dict[Box, list[int]] = {}
    for rank in layout.mesh.ranks:
        box = shard_box(layout, shape, rank)
        assert box is not None
        held.setdefault(box, []).append(rank - first)
    return tuple(Shard(box, tuple(ranks)) for box, ranks in sorted(held.items()))
