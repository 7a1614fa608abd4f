"""Meshes, placements and layouts, and what one collective can move between two of them.

A side's ranks form a mesh of two axes over a contiguous interval. A placement
says of each axis whether it replicates the tensor or shards one of its dims.
NCCL M2N wants exactly one sharded axis a side and even splits, carries few
dtypes and dims, and bounds how many shards meet in one transfer; the rules are
those of vLLM 0.33.0's `m2n_common`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd
from reprlib import repr as brief
from typing import Final, TypeGuard

import msgspec

from m2ncompile.dtypes import TRANSFERABLE
from m2ncompile.errors import LayoutError, Problem, Problems

__all__ = [
    "MESH_AXES",
    "REPLICATE",
    "REPLICATED",
    "Box",
    "Layout",
    "Limits",
    "Mesh",
    "Placements",
    "check_transfers",
    "is_int",
    "local_shape",
    "mesh_errors",
    "overlaps",
    "placement_errors",
    "shard_box",
    "transfer_problems",
]

#: The code of a mesh axis along which every rank holds the same. Any other
#: code is the tensor dim that the axis shards.
REPLICATE: Final = -1
#: The placements of a tensor that every rank holds whole.
REPLICATED: Final = None
MESH_AXES: Final = 2
#: What a plan can say.
_MOST: Final = 2**63 - 1

#: One code per mesh axis.
Placements = tuple[int, int]
#: One half-open interval per dim, in elements.
Box = tuple[tuple[int, int], ...]


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """`dims[0] * dims[1]` ranks from `start`, numbered row by row.

    Raises ValueError for anything but two positive dims and a start of at
    least 0.
    """

    dims: tuple[int, int]
    start: int = 0

    def __post_init__(self) -> None:
        errors = mesh_errors(self.dims)
        if not is_int(self.start) or self.start < 0:
            errors.append(f"a mesh starts at rank 0 or above, got {self.start!r}")
        if errors:
            raise ValueError("; ".join(errors))

    @property
    def size(self) -> int:
        return self.dims[0] * self.dims[1]

    @property
    def ranks(self) -> range:
        return range(self.start, self.start + self.size)


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor's pieces lie on one side's ranks.

    Raises ValueError for placements that M2N can't say.
    """

    mesh: Mesh
    placements: Placements | None

    def __post_init__(self) -> None:
        if self.placements is not None and (errors := placement_errors(self.placements)):
            raise ValueError("; ".join(errors))

    def resolved(self) -> Layout:
        """The same layout with one sharded axis, as M2N wants it.

        A replicated tensor gets the mesh `(size, 1)`, whose second axis shards
        into one piece. Refactoring the mesh is sound there, and only there,
        since all ranks hold the same.
        """
        if self.placements is not None:
            return self
        return Layout(Mesh((self.mesh.size, 1), self.mesh.start), (REPLICATE, 0))

    @property
    def split(self) -> tuple[int, int] | None:
        """The sharded dim and its number of shards; None when replicated."""
        if self.placements is None:
            return None
        axis = 1 if self.placements[0] == REPLICATE else 0
        return self.placements[axis], self.mesh.dims[axis]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one collective can do; the defaults are NCCL M2N's.

    `max_sources` counts the source shards that meet in one destination shard,
    `max_destinations` the destination shards that one source shard feeds.
    Tensors below `stack_bytes` may be stacked into one transfer: 64 MiB, which a link of
    400 GB/s moves in the time that a call takes the host. No rank packs or unpacks more of one
    than `stage_bytes`: 288 MiB, since what has the size of a power of two then goes in fewer
    stacks than at one.
    """

    max_dims: int = 3
    max_sources: int = 16
    max_destinations: int = 64
    stack_bytes: int = 1 << 26
    stage_bytes: int = 9 << 25

    @staticmethod
    def violations(values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
        """Of `values` by name: the name, and what is wrong with it."""
        for name, value in values.items():
            if not is_int(value) or value < 1:
                yield name, f"must be an int of at least 1, got {brief(value)}"
            elif value > _MOST:
                yield name, f"must be below 2**63, got {brief(value)}"

    def __post_init__(self) -> None:
        if wrong := [" ".join(one) for one in self.violations(msgspec.structs.asdict(self))]:
            raise ValueError("; ".join(wrong))


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is an int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def mesh_errors(dims: Sequence[object]) -> list[str]:
    """What is wrong with mesh dims of any origin; empty when nothing is."""
    if len(dims) != MESH_AXES:
        return [f"a mesh has {MESH_AXES} dims, got {len(dims)}"]
    return [
        f"mesh dim {axis} must be an int of at least 1, got {brief(dim)}"
        for axis, dim in enumerate(dims)
        if not is_int(dim) or dim < 1
    ]


def placement_errors(placements: Sequence[object]) -> list[str]:
    """What is wrong with placements of any origin; empty when nothing is."""
    if len(placements) != MESH_AXES:
        return [f"placements are {MESH_AXES} codes, one per mesh axis, got {len(placements)}"]
    errors = [
        f"placement {axis} must be {REPLICATE} (replicate) or a tensor dim, got {brief(code)}"
        for axis, code in enumerate(placements)
        if not is_int(code) or code < REPLICATE
    ]
    if errors:
        return errors
    sharded = sum(code != REPLICATE for code in placements)
    if sharded == 0:
        return ["two replicating axes: write null (None) for a tensor that all ranks hold whole"]
    if sharded == MESH_AXES:
        return [f"placements {list(placements)} shard both mesh axes, M2N can shard only one"]
    return []


def local_shape(layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in elements of what each rank holds of a tensor of `shape`.

    Raises LayoutError when the tensor lacks the sharded dim or its size does
    not divide evenly.
    """
    if error := _split_error(layout, shape):
        raise LayoutError(f"the layout does not fit: {error[0]}")
    local = list(shape)
    if layout.split:
        dim, shards = layout.split
        local[dim] //= shards
    return tuple(local)


