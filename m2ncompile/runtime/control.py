"""The control plane: every rank says something, and all learn the same of it.

Rank 0 collects what the ranks say and publishes the lot, so that survivors of a
failure can't see different things of who answered in time.

A store's calls have no time limit where the other side is there and does not answer (stopped,
or lost without a word), so each is made on a thread that can be left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from m2ncompile.errors import RunError
from m2ncompile.runtime.deadline import Deadline, within

if TYPE_CHECKING:
    from torch.distributed import Store
    from vllm.distributed.utils import StatelessProcessGroup

__all__ = ["Answers", "ControlPlane", "StoreControl", "Watch"]

_T = TypeVar("_T")

#: Says why waiting is in vain, or None.
Watch = Callable[[], str | None]

#: What the others wait longer than rank 0, which publishes at its deadline.
_MARGIN = 5.0
#: What rank 0 waits at most for the others to read what it published, in seconds.
_SETTLE = 2.0
#: How soon rank 0 looks again whether it waits in vain, in seconds, and as part of its wait so far.
_LOOK, _LOOK_AT_MOST, _LOOK_SHARE = 0.0002, 0.02, 0.02


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
        #: On rank 0, the last round that it published, each once; and who has still to read it.
        self._published = -1
        self._unread: list[str] = []
        self._publishing = threading.Lock()
        #: Whether the store has left a call without an answer.
        self._silent = False

    @classmethod
    def over(cls, group: StatelessProcessGroup) -> StoreControl:
        """Over the store of vLLM's group, without its pickles."""
        return cls(group.store, group.rank, group.world_size)

    def exchange(self, mine: bytes, deadline: Deadline, watch: Watch | None = None) -> Answers:
        number, self._round = self._round, self._round + 1
        limit = deadline.remaining + _MARGIN + _SETTLE
        try:
            return self._called(lambda: self._exchanged(number, mine, deadline, watch), limit)
        except (RuntimeError, OSError, msgspec.DecodeError) as error:
            if isinstance(error, RunError):
                raise
            # The store's own words name ports and milliseconds, which differ from rank to rank,
            # as deadlines may.
            raise RunError(
                "rank 0, which hosts the control plane, did not answer in time, or is gone"
            ) from error

    def _called(self, call: Callable[[], _T], seconds: float) -> _T:
        if self._silent:
            raise TimeoutError("no answer to an earlier call")
        try:
            return within(call, seconds)
        except TimeoutError:
            self._silent = True
            raise

    def _exchanged(
        self, number: int, mine: bytes, deadline: Deadline, watch: Watch | None
    ) -> Answers:
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

    def leave(self, why: str, mine: bytes) -> None:
        with suppress(TimeoutError):
            self._called(lambda: self._left(why, mine), _SETTLE)

    def _left(self, why: str, mine: bytes) -> None:
        if self.rank:
            # It may have spoken in the round that it was in, or not yet; and takes that back.
            for number in (max(self._round - 1, 0), self._round):
                if not self._store.check([f"{number}/all"]):
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
            with suppress(RuntimeError, TimeoutError):
                unread, patience = self._unread, timedelta(seconds=_SETTLE)
                self._called(lambda: self._store.wait(unread, patience), 2 * _SETTLE)
            self._unread = []

    def close(self) -> None:
        # On rank 0 nobody listens any more, so that another run can begin at its address.
        self.__dict__.pop("_store", None)

    def _publish(self, number: int, answers: Answers) -> None:
        with self._publishing:  # an exchange that was left behind must not contradict `leave`
            if number <= self._published:
                return
            self._published = number
            self._store.set(f"{number}/all", msgspec.msgpack.encode(answers))
        self._unread = [
            f"{number}/read/{rank}"
            for rank, answer in enumerate(answers.by_rank)
            if rank and answer is not None
        ]

    def _collect(self, number: int, deadline: Deadline, watch: Watch | None) -> Answers:
        keys = [f"{number}/{rank}" for rank in range(self.world)]
        missing: list[str] = []
        vain, began = None, time.monotonic()
        while not self._store.check(keys):  # all in one question
            if deadline.passed or (watch and (vain := watch()) is not None):
                missing = [key for key in keys if not self._store.check([key])]
                break
            # Not waits that time out: torch warns of each.
            waited = time.monotonic() - began
            time.sleep(min(max(_LOOK, waited * _LOOK_SHARE), _LOOK_AT_MOST))
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
