"""What a report shows. Bytes are bytes; ranks count from 0 on their own side."""

from __future__ import annotations

import msgspec

from m2ncompile.layout import Box
from m2ncompile.routes import Reason, Route
from m2ncompile.summary import Summary

__all__ = [
    "ROUTES",
    "Change",
    "Changes",
    "Landing",
    "Layer",
    "Move",
    "Param",
    "Report",
    "Shard",
    "Stop",
    "Tensor",
    "Transfer",
]

#: The order of every triple of bytes by route.
ROUTES: tuple[Route, ...] = ("direct", "reload", "fallback")


class Layer(msgspec.Struct, frozen=True):
    """Bytes of the tensors whose names have the first whole number `number` after `prefix`.

    `number` is None for names without one. A destination counts once, not once a worker.
    """

    prefix: str
    number: int | None
    nbytes: tuple[int, int, int]


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """A part of what a transfer moves, and the ranks that each hold it."""

    box: Box
    ranks: tuple[int, ...]


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One tensor's range between two layouts; many destinations share one.

    `trainers` and `workers` are the distinct shards. `feeds` has, for each of
    `workers`, the indices of the `trainers` that share an element with it.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: str
    destination: str
    trainers: tuple[Shard, ...]
    workers: tuple[Shard, ...]
    feeds: tuple[tuple[int, ...], ...]


class Tensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`source` is its layout on the trainer, in words."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: str


class Param(msgspec.Struct, frozen=True, array_like=True):
    """A live parameter: local shape; strides in elements, None where it is row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None


class Landing(msgspec.Struct, frozen=True, array_like=True):
    """Indexes `params`; (size, stride) dims in elements."""

    param: int
    dims: tuple[tuple[int, int], ...]


class Stop(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A plan's destination: indices, but for `base` and `offset` (in elements) and `route`.

    `base` is the first element of the tensor that travels.
    """

    tensor: int
    move: int
    base: int
    route: Route
    landing: int | None
    offset: int | tuple[int, ...] | None
    reason: int | None


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """One collective; `nbytes` is the size of what it carries, once.

    `part` is None, or (dim, start, size) where it carries a part of one stop.
    """

    nbytes: int
    route: Route
    stops: tuple[int, ...]
    part: tuple[int, int, int] | None


class Change(msgspec.Struct, frozen=True):
    """A titled list of groups of tensors: name, tensors, bytes, before, after."""

    title: str
    groups: tuple[tuple[str, int, int, str, str], ...]


class Changes(msgspec.Struct, frozen=True):
    """What differs from an earlier plan, in words.

    `marks` has the changed aspects of each tensor that changed, by its index.
    """

    headline: str
    same_program: bool
    plans: tuple[str, str]
    programs: tuple[str, str]
    inputs: tuple[tuple[str, str, str], ...]
    amounts: tuple[tuple[str, str, str, str], ...]
    notes: tuple[str, ...]
    sections: tuple[Change, ...]
    reasons: tuple[Reason, ...]
    marks: dict[int, tuple[str, ...]]


class Report(msgspec.Struct, frozen=True):
    """`traffic[t][w]` is what trainer rank t sends worker w in one sync.

    `facts` are label and text. `staging` has rank labels, each with what a
    run allocates there: (words, bytes).
    """

    model: str
    architecture: str
    digest: str
    facts: tuple[tuple[str, str], ...]
    summary: Summary
    layers: tuple[Layer, ...]
    traffic: tuple[tuple[int, ...], ...]
    staging: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    reasons: tuple[Reason, ...]
    params: tuple[Param, ...]
    landings: tuple[Landing, ...]
    moves: tuple[Move, ...]
    tensors: tuple[Tensor, ...]
    stops: tuple[Stop, ...]
    transfers: tuple[Transfer, ...]
    changes: Changes | None
