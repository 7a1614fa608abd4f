"""The workers of one of vLLM's executors: whatever any of them fails with, one raises.

An executor calls all of its workers alike. vLLM's for several processes (and Ray's, which derives
from it) reads their answers by rank, and stops at the first error: the answers behind that stay
queued, and are taken for those to the next calls, for good. So only the last worker may raise, and
must for the others too. Before any of them returns from a call in which one may fail alone, they
tell each other how they fared, and all go on in one state. With one worker, that is the last; Ray's
older executor waits for all, and raises what any did. Under an external launcher every process has
an executor of its own: each raises. Read in vLLM 0.33.0 and 0.32.0: `v1/executor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from m2ncompile.errors import Problem, RunError
from m2ncompile.runtime.control import StoreControl
from m2ncompile.runtime.deadline import Deadline

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Peers"]


class _Outcome(msgspec.Struct, frozen=True):
    """How a worker fared; `error` in words."""

    error: str | None


def _vllm_store() -> Store:
    """The store over which vLLM's workers found each other."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


class Peers:
    """This worker among them. `parallel` is vLLM's config, with the worker's rank.

    `number` counts the workers of a run, over all executors.
    """

    def __init__(self, parallel: Any, store: Callable[[], Store] = _vllm_store) -> None:
        self._rank, self._world, self._store = parallel.rank, parallel.world_size, store
        self._control: StoreControl | None = None
        if parallel.distributed_executor_backend == "external_launcher":
            # One rank and world for all replicas.
            self.number, self.raises, self._name = parallel.rank, True, "m2ncompile/launched"
        else:
            replica = parallel.data_parallel_index
            self.number = replica * parallel.world_size + parallel.rank
            self.raises = parallel.rank == parallel.world_size - 1
            self._name = f"m2ncompile/executor/{replica}"

    def told(self, error: Exception | None, timeout: float) -> Exception | None:
        """What any of them failed with, alike on all; `error` is this worker's.

        `timeout` is how much later than this one another may come, in seconds.
        """
        if self._world == 1:
            return error
        words = None if error is None else str(error) or type(error).__name__
        try:
            if self._control is None:
                self._control = StoreControl(self._store(), self._rank, self._world, self._name)
            mine = msgspec.json.encode(_Outcome(words))
            answers = self._control.exchange(mine, Deadline(timeout))
            said = [
                f"it did not say within {timeout:g} s how it fared"
                if answer is None
                else msgspec.json.decode(answer, type=_Outcome).error
                for answer in answers.by_rank
            ]
        except Exception as failure:  # its store is gone, and with it vLLM
            return error or failure
        if not any(said):
            return None
        if len(set(said)) == 1 and error is not None:
            return error
        first = self.number - self._rank
        problems = [Problem(f"worker {first + i}", one) for i, one in enumerate(said) if one]
        return RunError("workers of the engine failed", problems)
