"""What a plan amounts to: counts and bytes by route and reason, bytes per worker."""

from __future__ import annotations

from collections import Counter

import msgspec

from m2ncompile.dtypes import nbytes
from m2ncompile.layout import local_shape
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of
from m2ncompile.routes import Route
from m2ncompile.staging import POOL_SLOTS

__all__ = ["ReasonTotal", "RouteTotal", "Summary", "summarize"]


class RouteTotal(msgspec.Struct, frozen=True):
    """`nbytes` is what is moved, counted once a destination, not once a worker."""

    route: Route
    tensors: int
    nbytes: int


class ReasonTotal(msgspec.Struct, frozen=True):
    code: str
    text: str
    tensors: int
    nbytes: int


class Summary(msgspec.Struct, frozen=True):
    """`wire_bytes_per_worker[i]` is what worker `i` receives in one sync.

    `staging_bytes_per_rank[i]` is what a run allocates on communicator rank `i`; over NCCL M2N
    each rank also has its pool, of `pool_bytes`.
    """

    tensors: int
    nbytes: int
    routes: tuple[RouteTotal, ...]
    reasons: tuple[ReasonTotal, ...]
    collectives: int
    wire_bytes_per_worker: tuple[int, ...]
    staging_bytes_per_rank: tuple[int, ...]
    pool_bytes: int


def summarize(plan: Plan) -> Summary:
    layouts = layouts_of(plan)
    sizes = [nbytes(plan.dtypes[g.dtype], g.shape) for g in plan.geometries]
    kinds = Counter(
        (plan.wires[d.wire].geometry, d.layout, d.route, d.reason) for d in plan.destinations
    )
    bytes_by_route: Counter[Route] = Counter()
    bytes_by_reason: Counter[int | None] = Counter()
    first = plan.inputs.trainer.ranks
    received = [0] * plan.inputs.engine.workers
    for (geometry, layout, route, reason), count in kinds.items():
        bytes_by_route[route] += count * sizes[geometry]
        bytes_by_reason[reason] += count * sizes[geometry]
        shape = plan.geometries[geometry]
        local = nbytes(plan.dtypes[shape.dtype], local_shape(layouts[layout], shape.shape))
        for rank in layouts[layout].mesh.ranks:
            received[rank - first] += count * local
    # A tensor in parts counts once.
    by_route = Counter(route for route, _ in {(d.route, d.tensor) for d in plan.destinations})
    by_reason = Counter(reason for reason, _ in {(d.reason, d.tensor) for d in plan.destinations})
    order: tuple[Route, ...] = ("direct", "reload", "fallback")
    reasons = [
        ReasonTotal(reason.code, reason.text, by_reason[i], bytes_by_reason[i])
        for i, reason in enumerate(plan.reasons)
    ]
    return Summary(
        tensors=len(plan.tensors),
        nbytes=sum(sizes[t.geometry] for t in plan.tensors),
        routes=tuple(RouteTotal(r, by_route[r], bytes_by_route[r]) for r in order if by_route[r]),
        reasons=tuple(sorted(reasons, key=lambda r: (-r.nbytes, r.code, r.text))),
        collectives=len(plan.transfers),
        wire_bytes_per_worker=tuple(received),
        staging_bytes_per_rank=tuple(
            one.packed + one.unpacked + one.reloaded + one.whole for one in plan.staging
        ),
        pool_bytes=POOL_SLOTS * max(one.share for one in plan.staging),
    )
