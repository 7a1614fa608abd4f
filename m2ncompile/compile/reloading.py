"""What was recorded of the engine, as what its reload of a module waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from m2ncompile.engine.recording import Recording
from m2ncompile.staging import Reloading, module_of

__all__ = ["reloading"]


class _Recorded(Reloading):
    def __init__(self, recordings: Sequence[Recording], first_worker: int) -> None:
        self._names: dict[int, set[str]] = {}
        self._awaited: defaultdict[tuple[int, str], set[str]] = defaultdict(set)
        self._deferred: set[str] = set()
        for recording in recordings:
            rank = first_worker + recording.rank
            self._names[rank] = {
                name for param in recording.params for name in (param.name, *param.aliases)
            }
            for param in recording.params:
                for name in param.awaited:
                    self._awaited[rank, module_of(name)].add(name)
                if param.deferred:
                    self._deferred.add(module_of(param.name))

    def has(self, rank: int, param: str) -> bool:
        return param in self._names[rank]

    def kept(self, rank: int, param: str, loaded: Collection[str]) -> bool:
        module = module_of(param)
        return module in self._deferred or not self._awaited[rank, module] <= set(loaded)


def reloading(recordings: Sequence[Recording], first_worker: int) -> Reloading:
    """`recordings` has one per worker, in rank order; worker 0 is `first_worker`."""
    return _Recorded(recordings, first_worker)
