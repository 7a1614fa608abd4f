"""Plan -> Report. Pure; needs neither torch nor the engine."""

from __future__ import annotations

from collections import Counter

from m2ncompile.collector import collector_paused
from m2ncompile.diff import check_comparable, compare, marks
from m2ncompile.diff.layouts import layout_text
from m2ncompile.diff.words import amount_rows, headline, input_rows, notes, sections
from m2ncompile.dtypes import nbytes
from m2ncompile.families import numberless, numbers
from m2ncompile.plan import Inputs, Plan
from m2ncompile.plan_check import layouts_of
from m2ncompile.report.moves import move
from m2ncompile.report.ranks import staging, traffic
from m2ncompile.report.records import (
    ROUTES,
    Change,
    Changes,
    Landing,
    Layer,
    Move,
    Param,
    Report,
    Stop,
    Tensor,
    Transfer,
)
from m2ncompile.summary import summarize

__all__ = ["report"]


def report(plan: Plan, against: Plan | None = None) -> Report:
    """What the page shows of `plan`; with what changed since `against`.

    Raises PlanError where the two are of different models.
    """
    if against is not None:
        check_comparable(against, plan)
    with collector_paused():
        moves, stops = _stops(plan)
        return Report(
            model=plan.inputs.model.name,
            architecture=plan.inputs.model.architecture,
            digest=plan.digest,
            facts=_facts(plan),
            summary=summarize(plan),
            layers=_layers(plan, moves, stops),
            traffic=traffic(plan),
            staging=staging(plan),
            reasons=plan.reasons,
            params=tuple(Param(p.name, *_form(plan, p.geometry), p.stride) for p in plan.params),
            landings=tuple(Landing(one.param, one.dims) for one in plan.landings),
            moves=moves,
            tensors=_tensors(plan),
            stops=stops,
            transfers=_transfers(plan, moves, stops),
            changes=None if against is None else _changes(against, plan),
        )


def _form(plan: Plan, geometry: int) -> tuple[str, tuple[int, ...]]:
    form = plan.geometries[geometry]
    return plan.dtypes[form.dtype], form.shape


def _tensors(plan: Plan) -> tuple[Tensor, ...]:
    forms = [_form(plan, index) for index in range(len(plan.geometries))]
    sizes = [nbytes(*form) for form in forms]
    ranks = plan.inputs.trainer.ranks
    words = [layout_text(layout, ranks, "trainer rank") for layout in layouts_of(plan)]
    return tuple(
        Tensor(t.name, *forms[t.geometry], sizes[t.geometry], words[t.source]) for t in plan.tensors
    )


def _stops(plan: Plan) -> tuple[tuple[Move, ...], tuple[Stop, ...]]:
    layouts = layouts_of(plan)
    moves: dict[tuple[int, int, int], int] = {}
    stops = []
    for d in plan.destinations:
        wire = plan.wires[d.wire]
        index = moves.setdefault((wire.geometry, wire.source, d.layout), len(moves))
        stops.append(Stop(d.tensor, index, wire.base, d.route, d.landing, d.offset, d.reason))
    ranks = plan.inputs.trainer.ranks, plan.inputs.engine.workers
    found = (
        move(*_form(plan, geometry), layouts[source], layouts[layout], ranks)
        for geometry, source, layout in moves
    )
    return tuple(found), tuple(stops)


def _transfers(
    plan: Plan, moves: tuple[Move, ...], stops: tuple[Stop, ...]
) -> tuple[Transfer, ...]:
    found = []
    for transfer in plan.transfers:
        first = stops[transfer.destinations[0]]
        moved, part = moves[first.move], transfer.part
        total = moved.nbytes * len(transfer.destinations)
        if part is not None:
            total = total // moved.shape[part.dim] * part.size
        cut = None if part is None else (part.dim, part.start, part.size)
        found.append(Transfer(total, first.route, transfer.destinations, cut))
    return tuple(found)


def _layers(plan: Plan, moves: tuple[Move, ...], stops: tuple[Stop, ...]) -> tuple[Layer, ...]:
    """In the order of their prefixes, then by number; what has no number comes first."""
    homes = []
    for tensor in plan.tensors:
        found = numbers(tensor.name)
        homes.append((numberless(tensor.name).split("{}")[0], found[0]) if found else ("", None))
    totals: Counter[tuple[str, int | None, str]] = Counter()
    for stop in stops:
        totals[(*homes[stop.tensor], stop.route)] += moves[stop.move].nbytes
    prefixes = {prefix: place for place, prefix in enumerate(dict.fromkeys(p for p, _ in homes))}
    ordered = sorted(
        set(homes), key=lambda home: (home[1] is not None, prefixes[home[0]], home[1] or 0)
    )
    return tuple(
        Layer(prefix, number, tuple(totals[prefix, number, route] for route in ROUTES))  # type: ignore[arg-type]
        for prefix, number in ordered
    )


def _facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    inputs, digests = plan.inputs, plan.digests
    engine = inputs.engine
    return (
        ("engine", f"{engine.name} {engine.version} on {engine.target}"),
        (
            "workers",
            f"{engine.workers}: tp {engine.tp}, ep {engine.ep}, pp {engine.pp}, dp {engine.dp}",
        ),
        ("element types", f"dtype {engine.dtype}, quantization {engine.quantization}"),
        ("MoE backend", engine.moe_backend),
        ("trainer", _trainer(inputs)),
        ("resolver", inputs.resolver.name),
        *(("not sent", f"{missing.names}: {missing.reason}") for missing in inputs.model.missing),
        (
            "made by",
            f"m2ncompile {inputs.compiler}, plan format {plan.format.major}.{plan.format.minor}",
        ),
        ("plan", plan.digest),
        ("program", digests.program),
        ("source", digests.source),
        ("complete", digests.complete or "none: vLLM's own backend can't express the plan"),
    )


def _trainer(inputs: Inputs) -> str:
    trainer = inputs.trainer
    text = f"{trainer.ranks} ranks, {trainer.layout}"
    if trainer.shard_ranks is not None:
        text += f" over groups of {trainer.shard_ranks}"
    if trainer.rules:
        text += f", {len(trainer.rules)} rules"
    return text


def _changes(before: Plan, after: Plan) -> Changes:
    difference = compare(before, after)
    return Changes(
        headline=headline(difference),
        same_program=difference.same_program,
        plans=difference.plans,
        programs=difference.programs,
        inputs=tuple(input_rows(difference)),
        amounts=tuple(amount_rows(difference)),
        notes=tuple(notes(difference)),
        sections=tuple(
            Change(
                title,
                tuple((g.name, g.tensors, g.nbytes, g.before or "", g.after or "") for g in groups),
            )
            for title, groups in sections(difference)
        ),
        reasons=difference.reasons,
        marks=marks(before, after),
    )
