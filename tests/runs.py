"""What tests of runs share: plans of every kind, shards, a target, and what must come out."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TypeVar

import msgspec
import torch

from m2ncompile.compile.assemble import assemble
from m2ncompile.compile.coalesce import coalesce
from m2ncompile.compile.rows import by_rows
from m2ncompile.compile.split import split
from m2ncompile.errors import RunError
from m2ncompile.inventory import TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Limits, Mesh, local_shape, shard_box
from m2ncompile.plan import Plan, PlanTransfer
from m2ncompile.plan_check import layouts_of
from m2ncompile.routes import Destination, Landing, Param, Reason, Route, Wire
from m2ncompile.runtime.bind_worker import form_of
from m2ncompile.runtime.shards import Held, held_as_planned
from m2ncompile.runtime.target import Form
from m2ncompile.verify.transfers import bits, deliver, land
from tests.plans import make_inputs

REASON = Reason("processed", "the engine processes it after loading")
T = TypeVar("T")
DTYPES = ("bfloat16", "float32", "float16", "uint8", "int64")


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Every call in a thread of its own; the first error, once all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.result() for future in futures]


def failures(calls: Sequence[Callable[[], object]]) -> list[str]:
    """The text of the RunError that every call raises."""

    def failure(call: Callable[[], object]) -> str:
        try:
            call()
        except RunError as error:
            return str(error)
        raise AssertionError("it did not fail")

    return together([lambda call=call: failure(call) for call in calls])


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


# --- plans


def varied_plan(
    seed: int, trainers: int = 2, workers: int = 2, tensors: int = 12, stacked: bool = False
) -> Plan:
    """A random plan: all routes, parts, strided landings, padding, other dtypes, sub-meshes."""
    rng = random.Random(seed)
    infos, sources, destinations = [], [], []
    routes: list[Route] = [rng.choice(("direct", "reload")) for _ in range(tensors)]
    for number in range(tensors):
        name = f"layers.{number // 3}.{'abc'[number % 3]}"
        dtype = rng.choice(DTYPES)
        shape = tuple(rng.choice((4, 8, 12)) for _ in range(rng.randint(1, 3)))
        source = random_layout(rng, shape, range(trainers))
        infos.append(TensorInfo(name, dtype, shape))
        sources.append(source)
        route = routes[number // 3]  # an engine reloads a module as a unit
        destinations += _destinations(rng, number, infos[-1], source, trainers, workers, route)
    rng.shuffle(destinations)
    inputs = make_inputs(trainers=trainers, tp=workers)
    if not stacked:
        return assemble(inputs, infos, sources, destinations)
    # Little enough that some go in parts.
    limits = Limits(stage_bytes=rng.choice((32, 128, 1 << 28)))
    inputs = msgspec.structs.replace(inputs, limits=limits)
    # Everything twice, so that transfers of equal geometry are there to be stacked.
    infos += [msgspec.structs.replace(info, name=f"{info.name}x") for info in infos]
    destinations += [_twin(d, d.tensor + tensors) for d in destinations]
    groups = coalesce(infos, destinations, inputs.limits)
    transfers = by_rows(destinations, split(infos, destinations, groups, inputs.limits))
    return assemble(inputs, infos, sources * 2, destinations, transfers)


def experts_plan(
    experts: int, route: Route = "reload", stage_bytes: int = 1 << 28, rows: bool = False
) -> Plan:
    """Gate, up and down of each, listed as checkpoints do; two workers have half of every one."""
    source, workers = Layout(Mesh((2, 1), 0), (0, REPLICATE)), Mesh((1, 2), 2)
    gates = Param("experts.w13", "bfloat16", (experts, 8, 6))
    downs = Param("experts.w2", "bfloat16", (experts, 6, 4))
    reason = None if route == "direct" else REASON
    infos, destinations = [], []
    for expert in sorted(range(experts), key=str):
        for name, place, shape, dim in (
            ("down", 0, (6, 8), 1),
            ("gate", 0, (8, 6), 0),
            ("up", 24, (8, 6), 0),
        ):
            param, size = (downs, 24) if name == "down" else (gates, 48)
            landing = Landing(param, (expert * size + place,), ((24, 1),))
            layout = Layout(workers, (REPLICATE, dim))
            wire = Wire(0, shape, source)
            destinations.append(Destination(len(infos), wire, route, layout, landing, reason))
            infos.append(TensorInfo(f"layers.0.experts.{expert}.{name}", "bfloat16", shape))
    limits = Limits(stage_bytes=stage_bytes)
    inputs = msgspec.structs.replace(make_inputs(), limits=limits)
    groups = coalesce(infos, destinations, limits)
    transfers: Sequence[PlanTransfer] = [PlanTransfer(group) for group in groups]
    if rows:
        transfers = by_rows(destinations, transfers)
        assert all(transfer.by_rows for transfer in transfers if len(transfer.destinations) > 1)
    return assemble(inputs, infos, [source] * len(infos), destinations, transfers)


def _twin(d: Destination, tensor: int) -> Destination:
    landing = d.landing
    if landing is not None:
        param = msgspec.structs.replace(landing.param, name=f"{landing.param.name}x")
        landing = msgspec.structs.replace(landing, param=param)
    return msgspec.structs.replace(d, tensor=tensor, landing=landing)


def random_layout(rng: random.Random, shape: Sequence[int], ranks: range) -> Layout:
    """Over all of `ranks`: whole, or split evenly over all or over groups that hold the same."""
    options = [Layout(Mesh((len(ranks), 1), ranks.start), None)]
    for shards in range(1, len(ranks) + 1):
        if len(ranks) % shards:
            continue
        for dim in range(len(shape)):
            if shape[dim] % shards == 0:
                groups = len(ranks) // shards
                options.append(Layout(Mesh((groups, shards), ranks.start), (REPLICATE, dim)))
                options.append(Layout(Mesh((shards, groups), ranks.start), (dim, REPLICATE)))
    return rng.choice(options)


def _destinations(
    rng: random.Random,
    index: int,
    info: TensorInfo,
    source: Layout,
    trainers: int,
    workers: int,
    route: Route,
) -> Iterator[Destination]:
    name, dtype, shape = info.name, info.dtype, info.shape
    whole = range(trainers, trainers + workers)
    wire = Wire(0, shape, source)
    kind = rng.choice(
        ("direct", "direct", "reload", "reload", "fallback", "parts", "apiece", "cut")
    )
    if kind == "fallback":
        layout = Layout(Mesh((workers, 1), trainers), None)
        yield Destination(index, wire, "fallback", layout, None, REASON)
    elif kind == "parts" and source.split is None:
        # Its first and its second half, to a parameter of their own each, or to one.
        half = prod(shape) // 2
        layout, shared = random_layout(rng, (half,), whole), rng.random() < 0.5
        (size,) = local_shape(layout, (half,))
        for part in range(2):
            flat = Wire(part * half, (half,), source)
            if not shared:
                yield _landing(rng, index, flat, f"{name}_{part}", dtype, layout, route)
                continue
            landing = Landing(Param(name, dtype, (2, size)), (part * size,), ((size, 1),))
            reason = None if route == "direct" else REASON
            yield Destination(index, flat, route, layout, landing, reason)
    elif kind == "cut" and source.split is None and len(shape) == 2:
        # Each trainer rank sends columns of what it holds whole.
        seen = (*shape, 1)
        sent = Layout(Mesh((trainers, 1), 0), (1, REPLICATE))
        layout = random_layout(rng, seen, whole)
        yield _landing(rng, index, Wire(0, seen, sent), name, dtype, layout, route)
    elif kind == "apiece":
        # The same to every worker, by a transfer each.
        one = _landing(rng, index, wire, name, dtype, Layout(Mesh((1, 1), trainers), None), route)
        for rank in whole:
            layout = Layout(Mesh((1, 1), rank), None)
            yield msgspec.structs.replace(one, layout=layout)
    else:
        yield _landing(rng, index, wire, name, dtype, random_layout(rng, shape, whole), route)


def _landing(
    rng: random.Random,
    index: int,
    wire: Wire,
    name: str,
    dtype: str,
    layout: Layout,
    route: Route,
) -> Destination:
    """Into a parameter that may be longer than what arrives, of other strides, or dtype."""
    local, ranks = local_shape(layout, wire.shape), layout.mesh.size
    held = "float32" if dtype == "bfloat16" and rng.random() < 0.5 else dtype
    form = rng.choice(("dense", "padded", "spread", "columns", "transposed"))
    room, dims, starts = local, ((prod(local), 1),), (0,)
    if form == "padded":
        room, starts = (local[0] + 2, *local[1:]), (prod(local[1:]),)
    elif form == "spread" and ranks > 1:  # elsewhere on each worker
        room = (local[0] + ranks, *local[1:])
        starts = tuple(place * prod(local[1:]) for place in range(ranks))
    elif form == "columns":
        room = (*local[:-1], local[-1] + 3)
        dims, starts = tuple(zip(local, row_major(room), strict=True)), (1,)
    elif form == "transposed" and len(local) == 2:
        room, dims = (local[1], local[0]), ((local[0], 1), (local[1], local[0]))
    landing = Landing(Param(name, held, room), starts, dims)
    return Destination(index, wire, route, layout, landing, None if route == "direct" else REASON)


# --- a trainer's shards


class GivenShards:
    """One rank's shards of `tensors`, as the plan has them lie."""

    def __init__(self, plan: Plan, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._plan, self._rank = plan, rank

    def describe(self) -> Sequence[Held]:
        return held_as_planned(self._plan)

    def items(self, whole: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        layouts = layouts_of(self._plan)
        for entry, tensor in zip(self._plan.tensors, self.tensors, strict=True):
            box = shard_box(layouts[entry.source], tuple(tensor.shape), self._rank)
            assert box is not None
            yield entry.name, tensor[tuple(slice(a, b) for a, b in box)].contiguous()


# --- a worker


class DictTarget:
    """Stands for an engine: its parameters, in a dict.

    Parameters that go by reload are kept as they come until all that a sync
    loads of their module is there, as layer-wise reload does, or until
    `finish` where they are in `keeps`; then they are copied to `params`.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], keeps: Collection[str] = ()) -> None:
        self.version, self.device = "0.33.0", torch.device("cpu")
        self.platform: str | None = None
        self.params, self.whole = dict(params), dict[str, torch.Tensor]()
        self.keeps, self.abandoned, self.finished = keeps, 0, 0
        self._waiting: dict[str, torch.Tensor] = {}
        self._missing: dict[str, set[str]] = {}

    def check(self, plan: Plan) -> None:
        pass

    def held(self, name: str) -> torch.Tensor | None:
        return self.params.get(name)

    def live(self) -> Mapping[str, torch.Tensor]:
        return self.params

    def load_form(self, name: str) -> Form | None:
        return form_of(self.params[name]) if name in self.params else None

    def kept(self, name: str, loaded: Collection[str]) -> bool:
        return name in self.keeps

    def begin(self, reloaded: Collection[str], everything: bool) -> None:
        self._waiting.clear()
        self._missing.clear()
        for name in reloaded:
            self._missing.setdefault(name.rpartition(".")[0], set()).add(name)

    def load(self, name: str, value: torch.Tensor) -> None:
        module = name.rpartition(".")[0]
        self._waiting[name] = value
        self._missing[module].remove(name)
        if not self._missing[module]:
            for one in [n for n in self._waiting if n.rpartition(".")[0] == module]:
                if one not in self.keeps:
                    self.params[one].copy_(self._waiting.pop(one))

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.whole = dict(tensors)  # all at once, as loaders that keep them do

    def finish(self) -> None:
        for name, value in self._waiting.items():
            self.params[name].copy_(value)
        self._waiting.clear()
        self.finished += 1

    def abandon(self) -> None:
        self.abandoned += 1

    def synchronize(self) -> None: ...


def params_of(plan: Plan, worker: int) -> dict[str, torch.Tensor]:
    """Every parameter of the plan that lands on a worker, filled with a pattern."""
    rank, layouts = plan.inputs.trainer.ranks + worker, layouts_of(plan)
    landed = {
        plan.landings[d.landing].param
        for d in plan.destinations
        if d.landing is not None and rank in layouts[d.layout].mesh.ranks
    }
    params = {}
    for index in sorted(landed):
        param = plan.params[index]
        geometry = plan.geometries[param.geometry]
        value = torch.empty_strided(
            geometry.shape,
            param.stride or row_major(geometry.shape),
            dtype=torch_dtype(plan.dtypes[geometry.dtype]),
        )
        params[param.name] = value.fill_(7)
    return params


def expect(
    plan: Plan,
    worker: int,
    before: Mapping[str, torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A worker's parameters after a sync, and the whole tensors that its loaders get.

    By `deliver` and `land`, which a run shares no code with. What is reloaded
    starts from zeros.
    """
    rank, layouts = plan.inputs.trainer.ranks + worker, layouts_of(plan)
    problems: list[object] = []
    arrivals = deliver(plan, tensors, problems)[rank]  # type: ignore[arg-type]
    assert not problems
    params = {name: value.clone() for name, value in before.items()}
    for arrival in arrivals:
        d = arrival.destination
        if d.landing is not None and d.route == "reload":
            params[plan.params[plan.landings[d.landing].param].name].zero_()
    whole = {}
    for arrival in arrivals:
        d = arrival.destination
        if d.landing is None:
            tensor = plan.tensors[d.tensor]
            shape = plan.geometries[tensor.geometry].shape
            whole[tensor.name] = arrival.buffer.view(shape)
            continue
        place = rank - layouts[d.layout].mesh.start
        land(plan, arrival, place, params[plan.params[plan.landings[d.landing].param].name])
    return params, whole


def assert_same(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Every tensor, bit for bit."""
    assert got.keys() == wanted.keys()
    differing = [name for name in got if not torch.equal(bits(got[name]), bits(wanted[name]))]
    assert not differing, f"not as delivered: {differing}"
