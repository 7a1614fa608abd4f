"""NCCL M2N: one reshard a leg, over NVIDIA's nccl-extensions and NCCL4Py.

Facts that this rests on (nccl-extensions 0.1.0, nccl4py 0.6.0, NCCL 2.30.7): all ranks of the
communicator call every reshard in one order; one is under way per communicator and stream;
calls of a process are serialized; what it stages must fit a slot of its pool; after an error
inside of one the communicator is dead. What it registers for a communicator it keeps for the
whole process, under the communicator's address, until the handle is destroyed; and that must
come before the communicator's end.
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from importlib import metadata
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from m2ncompile.dtypes import ITEMSIZE
from m2ncompile.errors import RunError
from m2ncompile.layout import Layout
from m2ncompile.legs import Leg
from m2ncompile.runtime.deadline import Deadline
from m2ncompile.runtime.transports.streams import as_here
from m2ncompile.staging import POOL_SLOTS

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["M2nTransport", "decoded_id", "pool_bytes"]

#: The first NCCL that NCCL M2N runs on.
_NCCL = (2, 30, 5)
#: `NCCL_UNIQUE_ID_BYTES`.
_ID_BYTES = 128
_POOL = "NCCL_RESHARD_PACK_BUFFSIZES"
#: Legs whose end can be waited for by itself.
_KEPT = 8
#: For a communicator to be aborted, in seconds.
_PATIENCE = 3.0
#: How often a wait looks for errors, in seconds, and whether it is over.
_LOOK, _GLANCE = 0.05, 0.0001
_ID = "m2ncompile/unique_id"

#: Whether a communicator of this process ended before its handle: another one at its address
#: would be given what was registered for it.
_left_behind = False
#: What a run of this process set for the pool, as against what was set from outside.
_pool_set: str | None = None


def pool_bytes(legs: Sequence[Leg]) -> int:
    """The largest share that a rank has of a leg, on either side: what a slot must hold."""
    return max(
        ITEMSIZE[leg.dtype] * max(prod(leg.sent_shape), prod(leg.received_shape))
        for leg in set(legs)
    )


def decoded_id(text: str) -> bytes:
    """NCCL's unique id. Raises RunError for what is none, without showing it: it is a secret."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        data = b""
    if len(data) != _ID_BYTES:
        raise RunError(f"nccl_unique_id_b64 must be base64 of the {_ID_BYTES} bytes of an NCCL id")
    return data


