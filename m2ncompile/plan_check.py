"""Whether a plan's content is consistent: every index, layout, route and digest.

A plan is trusted by nobody: `load` is what every reader uses. It needs no torch
and no engine, and recomputes all digests from the content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path

from m2ncompile.dtypes import ITEMSIZE
from m2ncompile.errors import LayoutError, PlanError, Problems
from m2ncompile.layout import Layout, check_transfers, local_shape
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
#: Route -> (has no landing, has no reason).
_FORMS = {"direct": (False, True), "reload": (False, False), "fallback": (True, False)}


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
            if {getattr(record, field) for record in records} - {None} <= set(range(size)):
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
    names = {t.name for t in plan.tensors}
    if len(names) != len(plan.tensors) or "" in names:
        for name, count in Counter(t.name for t in plan.tensors).items():
            if count > 1 or not name:
                problems.add("tensors", f'name "{name}" stands {count} times')
    landed = {d.tensor for d in plan.destinations}
    for index in sorted(set(range(len(plan.tensors))) - landed):
        problems.add(f"tensors[{index}]", f"{plan.tensors[index].name} has no destination")
    for table in ("wires", "landings", "reasons"):
        used = {getattr(d, table[:-1]) for d in plan.destinations}
        for index in sorted(set(range(len(getattr(plan, table)))) - used):
            problems.add(f"{table}[{index}]", "no destination uses it")
    forms = {(d.route, d.landing is None, d.reason is None) for d in plan.destinations}
    if any(_FORMS[route] != (no_landing, no_reason) for route, no_landing, no_reason in forms):
        for i, d in enumerate(plan.destinations):
            if _FORMS[d.route] != (d.landing is None, d.reason is None):
                problems.add(
                    f"destinations[{i}]",
                    "a direct route has a landing and no reason, reload has both, fallback has "
                    f"a reason alone; got route {d.route}, landing {d.landing}, reason {d.reason}",
                )
    carried = [d for transfer in plan.transfers for d in transfer.destinations]
    if sorted(carried) != list(range(len(plan.destinations))):
        count = Counter(carried)
        for index in sorted(set(count) | set(range(len(plan.destinations)))):
            if count[index] != 1 or index >= len(plan.destinations):
                problems.add("transfers", f"destination {index} is carried {count[index]} times")
    for i, transfer in enumerate(plan.transfers):
        if len(transfer.destinations) != 1:
            problems.add(
                f"transfers[{i}]",
                f"carries {len(transfer.destinations)} destinations; format 1.0 has one each",
            )


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
    kinds: dict[_Kind, list[str]] = {}
    for d in plan.destinations:
        tensor = plan.tensors[d.tensor]
        kind = (tensor.geometry, tensor.source, d.wire, d.layout, d.landing)
        kinds.setdefault(kind, []).append(tensor.name)
    # Landings differ by layer, what crosses the wire hardly: check that once a kind.
    sound: dict[tuple[int, int], bool] = {}
    for kind, names in kinds.items():
        moved = kind[2], kind[3]
        if moved not in sound:
            try:
                check_transfers([(names[0], *_transfer(plan, layouts, kind))], plan.inputs.limits)
                sound[moved] = True
            except LayoutError:
                sound[moved] = False
        if sound[moved]:
            for message in _misfits(plan, layouts, kind):
                for name in names:
                    problems.add(name, message)
            continue
        try:
            check_transfers(
                ((name, *_transfer(plan, layouts, kind)) for name in names), plan.inputs.limits
            )
        except LayoutError as error:
            problems.extend(error.problems)


#: What a destination is besides its tensor's name: the tensor's geometry and
#: source layout, then the destination's wire, layout and landing.
_Kind = tuple[int, int, int, int, int | None]


def _transfer(
    plan: Plan, layouts: tuple[Layout, ...], kind: _Kind
) -> tuple[str, tuple[int, ...], Layout, Layout]:
    _, _, wire_index, layout, _ = kind
    wire = plan.wires[wire_index]
    geometry = plan.geometries[wire.geometry]
    return plan.dtypes[geometry.dtype], geometry.shape, layouts[wire.source], layouts[layout]


def _misfits(plan: Plan, layouts: tuple[Layout, ...], kind: _Kind) -> Iterator[str]:
    """How a wire range does not fit its tensor, or a landing its shard and parameter."""
    tensor_geometry, tensor_source, wire_index, layout_index, landing_index = kind
    wire, whole = plan.wires[wire_index], plan.geometries[tensor_geometry]
    moved, layout = plan.geometries[wire.geometry], layouts[layout_index]
    if moved.dtype != whole.dtype:
        yield f"its wire has dtype {plan.dtypes[moved.dtype]}, it {plan.dtypes[whole.dtype]}"
    start, stop = wire.base, wire.base + prod(moved.shape)
    if start < 0 or stop > prod(whole.shape):
        yield f"its wire is elements [{start}, {stop}) of {prod(whole.shape)}"
    if (start, moved) == (0, whole) and wire.source != tensor_source:
        yield f"its wire has layout {wire.source} on the trainer, it has {tensor_source}"
    if landing_index is None:
        if (start, stop) != (0, prod(whole.shape)):
            yield "it falls back, but its wire is a part of it"
        return
    landing = plan.landings[landing_index]
    param = plan.params[landing.param]
    held = plan.geometries[param.geometry].shape
    local = prod(local_shape(layout, moved.shape))
    if prod(size for size, _ in landing.dims) != local:
        yield f"its landing {[list(d) for d in landing.dims]} does not hold a shard of {local}"
    if len(landing.offsets) not in (1, layout.mesh.size):
        yield f"its landing has {len(landing.offsets)} offsets for {layout.mesh.size} ranks"
    if param.stride is None:
        room = prod(held)
    elif len(param.stride) != len(held) or any(s < 0 for s in param.stride):
        yield f"the strides of {param.name} do not fit its shape {list(held)}"
        return
    else:
        room = 1 + sum((n - 1) * s for n, s in zip(held, param.stride, strict=True))
    reach = 1 + sum((n - 1) * s for n, s in landing.dims)
    if any(n < 1 or s < 1 for n, s in landing.dims) or any(
        offset < 0 or offset + reach > room for offset in landing.offsets
    ):
        yield f"its landing reaches outside of {param.name}, which has {room} elements"


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
    whole = {
        (tensor.geometry, d.wire)
        for d, tensor in ((d, plan.tensors[d.tensor]) for d in order)
        if (plan.wires[d.wire].base, plan.wires[d.wire].geometry) != (0, tensor.geometry)
    }
    if len(meshes) != 1 or len(order) != len(plan.tensors) or whole:
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
