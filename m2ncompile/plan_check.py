"""Whether a plan's content is consistent: every index, layout, route and digest.

A plan is trusted by nobody: `load` is what every reader uses. It needs no torch
and no engine, and recomputes all digests from the content.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod
from operator import attrgetter
from pathlib import Path

import msgspec

from m2ncompile.collector import collector_paused
from m2ncompile.dtypes import ITEMSIZE
from m2ncompile.errors import LayoutError, PlanError, Problems
from m2ncompile.layout import Layout, check_transfers, local_shape, transfer_problems
from m2ncompile.plan import MAX_BYTES, Plan, PlanPart, decode, program_digest
from m2ncompile.stacking import stacked
from m2ncompile.views import cut, narrowed
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
    with collector_paused():
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


#: Which fields of which records index which tables; the tables come first.
_REFERENCES = {
    "layouts": {"mesh": "meshes"},
    "geometries": {"dtype": "dtypes"},
    "params": {"geometry": "geometries"},
    "wires": {"geometry": "geometries", "source": "layouts"},
    "landings": {"param": "params"},
    "tensors": {"geometry": "geometries", "source": "layouts"},
    "destinations": {
        "tensor": "tensors",
        "wire": "wires",
        "layout": "layouts",
        "landing": "landings",
        "reason": "reasons",
    },
}
#: Tables that have every entry once.
_TABLES = (
    "dtypes",
    "meshes",
    "layouts",
    "geometries",
    "params",
    "wires",
    "landings",
    "reasons",
)
#: Route -> (has no landing, no offset, no reason).
_FORMS = {
    "direct": (False, False, True),
    "reload": (False, False, False),
    "fallback": (True, True, False),
}


def _check_tables(plan: Plan, problems: Problems) -> None:
    for name in _TABLES:
        table = getattr(plan, name)
        if len(set(table)) != len(table):
            twice = next(i for i, entry in enumerate(table) if entry in table[:i])
            problems.add(f"{name}[{twice}]", "repeats an earlier entry of its table")
    for section, fields in _REFERENCES.items():
        records = getattr(plan, section)
        for field, table_name in fields.items():
            size = len(getattr(plan, table_name))
            # Distinct values first: one pass in C where all is well.
            if set(map(attrgetter(field), records)) - {None} <= set(range(size)):
                continue
            for i, record in enumerate(records):
                value = getattr(record, field)
                if value is not None and not 0 <= value < size:
                    problems.add(
                        f"{section}[{i}]",
                        f"{field} {value} is outside of {table_name}, which has {size} entries",
                    )
    for index, dtype in enumerate(plan.dtypes):
        if dtype not in ITEMSIZE:
            problems.add(f"dtypes[{index}]", f'"{dtype}" is no known dtype')
    for index, geometry in enumerate(plan.geometries):
        if any(not 0 < size < 2**48 for size in geometry.shape):
            problems.add(f"geometries[{index}]", f"sizes out of range: {list(geometry.shape)}")
    if problems:
        return
    try:
        layouts_of(plan)
    except ValueError as error:
        problems.add("layouts", str(error))


def _check_records(plan: Plan, problems: Problems) -> None:
    names = set(map(attrgetter("name"), plan.tensors))
    if len(names) != len(plan.tensors) or "" in names:
        for name, count in Counter(t.name for t in plan.tensors).items():
            if count > 1 or not name:
                problems.add("tensors", f'name "{name}" stands {count} times')
    landed = set(map(attrgetter("tensor"), plan.destinations))
    for index in sorted(set(range(len(plan.tensors))) - landed):
        problems.add(f"tensors[{index}]", f"{plan.tensors[index].name} has no destination")
    for table in ("wires", "landings", "reasons"):
        used = set(map(attrgetter(table[:-1]), plan.destinations))
        for index in sorted(set(range(len(getattr(plan, table)))) - used):
            problems.add(f"{table}[{index}]", "no destination uses it")
    forms = {
        (d.route, (d.landing is None, d.offset is None, d.reason is None))
        for d in plan.destinations
    }
    if any(_FORMS[route] != form for route, form in forms):
        for i, d in enumerate(plan.destinations):
            if _FORMS[d.route] != (d.landing is None, d.offset is None, d.reason is None):
                problems.add(
                    f"destinations[{i}]",
                    "a direct route has a landing with an offset and no reason, reload has all, "
                    f"fallback has a reason alone; got route {d.route}, landing {d.landing}, "
                    f"offset {d.offset}, reason {d.reason}",
                )
    parts = [transfer for transfer in plan.transfers if transfer.part is not None]
    several = [d for transfer in parts for d in transfer.destinations]
    carried = [d for t in plan.transfers if t.part is None for d in t.destinations]
    carried += set(several)  # whether they make up the whole is looked at below
    if sorted(carried) != list(range(len(plan.destinations))):
        times = Counter(carried)
        for index in sorted(set(times) | set(range(len(plan.destinations)))):
            if times[index] != 1 or index >= len(plan.destinations):
                problems.add("transfers", f"destination {index} is carried {times[index]} times")
    for i, transfer in enumerate(plan.transfers):
        if not transfer.destinations:
            problems.add(f"transfers[{i}]", "carries no destination")
        if transfer.part is not None and len(transfer.destinations) > 1:
            problems.add(f"transfers[{i}]", "carries parts of several destinations")
        if transfer.part is not None and transfer.by_rows:
            problems.add(f"transfers[{i}]", "a part does not go by rows")
    ranks = plan.inputs.trainer.ranks + plan.inputs.engine.workers
    if len(plan.staging) != ranks:
        problems.add("staging", f"has {len(plan.staging)} entries, there are {ranks} ranks")
    for i, staging in enumerate(plan.staging):
        if min(msgspec.structs.astuple(staging)) < 0:
            problems.add(f"staging[{i}]", f"bytes out of range: {staging}")


def _check_layouts(plan: Plan, problems: Problems) -> None:
    layouts = layouts_of(plan)
    trainers, workers = plan.inputs.trainer.ranks, plan.inputs.engine.workers
    sides = {
        "trainer": (
            range(trainers),
            {t.source for t in plan.tensors} | {w.source for w in plan.wires},
        ),
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
    for geometry, held in sorted({(t.geometry, t.source) for t in plan.tensors}):
        try:
            local_shape(layouts[held], plan.geometries[geometry].shape)
        except LayoutError as error:
            for tensor in plan.tensors:
                if (tensor.geometry, tensor.source) == (geometry, held):
                    problems.add(tensor.name, f"on the trainer {error}")
    _check_moves(plan, layouts, problems)
    _check_stacks(plan, layouts, problems)
    if not problems:
        _check_landings(plan, layouts, problems)
    if not problems:
        _check_parts(plan, layouts, problems)


def _names(plan: Plan, fields: tuple[str, ...], values: object) -> list[str]:
    """Tensors whose destinations have `values` in `fields`; for errors only."""
    of = attrgetter(*fields)
    return [plan.tensors[d.tensor].name for d in plan.destinations if of(d) == values]


def _check_moves(plan: Plan, layouts: tuple[Layout, ...], problems: Problems) -> None:
    """Every wire can be carried, and is part of its tensor. Distinct cases are few."""
    for wire_index, layout in sorted(set(map(attrgetter("wire", "layout"), plan.destinations))):
        wire = plan.wires[wire_index]
        moved = plan.geometries[wire.geometry]
        what = plan.dtypes[moved.dtype], moved.shape, layouts[wire.source], layouts[layout]
        try:
            check_transfers([("", *what)], plan.inputs.limits)
        except LayoutError:
            try:
                kind = wire_index, layout
                names = _names(plan, ("wire", "layout"), kind)
                check_transfers(((name, *what) for name in names), plan.inputs.limits)
            except LayoutError as error:
                problems.extend(error.problems)
    tensors = plan.tensors
    kinds = {
        (tensors[d.tensor].geometry, tensors[d.tensor].source, d.wire, d.landing is None)
        for d in plan.destinations
    }
    for geometry, source, wire_index, whole_needed in sorted(kinds):
        wire, whole = plan.wires[wire_index], plan.geometries[geometry]
        moved = plan.geometries[wire.geometry]
        start, stop, size = wire.base, wire.base + prod(moved.shape), prod(whole.shape)
        found = []
        if moved.dtype != whole.dtype:
            found.append(f"its wire has dtype {plan.dtypes[moved.dtype]}")
        if start < 0 or stop > size:
            found.append(f"its wire is elements [{start}, {stop}) of {size}")
        if (start, moved) == (0, whole) and wire.source != source:
            found.append(f"its wire lies on the trainer as {wire.source}, it as {source}")
        if whole_needed and (start, stop) != (0, size):
            found.append("it falls back, but its wire is a part of it")
        if found:
            for d in plan.destinations:
                tensor = tensors[d.tensor]
                if (tensor.geometry, tensor.source, d.wire) == (geometry, source, wire_index):
                    for message in found:
                        problems.add(tensor.name, message)


def _check_stacks(plan: Plan, layouts: tuple[Layout, ...], problems: Problems) -> None:
    """What a transfer carries together, one can carry."""
    kinds: dict[tuple[int, int, tuple[int, ...], bool], int] = {}
    landings: dict[tuple[int, int, int], int] = {}
    for i, transfer in enumerate(plan.transfers):
        if len(transfer.destinations) == 1 and not transfer.by_rows:
            continue
        carried = [plan.destinations[d] for d in transfer.destinations]
        wires = {plan.wires[d.wire] for d in carried}
        forms = {(wire.geometry, wire.source) for wire in wires}
        if len(forms) > 1 or len({d.route for d in carried}) > 1:
            message = "its destinations differ in route, or their wires in geometry or source"
            problems.add(f"transfers[{i}]", message)
            continue
        ((geometry, source),) = forms
        where = tuple(d.layout for d in carried)
        kinds.setdefault((geometry, source, where, transfer.by_rows), i)
        for d in carried if transfer.by_rows else ():
            landings.setdefault((geometry, d.layout, -1 if d.landing is None else d.landing), i)
    for (geometry, layout, landing), i in landings.items():
        if landing < 0:
            problems.add(f"transfers[{i}]", "what falls back does not go by rows")
            continue
        try:
            local = local_shape(layouts[layout], plan.geometries[geometry].shape)
            cut(plan.landings[landing].dims, prod(local[:1]))  # below: that it is a matrix
        except (LayoutError, ValueError) as error:
            problems.add(f"transfers[{i}]", f"its landings do not lie by rows: {error}")
    for (geometry, source, where, by_rows), i in kinds.items():
        name, form = f"transfers[{i}]", plan.geometries[geometry]
        destinations = [layouts[index] for index in where]
        try:
            stack = stacked(form.shape, layouts[source], destinations, by_rows)
        except ValueError as error:
            problems.add(name, str(error))
            continue
        what = plan.dtypes[form.dtype], stack.shape, stack.source, stack.destination
        problems.extend(transfer_problems(name, *what, plan.inputs.limits))


def _check_landings(plan: Plan, layouts: tuple[Layout, ...], problems: Problems) -> None:
    """Every landing holds the shards that use it, inside of its parameter."""
    rooms = []
    for index, param in enumerate(plan.params):
        shape = plan.geometries[param.geometry].shape
        stride = param.stride
        if stride is None:
            rooms.append(prod(shape))
        elif len(stride) != len(shape) or min(stride, default=0) < 0:
            problems.add(f"params[{index}]", f"{param.name}: strides do not fit {list(shape)}")
            return
        else:
            rooms.append(1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))
    held, reaches = [], []
    for index, (_, dims) in enumerate(map(attrgetter("param", "dims"), plan.landings)):
        held.append(prod(n for n, _ in dims))
        reaches.append(1 + sum((n - 1) * step for n, step in dims))
        if any(n <= 0 or step <= 0 for n, step in dims):
            problems.add(f"landings[{index}]", f"dims out of range: {list(dims)}")
    if problems:
        return
    uses: defaultdict[tuple[int, int, int], list[int | tuple[int, ...]]] = defaultdict(list)
    for d in plan.destinations:
        if d.landing is not None and d.offset is not None:
            uses[d.landing, d.wire, d.layout].append(d.offset)
    for (index, wire, layout), starts in uses.items():
        landing, ranks = plan.landings[index], layouts[layout].mesh.size
        shard = prod(local_shape(layouts[layout], plan.geometries[plan.wires[wire].geometry].shape))
        wrong = []
        if held[index] != shard:
            wrong.append(f"its landing has {held[index]} elements, its shards have {shard}")
        several = [start for start in starts if not isinstance(start, int)]
        if any(len(places) != ranks or len(set(places)) < 2 for places in several):
            wrong.append(f"its offsets are neither one nor {ranks} that differ, one for each rank")
        ends = [start for start in starts if isinstance(start, int)]
        ends += [start for places in several for start in places]
        if ends and not 0 <= min(ends) <= max(ends) <= rooms[landing.param] - reaches[index]:
            wrong.append(
                f"it reaches outside of {plan.params[landing.param].name}, which has "
                f"{rooms[landing.param]} elements"
            )
        for message in wrong:
            for name in _names(plan, ("landing", "wire", "layout"), (index, wire, layout)):
                problems.add(name, message)


def _check_parts(plan: Plan, layouts: tuple[Layout, ...], problems: Problems) -> None:
    """What goes in parts goes whole, each part once, in order, between all that hold it."""
    found: defaultdict[int, list[PlanPart]] = defaultdict(list)
    for transfer in plan.transfers:
        if transfer.part is not None:
            found[transfer.destinations[0]].append(transfer.part)
    for index, parts in found.items():
        d = plan.destinations[index]
        wire, name, dim = plan.wires[d.wire], plan.tensors[d.tensor].name, parts[0].dim
        shape = plan.geometries[wire.geometry].shape
        if not 0 <= dim < len(shape):
            problems.add(name, f"it goes in parts of dim {dim}, it has {len(shape)} dims")
            continue
        ends = [0, *(part.start + part.size for part in parts)]
        if (
            any(part.dim != dim or part.size < 1 for part in parts)
            or [part.start for part in parts] != ends[:-1]
            or ends[-1] != shape[dim]
        ):
            problems.add(name, f"its parts {parts} do not make up dim {dim} of {list(shape)}")
            continue
        for layout in (layouts[wire.source], layouts[d.layout]):
            if layout.split is not None and layout.split[0] == dim and layout.split[1] > 1:
                problems.add(name, f"it goes in parts of dim {dim}, which {layout} shards")
        if d.landing is not None and not problems:
            local = local_shape(layouts[d.layout], shape)
            try:
                narrowed(0, plan.landings[d.landing].dims, local, dim, 0, 1)
            except ValueError as error:
                problems.add(name, f"it goes in parts of dim {dim}, but in its parameter {error}")


def wire_digests(plan: Plan) -> tuple[str, str | None]:
    """vLLM's source and complete digests, over the tensors in the order in which they are sent.

    The complete digest is None where vLLM's own backend can't express the plan:
    parts of tensors, several destinations of one, several destination meshes.
    """
    layouts = layouts_of(plan)
    order = [plan.destinations[i] for transfer in plan.transfers for i in transfer.destinations]
    sent = [plan.tensors[i] for i in dict.fromkeys(d.tensor for d in order)]
    parts = {}
    for geometry, source in {(t.geometry, t.source) for t in sent}:
        shape, layout = plan.geometries[geometry], layouts[source]
        parts[geometry, source] = fragments(
            plan.dtypes[shape.dtype], shape.shape, layout.mesh.dims, layout.placements
        )
    digest = source_digest_of((t.name, parts[t.geometry, t.source]) for t in sent)
    meshes = {layouts[i].mesh for i in {d.layout for d in order}}
    if (
        len(meshes) != 1
        or len(order) != len(plan.tensors)
        or any(
            (plan.wires[wire].base, plan.wires[wire].geometry) != (0, geometry)
            for geometry, wire in {(plan.tensors[d.tensor].geometry, d.wire) for d in order}
        )
    ):
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
