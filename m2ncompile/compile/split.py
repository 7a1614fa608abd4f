"""Transfers of which a rank would hold more than it may stage, in parts.

NCCL M2N stages a rank's share of a transfer in a pool of its own and refuses what does not
fit one of its slots. A part is an interval of a dim that neither side shards, so that all
ranks take part in each as they do in the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from m2ncompile.dtypes import nbytes
from m2ncompile.inventory.records import TensorInfo
from m2ncompile.layout import Layout, Limits, local_shape
from m2ncompile.plan import PlanPart, PlanTransfer
from m2ncompile.routes import Destination
from m2ncompile.views import narrowed

__all__ = ["split"]

#: Elements whose runs stay whole in every dtype: 64 are 128 bytes of bfloat16.
_RUN = 64


def split(
    tensors: Sequence[TensorInfo],
    destinations: Sequence[Destination],
    groups: Sequence[tuple[int, ...]],
    limits: Limits,
) -> tuple[PlanTransfer, ...]:
    """`groups` of indices of `destinations`, in their order; what is alone and too large in parts.

    A tensor stays whole where every dim is sharded, or no part of it lies evenly
    in its parameter.
    """
    return tuple(
        PlanTransfer(group, part)
        for group in groups
        for part in (
            _parts(tensors[destinations[group[0]].tensor].dtype, destinations[group[0]], limits)
            if len(group) == 1
            else (None,)
        )
    )


def _parts(dtype: str, d: Destination, limits: Limits) -> Iterator[PlanPart | None]:
    shape = d.wire.shape
    sent, received = local_shape(d.wire.source, shape), local_shape(d.layout, shape)
    share = nbytes(dtype, (max(prod(sent), prod(received)),))
    if share > limits.stage_bytes:
        # Of the first dims: there a part is made of the longest runs.
        for dim, size in enumerate(shape):
            most = size * limits.stage_bytes // share
            run = _RUN if dim + 1 == len(shape) and most > _RUN else 1
            step = _even(size, run, most)
            if step and _lies_evenly(d, received, dim):
                for start in range(0, size, step):
                    yield PlanPart(dim, start, min(step, size - start))
                return
    yield None


def _even(size: int, run: int, most: int) -> int:
    """Of what size the parts of a dim are, in whole runs: as few as can be, and about alike."""
    runs, most = -(-size // run), most // run
    if not most:
        return 0
    return -(-runs // -(-runs // most)) * run


def _lies_evenly(d: Destination, received: Sequence[int], dim: int) -> bool:
    if any(_shards(layout, dim) > 1 for layout in (d.wire.source, d.layout)):
        return False
    if d.landing is None:
        return True
    try:
        narrowed(0, d.landing.dims, received, dim, 0, 1)
    except ValueError:
        return False
    return True


def _shards(layout: Layout, dim: int) -> int:
    return layout.split[1] if layout.split is not None and layout.split[0] == dim else 1
