"""A plan tied to a worker: what its module holds is what the plan assumes, and what goes where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import msgspec

from m2ncompile.dtypes import nbytes
from m2ncompile.errors import BindError, Problems, nearest
from m2ncompile.layout import Layout, local_shape
from m2ncompile.plan import Plan, PlanDestination, PlanTransfer
from m2ncompile.plan_check import layouts_of
from m2ncompile.routes import Route
from m2ncompile.runtime.target import Form, Target
from m2ncompile.staging import (
    BUFFERS,
    Life,
    in_place,
    landed_view,
    module_of,
    place,
    staged_bytes,
)
from m2ncompile.views import View, narrowed

if TYPE_CHECKING:
    import torch

__all__ = ["Part", "Receive", "Staged", "WorkerBinding", "bind_worker"]


class Part(msgspec.Struct, frozen=True):
    """What arrives for `tensor`, and where it goes: `view` of the storage of `into`.

    That is the live parameter for `direct`, a staged copy for `reload`, and None
    for `fallback`, where the whole tensor goes to the loaders: `view` is then None, or
    where a part of it lies in the whole.
    """

    tensor: int
    into: str | None
    view: View | None


class Receive(msgspec.Struct, frozen=True):
    """This rank's part of one leg: one tensor, or several that are stacked.

    What arrives is row-major. It is received `apart` and copied unless all of it goes to one
    contiguous run of a parameter, in its order and of its dtype.
    `last` where nothing more of it follows. `rows` is how many this rank gets of each where
    a stack goes by rows, else 0.
    """

    route: Route
    parts: tuple[Part, ...]
    apart: bool
    last: bool = True
    rows: int = 0


class Staged(msgspec.Struct, frozen=True):
    """A parameter that goes by reload, in staging memory from byte `start` on.

    Its memory is its own from leg `first` on; `zeroed` where something of it never
    arrives, such as the padding of a vocabulary.
    """

    name: str
    form: Form
    start: int
    nbytes: int
    first: int
    zeroed: bool


class WorkerBinding(msgspec.Struct, frozen=True):
    """`receives` by leg, None where this rank has no part.

    `staged` by the leg that completes them; `staging_nbytes` is all the memory that they need
    at once; `apart_numel` the elements of the largest part received apart, by dtype.
    """

    receives: tuple[Receive | None, ...]
    staged: Mapping[int, tuple[Staged, ...]]
    staging_nbytes: int
    apart_numel: Mapping[str, int]

    @property
    def reloaded(self) -> tuple[str, ...]:
        return tuple(one.name for group in self.staged.values() for one in group)

    @property
    def falls_back(self) -> bool:
        return any(one is not None and one.route == "fallback" for one in self.receives)


def bind_worker(plan: Plan, target: Target, rank: int) -> WorkerBinding:
    """`rank` is the communicator's. Raises BindError listing every difference."""
    layouts = layouts_of(plan)
    receives: list[Receive | None] = []
    apart: defaultdict[str, int] = defaultdict(int)
    arriving: dict[str, list[tuple[int, View]]] = {}
    routes: dict[str, set[Route]] = {}
    for leg, transfer in enumerate(plan.transfers):
        carried = [plan.destinations[index] for index in transfer.destinations]
        carried = [d for d in carried if rank in layouts[d.layout].mesh.ranks]
        if not carried:
            receives.append(None)
            continue
        route = carried[0].route
        parts = tuple(_part(plan, layouts, transfer, d, rank) for d in carried)
        copied = not in_place(plan, layouts, transfer, carried, rank)
        last = transfer.part is None or _whole(plan, carried[0])[transfer.part.dim] == (
            transfer.part.start + transfer.part.size
        )
        rows = 0
        if transfer.by_rows:
            rows = local_shape(layouts[carried[0].layout], _whole(plan, carried[0]))[0]
        receives.append(Receive(route, parts, copied, last, rows))
        for part in parts:
            if part.into is None or part.view is None:
                continue
            routes.setdefault(part.into, set()).add(route)
            if route == "reload":
                arriving.setdefault(part.into, []).append((leg, part.view))
        if copied:
            dtype = plan.dtypes[plan.geometries[plan.wires[carried[0].wire].geometry].dtype]
            numel = sum(prod(part.view.shape) for part in parts if part.view is not None)
            apart[dtype] = max(apart[dtype], numel)
    _check(plan, target, routes)
    staged, total = _stage(plan, target, arriving)
    _check_stated(plan, rank, apart, total)
    return WorkerBinding(tuple(receives), staged, total, dict(apart))


def _whole(plan: Plan, d: PlanDestination) -> tuple[int, ...]:
    return plan.geometries[plan.wires[d.wire].geometry].shape


def _part(
    plan: Plan, layouts: Sequence[Layout], transfer: PlanTransfer, d: PlanDestination, rank: int
) -> Part:
    if d.landing is not None:
        into = plan.params[plan.landings[d.landing].param].name
        return Part(d.tensor, into, landed_view(plan, layouts, transfer, d, rank))
    if (part := transfer.part) is None:
        return Part(d.tensor, None, None)
    shape = _whole(plan, d)
    dims = tuple((n, prod(shape[i + 1 :])) for i, n in enumerate(shape))
    return Part(d.tensor, None, narrowed(0, dims, shape, part.dim, part.start, part.size))


