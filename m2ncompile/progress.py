"""How long work reports on itself."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress"]

#: Called with the stage's name, steps done and steps in all.
Progress = Callable[[str, int, int], None]
