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
    geometries, layouts = range(len(plan.geometries)), range(len(plan.layouts))
    tensors, params = range(len(plan.tensors)), range(len(plan.params))
    reasons = range(len(plan.reasons))
    # Sets of distinct values first: one pass in C where all is well.
    if not {t.geometry for t in plan.tensors} <= set(geometries):
        for i, t in enumerate(plan.tensors):
            _index(t.geometry, plan.geometries, f"tensors[{i}]", "geometries", problems)
    if not {t.source for t in plan.tensors} <= set(layouts):
        for i, t in enumerate(plan.tensors):
            _index(t.source, plan.layouts, f"tensors[{i}]", "layouts", problems)
    names = Counter(t.name for t in plan.tensors)
    if len(names) != len(plan.tensors) or "" in names:
        for name, count in names.items():
            if count > 1 or not name:
                problems.add("tensors", f'name "{name}" stands {count} times')
    landed = set()
    written = Counter[int]()
    for i, d in enumerate(plan.destinations):
        landed.add(d.tensor)
        direct = d.route == "direct"
        if d.tensor not in tensors or d.layout not in layouts:
            problems.add(f"destinations[{i}]", "its tensor or layout is outside of its table")
        elif (
            direct != (d.param is not None)
            or direct == (d.reason is not None)
            or (d.param is not None and d.param not in params)
            or (d.reason is not None and d.reason not in reasons)
        ):
            problems.add(
                f"destinations[{i}]",
                "a direct route has a live parameter and no reason, any other the reverse; "
                f"got route {d.route}, param {d.param}, reason {d.reason}",
            )
        elif d.param is not None:
            written[d.param] += 1
    for param, count in written.items():
        if count > 1:
            problems.add(f"params[{param}]", f"{count} direct destinations write it whole")
    for param in set(params) - set(written):
        problems.add(f"params[{param}]", "no destination writes it")
    for tensor in sorted(set(tensors) - landed):
        problems.add(f"tensors[{tensor}]", f"{plan.tensors[tensor].name} has no destination")
    _check_transfer_records(plan, problems)


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
    known: dict[tuple[int, int], tuple[str, str]] = {}

    def items() -> list[tuple[str, tuple[str, str]]]:
        found = []
        for destination in order:
            tensor = plan.tensors[destination.tensor]
            key = (tensor.geometry, tensor.source)
            if key not in known:
                geometry, source = plan.geometries[tensor.geometry], layouts[tensor.source]
                known[key] = fragments(
                    plan.dtypes[geometry.dtype],
                    geometry.shape,
                    source.mesh.dims,
                    source.placements,
                )
            found.append((tensor.name, known[key]))
        return found

    source = source_digest_of(items())
    meshes: set[Mesh] = {layouts[i].mesh for i in {d.layout for d in order}}
    if len(meshes) != 1 or len(order) != len(plan.tensors):
        return source, None
    placements = [layouts[d.layout].placements for d in order]
    return source, complete_digest(source, meshes.pop(), placements)


def _check_digests(plan: Plan, problems: Problems) -> None:
    source, complete = wire_digests(plan)
    actual = {"program": program_digest(plan), "source": source, "complete": complete}
    for name, value in actual.items():
        stated = getattr(plan.digests, name)
        if stated != value:
            problems.add(
                f"digests.{name}", f"states {stated}, but the content gives {value}", "rebuild it"
            )
