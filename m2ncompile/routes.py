"""Where one tensor lands, by which route, and why not by a better one."""

from __future__ import annotations

from typing import Literal

import msgspec

from m2ncompile.layout import Layout

__all__ = ["Destination", "Landing", "Param", "Reason", "Route", "Wire"]

#: `direct`: the transfer writes the live parameter. `reload`: each worker
#: receives its shard, and the engine's layer-wise reload processes it.
#: `fallback`: every worker receives the whole tensor and runs `load_weights`.
Route = Literal["direct", "reload", "fallback"]


class Reason(msgspec.Struct, frozen=True):
    """Why a tensor is not `direct`: a stable code, and words to act on."""

    code: str
    text: str


class Param(msgspec.Struct, frozen=True):
    """A live parameter in load format, alike on every worker that has it.

    `shape` is local, in elements; `stride` is None for a row-major one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None


class Landing(msgspec.Struct, frozen=True):
    """Where in a live parameter's storage a worker's shard belongs, in elements.

    The received buffer, row-major, goes to `dims` of (size, stride), longest
    first, from an offset that is one for all ranks of the mesh or one each.
    """

    param: Param
    offsets: tuple[int, ...]
    dims: tuple[tuple[int, int], ...]

    @property
    def dense(self) -> bool:
        """Whether the target is one contiguous run in the buffer's order."""
        expected = 1
        for size, stride in reversed(self.dims):
            if stride != expected:
                return False
            expected *= size
        return True


class Wire(msgspec.Struct, frozen=True):
    """The range of a tensor that one transfer moves: from element `base`, as row-major `shape`.

    `source` is how that range lies on the trainer.
    """

    base: int
    shape: tuple[int, ...]
    source: Layout


class Destination(msgspec.Struct, frozen=True):
    """One landing of one tensor, or of a part of it.

    `tensor` indexes the inventory. `landing` is None for `fallback`, where
    `load_weights` decides. `reason` is None exactly for `direct`.
    """

    tensor: int
    wire: Wire
    route: Route
    layout: Layout
    landing: Landing | None
    reason: Reason | None
