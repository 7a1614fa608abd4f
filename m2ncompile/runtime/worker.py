"""The worker's side of a run: `Worker.receive` takes all weights into one module."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import prod

import torch

from m2ncompile.errors import EngineError
from m2ncompile.legs import legs_of
from m2ncompile.plan import Plan
from m2ncompile.runtime.bind_worker import Part, Receive, Staged, WorkerBinding, bind_worker
from m2ncompile.runtime.control import ControlPlane
from m2ncompile.runtime.copies import Copies, copy_all
from m2ncompile.runtime.deadline import Deadline
from m2ncompile.runtime.session import Session
from m2ncompile.runtime.stats import RouteStats, SyncStats
from m2ncompile.runtime.target import Target
from m2ncompile.runtime.transports.base import Transport
from m2ncompile.runtime.unpack import seen, unpacking
from m2ncompile.staging import BUFFERS
from m2ncompile.views import View

__all__ = ["Worker"]

Progress = Callable[[int, int], None]


class Worker:
    """One worker rank. As `Trainer`; it calls `receive` whenever the trainers send.

    `version` is that of the weights in the module, None before the first sync;
    `unusable` says when they may be mixed.
    """

    def __init__(
        self,
        load: Callable[[], Plan],
        target: Target,
        control: ControlPlane,
        transport: Transport,
        *,
        trainers: int,
        timeout: float,
    ) -> None:
        self.version: str | None = None
        self._target = target
        self._session = Session(control, transport, trainers, timeout)
        self.plan, self._binding = self._session.establish(load, self._bind)

    def _bind(self, plan: Plan) -> WorkerBinding:
        engine, target = plan.inputs.engine, self._target
        if target.version != engine.version:
            raise EngineError(
                f"the plan is for vLLM {engine.version}, this worker runs {target.version}; "
                f'build it with engine.version = "{target.version}"'
            )
        if target.platform not in (None, engine.target):
            # It decides what post-load processing does, hence what may be written directly.
            raise EngineError(
                f"the plan is for {engine.target}, this worker runs on {target.platform}; "
                f'build it with engine.target = "{target.platform}"'
            )
        target.check(plan)
        binding = bind_worker(plan, target, self._session.rank)
        self._staging = torch.empty(binding.staging_nbytes, dtype=torch.uint8, device=target.device)
        #: By dtype two buffers: one is emptied while the other is received into.
        self._apart = {
            dtype: torch.empty(BUFFERS, numel, dtype=getattr(torch, dtype), device=target.device)
            for dtype, numel in binding.apart_numel.items()
        }
        staged = {one.name: self._staged(one) for group in binding.staged.values() for one in group}
        #: (whole name, what `load` gets) by the leg that completes it.
        self._complete = {
            leg: [(one.name, staged[one.name]) for one in group]
            for leg, group in binding.staged.items()
        }
        #: Staging memory to clear before a leg, since something of it never arrives.
        self._cleared: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for one in (one for group in binding.staged.values() for one in group if one.zeroed):
            self._cleared[one.first].append(self._staging[one.start : one.start + one.nbytes])
        live = target.live()
        legs = legs_of(plan)
        self._shapes = [leg.received_shape for leg in legs]
        self._dtypes: list[torch.dtype] = [getattr(torch, leg.dtype) for leg in legs]
        #: By leg, where it is received; None where loaders get memory of their own.
        self._buffers: list[torch.Tensor | None] = []
        #: What is received apart, to where it goes.
        self._unpack: dict[int, Copies] = {}
        for leg, receive in enumerate(binding.receives):
            if receive is None or receive.route == "fallback":
                self._buffers.append(None)
                continue
            into = staged if receive.route == "reload" else live
            if receive.apart:
                self._buffers.append(self._apart_of(leg))
                self._unpack[leg] = unpacking(receive, self._apart_of(leg), into)
                continue
            # Of several parts, the first is where the run begins.
            part = receive.parts[0]
            assert part.into is not None and part.view is not None
            start = View(part.view.offset, self._shapes[leg], _row_major(self._shapes[leg]))
            self._buffers.append(seen(into[part.into], start))
        #: What is written directly, and where that is.
        self._direct = {
            part.into: (live[part.into], _at(live[part.into]))
            for receive in binding.receives
            if receive is not None and receive.route == "direct"
            for part in receive.parts
            if part.into is not None
        }
        #: By tensor, what has arrived so far of those that fall back in parts.
        self._partials: dict[int, torch.Tensor] = {}
        counts: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for leg, receive in enumerate(binding.receives):
            if receive is not None:
                counts[receive.route] += len(receive.parts)
                numel = torch.Size(self._shapes[leg]).numel()
                nbytes[receive.route] += numel * self._dtypes[leg].itemsize
        self._routes = tuple(RouteStats(r, counts[r], nbytes[r]) for r in sorted(counts))
        return binding

    def _replaced(self) -> str | None:
        """Which parameters are no longer the memory that was bound, in words."""
        found = []
        for name, (bound, at) in self._direct.items():
            held = self._target.held(name)
            # Of the same tensor no more than that: an engine's parameters are slow to ask.
            same = held is bound and held.data_ptr() == at[0]
            if not same and (held is None or _at(held) != at):
                found.append(name)
        if not found:
            return None
        return (
            f"{len(found)} of its parameters are not in the memory, or of the shape, that they "
            f"had at the start, such as {found[0]}: connect again"
        )

    def _staged(self, one: Staged) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, one.form.dtype)
        memory = self._staging[one.start : one.start + one.nbytes].view(dtype)
        return memory.as_strided(one.form.shape, one.form.strides)

    @property
    def unusable(self) -> str | None:
        """Why no more syncs are possible, and what that means for the weights, or None."""
        return self._session.unusable

    def receive(self, progress: Progress | None = None) -> SyncStats:
        """Takes one sync. Raises RunError, the same on all ranks.

        The module can't be used meanwhile. When it failed after data moved, the
        weights may be mixed, and `unusable` says so.
        """
        started = time.perf_counter()
        version, _, agreeing = self._session.sync(
            "", lambda _, deadline: self._run(deadline, progress), self._replaced()
        )
        self.version = version
        seconds = time.perf_counter() - started
        nbytes = sum(route.nbytes for route in self._routes)
        staging = sum(memory.nbytes for memory in (self._staging, *self._apart.values()))
        return SyncStats(version, seconds, agreeing, nbytes, staging, self._routes)

    def _run(self, deadline: Deadline, progress: Progress | None) -> bool:
        target, binding = self._target, self._binding
        with torch.no_grad():
            try:
                first = self._receive(0, deadline)
                # While the first leg is under way: an engine takes some milliseconds for it.
                target.begin(binding.reloaded, binding.falls_back)
                arriving = self._arriving(first, deadline, progress)
                if binding.falls_back:
                    target.load_weights(arriving)
                for _ in arriving:  # all of it without fallbacks; what loaders left otherwise
                    pass
                self._session.transport.wait(deadline)
                target.finish()
                target.synchronize()
            except BaseException:
                with suppress(Exception):  # what failed first is what is told
                    target.abandon()
                raise
        return True

    def _receive(self, leg: int, deadline: Deadline) -> torch.Tensor | None:
        """Begins a leg; the memory that it is received in, if it is."""
        for memory in self._cleared.get(leg, ()):
            memory.zero_()
        receive = self._binding.receives[leg]
        buffer = None if receive is None else self._buffer(leg, receive)
        self._session.transport.run(leg, None, buffer, deadline)
        return buffer

    def _arriving(
        self, first: torch.Tensor | None, deadline: Deadline, progress: Progress | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Runs the legs after `first`; gives out what falls back, for the engine's loaders."""
        legs, before = len(self._binding.receives), first
        for leg in range(legs):
            # The next one is under way while this one is settled.
            after = self._receive(leg + 1, deadline) if leg + 1 < legs else None
            yield from self._settle(leg, before, deadline)
            before = after
            if progress is not None:
                progress(leg + 1, legs)

    def _settle(
        self, leg: int, buffer: torch.Tensor | None, deadline: Deadline
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Puts what arrived in a leg where it belongs, and hands over what that completes."""
        receive, complete = self._binding.receives[leg], self._complete.get(leg, ())
        apart = receive is not None and receive.apart
        if apart or complete or (receive is not None and receive.route == "fallback"):
            self._session.transport.fence(leg, deadline)
        if leg in self._unpack:
            self._unpack[leg].run()
        elif receive is not None and buffer is not None and receive.route == "fallback":
            if receive.parts[0].view is not None:
                (part,) = receive.parts
                whole, place = self._partial(part)
                if apart:
                    copy_all([place], [buffer.view(place.shape)])
                if receive.last:
                    del self._partials[part.tensor]
                    yield self.plan.tensors[part.tensor].name, whole
            else:
                pieces = buffer.unbind() if len(receive.parts) > 1 else (buffer,)
                for part, piece in zip(receive.parts, pieces, strict=True):
                    tensor = self.plan.tensors[part.tensor]
                    shape = self.plan.geometries[tensor.geometry].shape
                    yield tensor.name, piece.view(shape)
        for name, value in complete:
            self._target.load(name, value)

    def _buffer(self, leg: int, receive: Receive) -> torch.Tensor:
        """Contiguous memory for a leg, as this rank's shard of it."""
        shape = self._shapes[leg]
        if (buffer := self._buffers[leg]) is not None:
            return buffer
        if receive.parts[0].view is None:
            # Loaders may keep a tensor until its module is complete: memory of its own.
            return torch.empty(shape, dtype=self._dtypes[leg], device=self._target.device)
        _, place = self._partial(receive.parts[0])
        if receive.apart:
            return self._apart_of(leg)
        return place.as_strided(shape, _row_major(shape), place.storage_offset())

    def _apart_of(self, leg: int) -> torch.Tensor:
        # Legs are settled one behind: two buffers are enough if they alternate by leg.
        apart = self._apart[str(self._dtypes[leg]).removeprefix("torch.")][leg % 2]
        return apart[: prod(self._shapes[leg])].view(self._shapes[leg])

    def _partial(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor that falls back and arrives in parts, and the place in it of this one."""
        assert part.view is not None
        if (whole := self._partials.get(part.tensor)) is None:
            geometry = self.plan.geometries[self.plan.tensors[part.tensor].geometry]
            dtype: torch.dtype = getattr(torch, self.plan.dtypes[geometry.dtype])
            whole = torch.empty(geometry.shape, dtype=dtype, device=self._target.device)
            self._partials[part.tensor] = whole
        return whole, seen(whole, part.view)

    def close(self) -> None:
        """Ends the run for this rank."""
        self._session.close()


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _at(tensor: torch.Tensor) -> tuple[object, ...]:
    """Which memory, seen as what."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