def shard_box(layout: Layout, shape: Sequence[int], rank: int) -> Box | None:
    """What `rank` of the communicator holds; None when it isn't in the mesh.

    Raises LayoutError as `local_shape` does.
    """
    local = local_shape(layout, shape)
    if rank not in layout.mesh.ranks:
        return None
    box = [(0, size) for size in shape]
    if layout.placements is not None:
        row_and_column = divmod(rank - layout.mesh.start, layout.mesh.dims[1])
        for index, dim in zip(row_and_column, layout.placements, strict=True):
            if dim != REPLICATE:
                box[dim] = (index * local[dim], (index + 1) * local[dim])
    return tuple(box)


def overlaps(shape: Sequence[int], source: Layout, destination: Layout) -> tuple[int, int]:
    """How many shards meet: `(max_sources, max_destinations)`.

    `max_sources` is the largest number of distinct source shards that share an
    element with one destination shard, `max_destinations` the largest number
    of destination shards that share one with a source shard. Copies of a shard
    count once. Raises LayoutError when a layout does not fit `shape`.
    """
    local_shape(source, shape)
    local_shape(destination, shape)
    if 0 in shape:
        return 0, 0
    source_dim, sources = source.split or (None, 1)
    destination_dim, destinations = destination.split or (None, 1)
    if source_dim != destination_dim:
        return sources, destinations
    return _most_met(destinations, sources), _most_met(sources, destinations)


def _most_met(pieces: int, others: int) -> int:
    """The most of `others` even pieces that one of `pieces` even pieces of an extent meets.

    In units of the common refinement a piece is `others / gcd` long and one of
    the others `pieces / gcd`, which are coprime: so some piece starts at the last
    unit of another, and meets that one and whatever its remaining units reach.
    The extent does not matter.
    """
    common = gcd(pieces, others)
    length, other_length = others // common, pieces // common
    return 1 - (1 - length) // other_length


def transfer_problems(
    name: str,
    dtype: str,
    shape: Sequence[int],
    source: Layout,
    destination: Layout,
    limits: Limits,
) -> list[Problem]:
    """Everything that keeps one collective from moving this tensor."""
    found = _geometry_errors(dtype, tuple(shape), source, destination, limits)
    return [Problem(name, message, fix) for message, fix in found]


