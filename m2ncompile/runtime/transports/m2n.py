"""NCCL M2N: one reshard a leg, over NVIDIA's nccl-extensions and NCCL4Py.

Facts that this rests on (nccl-extensions 0.1.0, nccl4py 0.6.0, NCCL 2.30.7): all ranks of the
communicator call every reshard in one order; one is under way per communicator and stream;
calls of a process are serialized; what it stages must fit a slot of its pool; after an error
inside of one the communicator is dead.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from importlib import metadata
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from m2ncompile.dtypes import ITEMSIZE
from m2ncompile.errors import RunError
from m2ncompile.layout import Layout
from m2ncompile.runtime.deadline import Deadline
from m2ncompile.runtime.legs import Leg

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["M2nTransport", "pool_bytes"]

#: The first NCCL that NCCL M2N runs on.
_NCCL = (2, 30, 5)
_POOL = "NCCL_RESHARD_PACK_BUFFSIZES"
_POOL_SLOTS = 2
#: Legs whose end can be waited for by itself.
_KEPT = 8
#: How often a wait looks for errors, in seconds.
_LOOK = 0.05


def pool_bytes(legs: Sequence[Leg]) -> int:
    """The largest share that a rank has of a leg, on either side: what a slot must hold."""
    return max(
        ITEMSIZE[leg.dtype] * max(prod(leg.sent_shape), prod(leg.received_shape))
        for leg in set(legs)
    )


class M2nTransport:
    """A communicator of its own. The unique id comes from rank 0 over `store`."""

    def __init__(
        self, store: Store, rank: int, world: int, device: torch.device, max_cta: int | None = None
    ) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._device, self._max_cta = device, max_cta
        self._comm: Any = None
        self._handle: Any = None
        self._legs: Sequence[Leg] = ()
        self._nothing: dict[Leg, tuple[Any, Any]] = {}
        self._described: dict[tuple[int, int], Any] = {}
        self._done: OrderedDict[int, torch.cuda.Event] = OrderedDict()

    def prepare(self, legs: Sequence[Leg]) -> None:
        if self._device.type != "cuda":
            raise RunError(f"NCCL M2N moves GPU memory, this rank's is on {self._device}")
        self._import()
        self._legs = legs
        # Before the first handle, and the same on all ranks: part of the identity.
        os.environ.setdefault(_POOL, f"{-(-pool_bytes(legs) // (1 << 20)) << 20}:{_POOL_SLOTS}")
        torch.cuda.set_device(self._device)
        self._stream = torch.cuda.Stream(self._device)
        for leg in set(legs):
            self._nothing[leg] = (
                self._tensor(leg.dtype, leg.sent_shape, leg.source, None),
                self._tensor(leg.dtype, leg.received_shape, leg.destination, None),
            )
        # Only `connect` needs it; who adopts a communicator has another.
        if self._rank == 0:
            unique = bytes(self._nccl.get_unique_id().as_bytes)
            self._store.set("m2ncompile/unique_id", unique)
        self._unique = bytes(self._store.get("m2ncompile/unique_id"))

    def _import(self) -> None:
        try:
            import nccl.core as nccl
            import nccl.m2n as m2n
        except ImportError as error:
            raise RunError(
                f"NCCL M2N is not there ({error}); pip install 'm2ncompile[nccl]'"
            ) from None
        self._nccl, self._m2n = nccl, m2n
        library = nccl.get_version().libnccl
        words = "none" if library is None else str(library.version)
        if library is None or _numbers(words) < _NCCL:
            needed = ".".join(map(str, _NCCL))
            raise RunError(
                f"NCCL M2N needs NCCL {needed} or newer, this process has loaded {words}; "
                "set LD_PRELOAD to the newer libnccl.so.2 before Python starts"
            )
        self._version = f"nccl {words}, m2n {metadata.version('nccl-extensions')}"

    @property
    def identity(self) -> str:
        unique = hashlib.sha256(self._unique).hexdigest()[:12]
        return f"{self._version}, {self._world} ranks, id {unique}, pool {os.environ[_POOL]}"

    def connect(self, deadline: Deadline) -> None:
        """Raises RunError when not all ranks come in time."""
        found: list[Any] = []

        def join() -> None:
            torch.cuda.set_device(self._device)
            try:
                unique = self._nccl.UniqueId.from_bytes(self._unique)
                found.append(
                    self._nccl.Communicator.init(
                        nranks=self._world, rank=self._rank, unique_id=unique
                    )
                )
            except Exception as error:  # told by whoever waits for this
                found.append(error)

        # NCCL has no deadline for this: a thread that it keeps is left behind.
        joining = threading.Thread(target=join, name="m2ncompile-nccl", daemon=True)
        joining.start()
        joining.join(deadline.remaining)
        if not found:
            raise RunError(f"not all ranks joined the communicator in {deadline.seconds:g} s")
        if isinstance(found[0], Exception):
            raise found[0]
        self._comm = found[0]
        self._handle = self._m2n.Handle.create(self._m2n.Config(max_cta=self._max_cta))

    def adopt(self, comm: Any, handle: Any) -> None:
        """In place of `connect`: a communicator and a handle that are made already."""
        self._comm, self._handle = comm, handle

    def _tensor(
        self, dtype: str, shape: Sequence[int], layout: Layout, buffer: torch.Tensor | None
    ) -> Any:
        m2n, resolved = self._m2n, layout.resolved()
        assert resolved.placements is not None
        return m2n.DistTensor(
            buffer,
            local_shape=list(shape),
            dtype=getattr(torch, dtype),
            mesh=m2n.Mesh(resolved.mesh.dims, start_rank=resolved.mesh.start),
            placements=[
                m2n.Replicate() if code < 0 else m2n.Shard(code) for code in resolved.placements
            ],
        )

    def run(
        self,
        leg: int,
        send: torch.Tensor | None,
        receive: torch.Tensor | None,
        deadline: Deadline,
    ) -> None:
        kind = self._legs[leg]
        source, destination = self._nothing[kind]
        if send is not None:
            source = self._describe(leg, send, kind.source)
        if receive is not None:
            destination = self._describe(leg, receive, kind.destination)
        # What was packed, unpacked or computed so far on the caller's stream comes first.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._handle.reshard(self._comm, source, destination, stream=self._stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        self._done[leg] = event
        if len(self._done) > _KEPT:
            self._done.popitem(last=False)

    def _describe(self, leg: int, buffer: torch.Tensor, layout: Layout) -> Any:
        """Buffers stay where they are from sync to sync, but for a source's own."""
        key = leg, buffer.data_ptr()
        if key not in self._described:
            for stale in [one for one in self._described if one[0] == leg]:
                del self._described[stale]
            kind = self._legs[leg]
            self._described[key] = self._tensor(kind.dtype, buffer.shape, layout, buffer)
        return self._described[key]

    def fence(self, leg: int, deadline: Deadline) -> None:
        # One stream runs them in order: where the leg's own event is no longer kept, a later one.
        event = next((event for kept, event in self._done.items() if kept >= leg), None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def wait(self, deadline: Deadline) -> None:
        current, event = torch.cuda.current_stream(self._device), torch.cuda.Event()
        current.wait_stream(self._stream)
        event.record(current)
        looked = time.monotonic()
        while not event.query():
            now = time.monotonic()
            if now - looked > _LOOK:
                looked = now
                self._check()
                if deadline.passed:
                    raise RunError(f"the transfer did not end within {deadline.seconds:g} s")
                time.sleep(0.001)
        self._check()
        self._done.clear()

    def _check(self) -> None:
        if (comm := self._comm) is None:
            raise RunError("the communicator is closed")
        error = comm.get_async_error()
        if int(error) not in (0, 7):  # success, in progress
            raise RunError(f"NCCL failed: {error} {comm.get_last_error()}")

    def close(self) -> None:
        comm, self._comm = self._comm, None
        handle, self._handle = self._handle, None
        self._described.clear()
        if comm is None:
            return
        if self._done and not next(reversed(self._done.values())).query():
            # Something is under way that may never end: the communicator ends it.
            comm.abort()
            return
        torch.cuda.synchronize(self._device)
        if handle is not None:
            handle.destroy()
        comm.abort()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
