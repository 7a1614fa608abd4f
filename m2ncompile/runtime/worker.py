"""The worker's side of a run: `Worker.receive` takes all weights into one module."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import torch

from m2ncompile.errors import EngineError
from m2ncompile.plan import Plan
from m2ncompile.runtime.bind_worker import Receive, Staged, WorkerBinding, bind_worker
from m2ncompile.runtime.control import ControlPlane
from m2ncompile.runtime.deadline import Deadline
from m2ncompile.runtime.legs import legs_of
from m2ncompile.runtime.session import Session
from m2ncompile.runtime.stats import RouteStats, SyncStats
from m2ncompile.runtime.target import Target
from m2ncompile.runtime.transports.base import Transport
from m2ncompile.runtime.views import View

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
        binding = bind_worker(plan, target, self._session.rank)
        self._staging = torch.empty(binding.staging_nbytes, dtype=torch.uint8, device=target.device)
        self._apart = {
            dtype: torch.empty(numel, dtype=getattr(torch, dtype), device=target.device)
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
        #: By leg, where what arrives belongs; None where that is not known before it does.
        self._places: list[torch.Tensor | None] = []
        for receive in binding.receives:
            if receive is None or receive.into is None or receive.view is None:
                self._places.append(None)
                continue
            into = staged if receive.route == "reload" else live
            self._places.append(_view(into[receive.into], receive.view))
        legs = legs_of(plan)
        self._shapes = [leg.received_shape for leg in legs]
        self._dtypes: list[torch.dtype] = [getattr(torch, leg.dtype) for leg in legs]
        counts = Counter(r.route for r in binding.receives if r is not None)
        nbytes: Counter[str] = Counter()
        for leg, receive in enumerate(binding.receives):
            if receive is not None:
                numel = torch.Size(self._shapes[leg]).numel()
                nbytes[receive.route] += numel * self._dtypes[leg].itemsize
        self._routes = tuple(RouteStats(r, counts[r], nbytes[r]) for r in sorted(counts))
        return binding

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
            "", lambda _, deadline: self._run(deadline, progress)
        )
        self.version = version
        seconds = time.perf_counter() - started
        nbytes = sum(route.nbytes for route in self._routes)
        return SyncStats(version, seconds, agreeing, nbytes, self._routes)

    def _run(self, deadline: Deadline, progress: Progress | None) -> bool:
        target, binding = self._target, self._binding
        with torch.no_grad():
            try:
                target.begin(binding.reloaded, binding.falls_back)
                arriving = self._arriving(deadline, progress)
                if binding.falls_back:
                    target.load_weights(arriving)
                for _ in arriving:  # all of it without fallbacks; what loaders left otherwise
                    pass
                self._session.transport.wait(deadline)
                target.finish()
                target.synchronize()
            except BaseException:
                target.abandon()
                raise
        return True

    def _arriving(
        self, deadline: Deadline, progress: Progress | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Runs all legs; gives out what falls back, for the engine's own loaders."""
        transport = self._session.transport
        for leg, receive in enumerate(self._binding.receives):
            for memory in self._cleared.get(leg, ()):
                memory.zero_()
            if receive is None:
                transport.run(leg, None, None, deadline)
            else:
                buffer = self._buffer(leg, receive)
                transport.run(leg, None, buffer, deadline)
                place = self._places[leg]
                if receive.apart and place is not None:
                    transport.wait(deadline)
                    place.copy_(buffer.view(place.shape))
                if receive.route == "fallback":
                    transport.wait(deadline)
                    tensor = self.plan.tensors[receive.tensor]
                    shape = self.plan.geometries[tensor.geometry].shape
                    yield tensor.name, buffer.view(shape)
            if leg in self._complete:
                transport.wait(deadline)
                for name, value in self._complete[leg]:
                    self._target.load(name, value)
            if progress is not None:
                progress(leg + 1, len(self._binding.receives))

    def _buffer(self, leg: int, receive: Receive) -> torch.Tensor:
        """Contiguous memory for a leg, as this rank's shard of the wire."""
        place, shape = self._places[leg], self._shapes[leg]
        if receive.apart:
            apart = self._apart[str(self._dtypes[leg]).removeprefix("torch.")]
            return apart[: torch.Size(shape).numel()].view(shape)
        if place is not None:
            return place.view(shape)
        # Loaders may keep a whole tensor until its module is complete: memory of its own.
        return torch.empty(shape, dtype=self._dtypes[leg], device=self._target.device)

    def close(self) -> None:
        """Ends the run for this rank."""
        self._session.close()


def _view(tensor: torch.Tensor, view: View) -> torch.Tensor:
    memory = tensor.detach()
    return memory.as_strided(view.shape, view.strides, memory.storage_offset() + view.offset)
