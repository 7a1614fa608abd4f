"""A plan tied to a trainer rank: what it holds is what the plan assumes, and what it sends."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import translate
from itertools import accumulate
from math import prod

import msgspec

from m2ncompile.dtypes import nbytes
from m2ncompile.errors import BindError, LayoutError, Problem, Problems, nearest
from m2ncompile.layout import Layout, local_shape, shard_box
from m2ncompile.plan import Plan, PlanPart, PlanTensor
from m2ncompile.plan_check import layouts_of
from m2ncompile.runtime.shards import Held
from m2ncompile.stacking import Rows
from m2ncompile.staging import BUFFERS, packed_rows
from m2ncompile.views import View, contiguous, sent_view

__all__ = ["Part", "Send", "TrainerBinding", "bind_trainer"]


class Part(msgspec.Struct, frozen=True):
    """A view of this rank's shard of `tensor`, as a row-major tensor."""

    tensor: int
    view: View


class Send(msgspec.Struct, frozen=True):
    """This rank's part of one leg: one tensor, or several that are stacked.

    `packed` where they are sent from a copy, being several, or one with gaps; `rows` the
    form of that copy where it is not one after the other.
    """

    parts: tuple[Part, ...]
    packed: bool
    rows: Rows | None = None


class TrainerBinding(msgspec.Struct, frozen=True):
    """`sends` by leg, None where this rank has no part.

    `needed` is how many of the trainer's tensors must have been given out before a leg,
    `dropped` the tensors that no leg after it needs. `shapes` are those that this rank's
    shards must have, by tensor; `whole` the tensors that every rank gathers; `packed_numel`
    the elements of the largest copy, by dtype, and `scratch_numel` of the largest of columns
    of several.
    """

    sends: tuple[Send | None, ...]
    needed: tuple[int, ...]
    dropped: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    whole: frozenset[str]
    packed_numel: Mapping[str, int]
    scratch_numel: Mapping[str, int]


def bind_trainer(plan: Plan, held: Sequence[Held], rank: int) -> TrainerBinding:
    """Raises BindError listing every difference between the trainer and the plan."""
    layouts = layouts_of(plan)
    whole = _check(plan, layouts, held)
    sends: list[Send | None] = []
    packed: defaultdict[str, int] = defaultdict(int)
    scratch: defaultdict[str, int] = defaultdict(int)
    views: dict[tuple[int, int, int, PlanPart | None], View | None] = {}
    problems = Problems()

    def view_of(tensor: PlanTensor, wire: int, part: PlanPart | None) -> View | None:
        key = tensor.geometry, tensor.source, wire, part
        if key not in views:
            try:
                views[key] = sent_view(
                    plan.geometries[tensor.geometry].shape,
                    layouts[tensor.source],
                    plan.wires[wire].base,
                    plan.geometries[plan.wires[wire].geometry].shape,
                    layouts[plan.wires[wire].source],
                    rank,
                    part,
                )
            except ValueError as error:
                problems.add(tensor.name, f"trainer {rank}: {error}", "rebuild the plan")
                views[key] = None
        return views[key]

    for transfer in plan.transfers:
        parts = []
        for d in (plan.destinations[index] for index in transfer.destinations):
            view = view_of(plan.tensors[d.tensor], d.wire, transfer.part)
            if view is not None:
                parts.append(Part(d.tensor, view))
        if not parts:
            sends.append(None)
            continue
        copied = len(parts) > 1 or transfer.by_rows or not contiguous(parts[0].view)
        rows = packed_rows(plan, layouts, transfer)
        if copied:
            dtype = plan.dtypes[plan.geometries[plan.tensors[parts[0].tensor].geometry].dtype]
            numel = sum(prod(part.view.shape) for part in parts)
            packed[dtype] = max(packed[dtype], numel)
            if rows is not None and rows.cut and len(parts) > 1:
                scratch[dtype] = max(scratch[dtype], numel)
        sends.append(Send(tuple(parts), copied, rows))
    takes = BUFFERS * sum(nbytes(dtype, (numel,)) for dtype, numel in packed.items())
    takes += sum(nbytes(dtype, (numel,)) for dtype, numel in scratch.items())
    if takes > (stated := plan.staging[rank].packed):
        message = f"what trainer {rank} packs takes {takes} bytes, the plan says {stated}"
        problems.add("staging", message, "rebuild the plan")
    problems.raise_if_any(BindError, "the plan does not fit the trainer")
    # All ranks take tensors at the same legs, whether they send them or not: a source may
    # run collectives, and a rank that ran ahead could wait for one that waits in those.
    position = {one.name: count for count, one in enumerate(held, start=1)}
    carried = [[plan.destinations[d].tensor for d in t.destinations] for t in plan.transfers]
    needed = accumulate(
        (max(position[plan.tensors[t].name] for t in tensors) for tensors in carried), max
    )
    last = {tensor: leg for leg, tensors in enumerate(carried) for tensor in tensors}
    dropped: list[list[int]] = [[] for _ in carried]
    for tensor, leg in last.items():
        dropped[leg].append(tensor)
    shapes = tuple(
        local_shape(layouts[tensor.source], plan.geometries[tensor.geometry].shape)
        for tensor in plan.tensors
    )
    return TrainerBinding(
        sends=tuple(sends),
        needed=tuple(needed),
        dropped=tuple(map(tuple, dropped)),
        shapes=shapes,
        whole=whole,
        packed_numel=dict(packed),
        scratch_numel=dict(scratch),
    )


