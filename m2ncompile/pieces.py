"""The pieces of one transfer: what each worker receives from which trainer ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from m2ncompile.layout import Box, Layout, shard_box

__all__ = ["Piece", "pieces"]


class Piece(msgspec.Struct, frozen=True):
    """`box` of the global tensor goes to communicator rank `worker`.

    Every rank in `trainers` holds it whole; which one sends is the transport's
    choice.
    """

    worker: int
    box: Box
    trainers: tuple[int, ...]


def pieces(shape: Sequence[int], source: Layout, destination: Layout) -> list[Piece]:
    """All pieces, by worker rank, then by place in the tensor."""
    held: dict[Box, list[int]] = {}
    for rank in source.mesh.ranks:
        box = shard_box(source, shape, rank)
        assert box is not None
        held.setdefault(box, []).append(rank)
    found = []
    for worker in destination.mesh.ranks:
        wanted = shard_box(destination, shape, worker)
        assert wanted is not None
        for box, trainers in sorted(held.items()):
            common = tuple(
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, box, strict=True)
            )
            if all(a < b for a, b in common):
                found.append(Piece(worker, common, tuple(trainers)))
    return found
