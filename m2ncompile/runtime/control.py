"""The control plane: every rank says something, and all learn the same of it.

Rank 0 collects what the ranks say and publishes the lot, so that survivors of a
failure can't see different things of who answered in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
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
#: What rank 0 waits at most for the others to read what it published, in seconds.
_SETTLE = 2.0
#: How soon rank 0 looks again whether it waits in vain, in seconds; twice as long each time.
_LOOK, _LOOK_AT_MOST = 0.0005, 0.02


class Answers(msgspec.Struct, frozen=True):
    """By rank, None where no answer came in the `waited` seconds; `vain` where rank 0 stopped."""

    by_rank: tuple[bytes | None, ...]
    vain: str | None = None
    waited: float | None = None


class ControlPlane(Protocol):
    """One for all ranks of a run: trainers, then workers."""

    rank: int
    world: int

    def exchange(self, mine: bytes, deadline: Deadline, watch: Watch | None = None) -> Answers:
        """What every rank said in this round; the same on all. `watch` counts on rank 0 alone.

        Raises RunError when rank 0 does not answer.
        """
        ...

    def settle(self) -> None:
        """Returns when all who spoke in the last round know what was said, or in a while.

        Before that the process of rank 0 should not end: what the others are to
        hear would be lost with it.
        """
        ...

    def leave(self, why: str, mine: bytes) -> None:
        """Says `mine` without waiting, for the round that the others are in or come to."""
        ...

    def close(self) -> None:
        """Gives the store back; nothing else is called after it."""
        ...


class StoreControl:
    """Over a `torch.distributed` store, which rank 0 should host."""

    def __init__(self, store: Store, rank: int, world: int, name: str = "m2ncompile") -> None:
        from torch.distributed import PrefixStore

        self.rank, self.world = rank, world
        self._store = PrefixStore(name, store)
        self._round = 0
        #: On rank 0, who has still to read what it published.
        self._unread: list[str] = []

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
                self._publish(number, answers)
                self._forget(number - 2)
                return answers
            patience = deadline.extended(_MARGIN)
            self._store.wait([f"{number}/all"], patience.timeout())
            answers = msgspec.msgpack.decode(self._store.get(f"{number}/all"), type=Answers)
            self._store.set(f"{number}/read/{self.rank}", b"")
            return answers
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
            # An interrupt may have come before it spoke in the round that it was in.
            for number in (max(self._round - 1, 0), self._round):
                if not self._store.check([f"{number}/{self.rank}"]):
                    self._store.set(f"{number}/{self.rank}", mine)
                    self._store.set(f"{number}/read/{self.rank}", b"")  # nor reads it
            return
        for number in (self._round - 1, self._round):
            if number >= 0 and not self._store.check([f"{number}/all"]):
                self._publish(number, Answers((None,) * self.world, why))
                self._unread = [f"{number}/read/{rank}" for rank in range(1, self.world)]
                return  # nobody comes to a later one

    def settle(self) -> None:
        if self._unread:
            with suppress(RuntimeError):
                self._store.wait(self._unread, timedelta(seconds=_SETTLE))
            self._unread = []

    def close(self) -> None:
        # On rank 0 nobody listens any more, so that another run can begin at its address.
        self.__dict__.pop("_store", None)

    def _publish(self, number: int, answers: Answers) -> None:
        self._store.set(f"{number}/all", msgspec.msgpack.encode(answers))
        self._unread = [
            f"{number}/read/{rank}"
            for rank, answer in enumerate(answers.by_rank)
            if rank and answer is not None
        ]

    def _collect(self, number: int, deadline: Deadline, watch: Watch | None) -> Answers:
        keys = [f"{number}/{rank}" for rank in range(self.world)]
        missing, vain, pause = keys, None, _LOOK
        if watch is None:
            with suppress(RuntimeError):
                self._store.wait(keys, deadline.timeout())
        while missing := [key for key in missing if not self._store.check([key])]:
            if deadline.passed or (watch and (vain := watch()) is not None):
                break
            # Not waits that time out: torch warns of each.
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_AT_MOST)
        answers = (None if key in missing else self._store.get(key) for key in keys)
        late = missing and vain is None
        return Answers(tuple(answers), vain, deadline.seconds if late else None)

    def _forget(self, number: int) -> None:
        """Everyone has read the round before the last, having spoken in the last."""
        if number >= 0:
            for rank in range(self.world):
                self._store.delete_key(f"{number}/{rank}")
                self._store.delete_key(f"{number}/read/{rank}")
            self._store.delete_key(f"{number}/all")
