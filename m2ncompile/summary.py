"""What a plan amounts to: counts and bytes by route and reason, bytes per worker."""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec

from m2ncompile.compile.routes import Route
from m2ncompile.dtypes import nbytes
from m2ncompile.layout import local_shape
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of

__all__ = ["ReasonTotal", "RouteTotal", "Summary", "summarize"]


class RouteTotal(msgspec.Struct, frozen=True):
    """Destinations by this route. `nbytes` is the size of what is moved, counted once a
    destination, not once a worker.
    """

    route: Route
    tensors: int
    nbytes: int


class ReasonTotal(msgspec.Struct, frozen=True):
    code: str
    text: str
    tensors: int
    nbytes: int


class Summary(msgspec.Struct, frozen=True):
    """`wire_bytes_per_worker[i]` is what worker `i` receives in one sync."""

    tensors: int
    nbytes: int
    routes: tuple[RouteTotal, ...]
    reasons: tuple[ReasonTotal, ...]
    collectives: int
    wire_bytes_per_worker: tuple[int, ...]


def summarize(plan: Plan) -> Summary:
    layouts = layouts_of(plan)
    sizes = [nbytes(plan.dtypes[g.dtype], g.shape) for g in plan.geometries]
    kinds = Counter(
        (plan.wires[d.wire].geometry, d.layout, d.route, d.reason) for d in plan.destinations
    )
    routes: defaultdict[Route, list[int]] = defaultdict(lambda: [0, 0])
    reasons: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    first = plan.inputs.trainer.ranks
    received = [0] * plan.inputs.engine.workers
    for (geometry, layout, route, reason), count in kinds.items():
        for total in [routes[route], *([] if reason is None else [reasons[reason]])]:
            total[0] += count
            total[1] += count * sizes[geometry]
        shape = plan.geometries[geometry]
        local = nbytes(plan.dtypes[shape.dtype], local_shape(layouts[layout], shape.shape))
        for rank in layouts[layout].mesh.ranks:
            received[rank - first] += count * local
    order: tuple[Route, ...] = ("direct", "reload", "fallback")
    return Summary(
        tensors=len(plan.tensors),
        nbytes=sum(sizes[t.geometry] for t in plan.tensors),
        routes=tuple(RouteTotal(r, *routes[r]) for r in order if r in routes),
        reasons=tuple(
            sorted(
                (
                    ReasonTotal(plan.reasons[i].code, plan.reasons[i].text, *total)
                    for i, total in reasons.items()
                ),
                key=lambda r: (-r.nbytes, r.code, r.text),
            )
        ),
        collectives=len(plan.transfers),
        wire_bytes_per_worker=tuple(received),
    )
