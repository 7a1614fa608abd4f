"""Whether a plan's content is consistent: every index, layout, route and digest.

A plan is trusted by nobody: `load` is what every reader uses. It needs no torch
and no engine, and recomputes all digests from the content.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from m2ncompile.dtypes import ITEMSIZE
from m2ncompile.errors import LayoutError, PlanError, Problems
from m2ncompile.layout import Layout, Mesh, check_transfers
from m2ncompile.plan import MAX_BYTES, Plan, decode, program_digest
from m2ncompile.wire import complete_digest, fragments, source_digest_of

__all__ = ["check", "layouts_of", "load", "loads", "wire_digests"]


def load(path: Path) -> Plan:
    """Read and check a plan file. Raises PlanError listing everything wrong."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PlanError(f"{path}: {path.stat().st_size} bytes; a plan has at most {MAX_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: can't read the plan: {error.strerror}") from None
    return loads(data, str(path))


def loads(data: bytes, where: str = "plan") -> Plan:
    """Decode and check a plan's bytes; `where` names them in errors."""
    plan = decode(data, where)
    check(plan, where)
    return plan


def layouts_of(plan: Plan) -> tuple[Layout, ...]:
    """The layout table with its meshes filled in."""
    return tuple(Layout(plan.meshes[entry.mesh], entry.placements) for entry in plan.layouts)


def check(plan: Plan, where: str = "plan") -> None:
    """Raises PlanError listing every inconsistency of `plan`."""
    title = f"{where}: the plan is inconsistent"
    problems = Problems()
    _check_tables(plan, problems)
    problems.raise_if_any(PlanError, title)  # what follows indexes the tables
    _check_records(plan, problems)
    problems.raise_if_any(PlanError, title)
    _check_layouts(plan, problems)
    _check_digests(plan, problems)
    problems.raise_if_any(PlanError, title)


def _check_tables(plan: Plan, problems: Problems) -> None:
    for name in ("dtypes", "meshes", "layouts", "geometries", "params", "reasons"):
        table = getattr(plan, name)
        if len(set(table)) != len(table):
            twice = [i for i, entry in enumerate(table) if entry in table[:i]]
            problems.add(f"{name}[{twice[0]}]", "repeats an earlier entry of its table")
    for index, dtype in enumerate(plan.dtypes):
        if dtype not in ITEMSIZE:
            problems.add(f"dtypes[{index}]", f'"{dtype}" is no known dtype')
    for index, layout in enumerate(plan.layouts):
        _index(layout.mesh, plan.meshes, f"layouts[{index}]", "meshes", problems)
    for index, geometry in enumerate(plan.geometries):
        _index(geometry.dtype, plan.dtypes, f"geometries[{index}]", "dtypes", problems)
        if any(not 0 < size < 2**48 for size in geometry.shape):
            problems.add(f"geometries[{index}]", f"sizes out of range: {list(geometry.shape)}")
    if problems:
        return
    try:
        layouts_of(plan)
    except ValueError as error:
        problems.add("layouts", str(error))


def _index(
    value: int, table: tuple[object, ...], where: str, name: str, problems: Problems
) -> None:
    if not 0 <= value < len(table):
        problems.add(where, f"index {value} is outside of {name}, which has {len(table)} entries")


def _check_records(plan: Plan, problems: Problems) -> None:
    # Sets of distinct values first: a pass or two in C where all is well.
    for field, table in (("geometry", "geometries"), ("source", "layouts")):
        entries = getattr(plan, table)
        if not {getattr(t, field) for t in plan.tensors} <= set(range(len(entries))):
            for i, tensor in enumerate(plan.tensors):
                _index(getattr(tensor, field), entries, f"tensors[{i}]", table, problems)
    names = {t.name for t in plan.tensors}
    if len(names) != len(plan.tensors) or "" in names:
        for name, count in Counter(t.name for t in plan.tensors).items():
            if count > 1 or not name:
                problems.add("tensors", f'name "{name}" stands {count} times')

    landed = {d.tensor for d in plan.destinations}
    tensors = range(len(plan.tensors))
    for tensor in sorted(set(tensors) - landed):
        problems.add(f"tensors[{tensor}]", f"{plan.tensors[tensor].name} has no destination")
    kinds = {(d.route, d.layout, d.param is None, d.reason) for d in plan.destinations}
    bad = {kind for kind in kinds if not _sound(plan, *kind)}
    if bad or not landed <= set(tensors):
        for i, d in enumerate(plan.destinations):
            if d.tensor not in tensors or d.layout not in range(len(plan.layouts)):
                problems.add(f"destinations[{i}]", "its tensor or layout is outside of its table")
            elif (d.route, d.layout, d.param is None, d.reason) in bad:
                problems.add(
                    f"destinations[{i}]",
                    "a direct route has a live parameter and no reason, any other the reverse; "
                    f"got route {d.route}, param {d.param}, reason {d.reason}",
                )
    written = Counter(d.param for d in plan.destinations if d.param is not None)
    for param in range(len(plan.params)):
        if written[param] != 1:
            problems.add(
                f"params[{param}]", f"{written[param]} direct destinations write it, expected 1"
            )
    for param in sorted(set(written) - set(range(len(plan.params)))):
        problems.add("destinations", f"param {param} is outside of its table")
    _check_transfer_records(plan, problems)


def _sound(plan: Plan, route: str, layout: int, no_param: bool, reason: int | None) -> bool:
    if layout not in range(len(plan.layouts)):
        return False
    if route == "direct":
        return not no_param and reason is None
    return no_param and reason is not None and reason in range(len(plan.reasons))


def _check_transfer_records(plan: Plan, problems: Problems) -> None:
    carried = [d for transfer in plan.transfers for d in transfer.destinations]
    if sorted(carried) != list(range(len(plan.destinations))):
        count = Counter(carried)
        for index in sorted(set(count) | set(range(len(plan.destinations)))):
            if count[index] != 1 or index >= len(plan.destinations):
                problems.add("transfers", f"destination {index} is carried {count[index]} times")
    for i, transfer in enumerate(plan.transfers):
        if not transfer.destinations:
            problems.add(f"transfers[{i}]", "carries nothing")
        elif len(transfer.destinations) > 1:
            problems.add(f"transfers[{i}]", "carries several destinations; format 1.0 has one each")


def _check_layouts(plan: Plan, problems: Problems) -> None:
    layouts = layouts_of(plan)
    trainers, workers = plan.inputs.trainer.ranks, plan.inputs.engine.workers
    sides = {
        "trainer": (range(trainers), {t.source for t in plan.tensors}),
        "worker": (range(trainers, trainers + workers), {d.layout for d in plan.destinations}),
    }
    for side, (ranks, used) in sides.items():
        for index in sorted(used):
            mesh = layouts[index].mesh.ranks
            if not (ranks.start <= mesh.start and mesh.stop <= ranks.stop):
                problems.add(
                    f"layouts[{index}]",
                    f"covers ranks [{mesh.start}, {mesh.stop}), outside of the {side} ranks "
                    f"[{ranks.start}, {ranks.stop})",
                )
    kinds: dict[tuple[int, int, int], list[str]] = {}
    for d in plan.destinations:
        tensor = plan.tensors[d.tensor]
        kinds.setdefault((tensor.geometry, tensor.source, d.layout), []).append(tensor.name)
    for (geometry, source, destination), names in kinds.items():
        shape = plan.geometries[geometry]
        what = (plan.dtypes[shape.dtype], shape.shape, layouts[source], layouts[destination])
        try:
            check_transfers([(names[0], *what)], plan.inputs.limits)
        except LayoutError:
            try:
                check_transfers(((name, *what) for name in names), plan.inputs.limits)
            except LayoutError as error:
                problems.extend(error.problems)


def wire_digests(plan: Plan) -> tuple[str, str | None]:
    """vLLM's source and complete digests of the plan, in transfer order.

    The complete digest is None when destinations use several meshes or tensors
    have several destinations, which vLLM's own backend can't express.
    """
    layouts = layouts_of(plan)
    order = [plan.destinations[i] for transfer in plan.transfers for i in transfer.destinations]
    sent = [plan.tensors[d.tensor] for d in order]
    parts = {}
    for geometry, source in {(t.geometry, t.source) for t in sent}:
        shape, layout = plan.geometries[geometry], layouts[source]
        parts[geometry, source] = fragments(
            plan.dtypes[shape.dtype], shape.shape, layout.mesh.dims, layout.placements
        )
    digest = source_digest_of((t.name, parts[t.geometry, t.source]) for t in sent)
    meshes: set[Mesh] = {layouts[i].mesh for i in {d.layout for d in order}}
    if len(meshes) != 1 or len(order) != len(plan.tensors):
        return digest, None
    placements = [layouts[d.layout].placements for d in order]
    return digest, complete_digest(digest, meshes.pop(), placements)


def _check_digests(plan: Plan, problems: Problems) -> None:
    source, complete = wire_digests(plan)
    actual = {"program": program_digest(plan), "source": source, "complete": complete}
    for name, value in actual.items():
        stated = getattr(plan.digests, name)
        if stated != value:
            problems.add(
                f"digests.{name}", f"states {stated}, but the content gives {value}", "rebuild it"
            )
