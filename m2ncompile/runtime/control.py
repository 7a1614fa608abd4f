"""The control plane: every rank says something, and all learn the same of it.

Rank 0 collects what the ranks say and publishes the lot, so that survivors of a
failure can't see different things of who answered in time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from m2ncompile.errors import RunError
from m2ncompile.runtime.deadline import Deadline

if TYPE_CHECKING:
    from torch.distributed import Store
    from vllm.distributed.utils import StatelessProcessGroup

__all__ = ["Answers", "ControlPlane", "StoreControl", "Watch"]

#: Says why waiting is in vain, or None.
Watch = Callable[[], str | None]

#: What the others wait longer than rank 0, which publishes at its deadline.
_MARGIN = 5.0
#: How often rank 0 looks whether it waits in vain, in seconds.
_LOOK = 0.25


class Answers(msgspec.Struct, frozen=True):
    """By rank, None where no answer came in time; `vain` where rank 0 stopped waiting."""

    by_rank: tuple[bytes | None, ...]
    vain: str | None = None


class ControlPlane(Protocol):
    """One for all ranks of a run: trainers, then workers."""

    rank: int
    world: int

    def exchange(self, mine: bytes, deadline: Deadline, watch: Watch | None = None) -> Answers:
        """What every rank said in this round; the same on all. `watch` counts on rank 0 alone.

        Raises RunError when rank 0 does not answer.
        """
        ...

    def leave(self, why: str, mine: bytes) -> None:
        """Says `mine` without waiting, for the round that the others are in or come to."""
        ...


class StoreControl:
    """Over a `torch.distributed` store, which rank 0 should host."""

    def __init__(self, store: Store, rank: int, world: int, name: str = "m2ncompile") -> None:
        from torch.distributed import PrefixStore

        self.rank, self.world = rank, world
        self._store = PrefixStore(name, store)
        self._round = 0

    @classmethod
    def over(cls, group: StatelessProcessGroup) -> StoreControl:
        """Over the store of vLLM's group, without its pickles."""
        return cls(group.store, group.rank, group.world_size)

    def exchange(self, mine: bytes, deadline: Deadline, watch: Watch | None = None) -> Answers:
        number, self._round = self._round, self._round + 1
        try:
            self._store.set(f"{number}/{self.rank}", mine)
            if self.rank == 0:
                answers = self._collect(number, deadline, watch)
                self._store.set(f"{number}/all", msgspec.msgpack.encode(answers))
                self._forget(number - 2)
                return answers
            patience = deadline.extended(_MARGIN)
            self._store.wait([f"{number}/all"], patience.timeout())
            return msgspec.msgpack.decode(self._store.get(f"{number}/all"), type=Answers)
        except (RuntimeError, OSError, msgspec.DecodeError) as error:
            if isinstance(error, RunError):
                raise
            # The store's own words name ports and milliseconds, which differ from rank to rank.
            raise RunError(
                "rank 0, which hosts the control plane, did not answer within "
                f"{deadline.seconds:g} s, or is gone"
            ) from error

    def leave(self, why: str, mine: bytes) -> None:
        if self.rank:
            self._store.set(f"{self._round}/{self.rank}", mine)
            return
        answers = msgspec.msgpack.encode(Answers((None,) * self.world, why))
        for number in (self._round - 1, self._round):
            if number >= 0 and not self._store.check([f"{number}/all"]):
                self._store.set(f"{number}/all", answers)

    def _collect(self, number: int, deadline: Deadline, watch: Watch | None) -> Answers:
        keys = [f"{number}/{rank}" for rank in range(self.world)]
        missing, vain = keys, None
        while missing:
            try:
                self._store.wait(missing, deadline.timeout(_LOOK if watch else None))
                missing = []
            except RuntimeError:
                missing = [key for key in missing if not self._store.check([key])]
                if deadline.passed or (watch and (vain := watch()) is not None):
                    break
        answers = (None if key in missing else self._store.get(key) for key in keys)
        return Answers(tuple(answers), vain)

    def _forget(self, number: int) -> None:
        """Everyone has read the round before the last, having spoken in the last."""
        if number >= 0:
            for name in (*range(self.world), "all"):
                self._store.delete_key(f"{number}/{name}")
