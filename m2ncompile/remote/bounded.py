"""Calls that end, whatever the other side does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["RATE", "SilentError", "bounded"]

#: Bytes a second below which a transfer is taken for stuck, once its first seconds are over.
RATE = 100_000

_T = TypeVar("_T")


class SilentError(Exception):
    """The call did not end in time."""


def bounded(call: Callable[[Callable[[int], None]], _T], seconds: float, nbytes: int = 0) -> _T:
    """What `call` returns or raises, if it ends within `seconds`.

    `nbytes` to be sent, and those that `call` says it received, each give the time that they take
    at `RATE`. Raises SilentError after that. The thread that still waits is left behind: each
    protocol has time limits of its own, of minutes, or none.
    """
    moved = [nbytes]
    results: list[_T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(call(moved.append))
        except BaseException as error:
            errors.append(error)
        done.set()

    start = time.monotonic()
    threading.Thread(target=run, name="m2ncompile-remote", daemon=True).start()
    while not done.wait(max(0.0, start + seconds + sum(moved) / RATE - time.monotonic())):
        if time.monotonic() >= start + seconds + sum(moved) / RATE:
            raise SilentError(f"no answer within {seconds:g} s, or less than {RATE} bytes a second")
    if errors:
        raise errors[0]
    return results[0]
