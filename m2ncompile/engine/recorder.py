"""Records what a model's `load_weights` copies where, without data.

Checkpoint tensors are meta tensors, so a view of one shares its storage, and a
copy says by the storages, offsets and strides on its two sides which slice of
which tensor goes where. A dispatch mode sees every operation of the loaders:

* views pass;
* a copy into a live parameter is recorded;
* what only rearranges (`clone`, `contiguous`, `cat`, `stack`, a copy into
  scratch memory) gives a storage whose pieces are known, and they are followed
  when it is copied on;
* what computes (arithmetic, a change of dtype, an index by a tensor) spoils its
  result, and the tensors in it are refused when it reaches a parameter;
* what takes data out (`item`, `bool`, `numpy`) refuses its tensor, and loading
  starts again without it.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from m2ncompile.engine.aten import (
    CAT,
    COPY,
    OVERWRITING,
    REARRANGING,
    STACK,
    called,
    on_meta,
    passes,
    takes_data_out,
    tensors_in,
    written_by,
    zeroes,
)
from m2ncompile.engine.boxes import UnevenError, disjoint, through
from m2ncompile.engine.callers import (
    caller,
    data_operation,
    frames_of,
    qualname,
    raised_by,
    words_of,
)
from m2ncompile.engine.recording import Copy, Recording, Refusal, View
from m2ncompile.engine.storages import (
    Cause,
    Held,
    HeldPiece,
    Live,
    live_params,
    named_tensors,
    place_of,
    settled,
    storage_key,
    uncovered,
    view_of,
)
from m2ncompile.errors import EngineError, M2nCompileError, Problem

if TYPE_CHECKING:
    from m2ncompile.engine.vllm_meta import MetaEngine
    from m2ncompile.inventory.records import TensorInfo

__all__ = ["MAX_RESTARTS", "record", "record_load"]

#: How often loading starts again before the build gives up.
MAX_RESTARTS = 64


def record(
    engine: MetaEngine,
    rank: int,
    tensors: Sequence[TensorInfo],
    not_direct: Callable[[nn.Module], Mapping[str, str]],
) -> Recording:
    """Builds worker `rank` and records how it loads `tensors`.

    `not_direct` maps names of the module's parameters to why writing them
    directly is not all there is to do. Raises EngineError when the model can't
    be built, and as `record_load` does.
    """
    with engine.worker(rank) as model, _as_weight_transfer_loads():
        return record_load(
            model, model.load_weights, tensors, rank=rank, not_direct=not_direct(model)
        )


def record_load(
    model: nn.Module,
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
    tensors: Sequence[TensorInfo],
    *,
    rank: int = 0,
    not_direct: Mapping[str, str] | None = None,
) -> Recording:
    """Records what `load` does with `tensors` to the parameters and buffers of `model`.

    `load` is called with (name, tensor) pairs in order; when it raises on a
    tensor or needs its data, again from the start without that tensor. It must
    do its work in the calling thread.

    Raises EngineError, with what was found so far, when `load` raises for no
    tensor in particular or has to start again more than MAX_RESTARTS times.
    """
    live = live_params(model, not_direct or {})
    refused: dict[int, Cause] = {}
    unknown: dict[int, str] = {}
    words = f"{MAX_RESTARTS} times it stopped at a tensor that it can't load as it is"
    for _ in range(MAX_RESTARTS + 1):
        recorder = _Recorder(live, tensors, refused.keys() | unknown.keys())
        raised: Exception | None = None
        try:
            with torch.no_grad(), recorder:
                load(recorder.items())
        except M2nCompileError:
            raise
        except Exception as error:
            raised = error
        if recorder.needed:
            refused |= recorder.needed
        elif raised is None:
            refused |= recorder.refusals(model, qualname(load))
            return Recording(
                rank,
                tuple(one.param for one in live),
                recorder.copies(),
                tuple(Refusal(index, *cause) for index, cause in sorted(refused.items())),
                tuple(sorted(unknown.items())),
                recorder.zeroed(),
            )
        elif (culprit := recorder.culprit(raised)) is None:
            words = words_of(raised)
            break
        elif (operation := data_operation(raised)) is not None:
            refused[culprit] = operation, raised_by(raised)
        else:
            unknown[culprit] = words_of(raised)
    found = unknown | {index: f"{op} in {loader}" for index, (op, loader) in refused.items()}
    raise EngineError(
        f"{qualname(load)} can't be recorded for worker rank {rank}: {words}",
        [Problem(tensors[index].name, message) for index, message in sorted(found.items())],
    )


def _as_weight_transfer_loads() -> AbstractContextManager[None]:
    """vLLM's weight transfer does not ask for multi-token-prediction layers to be complete."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import (
            disable_mtp_completeness_check,
        )
    except ImportError:
        return nullcontext()
    context: AbstractContextManager[None] = disable_mtp_completeness_check()
    return context