def _check_stated(plan: Plan, rank: int, apart: Mapping[str, int], staged: int) -> None:
    """The plan says how much memory a run takes, and it takes no more."""
    problems, stated = Problems(), plan.staging[rank]
    received = BUFFERS * sum(nbytes(dtype, (numel,)) for dtype, numel in apart.items())
    for what, takes, most in (
        ("received apart", received, stated.unpacked),
        ("reloaded", staged, stated.reloaded),
    ):
        if takes > most:
            problems.add(
                "staging",
                f"what is {what} takes {takes} bytes, the plan says {most}",
                "was the plan built for another engine?",
            )
    problems.raise_if_any(BindError, "the worker would need more memory than the plan says")


def _check(plan: Plan, target: Target, routes: Mapping[str, set[Route]]) -> None:
    """Every parameter of the plan is there, in the form that its routes need."""
    problems = Problems()
    live = target.live()
    storages: dict[int, str] = {}
    strangers = sorted(live.keys() - {param.name for param in plan.params})
    reloaded = {module_of(name): name for name, found in routes.items() if "reload" in found}
    for param in plan.params:
        if param.name not in routes:
            continue  # another worker's
        geometry = plan.geometries[param.geometry]
        row_major = tuple(prod(geometry.shape[i + 1 :]) for i in range(len(geometry.shape)))
        expected = Form(plan.dtypes[geometry.dtype], geometry.shape, param.stride or row_major)
        form = target.load_form(param.name)
        if form is None:
            close = nearest(param.name, strangers) if len(problems) < 20 else None
            problems.add(
                param.name,
                "the worker has no such parameter",
                f"it has {close}" if close else "was the plan built from another model?",
            )
            continue
        if form != expected:
            problems.add(
                param.name,
                f"the worker loads it as {_words(form)}, the plan expects {_words(expected)}",
                "was the plan built for another engine, or another parallel layout?",
            )
            continue
        if "direct" not in routes[param.name]:
            continue
        if (sibling := reloaded.get(module_of(param.name))) is not None:
            problems.add(
                param.name,
                f"it is written directly, but {sibling} goes by reload, and the engine reloads "
                "a module as a unit",
                "rebuild the plan",
            )
            continue
        if param.name not in live:
            problems.add(param.name, "it is written directly, and gone since it was loaded")
            continue
        tensor = live[param.name]
        kernel = form_of(tensor)
        if kernel != expected or tensor.device != target.device:
            problems.add(
                param.name,
                f"it is written directly, but the worker runs it as {_words(kernel)} on "
                f"{tensor.device}, the plan expects {_words(expected)} on {target.device}",
                "was the plan built for another target platform?",
            )
            continue
        address = tensor.untyped_storage().data_ptr()
        if address and (other := storages.setdefault(address, param.name)) != param.name:
            problems.add(
                param.name, f"it shares its memory with {other}; the plan writes both on their own"
            )
    problems.raise_if_any(BindError, "the worker does not hold what the plan assumes")


def form_of(tensor: torch.Tensor) -> Form:
    """A tensor's form."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Form(dtype, tuple(tensor.shape), tuple(tensor.stride()))


def _words(form: Form) -> str:
    return f"{form.dtype} {list(form.shape)} with strides {list(form.strides)}"


def _stage(
    plan: Plan, target: Target, arriving: Mapping[str, Sequence[tuple[int, View]]]
) -> tuple[dict[int, tuple[Staged, ...]], int]:
    """Places every reloaded parameter in staging memory, two in one place only one after the other.

    Returns them by the leg that completes them, and the bytes of all.
    """
    spans: dict[str, tuple[int, int]] = {}
    for name, parts in arriving.items():
        first, last = parts[0][0], parts[-1][0]
        a, b = spans.get(module_of(name), (first, last))
        spans[module_of(name)] = min(a, first), max(b, last)
    # Where loaders fill a parameter on other workers alone they put zeros here: a bias that
    # only the first of a row-parallel layer's workers adds.
    empty = [
        param.name
        for param in plan.params
        if module_of(param.name) in spans and param.name not in arriving
    ]
    loaded = {*arriving, *empty}
    found: list[tuple[str, Form, int, bool]] = []
    lives = []
    for name in (*arriving, *empty):
        parts = arriving.get(name, ())
        form = target.load_form(name)
        if form is None:
            continue  # the module has it on other workers alone
        first, last = spans[module_of(name)]
        extent = 1 + sum((n - 1) * s for n, s in zip(form.shape, form.strides, strict=True))
        filled = sum(prod(view.shape) for _, view in parts)
        found.append((name, form, parts[-1][0] if parts else first, filled < extent))
        lives.append(
            Life(
                nbytes=staged_bytes(form.dtype, form.shape, form.strides),
                first=parts[0][0] if parts else first,
                # A leg is settled while the next is under way.
                until=len(plan.transfers) if target.kept(name, loaded) else last + 1,
            )
        )
    starts, top = place(lives)
    staged: defaultdict[int, list[Staged]] = defaultdict(list)
    for (name, form, complete, zeroed), life, start in zip(found, lives, starts, strict=True):
        staged[complete].append(Staged(name, form, start, life.nbytes, life.first, zeroed))
    return {leg: tuple(group) for leg, group in staged.items()}, top
