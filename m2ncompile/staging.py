"""What memory a plan needs besides the tensors themselves, rank by rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from itertools import chain
from math import prod

import msgspec

from m2ncompile.dtypes import nbytes
from m2ncompile.layout import Layout, local_shape
from m2ncompile.legs import Leg, legs_of
from m2ncompile.plan import Plan, PlanDestination, PlanStaging, PlanTransfer
from m2ncompile.plan_check import layouts_of
from m2ncompile.stacking import Rows, rows_of
from m2ncompile.views import View, contiguous, cut, narrowed, sent_view

__all__ = [
    "BUFFERS",
    "POOL_SLOTS",
    "Life",
    "Reloading",
    "in_place",
    "landed_view",
    "module_of",
    "packed_rows",
    "place",
    "staged_bytes",
    "staging_of",
]

#: Of staged parameters, in bytes.
_ALIGNMENT = 256
#: Of NCCL M2N's pool, each as large as the largest share of a transfer.
POOL_SLOTS = 2
#: Of each dtype, on either side: one is filled while the other is emptied.
BUFFERS = 2


class Reloading:
    """What is known of an engine's reload; here nothing, so that all counts as kept."""

    def has(self, rank: int, param: str) -> bool:
        """Whether a module of the worker `rank` has the parameter."""
        return True

    def kept(self, rank: int, param: str, loaded: Collection[str]) -> bool:
        """As `Target.kept`."""
        return True


class Life(msgspec.Struct, frozen=True):
    """Staging memory of `nbytes` that is in use from leg `first` to leg `until`."""

    nbytes: int
    first: int
    until: int


def place(lives: Sequence[Life]) -> tuple[list[int], int]:
    """Where each starts, in bytes, and the end of all: none lies on another at one time."""
    starts = [0] * len(lives)
    under: list[tuple[int, Life]] = []
    top = 0
    # First fit, in the order of their first legs: what is done with leaves its place.
    for index in sorted(range(len(lives)), key=lambda index: lives[index].first):
        life = lives[index]
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
        starts[index] = start
        top = max(top, start + life.nbytes)
    return starts, top


