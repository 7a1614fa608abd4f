"""How long a wait may take."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ["Aside", "Call", "Deadline", "within"]

T = TypeVar("T")


class Aside:
    """Calls on a thread that can be left behind in one; the next is then on another thread.

    The thread stays for the next call, since to start one costs more than most calls.
    """

    def __init__(self) -> None:
        self._line: _Line | None = None

    def begin(self, action: Callable[[], T]) -> Call[T]:
        """Makes the call, and goes on."""
        line, self._line = self._line or _Line(), None
        line.calls.put(action)
        return Call(self, line)

    def run(self, action: Callable[[], T], seconds: float) -> T:
        """What `action` returns or raises. Raises TimeoutError after `seconds`.

        What does not end by itself is left behind, as it is by an interrupt.
        """
        return self.begin(action).result(seconds)


class Call(Generic[T]):
    """One that is under way, or has ended."""

    def __init__(self, aside: Aside, line: _Line) -> None:
        self._aside, self._line = aside, line
        self._outcome: tuple[Any, BaseException | None] | None = None

    def result(self, seconds: float) -> T:
        """What it returns or raises. Raises TimeoutError after `seconds`; then it goes on."""
        if self._outcome is None:
            try:
                self._outcome = self._line.outcomes.get(timeout=max(0.0, seconds))
            except Empty:
                raise TimeoutError(f"no answer within {seconds:g} s") from None
            self._aside._line = self._line
        found, failure = self._outcome
        if failure is not None:
            raise failure
        return found  # type: ignore[no-any-return]


class _Line:
    """A thread that makes the calls it is given, until nobody has this any more."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self.outcomes: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        weakref.finalize(self, self.calls.put, None)
        serve = threading.Thread(
            target=_serve, args=(self.calls, self.outcomes), name="m2ncompile-run", daemon=True
        )
        serve.start()


def _serve(
    calls: SimpleQueue[Callable[[], Any] | None],
    outcomes: SimpleQueue[tuple[Any, BaseException | None]],
) -> None:
    while (action := calls.get()) is not None:
        try:
            outcomes.put((action(), None))
        except BaseException as error:
            outcomes.put((None, error))
        del action  # and what it holds


def within(action: Callable[[], T], seconds: float) -> T:
    """As `Aside.run`, once."""
    return Aside().run(action, seconds)


class Deadline:
    """`seconds` from now. No wait of a run is without one."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.remaining == 0

    def extended(self, seconds: float) -> Deadline:
        """One that ends `seconds` later, for those who wait for somebody's answer to this one."""
        later = Deadline(self.remaining + seconds)
        later.seconds = self.seconds + seconds
        return later

    def timeout(self) -> timedelta:
        """What torch's waits take; never zero, which some of them read as for ever."""
        return timedelta(seconds=max(self.remaining, 0.001))
