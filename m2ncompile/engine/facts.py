"""What the resolver needs to know of a live parameter, free of the engine.

The front-end fills these from the real model class; everything after it works
on records alone.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["LoaderKind", "ModelFacts", "ParamFacts"]

#: Loaders told apart by identity of the function, never by name.
#: `none`: the parameter has no loader; `partial`: a wrapped one, whose wrapper
#: may do anything; `unknown`: any other function.
LoaderKind = Literal["none", "partial", "replicated", "column", "row", "unknown"]


class ParamFacts(msgspec.Struct, frozen=True):
    """One live parameter on one worker rank, in load format."""

    name: str
    #: torch name, e.g. `bfloat16`.
    dtype: str
    #: Local shape on this rank, elements.
    shape: tuple[int, ...]
    contiguous: bool
    loader: LoaderKind
    #: Qualified name of the loader, for messages.
    loader_name: str
    #: The dim that the loader declares it shards (`output_dim` or `input_dim`).
    shard_dim: int | None
    #: `tp_size` of the layer that owns the loader.
    owner_tp: int | None
    #: Attributes that say the stored form differs from the checkpoint's
    #: (packing, transposition, pre-sharding).
    storage_marks: tuple[str, ...]
    #: Class whose model-level loading transforms what is below it.
    blocked_by: str | None


class ModelFacts(msgspec.Struct, frozen=True):
    """One worker rank's model."""

    engine: str
    engine_version: str
    architecture: str
    #: Quantization method in force, None for none.
    quantization: str | None
    rank: int
    params: tuple[ParamFacts, ...]
