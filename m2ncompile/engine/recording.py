"""What `load_weights` does on one worker rank, as records free of the engine.

All strides and offsets count elements. A checkpoint tensor is row-major and
contiguous; a live parameter is addressed in its storage.
"""

from __future__ import annotations

import msgspec

__all__ = ["Copy", "LiveParam", "Recording", "Refusal", "View"]


class View(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A strided box; a stride of 0 repeats an element."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Copy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The loader copies `source` of a checkpoint tensor to `target` of a live parameter.

    `tensor` indexes the inventory, `param` the recording's `params`. Both views
    have the same shape.
    """

    tensor: int
    source: View
    param: int
    target: View


class LiveParam(msgspec.Struct, frozen=True):
    """One live parameter or buffer in load format.

    `view` is the parameter inside its storage; parameters that share a storage
    are listed once, by the one that shows most of it, with the other names in
    `aliases`. `owner` is the class of the module that holds it, `loader` the
    qualified name of its own loader, empty where it has none.
    `not_direct` says why writing it directly is not all there is to do on the
    target platform, None where that is known. `parameter` is False for a buffer.
    `awaited` are those of its names that the engine's reload of a module waits for;
    `deferred` where it keeps them until all other modules are done.
    """

    name: str
    aliases: tuple[str, ...]
    dtype: str
    view: View
    owner: str
    loader: str
    not_direct: str | None
    parameter: bool = True
    awaited: tuple[str, ...] = ()
    deferred: bool = False


class Refusal(msgspec.Struct, frozen=True):
    """Why what a loader does with a tensor can't be recorded.

    `op` is the operation that needs the data, or how else the tensor gets where
    no copy shows it; `loader` is the function that called it.
    """

    tensor: int
    op: str
    loader: str


class Recording(msgspec.Struct, frozen=True):
    """One rank. `unknown` are tensors that the model's `load_weights` raised on, with its words.

    `copies` are by parameter, then in the order in which they were made: a later
    one wins where two overlap. A tensor that is refused may also be in copies,
    which then do not say all. A tensor that is in no copy, refusal or `unknown`
    was accepted and not read (another rank's expert), or skipped. Elements that
    no copy fills are as they were, or constants of the loader's; `zeroed` are the
    parameters of some of which those are zeros.
    """

    rank: int
    params: tuple[LiveParam, ...]
    copies: tuple[Copy, ...]
    refusals: tuple[Refusal, ...]
    unknown: tuple[tuple[int, str], ...]
    zeroed: tuple[int, ...] = ()
