"""What each rank sends, receives and stages."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import groupby

from m2ncompile.dtypes import nbytes
from m2ncompile.plan import Plan
from m2ncompile.runtime.legs import legs_of
from m2ncompile.runtime.transports.routes import messages

__all__ = ["staging", "traffic"]


def traffic(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """`[t][w]`: the bytes that trainer rank t sends worker w in one sync.

    Where several trainer ranks hold a piece, who sends is the torch transport's
    choice: the workers are dealt out among them. NCCL M2N chooses for itself, with
    the same total for each worker.
    """
    first = plan.inputs.trainer.ranks
    sent = [[0] * plan.inputs.engine.workers for _ in range(first)]
    for leg, count in Counter(legs_of(plan)).items():
        for message in messages(leg):
            box = tuple(b - a for a, b in message.sent)
            sent[message.sender][message.receiver - first] += count * nbytes(leg.dtype, box)
    return tuple(map(tuple, sent))


def staging(plan: Plan) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    """By rank, neighbours alike as one: the most bytes packed or unpacked for one stack."""
    most: defaultdict[int, int] = defaultdict(int)
    for leg in dict.fromkeys(leg for leg in legs_of(plan) if leg.stack > 1):
        for layout, shape in (
            (leg.source, leg.sent_shape),
            (leg.destination, leg.received_shape),
        ):
            for rank in layout.mesh.ranks:
                most[rank] = max(most[rank], nbytes(leg.dtype, shape))
    first = plan.inputs.trainer.ranks
    sides = (
        ("trainer", "packs", range(first)),
        ("worker", "unpacks", range(first, first + plan.inputs.engine.workers)),
    )
    return tuple(
        (_label(side, [rank - ranks.start for rank in run]), ((verb, held),))
        for side, verb, ranks in sides
        for held, run in groupby(ranks, key=lambda rank: most[rank])
    )


def _label(side: str, ranks: list[int]) -> str:
    return f"{side} {ranks[0]}" if len(ranks) == 1 else f"{side}s {ranks[0]} to {ranks[-1]}"
