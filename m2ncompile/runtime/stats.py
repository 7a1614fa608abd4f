"""What a sync came to."""

from __future__ import annotations

import msgspec

__all__ = ["RouteStats", "SyncStats"]


class RouteStats(msgspec.Struct, frozen=True):
    """`tensors`, or parts of some, that this rank received by a route, and their bytes."""

    route: str
    tensors: int
    nbytes: int


class SyncStats(msgspec.Struct, frozen=True):
    """One rank's sync. `seconds` are wall clock, from the call to its return.

    `agreeing` of them went to waiting for all ranks, before and after. `nbytes`
    is what this rank sent from, or received. `staging` is the memory, in bytes, that the run
    holds between syncs for what is packed, unpacked and reloaded.
    """

    version: str
    seconds: float
    agreeing: float
    nbytes: int
    staging: int
    routes: tuple[RouteStats, ...] = ()