def _check(plan: Plan, layouts: Sequence[Layout], held: Sequence[Held]) -> frozenset[str]:
    """The tensors to gather. Raises BindError."""
    problems = Problems()
    by_name = {one.name: one for one in held}
    if len(by_name) != len(held):
        for name in sorted({one.name for one in held}):
            if (count := sum(one.name == name for one in held)) > 1:
                problems.add(name, f"the trainer has it {count} times")
    whole = set()
    strangers = by_name.keys() - {tensor.name for tensor in plan.tensors}
    for tensor in plan.tensors:
        geometry, layout = plan.geometries[tensor.geometry], layouts[tensor.source]
        one = by_name.pop(tensor.name, None)
        if one is None:
            close = nearest(tensor.name, sorted(strangers)) if len(problems) < 20 else None
            problems.add(
                tensor.name,
                "the trainer has no such tensor",
                f"did it rename {close}?" if close else None,
            )
            continue
        problems.extend(_differences(one, plan.dtypes[geometry.dtype], geometry.shape))
        if _same(layout, one.layout, geometry.shape):
            if one.flaw is not None:
                problems.add(tensor.name, one.flaw)
            continue
        if layout.split is None and one.gathers:
            whole.add(tensor.name)
        else:
            message = f"the trainer holds it as {one.layout}, the plan expects {layout}"
            problems.add(tensor.name, message)
    model = plan.inputs.model
    spared = [re.compile(translate(glob)) for glob in model.exclude]
    spared += [re.compile(translate(missing.names)) for missing in model.missing]
    for name in by_name:
        if not any(pattern.match(name) for pattern in spared):
            problems.add(
                name,
                "the trainer has it, the plan does not",
                "rebuild the plan with it, or list it in model.exclude",
            )
    problems.raise_if_any(BindError, "the trainer does not hold what the plan assumes")
    return frozenset(whole)


def _same(one: Layout, other: Layout | str, shape: tuple[int, ...]) -> bool:
    """Whether every rank holds the same, however it is spelled."""
    if isinstance(other, str):
        return False
    try:
        return one.mesh.ranks == other.mesh.ranks and all(
            shard_box(one, shape, rank) == shard_box(other, shape, rank) for rank in one.mesh.ranks
        )
    except LayoutError:  # torch splits unevenly, a plan does not
        return False


def _differences(one: Held, dtype: str, shape: tuple[int, ...]) -> list[Problem]:
    found = []
    if one.dtype != dtype:
        found.append(Problem(one.name, f"the trainer has {one.dtype}, the plan expects {dtype}"))
    if one.shape != shape:
        message = f"the trainer has shape {list(one.shape)}, the plan expects {list(shape)}"
        found.append(Problem(one.name, message))
    return found