def check_transfers(
    transfers: Iterable[tuple[str, str, tuple[int, ...], Layout, Layout]], limits: Limits
) -> None:
    """Check `(name, dtype, shape, source, destination)` of every transfer.

    Raises one LayoutError that lists all problems of all tensors. Tensors of
    equal geometry are worked out once.
    """
    known: dict[object, list[tuple[str, str]]] = {}
    problems = Problems()
    total = bad = 0
    for name, dtype, shape, source, destination in transfers:
        total += 1
        key = (dtype, shape, source, destination)
        if (found := known.get(key)) is None:
            found = known[key] = _geometry_errors(dtype, shape, source, destination, limits)
        if found:
            bad += 1
            problems.extend(Problem(name, message, fix) for message, fix in found)
    problems.raise_if_any(LayoutError, f"{bad} of {total} tensors can't be moved as planned")


def _geometry_errors(
    dtype: str, shape: tuple[int, ...], source: Layout, destination: Layout, limits: Limits
) -> list[tuple[str, str]]:
    """(message, fix) of everything wrong with a transfer, whatever the tensor's name."""
    errors: list[tuple[str, str]] = []
    if dtype not in TRANSFERABLE:
        errors.append(
            (
                f"dtype {dtype} can't be transferred",
                f"cast it on the trainer to one of {', '.join(sorted(TRANSFERABLE))}",
            )
        )
    if not 1 <= len(shape) <= limits.max_dims:
        errors.append(
            (
                f"shape {list(shape)} has {len(shape)} dims, a transfer takes "
                f"1 to {limits.max_dims}",
                "exclude it (model.exclude), or send it in a form with fewer dims"
                if shape
                else "exclude it (model.exclude), or send it as one element of shape [1]",
            )
        )
    if any(size < 1 for size in shape):
        errors.append(
            (f"shape {list(shape)} holds no elements, all sizes must be 1 or more", "leave it out")
        )
    misfits = [
        (f"{side} {error}", fix)
        for side, layout in (("source", source), ("destination", destination))
        if (split_error := _split_error(layout, shape))
        for error, fix in [split_error]
    ]
    errors += misfits
    if not misfits:
        errors += _limit_errors(shape, source, destination, limits)
    a, b = source.mesh.ranks, destination.mesh.ranks
    shared = range(max(a.start, b.start), min(a.stop, b.stop))
    if shared.start < shared.stop:
        errors.append(
            (
                f"source ranks {_interval(a)} and destination ranks {_interval(b)} "
                f"share {_interval(shared)}",
                f"trainer and workers need ranks of their own: start the destination "
                f"at {a.stop} or above",
            )
        )
    return errors


def _split_error(layout: Layout, shape: Sequence[int]) -> tuple[str, str] | None:
    if layout.split is None:
        return None
    dim, shards = layout.split
    if dim >= len(shape):
        return (
            f"shards dim {dim}, but shape {list(shape)} has {len(shape)} dims",
            "shard a dim that it has, or replicate it",
        )
    each, rest = divmod(shape[dim], shards)
    if rest:
        return (
            f"shards dim {dim} of {list(shape)} over {shards} ranks, which is uneven: "
            f"{shape[dim]} = {shards} * {each} + {rest}",
            f"use a mesh axis that divides {shape[dim]}, or replicate it",
        )
    return None


def _limit_errors(
    shape: tuple[int, ...], source: Layout, destination: Layout, limits: Limits
) -> list[tuple[str, str]]:
    sources, destinations = overlaps(shape, source, destination)
    splits = f"source {_split_text(source)}, destination {_split_text(destination)}"
    errors = []
    if sources > limits.max_sources:
        errors.append(
            (
                f"{sources} source shards meet in one destination shard, "
                f"over the limit of {limits.max_sources} ({splits})",
                "use fewer source shards, or more destination shards along the source's dim",
            )
        )
    if destinations > limits.max_destinations:
        errors.append(
            (
                f"one source shard feeds {destinations} destination shards, "
                f"over the limit of {limits.max_destinations} ({splits})",
                "use fewer destination shards, or more source shards along the destination's dim",
            )
        )
    return errors


def _split_text(layout: Layout) -> str:
    if layout.split is None:
        return "whole"
    dim, shards = layout.split
    return f"{shards} along dim {dim}"


def _interval(ranks: range) -> str:
    return f"[{ranks.start}, {ranks.stop})"
