"""How long a wait may take."""

from __future__ import annotations

import time
from datetime import timedelta

__all__ = ["Deadline"]


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
