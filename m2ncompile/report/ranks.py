"""What each rank sends, receives and allocates."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from m2ncompile.dtypes import nbytes
from m2ncompile.legs import legs_of
from m2ncompile.plan import Plan, PlanStaging
from m2ncompile.runtime.transports.routes import messages
from m2ncompile.staging import POOL_SLOTS

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
    """By rank, neighbours alike as one: what a run allocates there, in bytes."""
    first = plan.inputs.trainer.ranks
    pool = POOL_SLOTS * max(one.share for one in plan.staging)
    sides = (("trainer", range(first)), ("worker", range(first, len(plan.staging))))
    return tuple(
        (_label(side, [rank - ranks.start for rank in run]), _held(stated, pool))
        for side, ranks in sides
        for stated, run in groupby(ranks, key=lambda rank: plan.staging[rank])
    )


def _held(stated: PlanStaging, pool: int) -> tuple[tuple[str, int], ...]:
    held = (
        ("packed to be sent", stated.packed),
        ("received apart", stated.unpacked),
        ("on the way to a reload", stated.reloaded),
        ("tensors that fall back, at most", stated.whole),
        ("NCCL M2N\u2019s pool", pool),
        ("of the engine: its largest module, reloaded", stated.module),
    )
    return tuple((words, size) for words, size in held if size)


def _label(side: str, ranks: list[int]) -> str:
    return f"{side} {ranks[0]}" if len(ranks) == 1 else f"{side}s {ranks[0]} to {ranks[-1]}"
