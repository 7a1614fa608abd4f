"""The control plane: every rank says something, and all learn the same of it.

Rank 0 collects what the ranks say and publishes the lot, so that survivors of a
failure can't see different things of who answered in time.

A store's calls have no time limit where the other side is there and does not answer (stopped,
or lost without a word), so each is made on a thread that can be left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from m2ncompile.errors import RunError
from m2ncompile.runtime.deadline import Aside, Deadline

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
#: How soon rank 0 looks again: as part of its wait so far, and at most in seconds.
_LOOK_SHARE, _LOOK_AT_MOST = 0.02, 0.02
#: For a rank that left: the round that it speaks in, and has read.
_EVERY = 1 << 62


class Answers(msgspec.Struct, frozen=True):
    """By rank, None where no answer came in the `waited` seconds; `vain` where rank 0 stopped."""

    by_rank: tuple[bytes | None, ...]
    vain: str | None = None
    waited: float | None = None


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """What a rank said last, in `round`."""

    round: int
    words: bytes


class ControlPlane(Protocol):
    """One for all ranks of a run: trainers, then workers."""

    rank: int
    world: int

    def exchange(self, mine: bytes, deadline: Deadline, watch: Watch | None = None) -> Answers:
        """What every rank said in this round; the same on all. `watch` counts on rank 0 alone.

        Raises RunError when rank 0 does not answer.
        """
        ...

    def ahead(self) -> tuple[bytes | None, ...]:
        """By rank, what was said already in the round that this rank comes to; None for nothing."""
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
    """Over a `torch.distributed` store, which rank 0 should host.

    Each rank has one key for what it said last and one for the last round that it read, which it
    overwrites: a store deletes one key a call, and calls are what an exchange costs.
    """

    def __init__(self, store: Store, rank: int, world: int, name: str = "m2ncompile") -> None:
        from torch.distributed import PrefixStore

        self.rank, self.world = rank, world
        self._store = PrefixStore(name, store)
        self._round = 0
        #: On rank 0: whether all others have spoken ever, so that their keys are there.
        self._met = False
        #: The last round that it published, each once; and who has still to read it.
        self._published = -1
        self._unread: list[int] = []
        self._publishing = threading.Lock()
        self._aside = Aside()
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
            return self._aside.run(call, seconds)
        except TimeoutError:
            self._silent = True
            raise

    def _exchanged(
        self, number: int, mine: bytes, deadline: Deadline, watch: Watch | None
    ) -> Answers:
        if self.rank == 0:
            answers = self._collect(number, mine, deadline, watch)
            self._publish(number, answers)
            if number > 1:
                # Everyone has read the round before the last, having spoken in the last.
                self._store.delete_key(f"{number - 2}/all")
            return answers
        self._say(number, mine)
        patience = deadline.extended(_MARGIN)
        self._store.wait([f"{number}/all"], patience.timeout())
        answers = msgspec.msgpack.decode(self._store.get(f"{number}/all"), type=Answers)
        self._store.set(f"read/{self.rank}", str(number))
        return answers

    def _say(self, number: int, words: bytes) -> None:
        self._store.set(f"said/{self.rank}", msgspec.msgpack.encode(_Said(number, words)))

    def ahead(self) -> tuple[bytes | None, ...]:
        return self._aside.run(self._ahead, _SETTLE)

    def _ahead(self) -> tuple[bytes | None, ...]:
        number = self._round
        if self.rank and self._store.check([f"{number}/all"]):
            answers = msgspec.msgpack.decode(self._store.get(f"{number}/all"), type=Answers)
            return answers.by_rank
        others = [rank for rank in range(1, self.world) if rank != self.rank]
        keys = [f"said/{rank}" for rank in others]
        found: list[bytes | None] = [None] * self.world
        if keys and self._store.check(keys):
            for rank, words in zip(others, self._heard(number, keys), strict=True):
                found[rank] = words
        return tuple(found)

    def leave(self, why: str, mine: bytes) -> None:
        with suppress(TimeoutError):
            self._called(lambda: self._left(why, mine), _SETTLE)

    def _left(self, why: str, mine: bytes) -> None:
        if self.rank:
            # It may have spoken in the round that it was in, or not yet; and takes that back.
            self._say(_EVERY, mine)
            self._store.set(f"read/{self.rank}", str(_EVERY))  # nor reads it
            return
        for number in (self._round - 1, self._round):
            if number >= 0 and not self._store.check([f"{number}/all"]):
                self._publish(number, Answers((None,) * self.world, why))
                self._unread = list(range(1, self.world))
                return  # nobody comes to a later one

    def settle(self) -> None:
        if self._unread:
            with suppress(RuntimeError, TimeoutError):
                self._called(self._settled, 2 * _SETTLE)
            self._unread = []

    def _settled(self) -> None:
        keys, deadline = [f"read/{rank}" for rank in self._unread], Deadline(_SETTLE)
        began = time.monotonic()
        while not deadline.passed:
            if self._store.check(keys) and all(
                int(read) >= self._published for read in self._values(keys)
            ):
                return
            _pause(began)

    def close(self) -> None:
        # On rank 0 nobody listens any more, so that another run can begin at its address.
        self.__dict__.pop("_store", None)

    def _publish(self, number: int, answers: Answers) -> None:
        with self._publishing:  # an exchange that was left behind must not contradict `leave`
            if number <= self._published:
                return
            self._published = number
            self._store.set(f"{number}/all", msgspec.msgpack.encode(answers))
        spoke = enumerate(answers.by_rank)
        self._unread = [rank for rank, answer in spoke if rank and answer is not None]

    def _collect(
        self, number: int, mine: bytes, deadline: Deadline, watch: Watch | None
    ) -> Answers:
        keys = [f"said/{rank}" for rank in range(1, self.world)]
        vain, began = None, time.monotonic()
        while True:
            self._met = self._met or self._store.check(keys)
            answers = [mine, *self._heard(number, keys if self._met else ())]
            if len(answers) == self.world and None not in answers:
                return Answers(tuple(answers))
            if deadline.passed or (watch and (vain := watch()) is not None):
                break
            _pause(began)
        one_by_one = (
            self._heard(number, [key]) if self._store.check([key]) else [None] for key in keys
        )
        answers = [mine, *(answer for one in one_by_one for answer in one)]
        late = vain is None and None in answers
        return Answers(tuple(answers), vain, deadline.seconds if late else None)

    def _heard(self, number: int, keys: Sequence[str]) -> list[bytes | None]:
        """What was said in a round, None where it was said before that."""
        said = [msgspec.msgpack.decode(value, type=_Said) for value in self._values(keys)]
        return [one.words if one.round in (number, _EVERY) else None for one in said]

    def _values(self, keys: Sequence[str]) -> list[bytes]:
        """Of keys that are there, in one call where the store can."""
        if keys and self._store.has_extended_api():
            found: list[bytes] = self._store.multi_get(list(keys))
            return found
        return [self._store.get(key) for key in keys]


def _pause(began: float) -> None:
    """Before rank 0 looks again. It does not wait for a key: torch warns of each that times out."""
    time.sleep(min((time.monotonic() - began) * _LOOK_SHARE, _LOOK_AT_MOST))
