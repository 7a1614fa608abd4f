"""Storages: what live parameters a model has, and what is known to be in each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from m2ncompile.engine.boxes import UnevenError, through
from m2ncompile.engine.callers import qualname
from m2ncompile.engine.recording import LiveParam, View
from m2ncompile.engine.reloading import awaited, deferred

__all__ = [
    "Cause",
    "Held",
    "HeldPiece",
    "Live",
    "live_params",
    "named_tensors",
    "place_of",
    "settled",
    "storage_key",
    "uncovered",
    "view_of",
]

#: The operation, and the function that called it.
Cause = tuple[str, str]
#: Where in the storage, which tensor, where in the tensor.
HeldPiece = tuple[View, int, View]


class Live(NamedTuple):
    """A parameter's record, its storage, and what its names stand for."""

    param: LiveParam
    storage: torch.UntypedStorage
    dtype: torch.dtype
    places: dict[str, tuple[torch.dtype, int, View]]


def live_params(model: nn.Module, not_direct: Mapping[str, str]) -> list[Live]:
    groups: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named_tensors(model):
        groups.setdefault(storage_key(tensor), []).append((name, tensor))
    found = []
    for group in groups.values():
        # The one that shows most of the storage stands for the others.
        name, tensor = max(group, key=lambda one: one[1].numel())
        aliases = tuple(other for other, _ in group if other != name)
        owner = model.get_submodule(name.rpartition(".")[0])
        param = LiveParam(
            name=name,
            aliases=aliases,
            dtype=str(tensor.dtype).removeprefix("torch."),
            view=view_of(tensor),
            owner=type(owner).__qualname__,
            loader=_loader(tensor),
            not_direct=next(
                (not_direct[one] for one in (name, *aliases) if one in not_direct), None
            ),
            parameter=any(isinstance(other, nn.Parameter) for _, other in group),
            awaited=tuple(one for one, other in group if awaited(one, other)),
            deferred=deferred(owner),
        )
        places = {one: place_of(other) for one, other in group}
        found.append(Live(param, tensor.untyped_storage(), tensor.dtype, places))
    return found


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if not is_lazy(tensor):
            yield name, tensor


def _loader(param: torch.Tensor) -> str:
    loader = getattr(param, "weight_loader", None)
    return "" if loader is None else qualname(loader)


def storage_key(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage: its identity while it lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def view_of(tensor: torch.Tensor) -> View:
    return View(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def place_of(tensor: torch.Tensor) -> tuple[torch.dtype, int, View]:
    return tensor.dtype, storage_key(tensor), view_of(tensor)


class Held:
    """What is known of a storage: a parameter's, scratch memory, a tensor once written to.

    `pieces` are in the order in which they were written; in all but parameters
    no two overlap. `spoiled` are the tensors that something was computed from.
    """

    __slots__ = ("dtype", "is_param", "pieces", "spoiled")

    def __init__(self, dtype: torch.dtype, is_param: bool = False) -> None:
        self.dtype = dtype
        self.is_param = is_param
        self.pieces: list[HeldPiece] = []
        self.spoiled: dict[int, Cause] = {}


def uncovered(pieces: Iterable[HeldPiece], box: View) -> list[HeldPiece]:
    """The pieces that writing `box` leaves. Raises UnevenError where it cuts one."""
    left = []
    for piece in pieces:
        common = through(piece[0], piece[0], box, box)
        if common is None:
            left.append(piece)
        elif prod(common[0].shape) != prod(piece[0].shape):
            raise UnevenError
    return left


def settled(held: Held) -> list[HeldPiece]:
    """The pieces that no later one covers. Raises UnevenError where one is cut."""
    if not held.is_param:
        return held.pieces
    settled: list[HeldPiece] = []
    for piece in held.pieces:
        settled = [*uncovered(settled, piece[0]), piece]
    return settled
