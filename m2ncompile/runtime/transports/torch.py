"""Point-to-point messages over torch.distributed: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed as dist

from m2ncompile.errors import RunError
from m2ncompile.layout import Box
from m2ncompile.legs import Leg
from m2ncompile.runtime.deadline import Deadline
from m2ncompile.runtime.transports.routes import messages
from m2ncompile.runtime.transports.streams import as_here

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["TorchTransport"]

#: Legs under way at once. Enough to keep a link busy, few enough for its queues.
_WINDOW = 32


class _Part(NamedTuple):
    """This rank's end of a message; `run` where the box is contiguous in the rank's shard."""

    peer: int
    slices: tuple[slice, ...]
    run: bool


class _Ends(NamedTuple):
    sends: tuple[_Part, ...]
    receives: tuple[_Part, ...]


class _Started(NamedTuple):
    """A leg under way: what to wait for, then what to copy where."""

    leg: int
    works: list[Any]
    copies: list[tuple[torch.Tensor, torch.Tensor]]


class TorchTransport:
    """A process group of its own over `store`, apart from those of trainer and engine."""

    def __init__(
        self, store: Store, rank: int, world: int, device: torch.device | None = None
    ) -> None:
        self._device = torch.device("cpu") if device is None else device
        self._rank, self._world = rank, world
        self._store: Store | None = store
        self._group: Any = None
        self._ends: dict[Leg, _Ends] = {}
        self._legs: Sequence[Leg] = ()
        self._started: deque[_Started] = deque()

    @property
    def identity(self) -> str:
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        return f"torch {backend}, {self._world} ranks"

    def detached(self) -> AbstractContextManager[object] | None:
        if self._device.type != "cuda":
            return None
        return as_here(self._device)

    def prepare(self, legs: Sequence[Leg]) -> None:
        self._legs = legs
        largest = 0
        for leg in set(legs):
            sends, receives = [], []
            for message in messages(leg):
                if message.sender == self._rank:
                    sends.append(_part(message.receiver, message.sent, leg.sent_shape))
                if message.receiver == self._rank:
                    receives.append(_part(message.sender, message.received, leg.received_shape))
            self._ends[leg] = _Ends(tuple(sends), tuple(receives))
            cut = sum(_numel(part) for part in (*sends, *receives) if not part.run)
            largest = max(largest, cut * getattr(torch, leg.dtype).itemsize)
        # What is cut out of a tensor goes through memory of its own, a slot for each leg.
        slot = -(-largest // 256) * 256
        self._slots = torch.empty(_WINDOW, slot, dtype=torch.uint8, device=self._device)
        self._next = 0

    def connect(self, deadline: Deadline) -> None:
        assert self._store is not None
        store, self._store = dist.PrefixStore("m2ncompile/torch", self._store), None
        store.set_timeout(deadline.timeout())
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = deadline.timeout()
            self._group = dist.ProcessGroupNCCL(store, self._rank, self._world, options)
        else:
            self._group = dist.ProcessGroupGloo(store, self._rank, self._world, deadline.timeout())

    def run(
        self,
        leg: int,
        send: torch.Tensor | None,
        receive: torch.Tensor | None,
        deadline: Deadline,
    ) -> None:
        ends = self._ends[self._legs[leg]]
        if not ends.sends and not ends.receives:
            return
        self._check_open()
        if len(self._started) == _WINDOW:
            self._finish(self._started.popleft(), deadline)
        started = _Started(leg, [], [])
        self._started.append(started)
        scratch = _Scratch(self._slots[self._next])
        self._next = (self._next + 1) % _WINDOW
        if send is not None:
            for part in ends.sends:
                piece = send[part.slices]
                if not part.run:
                    piece = scratch.like(piece).copy_(piece)
                started.works.append(self._group.send([piece.flatten()], part.peer, leg))
        if receive is not None:
            for part in ends.receives:
                piece = receive[part.slices]
                if not part.run:
                    whole, piece = piece, scratch.like(piece)
                    started.copies.append((whole, piece))
                started.works.append(self._group.recv([piece.flatten()], part.peer, leg))

    def fence(self, leg: int, deadline: Deadline) -> None:
        while self._started and self._started[0].leg <= leg:
            self._finish(self._started.popleft(), deadline)

    def wait(self, deadline: Deadline) -> None:
        while self._started:
            self._finish(self._started.popleft(), deadline)
        self._check_open()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _check_open(self) -> None:
        """Closing drops what is under way: without this a wait would take it for done."""
        if self._group is None:
            raise RunError("it was closed")

    def _finish(self, started: _Started, deadline: Deadline) -> None:
        for work in started.works:
            if deadline.passed:
                raise RunError(f"the transfer did not end within {deadline.seconds:g} s")
            work.wait(deadline.timeout())
        for whole, piece in started.copies:
            whole.copy_(piece)

    def close(self) -> None:
        group, self._group = self._group, None
        self._store = None
        self._started.clear()
        if group is not None:
            group.abort()


class _Scratch:
    """Cuts tensors, all of one dtype, out of a slot."""

    def __init__(self, slot: torch.Tensor) -> None:
        self._slot, self._used = slot, 0

    def like(self, piece: torch.Tensor) -> torch.Tensor:
        start, self._used = self._used, self._used + piece.numel() * piece.element_size()
        return self._slot[start : self._used].view(piece.dtype).view(piece.shape)


def _part(peer: int, box: Box, shape: tuple[int, ...]) -> _Part:
    run, cut = True, False
    for (a, b), size in zip(reversed(box), reversed(shape), strict=True):
        run &= not cut or b - a == 1
        cut |= b - a != size
    return _Part(peer, tuple(slice(a, b) for a, b in box), run)


def _numel(part: _Part) -> int:
    numel = 1
    for one in part.slices:
        numel *= one.stop - one.start
    return numel