class M2nTransport:
    """A communicator of its own. Where no unique id is given, it comes from rank 0 over `store`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        device: torch.device,
        pool: bool = True,
        unique_id: str | None = None,
    ) -> None:
        """`pool` is whether this run sets the size of NCCL M2N's staging pool.

        `unique_id` is one of NCCL's that all ranks have already, in base64.
        """
        self._store, self._rank, self._world = store, rank, world
        self._device, self._pool, self._given = device, pool, unique_id
        self._comm: Any = None
        self._handle: Any = None
        self._legs: Sequence[Leg] = ()
        self._nothing: dict[Leg, tuple[Any, Any]] = {}
        #: By leg, the address of the buffer that was last described, and its descriptor, which
        #: does not keep it.
        self._described: dict[int, tuple[int, Any]] = {}
        #: What may still be sent or received into.
        self._in_use: list[torch.Tensor] = []
        self._done: OrderedDict[int, torch.cuda.Event] = OrderedDict()
        #: Events are recorded again and again: to make one costs as much as to record it.
        self._spare: list[torch.cuda.Event] = []
        self._watchdog: threading.Timer | None = None
        self._aborted = False

    def detached(self) -> AbstractContextManager[object]:
        return as_here(self._device)

    def prepare(self, legs: Sequence[Leg]) -> None:
        try:
            self._prepare(legs)
        except BaseException:
            if self._rank == 0 and self._given is None:
                with suppress(Exception):
                    self._store.set(_ID, b"")  # the others wait for it
            raise

    def _prepare(self, legs: Sequence[Leg]) -> None:
        if _left_behind:
            raise RunError(
                "a transfer of this process was broken off, and NCCL M2N keeps what it "
                "registered for it: restart the process"
            )
        if self._device.type != "cuda":
            raise RunError(f"NCCL M2N moves GPU memory, this rank's is on {self._device}")
        self._import()
        self._legs = legs
        # Before the first handle, and the same on all ranks: part of the identity.
        if self._pool:
            _set_pool(f"{-(-pool_bytes(legs) // (1 << 20)) << 20}:{POOL_SLOTS}")
        torch.cuda.set_device(self._device)
        self._stream, self._before = torch.cuda.Stream(self._device), torch.cuda.Event()
        for leg in set(legs):
            self._nothing[leg] = (
                self._tensor(leg.dtype, leg.sent_shape, leg.source, None),
                self._tensor(leg.dtype, leg.received_shape, leg.destination, None),
            )
        # Only `connect` needs it; who adopts a communicator has another.
        if self._given is not None:
            self._unique = decoded_id(self._given)
            return
        if self._rank == 0:
            self._store.set(_ID, bytes(self._nccl.get_unique_id().as_bytes))
        self._unique = bytes(self._store.get(_ID))
        if not self._unique:
            raise RunError("rank 0 has no NCCL id for the others")

    def _import(self) -> None:
        try:
            import nccl.core as nccl
            import nccl.m2n as m2n
        except ImportError as error:
            raise RunError(
                f"NCCL M2N is not there ({error}); pip install 'm2ncompile[nccl]'"
            ) from None
        self._nccl, self._m2n, self._descriptor = nccl, m2n, _keeping(m2n)
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
        return f"pool {os.environ.get(_POOL)}, {self._version}, id {unique}, {self._world} ranks"

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
        self._handle = self._m2n.Handle.create(self._m2n.Config())

    def adopt(self, comm: Any, handle: Any) -> None:
        """In place of `connect`: a communicator and a handle that are made already."""
        self._comm, self._handle = comm, handle

    def _tensor(self, dtype: str, shape: Sequence[int], layout: Layout, buffer: int | None) -> Any:
        m2n, resolved = self._m2n, layout.resolved()
        assert resolved.placements is not None
        return self._descriptor(
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
        if self._watchdog is None:
            # The call itself waits for a staging slot, with no deadline of its own.
            self._watchdog = threading.Timer(deadline.remaining, self._abort)
            self._watchdog.daemon = True
            self._watchdog.start()
        # What was packed, unpacked or computed so far on the caller's stream comes first.
        self._before.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._before)
        try:
            self._handle.reshard(self._comm, source, destination, stream=self._stream)
        except Exception as error:
            self._check(deadline)
            raise RunError(f"NCCL M2N failed: {error}") from error
        self._check(deadline)
        event = self._spare.pop() if self._spare else torch.cuda.Event()
        event.record(self._stream)
        self._done[leg] = event
        if len(self._done) > _KEPT:
            self._spare.append(self._done.popitem(last=False)[1])

    def _describe(self, leg: int, buffer: torch.Tensor, layout: Layout) -> Any:
        """Buffers stay where they are from sync to sync, but for a source's own."""
        assert buffer.is_contiguous()
        self._in_use.append(buffer)
        address, described = self._described.get(leg, (None, None))
        if address != buffer.data_ptr():
            address = buffer.data_ptr()
            described = self._tensor(self._legs[leg].dtype, buffer.shape, layout, address)
            self._described[leg] = address, described
        return described

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
                self._check(deadline, thoroughly=True)
            time.sleep(_GLANCE)  # for the engine's other threads
        self._check(deadline, thoroughly=True)
        self._spare += self._done.values()
        self._done.clear()
        self._in_use.clear()
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _check(self, deadline: Deadline, thoroughly: bool = False) -> None:
        if self._aborted or deadline.passed:
            raise RunError(f"the transfer did not end within {deadline.seconds:g} s")
        if (comm := self._comm) is None:
            raise RunError("the communicator is closed")
        if thoroughly and int(error := comm.get_async_error()) not in (0, 7):  # ok, in progress
            raise RunError(f"NCCL failed: {error} {comm.get_last_error()}")

    def _abort(self) -> None:
        """Ends whatever waits in the communicator, which is dead from then on."""
        global _left_behind
        self._aborted = True
        torch.cuda.set_device(self._device)  # a thread's own
        if (comm := self._comm) is not None:
            _left_behind = _left_behind or self._handle is not None
            comm.abort()

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        comm, handle, aborted = self._comm, self._handle, self._aborted
        self._described.clear()
        if comm is None or aborted:
            self._comm = self._handle = None
            return
        ended = not self._done or next(reversed(self._done.values())).query()
        if ended and handle is not None:
            torch.cuda.synchronize(self._device)
            handle.destroy()
            self._handle = None
        # Where something is under way that may never end, the communicator ends it. Nothing
        # bounds that either.
        ending = threading.Thread(target=self._abort, name="m2ncompile-abort", daemon=True)
        ending.start()
        ending.join(_PATIENCE)
        self._comm = self._handle = None


def _keeping(m2n: Any) -> Any:
    """NCCL M2N's descriptor of a tensor, which makes its binding with each call, made once."""

    class Tensor(m2n.DistTensor):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._kept = super().as_binding()

        def as_binding(self) -> Any:
            return self._kept

    return Tensor


def _set_pool(value: str) -> None:
    """Unless it was set from outside of this process."""
    global _pool_set
    if os.environ.get(_POOL) in (None, _pool_set):
        os.environ[_POOL] = _pool_set = value


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