class _NeedsDataError(Exception):
    """Ends loading. A loader that catches it changes nothing: `needed` says so too."""


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """One run of `load`; `needed` are tensors whose data it asked for, which ended it."""

    def __init__(
        self, live: Sequence[Live], tensors: Sequence[TensorInfo], without: Set[int]
    ) -> None:
        super().__init__()
        self.needed: dict[int, Cause] = {}
        self._refused: dict[int, Cause] = {}
        self._live = live
        self._tensors = tensors
        self._dtypes = [getattr(torch, info.dtype) for info in tensors]
        self._current: int | None = None
        self._waiting: deque[tuple[int, torch.Tensor]] = deque()
        #: Tensor of each storage that nothing wrote to, and what is in all others.
        self._sources: dict[int, int] = {}
        self._held = {one.storage._cdata: Held(one.dtype, is_param=True) for one in live}
        #: Storages of nothing but zeros, and the parameters that such were written to.
        self._zeros: dict[int, torch.UntypedStorage] = {}
        self._zeroed: set[int] = set()
        #: All but parameters'. They live to the end, or another could take their address.
        self._storages: dict[int, torch.UntypedStorage] = {}
        for index, info in enumerate(tensors):
            if index not in without:
                tensor = torch.empty(info.shape, dtype=self._dtypes[index], device="meta")
                self._waiting.append((index, tensor))
                self._storages[storage_key(tensor)] = tensor.untyped_storage()
                self._sources[storage_key(tensor)] = index

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and keeping dynamo out costs as much as the rest.
        return False

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What `load` gets. No local here may keep a tensor alive: see `refusals`."""
        while self._waiting:
            self._current = self._waiting[0][0]
            yield self._tensors[self._current].name, self._waiting.popleft()[1]
        self._current = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is COPY:
            return self._copy(args[0], args[1])
        if zeroes(func, args):
            return self._zero(func, args, kwargs or {})
        if passes(func):
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in REARRANGING:
            result = self._rearrange(func, args, kwargs or {})
            if self._zeros and all(storage_key(part) in self._zeros for part in tensors_in(args)):
                self._zeros[storage_key(result)] = result.untyped_storage()
            return result
        return self._compute(func, args, kwargs or {})

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        # Nearly all copies: a view of a checkpoint tensor to a view of a parameter.
        index = self._sources.get(source.untyped_storage()._cdata)
        held = self._held.get(target.untyped_storage()._cdata)
        if (
            index is not None
            and held is not None
            and held.is_param
            and target.shape == source.shape
            and target.dtype is held.dtype
            and source.dtype is self._dtypes[index]
        ):
            into = view_of(target)
            if 0 not in into.stride:
                held.pieces.append((into, index, view_of(source)))
                return target

        self._zeros.pop(storage_key(target), None)
        if not self._carries(source):
            if storage_key(source) in self._zeros:
                self._zeroed.add(storage_key(target))
            self._overwrite(target, "copy_")
            result: torch.Tensor = COPY(target, source)
            return result
        if target.shape != source.shape:
            source = source.expand(target.shape)
        self._follow(target, source)
        return target

    def _zero(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs) if passes(func) else self._compute(func, args, kwargs)
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            held = self._held.get(storage._cdata)
            if held is not None and held.is_param:
                self._zeroed.add(storage._cdata)
            elif result.numel() * result.element_size() == storage.nbytes():
                self._zeros[storage._cdata] = storage
        return result

    def _rearrange(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        joins = func in (CAT, STACK)
        parts: Sequence[torch.Tensor] = args[0] if joins else args[:1]
        if not any(self._carries(part) for part in parts):
            return func(*args, **kwargs)
        dtypes = {part.dtype for part in parts} | ({kwargs.get("dtype")} - {None})
        if len(dtypes) > 1 or len({part.device for part in parts}) > 1:
            return self._compute(func, args, kwargs)
        result = func(*args, **on_meta(kwargs))
        # Concatenation takes parts of shape (0,) among any others.
        parts = [part for part in parts if part.numel()]
        places: Sequence[torch.Tensor] = [result] if parts else []
        if joins and parts:
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            places = (
                result.unbind(dim)
                if func is STACK
                else result.split([part.shape[dim] for part in parts], dim)
            )
        for place, part in zip(places, parts, strict=True):
            if self._carries(part):
                self._follow(place, part)
        return result

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        read = list(tensors_in((*args, *kwargs.values())))
        written = [
            tensor
            for position, argument in written_by(func)
            for tensor in tensors_in(args[position : position + 1] or kwargs.get(argument))
        ]
        for tensor in written:
            self._zeros.pop(storage_key(tensor), None)
        if not any(self._carries(tensor) for tensor in read):
            return func(*args, **kwargs)
        name = called(func)
        if func._schema.name in OVERWRITING:
            read = [one for one in read if not any(one is other for other in written)]
        causes: dict[int, Cause] = {}
        for tensor in read:
            causes = self._visible(tensor, name) | causes
        if not causes:
            for tensor in written:
                self._overwrite(tensor, name)
            return func(*args, **kwargs)
        if takes_data_out(func):
            self._need(causes)
        try:
            result = func(*args, **on_meta(kwargs))
        except Exception as error:
            # Fails only here, where there is no data, or some of it is on another device.
            if isinstance(error, NotImplementedError) or len({one.device for one in read}) > 1:
                self._need(causes)
            raise
        for tensor in (*written, *tensors_in(result)):
            self._zeros.pop(storage_key(tensor), None)
            self._spoil(tensor, causes)
        return result

    def _need(self, causes: dict[int, Cause]) -> NoReturn:
        self.needed |= causes
        raise _NeedsDataError

    def _carries(self, tensor: torch.Tensor) -> bool:
        """Whether anything of a checkpoint tensor is in a tensor's storage."""
        key = storage_key(tensor)
        held = self._held.get(key)
        return key in self._sources or (held is not None and bool(held.pieces or held.spoiled))

    def _visible(self, tensor: torch.Tensor, operation: str) -> dict[int, Cause]:
        """The checkpoint tensors that `tensor` shows something of, each with a cause."""
        return self._inside(storage_key(tensor), (operation, caller()), view_of(tensor))

    def _inside(self, key: int, cause: Cause, view: View | None = None) -> dict[int, Cause]:
        """The checkpoint tensors in a storage, or in a part of it."""
        if key in self._sources:
            return {self._sources[key]: cause}
        held = self._held.get(key)
        if held is None:
            return {}
        pieces = (one for one in held.pieces if view is None or not disjoint(view, one[0]))
        return {index: cause for _, index, _ in pieces} | held.spoiled

    def _holder(self, tensor: torch.Tensor) -> Held:
        """What is in a tensor's storage, which is about to be written to."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._held:
            self._storages[key] = storage
            index = self._sources.pop(key, None)
            if index is None:
                self._held[key] = Held(tensor.dtype)
            else:
                self._held[key] = Held(self._dtypes[index])
                whole = View(0, (prod(self._tensors[index].shape),), (1,))
                self._held[key].pieces.append((whole, index, whole))
        return self._held[key]

    def _follow(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy, of equal shapes, from a storage that carries something."""
        if target.numel() == 0:
            return
        read, into = view_of(source), view_of(target)
        whole = self._sources.get(storage_key(source))
        pieces: list[HeldPiece] = []
        spoiled: dict[int, Cause] = {}
        if whole is not None:
            stored = self._dtypes[whole]
            pieces.append((into, whole, read))
        else:
            held = self._held[storage_key(source)]
            stored = held.dtype
            spoiled |= held.spoiled
            try:
                for box, index, origin in settled(held):
                    common = through(read, into, box, origin)
                    if common is not None:
                        pieces.append((common[1], index, common[0]))
            except UnevenError:
                spoiled |= self._visible(source, "a rearrangement that is no box")

        holder = self._holder(target)
        reason = None
        if any(step == 0 and size > 1 for step, size in zip(into.stride, into.shape, strict=True)):
            reason = "copy_ to an expanded view"
        elif any(self._dtypes[index] != stored for _, index, _ in pieces):
            # Changed before; the record has room for one change, into a parameter.
            reason = "to(dtype)"
        elif (source.dtype, target.dtype) != (stored, holder.dtype):
            # The same bits under one other name on both sides are but a copy.
            named = stored == holder.dtype and source.dtype == target.dtype
            if not (named and source.dtype.itemsize == stored.itemsize):
                reason = "view(dtype)"
        if reason or spoiled:
            cause = (reason, caller()) if reason else next(iter(spoiled.values()))
            self._spoil(target, spoiled | {index: cause for _, index, _ in pieces})
            return
        covered = sum(prod(box.shape) for box, _, _ in pieces)
        if covered < target.numel() or not holder.is_param:
            self._overwrite(target, "copy_")
        holder.pieces += pieces

    def _overwrite(self, tensor: torch.Tensor, operation: str) -> None:
        """A write of what is no checkpoint tensor's; of what is, before it is put down."""
        if not self._carries(tensor):
            return
        held = self._holder(tensor)
        try:
            left = uncovered(held.pieces, view_of(tensor))
            if not held.is_param:
                held.pieces = left
                return
            if len(left) == len(held.pieces):
                return
        except UnevenError:
            pass
        self._spoil(tensor, self._visible(tensor, operation))

    def _spoil(self, tensor: torch.Tensor, causes: dict[int, Cause]) -> None:
        held = self._holder(tensor)
        held.spoiled = causes | held.spoiled
        if held.is_param:
            self._refused = causes | self._refused

    # What came of it.

    def copies(self) -> tuple[Copy, ...]:
        """Parameter by parameter, in the order in which each was written."""
        views: dict[View, View] = {}
        return tuple(
            Copy(
                index, views.setdefault(source, source), position, views.setdefault(target, target)
            )
            for position, one in enumerate(self._live)
            for target, index, source in self._held[one.storage._cdata].pieces
            if 0 not in target.shape
        )

    def zeroed(self) -> tuple[int, ...]:
        """The parameters that zeros of the loader's own were written to, by position."""
        return tuple(
            position
            for position, one in enumerate(self._live)
            if one.storage._cdata in self._zeroed
        )

    def refusals(self, model: nn.Module, loader: str) -> dict[int, Cause]:
        """The tensors that ended up where no copy shows them. Forgets all storages."""
        now = {name: place_of(tensor) for name, tensor in named_tensors(model)}
        for one in self._live:
            for name, place in one.places.items():
                if now.get(name) != place:
                    cause = f"replacing {name}", one.param.loader or loader
                    self._refused = self._inside(place[1], cause) | self._refused
                    if name in now:
                        self._refused = self._inside(now[name][1], cause) | self._refused
        self._waiting.clear()
        cause = "keeping it outside the parameters", loader
        inside = {key: self._inside(key, cause) for key in self._storages}
        kept = [(StorageWeakRef(self._storages.pop(key)), inside[key]) for key in inside]
        if not all(storage.expired() for storage, _ in kept):
            gc.collect()
        for storage, causes in kept:
            if not storage.expired():
                self._refused = causes | self._refused
        return self._refused

    def culprit(self, error: Exception) -> int | None:
        """The tensor that the innermost function with one in hand was at, else the last given out.

        None where all were given out and none is in hand.
        """
        for frame in reversed(frames_of(error)):
            tensors = [one for one in frame.f_locals.values() if isinstance(one, torch.Tensor)]
            found = [
                self._sources[key] for key in map(storage_key, tensors) if key in self._sources
            ]
            if found:
                return max(found)
        return self._current
