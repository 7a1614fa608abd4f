"""The trainer's side of a run: `Trainer.send` gives all weights to all workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING

import torch

from m2ncompile.errors import RunError
from m2ncompile.legs import legs_of
from m2ncompile.plan import Plan
from m2ncompile.runtime.bind_trainer import Send, TrainerBinding, bind_trainer
from m2ncompile.runtime.control import ControlPlane, Watch
from m2ncompile.runtime.copies import copy_all
from m2ncompile.runtime.deadline import Deadline
from m2ncompile.runtime.pack import pack_rows
from m2ncompile.runtime.session import Session
from m2ncompile.runtime.shards import Shards
from m2ncompile.runtime.stats import SyncStats
from m2ncompile.runtime.transports.base import Transport
from m2ncompile.staging import BUFFERS
from m2ncompile.views import View, contiguous

if TYPE_CHECKING:
    from m2ncompile.runtime.stock import StockSession

__all__ = ["Trainer"]

Progress = Callable[[int, int], None]


class Trainer:
    """One trainer rank. Every rank constructs one, and calls `send` after each step.

    `timeout` bounds each phase of the start, and in each sync the wait for all ranks and then
    the transfer, in seconds. Raises RunError, the same on all ranks, when any of them can't go on.
    """

    def __init__(
        self,
        load: Callable[[], Plan],
        shards: Shards,
        control: ControlPlane,
        transport: Transport,
        *,
        trainers: int,
        timeout: float,
        device: torch.device | None = None,
        watch: Watch | None = None,
    ) -> None:
        session = Session(control, transport, trainers, timeout, watch)
        self._start(load, shards, session, device)

    @classmethod
    def over(
        cls,
        session: StockSession,
        load: Callable[[], Plan],
        shards: Shards,
        device: torch.device,
    ) -> Trainer:
        """With workers that are not ours."""
        trainer = cls.__new__(cls)
        trainer._start(load, shards, session, device)
        return trainer

    def _start(
        self,
        load: Callable[[], Plan],
        shards: Shards,
        session: Session | StockSession,
        device: torch.device | None,
    ) -> None:
        self._shards, self._device = shards, device or torch.device("cpu")
        self._on_gpu = self._device.type == "cuda"
        self._session = session
        self.plan, self._binding = session.establish(load, self._bind)
        self._version = 0

    def _bind(self, plan: Plan) -> TrainerBinding:
        described = self._shards.describe()
        binding = bind_trainer(plan, described, self._session.rank)
        index = {tensor.name: number for number, tensor in enumerate(plan.tensors)}
        #: In the order in which the source gives them out; None for what is not sent.
        self._order = [(one.name, index.get(one.name)) for one in described]
        self._dtypes: list[torch.dtype] = [
            getattr(torch, plan.dtypes[plan.geometries[t.geometry].dtype]) for t in plan.tensors
        ]
        #: By tensor, what this rank's shard of it must be like.
        self._shapes = [torch.Size(shape) for shape in binding.shapes]
        #: By leg and part, the tensor, and the view of its shard where it is not sent as it is.
        self._parts = [
            [
                (part.tensor, None if _is_all(part.view, shape) else part.view)
                for part in send.parts
                for shape in (binding.shapes[part.tensor],)
            ]
            for send in (one or Send((), False) for one in binding.sends)
        ]
        self._rows = [None if one is None else one.rows for one in binding.sends]
        self._scratch = {
            dtype: torch.empty(numel, dtype=getattr(torch, dtype), device=self._device)
            for dtype, numel in binding.scratch_numel.items()
        }
        #: By leg, what this rank sends, as the transport sees it.
        self._sent = [leg.sent_shape for leg in legs_of(plan)]
        #: By dtype two buffers: one is packed while the other is sent.
        self._packed = {
            dtype: torch.empty(BUFFERS, numel, dtype=getattr(torch, dtype), device=self._device)
            for dtype, numel in binding.packed_numel.items()
        }
        return binding

    @property
    def unusable(self) -> str | None:
        """Why no more syncs are possible; None while they are."""
        return self._session.unusable

    def send(self, version: str | None = None, progress: Progress | None = None) -> SyncStats:
        """Sends all weights, as of now; every trainer rank calls it, and every worker receives.

        `version` names them, the same on all ranks; they are counted where it is not
        given. Weights must not change until it returns. Raises RunError, the
        same on all ranks; `unusable` then says whether another sync is possible.
        """
        started = time.perf_counter()
        name = str(self._version + 1 if version is None else version)
        _, nbytes, agreeing = self._session.sync(name, lambda _, d: self._run(d, progress))
        self._version += 1
        buffers = (*self._packed.values(), *self._scratch.values())
        staging = sum(memory.nbytes for memory in buffers)
        return SyncStats(name, time.perf_counter() - started, agreeing, nbytes, staging)

    def _run(self, deadline: Deadline, progress: Progress | None) -> int:
        binding, transport = self._binding, self._session.transport
        assert transport is not None
        given: dict[int, torch.Tensor] = {}
        #: Leg that last used each of the packed buffers.
        used: dict[int, int] = {}
        nbytes = taken = packed = 0
        if self._on_gpu:
            torch.cuda.synchronize(self._device)  # the step may have run on other streams
        with torch.no_grad():
            source = iter(self._shards.items(binding.whole))
            for leg, send in enumerate(binding.sends):
                while taken < binding.needed[leg]:
                    self._take(source, taken, given)
                    taken += 1
                if send is None:
                    piece = None
                elif send.packed:
                    if packed in used:
                        transport.fence(used[packed], deadline)
                    piece = self._pack(leg, given, packed)
                    used[packed], packed = leg, 1 - packed
                else:
                    piece = _view(given, *self._parts[leg][0])
                transport.run(leg, piece, None, deadline)
                if piece is not None:
                    nbytes += piece.numel() * piece.element_size()
                for tensor in binding.dropped[leg]:
                    del given[tensor]
                if progress is not None:
                    progress(leg + 1, len(binding.sends))
            while taken < len(self._order):  # collectives of the source run on all ranks
                self._take(source, taken, given)
                taken += 1
            if (extra := next(source, None)) is not None:
                raise RunError(f"the source gave out {extra[0]} after its last tensor")
            transport.wait(deadline)
        return nbytes

    def _pack(self, leg: int, given: dict[int, torch.Tensor], slot: int) -> torch.Tensor:
        """What this rank sends in a leg, copied together."""
        pieces = [_view(given, tensor, view) for tensor, view in self._parts[leg]]
        dtype = str(pieces[0].dtype).removeprefix("torch.")
        numel = prod(self._sent[leg])
        packed = self._packed[dtype][slot, :numel].view(self._sent[leg])
        # Stacks are exact to the bit, and take a tenth of the host's time of fused copies.
        if (form := self._rows[leg]) is not None:
            cut = form.cut and len(pieces) > 1
            pack_rows(pieces, packed, form, self._scratch[dtype][:numel] if cut else None)
        elif len(pieces) > 1:
            torch.stack(pieces, out=packed)
        else:
            copy_all([packed], pieces)
        return packed

    def _take(
        self,
        source: Iterator[tuple[str, torch.Tensor]],
        position: int,
        given: dict[int, torch.Tensor],
    ) -> None:
        """The next tensor of the source, which must be what it was when it was bound."""
        name, index = self._order[position]
        got = next(source, None)
        if got is None:
            raise RunError(
                f"the source gave out {position} tensors, and {len(self._order)} when it was "
                f"bound: {name} is missing"
            )
        if got[0] != name:
            raise RunError(
                f"the source gave out {got[0]} as number {position}; when it was bound, that "
                f"was {name}"
            )
        if index is None:
            return
        shard, shape = got[1], self._shapes[index]
        if shard.shape != shape or shard.dtype != self._dtypes[index]:
            raise RunError(
                f"{name}: the source gave out {shard.dtype} {list(shard.shape)}, it must be "
                f"{self._dtypes[index]} {list(shape)}"
            )
        if shard.is_cuda != self._on_gpu:
            raise RunError(f"{name}: its shard is on {shard.device}, the run is on {self._device}")
        if not shard.is_contiguous():
            raise RunError(f"{name}: its shard has strides {list(shard.stride())}, not row-major")
        given[index] = shard

    def close(self) -> None:
        """Ends the run for this rank."""
        self._session.close()


def _is_all(view: View, shape: tuple[int, ...]) -> bool:
    """Whether a view of a row-major shard of `shape` is the shard as it is."""
    return view.shape == shape and view.offset == 0 and contiguous(view)


def _view(given: dict[int, torch.Tensor], tensor: int, view: View | None) -> torch.Tensor:
    shard = given[tensor]
    if view is None:
        return shard
    return shard.as_strided(view.shape, view.strides, shard.storage_offset() + view.offset)
