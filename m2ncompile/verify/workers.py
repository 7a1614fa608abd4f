"""Executes a plan in one process: each worker's module synced, against one loaded as usual.

A module on the CPU is filled with a pattern, so that what nothing fills is equal on
both sides. On the plan's side `load_weights` then gives it other weights, as a live
worker has: what the plan leaves alone keeps what that put there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import msgspec
import torch

from m2ncompile.engine.processing import load, own_tensors, process
from m2ncompile.engine.vllm_meta import MetaEngine
from m2ncompile.errors import Problem
from m2ncompile.families import families
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of
from m2ncompile.progress import Progress
from m2ncompile.verify.transfers import Arrival, bits, deliver, land, random_tensors

__all__ = ["Execution", "ModuleRow", "execute"]

_PATTERN = 0xAA


class ModuleRow(msgspec.Struct, frozen=True):
    """Modules alike but for the numbers in their names.

    `tensors` land in them; those by fallback are not counted. `elements` of parameters
    and buffers were compared, over all `ranks`. `processed` says whether vLLM's
    processing after loading ran here and its results were compared too, `why` why not;
    it is None where vLLM has nothing to do.
    """

    name: str
    kind: str
    modules: int
    routes: tuple[str, ...]
    tensors: int
    ranks: int
    elements: int
    processed: bool | None
    why: str | None


class Execution(msgspec.Struct, frozen=True):
    """What running a plan came to: all was equal where there are no problems."""

    modules: tuple[ModuleRow, ...]
    problems: tuple[Problem, ...]


class _Module(msgspec.Struct):
    """One module, over all ranks."""

    path: str
    kind: str
    routes: set[str] = msgspec.field(default_factory=set)
    tensors: set[int] = msgspec.field(default_factory=set)
    ranks: set[int] = msgspec.field(default_factory=set)
    elements: int = 0
    outcomes: set[str | None] = msgspec.field(default_factory=set)


class _Side(msgspec.Struct):
    """A module's tensors as bits: by name once loaded, by path and name once processed.

    `outcomes` is `process`'s answer; `changed` is what filling it said.
    """

    kinds: dict[str, str]
    loaded: dict[str, torch.Tensor]
    outcomes: dict[str, str | None]
    processed: dict[str, dict[str, torch.Tensor]]
    changed: set[str]


def execute(
    plan: Plan, engine: MetaEngine, progress: Progress = lambda stage, done, total: None
) -> Execution:
    """Syncs all workers of `plan` with random weights, and compares them bit for bit.

    `engine` is that of the model that the plan is for, and must be small.
    """
    problems: list[Problem] = []
    before, after = random_tensors(plan, 0), random_tensors(plan, 1)
    arrivals = deliver(plan, after, problems)
    modules: dict[str, _Module] = {}
    workers = plan.inputs.engine.workers
    for rank in range(workers):
        worker = _Worker(plan, rank, arrivals.pop(plan.inputs.trainer.ranks + rank))
        worker.run(engine, before, after)
        worker.report(modules)
        problems += worker.problems
        progress("verify", rank + 1, workers)
    return Execution(_rows(list(modules.values())), tuple(problems))


class _Worker:
    """One worker rank: what it received, and what became of its module."""

    def __init__(self, plan: Plan, rank: int, arrivals: Sequence[Arrival]) -> None:
        self.problems: list[Problem] = []
        self._plan, self._rank = plan, rank
        self._names = [tensor.name for tensor in plan.tensors]
        self._landings = [a for a in arrivals if a.destination.landing is not None]
        self._fallen = [a for a in arrivals if a.destination.landing is None]
        layouts = layouts_of(plan)
        first = plan.inputs.trainer.ranks
        self._places = [
            first + rank - layouts[a.destination.layout].mesh.start for a in self._landings
        ]

    def run(
        self, engine: MetaEngine, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
    ) -> None:
        """Builds and fills both modules."""

        def synced(model: torch.nn.Module) -> set[str]:
            load(model, zip(self._names, before, strict=True))
            self._land(model)
            if not self._fallen:
                return set()
            landed = _memory(model)
            load(
                model,
                (
                    (self._name(a), a.buffer.view(before[a.destination.tensor].shape))
                    for a in self._fallen
                ),
            )
            return {k for k, v in _memory(model).items() if not torch.equal(v, landed[k])}

        def loaded(model: torch.nn.Module) -> set[str]:
            load(model, zip(self._names, after, strict=True))
            return set()

        self._ours = _side(engine, self._rank, synced)
        self._theirs = _side(engine, self._rank, loaded)

    def _name(self, arrival: Arrival) -> str:
        return self._names[arrival.destination.tensor]

    def _param(self, arrival: Arrival) -> str:
        assert arrival.destination.landing is not None
        return self._plan.params[self._plan.landings[arrival.destination.landing].param].name

    def _land(self, model: torch.nn.Module) -> None:
        live = dict(model.named_parameters(remove_duplicate=False))
        live.update(model.named_buffers(remove_duplicate=False))
        for arrival, place in zip(self._landings, self._places, strict=True):
            if (name := self._param(arrival)) not in live:
                self._problem(self._name(arrival), f"the module has no {name}")
                continue
            try:
                land(self._plan, arrival, place, live[name])
            except RuntimeError as error:
                self._problem(self._name(arrival), f"it can't be written to {name}: {error}")

    def _problem(self, where: str, message: str) -> None:
        self.problems.append(Problem(where, f"worker {self._rank}: {message}"))

    def report(self, modules: dict[str, _Module]) -> None:
        """Compares the two, and adds what was done to `modules`, by path."""
        ours, theirs = self._ours, self._theirs
        mine = {path: modules.setdefault(path, _Module(path, k)) for path, k in ours.kinds.items()}
        for arrival in self._landings:
            if (owner := _owner(self._param(arrival))) in mine:
                mine[owner].routes.add(arrival.destination.route)
                mine[owner].tensors.add(arrival.destination.tensor)
        for name in ours.changed:
            mine[_owner(name)].routes.add("fallback")
        wrong = set()
        for name, expected in theirs.loaded.items():
            module = mine[_owner(name)]
            module.ranks.add(self._rank)
            module.elements += expected.numel()
            if not torch.equal(ours.loaded[name], expected):
                wrong.add(_owner(name))
                self._differs(name, ours.loaded[name], expected)
        for path, module in mine.items():
            if path in theirs.outcomes:
                outcome = theirs.outcomes[path] or ours.outcomes[path]
                module.outcomes.add(outcome)
                if outcome is None and path not in wrong:
                    self._compare_processed(path, ours.processed[path], theirs.processed[path])

    def _compare_processed(
        self, path: str, got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
    ) -> None:
        for name in sorted(got.keys() | expected.keys()):
            if name not in got or name not in expected or not _same(got[name], expected[name]):
                where = f"{path}.{name}".lstrip(".")
                self._problem(where, "after vLLM's processing it is not as after load_weights")

    def _differs(self, name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        unequal = (got != expected).flatten().nonzero().flatten()
        index = torch.unravel_index(unequal[0], expected.shape)
        first = [int(i) for i in index]
        senders = [
            self._name(arrival)
            for arrival, place in zip(self._landings, self._places, strict=True)
            if self._param(arrival) == name and _covers(self._plan, arrival, place, first)
        ]
        self._problem(
            ", ".join(senders) or name,
            f"{name} is not as load_weights makes it: {len(unequal)} of {expected.numel()} "
            f"elements differ, the first at {first}" + ("" if senders else ", where nothing lands"),
        )


def _side(engine: MetaEngine, rank: int, fill: Callable[[torch.nn.Module], set[str]]) -> _Side:
    with engine.worker(rank, device="cpu") as model, torch.no_grad():
        for param in model.parameters():
            if not param.is_meta:
                memory = torch.empty(0, dtype=torch.uint8)
                memory.set_(param.untyped_storage())
                memory.fill_(_PATTERN)
        changed = fill(model)
        loaded = _memory(model)
        outcomes = process(model, getattr(torch, engine.dtype))
        processed = {
            path: {
                name: bits(tensor)
                for name, tensor in own_tensors(model.get_submodule(path)).items()
                if not tensor.is_meta
            }
            for path, failure in outcomes.items()
            if failure is None
        }
        kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    return _Side(kinds, loaded, outcomes, processed, changed)


def _memory(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters and buffers. vLLM keeps some buffers for several models, on meta."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: bits(tensor).clone() for name, tensor in named if not tensor.is_meta}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and bool(torch.equal(one, other))


def _covers(plan: Plan, arrival: Arrival, place: int, index: Sequence[int]) -> bool:
    """Whether a landing writes the element at `index` of its parameter."""
    assert arrival.destination.landing is not None
    landing = plan.landings[arrival.destination.landing]
    param = plan.params[landing.param]
    shape = plan.geometries[param.geometry].shape
    strides = param.stride or [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    at = sum(i * stride for i, stride in zip(index, strides, strict=True))
    offset = arrival.destination.offset_at(place)
    sizes, steps = zip(*landing.dims, strict=True)
    reach = offset + 1 + sum((n - 1) * step for n, step in landing.dims)
    return bool((torch.arange(reach).as_strided(sizes, steps, offset) == at).any())


def _owner(param: str) -> str:
    return param.rpartition(".")[0]


def _rows(modules: Sequence[_Module]) -> tuple[ModuleRow, ...]:
    grouped = families(
        [module for module in modules if module.ranks],
        name=lambda m: m.path,
        same=lambda m: (
            m.kind,
            frozenset(m.routes),
            frozenset(m.ranks),
            frozenset(m.outcomes),
        ),
    )
    rows = []
    for name, members in grouped:
        outcomes = members[0].outcomes
        failures = sorted(outcome for outcome in outcomes if outcome is not None)
        rows.append(
            ModuleRow(
                name=name,
                kind=members[0].kind,
                modules=len(members),
                routes=tuple(r for r in ("direct", "reload", "fallback") if r in members[0].routes),
                tensors=len(set().union(*(m.tensors for m in members))),
                ranks=len(members[0].ranks),
                elements=sum(m.elements for m in members),
                processed=not failures if outcomes else None,
                why="; ".join(failures) or None,
            )
        )
    return tuple(rows)
