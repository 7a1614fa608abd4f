"""Recordings of all worker ranks, on as many cores as there are."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

import msgspec

from m2ncompile.engine.recorder import record
from m2ncompile.engine.recording import Recording
from m2ncompile.errors import EngineError
from m2ncompile.progress import Progress

if TYPE_CHECKING:
    from torch import nn

    from m2ncompile.engine.vllm_meta import MetaEngine
    from m2ncompile.inventory.records import TensorInfo

__all__ = ["record_all"]

_NotDirect = Callable[["nn.Module"], Mapping[str, str]]


def record_all(
    engine: MetaEngine,
    tensors: Sequence[TensorInfo],
    not_direct: _NotDirect,
    progress: Progress,
    jobs: int | None = None,
) -> list[Recording]:
    """One recording per worker, in rank order. Raises what `record` raises.

    Ranks are independent of each other. With more than one job they run in
    forks of this process, which have the engine imported already.
    """
    workers = engine.spec.workers
    if jobs is None:
        # Elsewhere a fork of a process that has loaded system frameworks is not safe.
        jobs = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    recordings: list[Recording | None] = [None] * workers
    # The first goes alone: what it imports and caches, the forks inherit.
    recordings[0] = record(engine, 0, tensors, not_direct)
    progress("workers", 1, workers)
    if min(jobs, workers - 1) < 2:
        for rank in range(1, workers):
            recordings[rank] = record(engine, rank, tensors, not_direct)
            progress("workers", rank + 1, workers)
        return [r for r in recordings if r is not None]

    global _shared
    _shared = (engine, tensors, not_direct)
    try:
        with ProcessPoolExecutor(
            min(jobs, workers - 1), mp_context=multiprocessing.get_context("fork")
        ) as pool:
            waiting = [pool.submit(_record_in_fork, rank) for rank in range(1, workers)]
            for done, future in enumerate(as_completed(waiting), start=2):
                recording = msgspec.msgpack.decode(future.result(), type=Recording)
                recordings[recording.rank] = recording
                progress("workers", done, workers)
    except BrokenProcessPool:
        raise EngineError(
            "a process that recorded a worker's loaders was killed (out of memory?)"
        ) from None
    finally:
        _shared = None
    return [r for r in recordings if r is not None]


#: What forks inherit instead of being sent: modules and closures do not pickle.
_shared: tuple[MetaEngine, Sequence[TensorInfo], _NotDirect] | None = None


def _record_in_fork(rank: int) -> bytes:
    assert _shared is not None
    engine, tensors, not_direct = _shared
    return msgspec.msgpack.encode(record(engine, rank, tensors, not_direct))
