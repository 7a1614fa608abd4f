"""The part of validation that is not about which element goes where: routes, parties, form.

A tensor takes the best route that is right for it, each side's ranks are those that
the inputs say, and what can be written in several ways is written in one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import msgspec

from m2ncompile.compile.resolve_traced import pieces_by_tensor
from m2ncompile.compile.spread import InexpressibleError, carry
from m2ncompile.engine.recording import LiveParam, Recording
from m2ncompile.errors import Problem
from m2ncompile.inventory.records import Inventory, TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Mesh
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of
from m2ncompile.source import source_layouts

__all__ = ["route_problems", "trainer_problems"]


def route_problems(plan: Plan, recordings: Sequence[Recording]) -> Iterator[Problem]:
    """`direct` exactly where writing is all there is to do; `fallback` only where nothing else is.

    A live parameter is written directly if its class is known to leave it alone, the
    shard is one contiguous run of its storage and of its dtype, and the same holds
    for all that fills its module, which the engine reloads as a unit.
    """
    live = {param.name: param for recording in recordings for param in recording.params}
    refused = {refusal.tensor for recording in recordings for refusal in recording.refusals}
    yield from _param_problems(plan, live)
    yield from _receiver_problems(plan)
    fallen = {d.tensor for d in plan.destinations if d.route == "fallback"}
    for index in sorted(fallen - refused):
        if _can_be_carried(plan, recordings, index):
            yield Problem(
                plan.tensors[index].name, "it falls back, though transfers can place its shards"
            )
    #: Module -> what keeps parameters in it from being written directly.
    kept: defaultdict[str, list[str]] = defaultdict(list)
    for recording in recordings if fallen else ():
        for copy in recording.copies:
            if copy.tensor in fallen:
                module = _module(recording.params[copy.param].name)
                kept[module].append(f"{plan.tensors[copy.tensor].name} falls back")
    modules = [_module(plan.params[landing.param].name) for landing in plan.landings]
    landed = [(d, d.landing) for d in plan.destinations if d.landing is not None]
    for d, landing in landed:
        if (work := _local_work(plan, d.tensor, landing, live)) is not None:
            kept[modules[landing]].append(work)
    for d, landing in landed:
        found = kept.get(modules[landing])
        if refused and not found:
            found = [f"where {plan.tensors[min(refused)].name} goes is not known"]
        if d.route == "direct" and found:
            yield Problem(plan.tensors[d.tensor].name, f"it is written directly, but {found[0]}")
        if d.route == "reload" and not found:
            yield Problem(
                plan.tensors[d.tensor].name, "it is reloaded, though writing it is all there is"
            )


def _module(param: str) -> str:
    return param.rpartition(".")[0]


def _local_work(plan: Plan, tensor: int, landing: int, live: Mapping[str, LiveParam]) -> str | None:
    """What there is to do besides writing, by the destination alone."""
    dims = plan.landings[landing].dims
    param = live.get(plan.params[plan.landings[landing].param].name)
    if param is None:
        return None
    dtype = plan.dtypes[plan.geometries[plan.tensors[tensor].geometry].dtype]
    if dtype != param.dtype:
        return f"{param.name} has dtype {param.dtype}, it {dtype}"
    step = 1
    for size, stride in reversed(dims):
        if stride != step:
            return f"its shard is no contiguous run of {param.name}"
        step *= size
    return None if param.not_direct is None else f"{param.name}: {param.not_direct}"


def _can_be_carried(plan: Plan, recordings: Sequence[Recording], index: int) -> bool:
    alone = [
        msgspec.structs.replace(r, copies=tuple(c for c in r.copies if c.tensor == index))
        for r in recordings
    ]
    shape = plan.geometries[plan.tensors[index].geometry].shape
    source = layouts_of(plan)[plan.tensors[index].source]
    try:
        for pieces in pieces_by_tensor(alone, plan.inputs.trainer.ranks)[index].values():
            carry(shape, source, pieces, plan.inputs.limits.max_dims)
    except InexpressibleError:
        return False
    return True


def _param_problems(plan: Plan, live: Mapping[str, LiveParam]) -> Iterator[Problem]:
    for param in plan.params:
        geometry = plan.geometries[param.geometry]
        dtype, shape = plan.dtypes[geometry.dtype], geometry.shape
        if (found := live.get(param.name)) is None:
            yield Problem(param.name, "no worker's module has such a parameter")
            continue
        row_major = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        steps, expected = (
            [step for step, size in zip(strides, shape, strict=False) if size > 1]
            for strides in (param.stride or row_major, found.view.stride)
        )
        if (dtype, shape, steps) != (found.dtype, found.view.shape, expected):
            yield Problem(
                param.name,
                f"the module has {found.dtype} {list(found.view.shape)} by "
                f"{list(found.view.stride)}, the plan {dtype} {list(shape)} by "
                f"{list(param.stride or row_major)}",
            )
        if param.stride == row_major:
            yield Problem(param.name, "its strides are row-major, which is written as null")


def _receiver_problems(plan: Plan) -> Iterator[Problem]:
    """All workers receive what falls back; what can be written in several ways is in one."""
    engine, layouts = plan.inputs.engine, layouts_of(plan)
    everywhere = Layout(Mesh((engine.dp * engine.pp, engine.tp), plan.inputs.trainer.ranks), None)
    kinds = {(d.layout, d.landing): d.tensor for d in plan.destinations}
    for (layout_index, landing), tensor in kinds.items():
        name, layout = plan.tensors[tensor].name, layouts[layout_index]
        if landing is None:
            if layout != everywhere:
                yield Problem(name, f"it falls back to {layout}, which is not {everywhere}")
            continue
        dims = plan.landings[landing].dims
        if layout.split is None and layout.mesh.dims[1] != 1:
            yield Problem(name, f"{layout} has its copies along the second axis, not the first")
        if layout.split is not None and layout.split[1] == 1:
            yield Problem(name, f"{layout} has one shard, which is written as null")
        if any(size == 1 for size, _ in dims) and dims != ((1, 1),):
            yield Problem(name, f"its landing has dims of one element: {[list(d) for d in dims]}")


def trainer_problems(plan: Plan) -> Iterator[Problem]:
    """The tensors are the inventory's, lie on the trainer as the inputs say, and come from there.

    With exclusions the inventory is not known from the plan.
    """
    model, layouts = plan.inputs.model, layouts_of(plan)
    shapes = [plan.geometries[tensor.geometry] for tensor in plan.tensors]
    tensors = tuple(
        TensorInfo(tensor.name, plan.dtypes[geometry.dtype], geometry.shape)
        for tensor, geometry in zip(plan.tensors, shapes, strict=True)
    )
    if not model.exclude and Inventory(model.origin, tensors).digest != model.inventory:
        yield Problem("tensors", f"they are not those of the inventory {model.inventory}")
    held = source_layouts(plan.inputs.trainer, tensors)
    for tensor, layout in zip(plan.tensors, held, strict=True):
        if layouts[tensor.source] != layout:
            yield Problem(
                tensor.name, f"the trainer holds it as {layout}, not as {layouts[tensor.source]}"
            )
    kinds = {
        (plan.tensors[d.tensor].geometry, plan.tensors[d.tensor].source, d.wire): d.tensor
        for d in plan.destinations
    }
    for (geometry, source, wire_index), index in kinds.items():
        wire = plan.wires[wire_index]
        if (wire.base, wire.geometry, wire.source) == (0, geometry, source):
            continue
        name, sent = plan.tensors[index].name, layouts[wire.source]
        numel = prod(plan.geometries[wire.geometry].shape)
        mesh, shards = _senders(plan.geometries[geometry].shape, layouts[source], wire.base, numel)
        if sent.mesh != mesh or (sent.split is not None) != (shards > 1):
            yield Problem(
                name,
                f"elements [{wire.base}, {wire.base + numel}) of it are sent as {sent}; "
                f"{mesh} holds them, in {shards} shards",
            )


def _senders(shape: Sequence[int], held: Layout, base: int, numel: int) -> tuple[Mesh, int]:
    """The trainer ranks that send a range, and in how many shards.

    One copy of it, or all where they are neighbours.
    """
    if held.split is None or held.placements is None:
        return held.mesh, 1
    dim, shards = held.split
    period = prod(shape[dim:])
    if base % period == numel % period == 0:
        return held.mesh, shards
    length = period // shards
    first = base // length
    count = (base + numel - 1) // length - first + 1
    if held.placements[0] == REPLICATE:
        return Mesh((1, count), held.mesh.start + first), count
    copies = held.mesh.dims[1]
    return Mesh((count, copies), held.mesh.start + first * copies), count
