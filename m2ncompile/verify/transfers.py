"""One sync of a plan with real data, all ranks in this process.

Trainer ranks hold their shards and nothing else, and send from those; a worker's
buffer is put together from what was sent to it. Which elements a rank holds, sends
and receives is read off the layouts in the plan, by slicing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

import msgspec
import torch

from m2ncompile.errors import Problem
from m2ncompile.layout import Box, Layout, local_shape, shard_box
from m2ncompile.plan import Plan, PlanDestination, PlanPart
from m2ncompile.plan_check import layouts_of

__all__ = ["Arrival", "bits", "deliver", "land", "random_tensors"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Arrival(msgspec.Struct, frozen=True):
    """What a worker received for one destination: its shard of the wire, row-major."""

    destination: PlanDestination
    buffer: torch.Tensor


def random_tensors(plan: Plan, step: int) -> list[torch.Tensor]:
    """Checkpoint tensors for the plan's table, others at each training step (0 to 9).

    They are numbers where the dtype has 16 bits or more, any bytes elsewhere.
    """
    tensors = []
    for index, tensor in enumerate(plan.tensors):
        geometry = plan.geometries[tensor.geometry]
        dtype: torch.dtype = getattr(torch, plan.dtypes[geometry.dtype])
        generator = torch.Generator().manual_seed(10 * index + step)  # 32 bits count
        if dtype.is_floating_point and dtype.itemsize > 1:
            value = torch.randn(geometry.shape, generator=generator).to(dtype)
        elif dtype == torch.bool:
            value = torch.randint(0, 2, geometry.shape, generator=generator).to(dtype)
        else:
            size = (prod(geometry.shape) * dtype.itemsize,)
            value = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
            value = value.view(dtype).view(geometry.shape)
        tensors.append(value)
    return tensors


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers, which compare equal exactly when all bits do."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def deliver(
    plan: Plan, tensors: Sequence[torch.Tensor], problems: list[Problem]
) -> dict[int, list[Arrival]]:
    """Runs the plan's transfers: what each worker's communicator rank receives, in order.

    `tensors` are the global ones. A sender that lacks what it is to send, and a
    receiver that nobody sends something to, become problems.
    """
    layouts = layouts_of(plan)
    first = plan.inputs.trainer.ranks
    arrivals: dict[int, list[Arrival]] = {
        rank: [] for rank in range(first, first + plan.inputs.engine.workers)
    }
    #: By rank and destination, the parts that have come so far.
    parts: defaultdict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    for transfer in plan.transfers:
        for index in transfer.destinations:
            d, part = plan.destinations[index], transfer.part
            name = plan.tensors[d.tensor].name
            layout, shape = layouts[d.layout], plan.geometries[plan.wires[d.wire].geometry].shape
            sent, moved = _sent(plan, layouts, d, tensors[d.tensor], problems), shape
            if part is not None:
                sent, moved = _part_of(part, sent, shape)
            for rank in layout.mesh.ranks:
                buffer = _received(moved, layout, rank, sent)
                if buffer is None:
                    message = f"worker {rank - first}: no trainer sends it all of its shard"
                    problems.append(Problem(name, message))
                    continue
                if part is not None:
                    parts[rank, index].append(buffer)
                    if part.start + part.size < shape[part.dim]:
                        continue
                    buffer = torch.cat(parts.pop((rank, index)), part.dim)
                arrivals[rank].append(Arrival(d, buffer.view(tensors[d.tensor].dtype)))
    return arrivals


def _part_of(
    part: PlanPart, sent: Mapping[Box, torch.Tensor], shape: Sequence[int]
) -> tuple[dict[Box, torch.Tensor], tuple[int, ...]]:
    """What is sent of a wire of `shape`, and that shape, for one part."""
    dim = part.dim
    pieces = {
        (*box[:dim], (0, part.size), *box[dim + 1 :]): piece.narrow(dim, part.start, part.size)
        for box, piece in sent.items()
    }
    return pieces, (*shape[:dim], part.size, *shape[dim + 1 :])


def _sent(
    plan: Plan,
    layouts: Sequence[Layout],
    d: PlanDestination,
    tensor: torch.Tensor,
    problems: list[Problem],
) -> dict[Box, torch.Tensor]:
    """The pieces of the wire that trainer ranks send, as bits, each once."""
    entry, wire = plan.tensors[d.tensor], plan.wires[d.wire]
    held, source = layouts[entry.source], layouts[wire.source]
    shape = plan.geometries[wire.geometry].shape
    sent: dict[Box, torch.Tensor] = {}
    # Mostly a rank sends its shard as it is.
    as_held = (wire.base, tuple(shape), source) == (0, tuple(tensor.shape), held)
    for rank in source.mesh.ranks:
        box = shard_box(source, shape, rank)
        mine = shard_box(held, tuple(tensor.shape), rank)
        assert box is not None
        if as_held:
            sent[box] = bits(tensor[_slices(box)])
            continue
        known = torch.zeros(tensor.shape, dtype=torch.bool)
        memory = torch.zeros(tensor.shape, dtype=_INTEGERS[tensor.element_size()])
        if mine is not None:
            known[_slices(mine)] = True
            memory[_slices(mine)] = bits(tensor[_slices(mine)])
        stop = wire.base + prod(shape)
        if not known.flatten()[wire.base : stop].view(shape)[_slices(box)].all():
            message = f"trainer rank {rank} is to send elements that it does not hold"
            problems.append(Problem(entry.name, message))
            continue
        sent[box] = memory.flatten()[wire.base : stop].view(shape)[_slices(box)]
    return sent


def _received(
    shape: Sequence[int], layout: Layout, rank: int, sent: Mapping[Box, torch.Tensor]
) -> torch.Tensor | None:
    """A worker's shard of the wire, from the pieces; None where they leave some of it out."""
    wanted = shard_box(layout, shape, rank)
    assert wanted is not None
    buffer: torch.Tensor | None = None
    filled = 0
    for box, piece in sent.items():
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, box, strict=True))
        if any(a >= b for a, b in common):
            continue
        if buffer is None:
            buffer = torch.zeros(local_shape(layout, shape), dtype=piece.dtype)
        part = piece[_slices(common, box)]
        buffer[_slices(common, wanted)] = part
        filled += part.numel()
    return buffer if buffer is not None and filled == buffer.numel() else None


def _slices(box: Box, within: Box | None = None) -> tuple[slice, ...]:
    starts = [a for a, _ in within or ((0, 0),) * len(box)]
    return tuple(slice(a - start, b - start) for (a, b), start in zip(box, starts, strict=True))


def land(plan: Plan, arrival: Arrival, place: int, param: torch.Tensor) -> None:
    """Writes a received shard where its landing says; `place` is the rank's in the mesh.

    Raises RuntimeError when the landing reaches out of the parameter's storage.
    """
    assert arrival.destination.landing is not None
    landing = plan.landings[arrival.destination.landing]
    sizes, strides = zip(*landing.dims, strict=True)
    start = param.storage_offset() + arrival.destination.offset_at(place)
    target = param.detach().as_strided(sizes, strides, start)
    target.copy_(arrival.buffer.view(sizes))
