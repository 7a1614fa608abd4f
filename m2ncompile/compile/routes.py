"""Where one tensor lands, by which route, and why not by a better one."""

from __future__ import annotations

from typing import Literal

import msgspec

from m2ncompile.layout import Layout

__all__ = ["Destination", "Reason", "Route"]

#: `direct`: the transfer writes the live parameter. `reload`: each worker
#: receives its shard, and the engine's layer-wise reload processes it.
#: `fallback`: every worker receives the whole tensor and runs `load_weights`.
Route = Literal["direct", "reload", "fallback"]


class Reason(msgspec.Struct, frozen=True):
    """Why a tensor is not `direct`: a stable code, and words to act on."""

    code: str
    text: str


class Destination(msgspec.Struct, frozen=True):
    """One landing of one tensor.

    `tensor` indexes the inventory. `param` is the live parameter that a direct
    transfer writes, None for the other routes. `reason` is None exactly for
    `direct`.
    """

    tensor: int
    route: Route
    layout: Layout
    param: str | None
    reason: Reason | None
