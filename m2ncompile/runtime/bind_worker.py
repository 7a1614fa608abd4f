"""A plan tied to a worker: what its module holds is what the plan assumes, and what goes where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import msgspec

from m2ncompile.compile.routes import Route
from m2ncompile.dtypes import nbytes
from m2ncompile.errors import BindError, Problems, nearest
from m2ncompile.layout import Layout
from m2ncompile.plan import Plan, PlanDestination
from m2ncompile.plan_check import layouts_of
from m2ncompile.runtime.target import Form, Target
from m2ncompile.runtime.views import View, contiguous

if TYPE_CHECKING:
    import torch

__all__ = ["Part", "Receive", "Staged", "WorkerBinding", "bind_worker"]


#: Of staged parameters, in bytes.
_ALIGNMENT = 256


class Part(msgspec.Struct, frozen=True):
    """What arrives for `tensor`, and where it goes: `view` of the storage of `into`.

    That is the live parameter for `direct`, a staged copy for `reload`, and None
    for `fallback`, where the whole tensor goes to the loaders.
    """

    tensor: int
    into: str | None
    view: View | None


class Receive(msgspec.Struct, frozen=True):
    """This rank's part of one leg: one tensor, or several that are stacked.

    What arrives is row-major. It is received `apart` and copied where it is for
    several places, or for one that is no contiguous run in its order, or of another dtype.
    """

    route: Route
    parts: tuple[Part, ...]
    apart: bool


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
        route, parts = carried[0].route, tuple(_part(plan, layouts, d, rank) for d in carried)
        copied = len(parts) > 1 or not _in_place(plan, carried[0], parts[0])
        receives.append(Receive(route, parts, copied))
        for part in parts:
            if part.into is None or part.view is None:
                continue
            routes.setdefault(part.into, set()).add(route)
            if route == "reload":
                arriving.setdefault(part.into, []).append((leg, part.view))
        if copied and route != "fallback":
            dtype = plan.dtypes[plan.geometries[plan.wires[carried[0].wire].geometry].dtype]
            numel = sum(prod(part.view.shape) for part in parts if part.view is not None)
            apart[dtype] = max(apart[dtype], numel)
    _check(plan, target, routes)
    staged, total = _stage(plan, target, arriving)
    return WorkerBinding(tuple(receives), staged, total, dict(apart))


def _part(plan: Plan, layouts: Sequence[Layout], d: PlanDestination, rank: int) -> Part:
    if d.landing is None:
        return Part(d.tensor, None, None)
    landing = plan.landings[d.landing]
    sizes, strides = zip(*landing.dims, strict=True)
    view = View(d.offset_at(rank - layouts[d.layout].mesh.start), sizes, strides)
    return Part(d.tensor, plan.params[landing.param].name, view)


def _in_place(plan: Plan, d: PlanDestination, part: Part) -> bool:
    """Whether what arrives can be received where it goes."""
    if d.landing is None or part.view is None:
        return True
    param = plan.geometries[plan.params[plan.landings[d.landing].param].geometry]
    sent = plan.geometries[plan.wires[d.wire].geometry]
    return contiguous(part.view) and param.dtype == sent.dtype


def _check(plan: Plan, target: Target, routes: Mapping[str, set[Route]]) -> None:
    """Every parameter of the plan is there, in the form that its routes need."""
    problems = Problems()
    live = target.live()
    storages: dict[int, str] = {}
    strangers = sorted(live.keys() - {param.name for param in plan.params})
    reloaded = {_module(name): name for name, found in routes.items() if "reload" in found}
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
        if (sibling := reloaded.get(_module(param.name))) is not None:
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


def _module(param: str) -> str:
    return param.rpartition(".")[0]


class _Life(msgspec.Struct):
    """From the first leg that fills a parameter to the last that its memory is needed in."""

    name: str
    form: Form
    nbytes: int
    first: int
    complete: int
    until: int
    zeroed: bool


def _stage(
    plan: Plan, target: Target, arriving: Mapping[str, Sequence[tuple[int, View]]]
) -> tuple[dict[int, tuple[Staged, ...]], int]:
    """Places every reloaded parameter in staging memory, two in one place only one after the other.

    Returns them by the leg that completes them, and the bytes of all.
    """
    spans: dict[str, tuple[int, int]] = {}
    for name, parts in arriving.items():
        first, last = parts[0][0], parts[-1][0]
        a, b = spans.get(_module(name), (first, last))
        spans[_module(name)] = min(a, first), max(b, last)
    # Where loaders fill a parameter on other workers alone they put zeros here: a bias that
    # only the first of a row-parallel layer's workers adds.
    empty = [
        param.name
        for param in plan.params
        if _module(param.name) in spans and param.name not in arriving
    ]
    loaded = {*arriving, *empty}
    lives = []
    for name in (*arriving, *empty):
        parts = arriving.get(name, ())
        form = target.load_form(name)
        if form is None:
            continue  # the module has it on other workers alone
        first, last = spans[_module(name)]
        extent = 1 + sum((n - 1) * s for n, s in zip(form.shape, form.strides, strict=True))
        itemsize = nbytes(form.dtype, (1,))
        filled = sum(prod(view.shape) for _, view in parts)
        kept = target.kept(name, loaded)
        lives.append(
            _Life(
                name=name,
                form=form,
                nbytes=-(-extent * itemsize // _ALIGNMENT) * _ALIGNMENT,
                first=parts[0][0] if parts else first,
                complete=parts[-1][0] if parts else first,
                # A leg is settled while the next is under way.
                until=len(plan.transfers) if kept else last + 1,
                zeroed=filled < extent,
            )
        )
    # First fit, in the order of their first legs: what is done with leaves its place.
    placed: list[tuple[int, _Life]] = []
    under: list[tuple[int, _Life]] = []
    top = 0
    for life in sorted(lives, key=lambda life: life.first):
        under = sorted(
            ((start, other) for start, other in under if other.until >= life.first),
            key=lambda one: one[0],
        )
        start = 0
        for taken, other in under:
            if start + life.nbytes <= taken:
                break
            start = max(start, taken + other.nbytes)
        under.append((start, life))
        placed.append((start, life))
        top = max(top, start + life.nbytes)
    staged: defaultdict[int, list[Staged]] = defaultdict(list)
    for start, life in placed:
        staged[life.complete].append(
            Staged(life.name, life.form, start, life.nbytes, life.first, life.zeroed)
        )
    return {leg: tuple(group) for leg, group in staged.items()}, top