def staged_bytes(dtype: str, shape: Sequence[int], strides: Sequence[int]) -> int:
    """What a staged parameter takes, in bytes."""
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return -(-nbytes(dtype, (extent,)) // _ALIGNMENT) * _ALIGNMENT


def landed_view(
    plan: Plan, layouts: Sequence[Layout], transfer: PlanTransfer, d: PlanDestination, rank: int
) -> View:
    """Where in its parameter's storage the worker `rank` puts what a transfer brings of `d`.

    Not for `fallback`. Its dims are the rows first, where it goes by rows. Raises ValueError
    where a part is no strided box there.
    """
    assert d.landing is not None
    layout, dims = layouts[d.layout], plan.landings[d.landing].dims
    offset = d.offset_at(rank - layout.mesh.start)
    if transfer.part is None and not transfer.by_rows:
        sizes, strides = zip(*dims, strict=True)
        return View(offset, sizes, strides)
    local = local_shape(layout, plan.geometries[plan.wires[d.wire].geometry].shape)
    if (part := transfer.part) is not None:
        return narrowed(offset, dims, local, part.dim, part.start, part.size)
    sizes, strides = zip(*chain(*cut(dims, local[0])), strict=True)
    return View(offset, sizes, strides)


def staging_of(plan: Plan, reloading: Reloading) -> tuple[PlanStaging, ...]:
    """By communicator rank."""
    layouts, legs = layouts_of(plan), legs_of(plan)
    ranks = plan.inputs.trainer.ranks + plan.inputs.engine.workers
    shares = [0] * ranks
    for leg in set(legs):
        for side, shape in ((leg.source, leg.sent_shape), (leg.destination, leg.received_shape)):
            share = nbytes(leg.dtype, shape)
            for rank in side.mesh.ranks:
                shares[rank] = max(shares[rank], share)
    (packed, scratch), (unpacked, whole) = (
        _packed(plan, layouts, legs),
        _unpacked(plan, layouts, legs),
    )
    reloaded, modules = _reloaded(plan, layouts, reloading)
    return tuple(
        PlanStaging(
            packed=BUFFERS * sum(packed[rank].values()) + sum(scratch[rank].values()),
            unpacked=BUFFERS * sum(unpacked[rank].values()),
            reloaded=reloaded[rank],
            whole=whole[rank],
            share=shares[rank],
            module=modules[rank],
        )
        for rank in range(ranks)
    )


def packed_rows(plan: Plan, layouts: Sequence[Layout], transfer: PlanTransfer) -> Rows | None:
    """How a transfer is packed where it goes by rows."""
    if not transfer.by_rows:
        return None
    carried = [plan.destinations[index] for index in transfer.destinations]
    wire = plan.wires[carried[0].wire]
    shape = plan.geometries[wire.geometry].shape
    return rows_of(shape, layouts[wire.source], [layouts[d.layout] for d in carried])


def _packed(
    plan: Plan, layouts: Sequence[Layout], legs: Sequence[Leg]
) -> tuple[defaultdict[int, Counter[str]], defaultdict[int, Counter[str]]]:
    """Trainer rank -> dtype -> bytes of the largest copy to send, and of columns of several."""
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    scratch: defaultdict[int, Counter[str]] = defaultdict(Counter)
    known: dict[tuple[object, ...], bool] = {}
    for transfer, leg in zip(plan.transfers, legs, strict=True):
        if len(transfer.destinations) == 1 and not transfer.by_rows:
            d = plan.destinations[transfer.destinations[0]]
            tensor = plan.tensors[d.tensor]
            key = tensor.geometry, tensor.source, d.wire, transfer.part
            if key not in known:
                known[key] = _sent_as_held(plan, layouts, transfer, d)
            if known[key]:
                continue
        size = nbytes(leg.dtype, leg.sent_shape)
        form = packed_rows(plan, layouts, transfer)
        cut = form is not None and form.cut and len(transfer.destinations) > 1
        for rank in leg.source.mesh.ranks:
            for sizes in (found, scratch) if cut else (found,):
                sizes[rank][leg.dtype] = max(sizes[rank][leg.dtype], size)
    return found, scratch


def _sent_as_held(
    plan: Plan, layouts: Sequence[Layout], transfer: PlanTransfer, d: PlanDestination
) -> bool:
    """Whether trainer ranks send their part of `d`, alone in its transfer, from where it lies."""
    tensor, wire = plan.tensors[d.tensor], plan.wires[d.wire]
    try:
        view = sent_view(
            plan.geometries[tensor.geometry].shape,
            layouts[tensor.source],
            wire.base,
            plan.geometries[wire.geometry].shape,
            layouts[wire.source],
            layouts[wire.source].mesh.start,
            transfer.part,
        )
    except ValueError:  # said by name where the plan is validated, and where it is bound
        return False
    return view is not None and contiguous(view)


def in_place(
    plan: Plan,
    layouts: Sequence[Layout],
    transfer: PlanTransfer,
    carried: Sequence[PlanDestination],
    rank: int,
) -> bool:
    """Whether what a transfer brings a worker, for `carried`, can be received where it goes.

    Several are when they follow each other in one parameter, as the experts of a layer do.
    """
    if transfer.by_rows and len(carried) > 1:
        return False
    first = carried[0]
    wire = plan.geometries[plan.wires[first.wire].geometry]
    if first.landing is None:  # a stack of what falls back has memory of its own
        part = transfer.part
        return part is None or prod(wire.shape[: part.dim]) == 1
    param = plan.landings[first.landing].param
    if plan.geometries[plan.params[param].geometry].dtype != wire.dtype:
        return False
    view = landed_view(plan, layouts, transfer, first, rank)
    if not contiguous(view):
        return False
    expected, numel = view.offset, prod(view.shape)
    for d in carried:
        if d.landing != first.landing:
            if d.landing is None or plan.landings[d.landing].param != param:
                return False
            if not contiguous(landed_view(plan, layouts, transfer, d, rank)):
                return False
        if d.offset_at(rank - layouts[d.layout].mesh.start) != expected and len(carried) > 1:
            return False
        expected += numel
    return True


def _unpacked(
    plan: Plan, layouts: Sequence[Layout], legs: Sequence[Leg]
) -> tuple[defaultdict[int, Counter[str]], Counter[int]]:
    """Worker -> dtype -> bytes of the largest part received apart; and bytes that fall back."""
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    whole: Counter[int] = Counter()
    for transfer, leg in zip(plan.transfers, legs, strict=True):
        size = nbytes(leg.dtype, leg.received_shape)
        by_layout: defaultdict[int, list[PlanDestination]] = defaultdict(list)
        for index in transfer.destinations:
            d = plan.destinations[index]
            by_layout[d.layout].append(d)
        for layout, carried in by_layout.items():
            for rank in layouts[layout].mesh.ranks:
                if carried[0].route == "fallback":
                    whole[rank] += size
                if not in_place(plan, layouts, transfer, carried, rank):
                    found[rank][leg.dtype] = max(found[rank][leg.dtype], size)
    return found, whole


def _reloaded(
    plan: Plan, layouts: Sequence[Layout], reloading: Reloading
) -> tuple[Counter[int], Counter[int]]:
    """Worker -> bytes of all staged parameters at their most, and of the largest module."""
    legs: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    for leg, transfer in enumerate(plan.transfers):
        for d in (plan.destinations[index] for index in transfer.destinations):
            if d.route != "reload" or d.landing is None:
                continue
            param = plan.landings[d.landing].param
            for rank in layouts[d.layout].mesh.ranks:
                first, _ = legs[rank].get(param, (leg, leg))
                legs[rank][param] = first, leg
    modules = [module_of(param.name) for param in plan.params]
    sizes = []
    for entry in plan.params:
        form = plan.geometries[entry.geometry]
        row_major = tuple(prod(form.shape[i + 1 :]) for i in range(len(form.shape)))
        sizes.append(staged_bytes(plan.dtypes[form.dtype], form.shape, entry.stride or row_major))
    totals: Counter[int] = Counter()
    largest: Counter[int] = Counter()
    for rank, found in legs.items():
        spans: dict[str, tuple[int, int]] = {}
        for param, (first, last) in found.items():
            a, b = spans.get(modules[param], (first, last))
            spans[modules[param]] = min(a, first), max(b, last)
        # As a run does: what only other workers fill is put there as zeros.
        staged = [
            index
            for index, (param, module) in enumerate(zip(plan.params, modules, strict=True))
            if index in found or (module in spans and reloading.has(rank, param.name))
        ]
        names = {plan.params[index].name for index in staged}
        lives, made = [], Counter[str]()
        for index in staged:
            name, module = plan.params[index].name, modules[index]
            first, last = spans[module]
            made[module] += sizes[index]
            lives.append(
                Life(
                    nbytes=sizes[index],
                    first=found[index][0] if index in found else first,
                    until=len(plan.transfers) if reloading.kept(rank, name, names) else last + 1,
                )
            )
        totals[rank] = place(lives)[1]
        largest[rank] = max(made.values())
    return totals, largest


def module_of(param: str) -> str:
    """The name of the module that has a parameter."""
    return param.rpartition(".")[0]
