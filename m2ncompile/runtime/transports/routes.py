"""Who sends what to whom in a leg: the pieces of a transfer as point-to-point messages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from m2ncompile.layout import Box, Layout, shard_box
from m2ncompile.legs import Leg
from m2ncompile.pieces import pieces

__all__ = ["Message", "messages"]


class Message(msgspec.Struct, frozen=True):
    """A box, of the sender's shard and of the receiver's."""

    sender: int
    receiver: int
    sent: Box
    received: Box


@lru_cache(maxsize=4096)  # a model has many legs, of few kinds
def messages(leg: Leg) -> Sequence[Message]:
    """All messages of a leg, in the order in which every rank starts its own.

    Where several trainers hold the same, the workers are dealt out among them.
    """
    found = []
    turns: dict[tuple[int, ...], int] = {}
    for piece in pieces(leg.shape, leg.source, leg.destination):
        turn = turns.get(piece.trainers, 0)
        turns[piece.trainers] = turn + 1
        sender = piece.trainers[turn % len(piece.trainers)]
        found.append(
            Message(
                sender,
                piece.worker,
                _within(piece.box, leg.source, leg.shape, sender),
                _within(piece.box, leg.destination, leg.shape, piece.worker),
            )
        )
    return found


def _within(box: Box, layout: Layout, shape: tuple[int, ...], rank: int) -> Box:
    held = shard_box(layout, shape, rank)
    assert held is not None
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(box, held, strict=True))
