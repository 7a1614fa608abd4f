"""What a stack brought, from where it was received to where it goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch

from m2ncompile.runtime.bind_worker import Part, Receive
from m2ncompile.runtime.copies import Copies
from m2ncompile.views import View

__all__ = ["seen", "unpacking"]


def unpacking(receive: Receive, buffer: torch.Tensor, into: Mapping[str, torch.Tensor]) -> Copies:
    """The copies out of `buffer`, which has no gaps, into the storages of `into`, by name.

    Members that follow each other at one distance, such as experts in their parameter, are
    copied as one.
    """
    parts, rows = receive.parts, receive.rows
    shape = (rows, len(parts), -1) if rows else (1, len(parts), -1)
    members = buffer.reshape(-1).view(shape)
    places, pieces = [], []
    for first, count, step in _runs(parts):
        part = parts[first]
        assert part.into is not None and part.view is not None
        view, lead = part.view, _lead(part.view.shape, rows) if rows else 0
        sizes = (*view.shape[:lead], count, *view.shape[lead:])
        strides = (*view.strides[:lead], step, *view.strides[lead:])
        places.append(seen(into[part.into], View(view.offset, sizes, strides)))
        pieces.append(members[:, first : first + count].view(sizes))
    return Copies(places, pieces)


def seen(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """A view of the memory of `tensor`, from its first element on."""
    memory = tensor.detach()
    return memory.as_strided(view.shape, view.strides, memory.storage_offset() + view.offset)


def _runs(parts: Sequence[Part]) -> Iterator[tuple[int, int, int]]:
    """Of parts alike in one parameter: the first, how many, and how far from one to the next."""
    first = 0
    while first < len(parts):
        count, step = 1, 0
        while first + count < len(parts):
            one, other = parts[first + count - 1], parts[first + count]
            assert one.view is not None and other.view is not None
            distance = other.view.offset - one.view.offset
            alike = (one.into, one.view.shape, one.view.strides) == (
                *(other.into, other.view.shape, other.view.strides),
            )
            if not alike or distance <= 0 or (count > 1 and distance != step):
                break
            count, step = count + 1, distance
        yield first, count, step
        first += count


def _lead(shape: Sequence[int], rows: int) -> int:
    """How many of the first dims make up the rows."""
    return next(lead for lead in range(len(shape) + 1) if prod(shape[:lead]) == rows)
