"""How long a wait may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

__all__ = ["Deadline", "within"]

T = TypeVar("T")


def within(action: Callable[[], T], seconds: float) -> T:
    """What `action` returns or raises, on a thread of its own.

    Raises TimeoutError after `seconds`. What does not end by itself is left behind.
    """
    outcome: list[tuple[T, None] | tuple[None, BaseException]] = []

    def run() -> None:
        try:
            outcome.append((action(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="m2ncompile-run", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    found, failure = outcome[0]
    if failure is not None:
        raise failure
    return found  # type: ignore[return-value]


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
