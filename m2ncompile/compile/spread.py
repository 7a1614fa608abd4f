"""What the workers' pieces of one tensor are as layouts: meshes, placements, wire shapes.

Recorded loaders say which box of a tensor each worker reads. One collective
moves a whole tensor, or a contiguous range of it, between two even splits along
one dim a side. Here the first is put as the second, where it can be: an even
split in rank order, groups that hold the same, one rank alone, several replicas.
Dims may be regrouped, since only memory order counts: `[E, 2I, H]` is
`[2E, I, H]` as well.

A split of row-major memory along one dim is its *period* (elements from one row
of that dim's parent to the next) and its number of shards; the names of dims
don't matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import msgspec

from m2ncompile.compile.strided import Dim, Piece, canonical
from m2ncompile.layout import REPLICATE, Layout, Mesh

__all__ = ["Carried", "InexpressibleError", "carry"]


class InexpressibleError(Exception):
    """The workers' pieces are no even split; the message says why."""


class Carried(msgspec.Struct, frozen=True):
    """One collective's worth: a range of the tensor, how it is split on both sides.

    The range starts `base` elements into the tensor and is seen as row-major
    `shape`. `pieces` has one piece per rank of the destination mesh.
    """

    base: int
    shape: tuple[int, ...]
    source: Layout
    destination: Layout
    pieces: tuple[Piece, ...]


class _Split(msgspec.Struct, frozen=True):
    """`numel` elements from `base` on, in `shards` shards that repeat every `period`."""

    base: int
    numel: int
    period: int
    shards: int

    @property
    def length(self) -> int:
        return self.period // self.shards


#: Beyond this many transfers for one tensor, sending it whole is the better way.
MAX_PARTS = 128


def carry(
    shape: Sequence[int],
    source: Layout,
    pieces: Mapping[int, Sequence[Piece]],
    max_dims: int,
) -> tuple[Carried, ...]:
    """What moves a tensor of `shape` to the `pieces` of each communicator rank that reads it.

    As few transfers as the layouts allow: the pieces as they are; else their
    rows by themselves (gate and up of one tensor); else whatever one trainer
    rank holds of one worker's piece. Raises InexpressibleError, with the reason
    why the first way is closed, when all are.
    """
    refused: InexpressibleError | None = None
    for families in (_in_step, _by_row, _by_block, _by_block_of_row):
        try:
            return tuple(
                carried
                for family in families(shape, source, pieces)
                for carried in _carry_family(tuple(shape), source, family, max_dims)
            )
        except InexpressibleError as error:
            refused = refused or error
    assert refused is not None
    raise refused


#: Pieces of several ranks that are shards of one split: rank -> piece.
_Family = Mapping[int, Piece]


def _in_step(
    shape: Sequence[int], source: Layout, pieces: Mapping[int, Sequence[Piece]]
) -> list[_Family]:
    """Every rank's first pieces, every rank's second, and so on."""
    counts = {len(found) for found in pieces.values()}
    if len(counts) != 1:
        raise InexpressibleError(
            f"workers read it in {min(counts)} to {max(counts)} pieces, so they are no shards "
            "of one split"
        )
    return [
        {rank: found[place] for rank, found in sorted(pieces.items())}
        for place in range(counts.pop())
    ]


def _by_row(
    shape: Sequence[int], source: Layout, pieces: Mapping[int, Sequence[Piece]]
) -> list[_Family]:
    """The steps of each piece's longest stride as pieces of their own, in step."""
    return _in_step(shape, source, _rows(pieces))


def _by_block_of_row(
    shape: Sequence[int], source: Layout, pieces: Mapping[int, Sequence[Piece]]
) -> list[_Family]:
    return _by_block(shape, source, _rows(pieces))


def _rows(pieces: Mapping[int, Sequence[Piece]]) -> dict[int, list[Piece]]:
    rows: dict[int, list[Piece]] = {}
    for rank, found in pieces.items():
        rows[rank] = []
        for piece in found:
            outer, *inner = piece.dims if len(piece.dims) > 1 else (Dim(1, 0, 0), *piece.dims)
            if outer.size > MAX_PARTS:
                raise InexpressibleError(f"it has {outer.size} rows")
            rows[rank] += [
                Piece(
                    piece.source + i * outer.source, piece.target + i * outer.target, tuple(inner)
                )
                for i in range(outer.size)
            ]
    return rows


def _by_block(
    shape: Sequence[int], source: Layout, pieces: Mapping[int, Sequence[Piece]]
) -> list[_Family]:
    """Each piece, cut where the trainer's ranks change, with the ranks that read that very part."""
    cut = prod(shape)
    if source.split is not None and prod(shape[source.split[0] :]) == cut:
        cut //= source.split[1]
    families: dict[tuple[int, tuple[tuple[int, int], ...]], dict[int, Piece]] = {}
    for rank, found in sorted(pieces.items()):
        for piece in found:
            for part in _cut(piece, cut):
                key = part.source, tuple((dim.size, dim.source) for dim in part.dims)
                if rank in families.setdefault(key, {}):
                    raise InexpressibleError("a worker reads a part of it twice")
                families[key][rank] = part
    if len(families) > MAX_PARTS:
        raise InexpressibleError(f"it would take {len(families)} transfers")
    return [families[key] for key in sorted(families)]


def _cut(piece: Piece, every: int) -> list[Piece]:
    """`piece` in parts that lie within `every` elements each."""
    if not piece.dims or (piece.source % every + _reach(piece)) < every:
        return [piece]
    outer, *inner = piece.dims
    parts = []
    done = 0
    while done < outer.size:
        start = piece.source + done * outer.source
        room = every - start % every
        span = 1 + sum((dim.size - 1) * dim.source for dim in inner)
        steps = min(outer.size - done, 1 + (room - span) // outer.source if room >= span else 0)
        if steps < 1:
            raise InexpressibleError("a trainer shard ends inside of a worker's row")
        dims = canonical((Dim(steps, outer.source, outer.target), *inner))
        parts.append(Piece(start, piece.target + done * outer.target, dims))
        done += steps
    return parts


def _reach(piece: Piece) -> int:
    return sum((dim.size - 1) * dim.source for dim in piece.dims)


def _carry_family(
    shape: tuple[int, ...], source: Layout, family: _Family, max_dims: int
) -> list[Carried]:
    split, indices = _split_of(family)
    wire, sources, dim = _wire(shape, source, split, max_dims)
    return [
        Carried(
            split.base,
            wire,
            sources,
            Layout(mesh, placements),
            tuple(family[rank] for rank in mesh.ranks),
        )
        for mesh, placements in _meshes(indices, split.shards, dim)
    ]


def _split_of(family: Mapping[int, Piece]) -> tuple[_Split, dict[int, int]]:
    """The split that the pieces are shards of, and each rank's shard."""
    boxes = {
        canonical(Dim(dim.size, dim.source, dim.source) for dim in piece.dims)
        for piece in family.values()
    }
    if len(boxes) != 1:
        raise InexpressibleError("the workers' shards differ in size (an uneven split)")
    if len({tuple((dim.size, dim.target) for dim in piece.dims) for piece in family.values()}) != 1:
        raise InexpressibleError("the workers lay their shards out differently")
    box = boxes.pop()
    if any(dim.source < 1 for dim in box):
        raise InexpressibleError("the loader repeats elements of it")
    if not box or box[-1].source != 1:
        box = (*box, Dim(1, 1, 1))  # runs of one element
    if len(box) > 2:
        raise InexpressibleError("the loader shards two dims of it, and a collective shards one")
    length = box[-1].size
    offsets = {rank: piece.source for rank, piece in family.items()}
    starts = sorted(set(offsets.values()))
    if len(box) < 2:
        base, period = starts[0], len(starts) * length
        numel = period
    else:
        rows, period = box[0].size, box[0].source
        base = starts[0] // period * period
        numel = rows * period
        if length * len(starts) != period:
            raise InexpressibleError(
                f"the workers read {len(starts)} runs of {length} out of every {period} elements, "
                "which is not all of them"
            )
    split = _Split(base, numel, period, len(starts))
    if starts != [base + i * length for i in range(len(starts))]:
        raise InexpressibleError("the workers' shards are not one behind the other")
    return split, {rank: (offset - base) // length for rank, offset in offsets.items()}


def _meshes(
    indices: Mapping[int, int], shards: int, dim: int
) -> list[tuple[Mesh, tuple[int, int] | None]]:
    """Meshes over intervals of ranks which hold shard `indices[rank]`; each has all shards."""
    ranks = sorted(indices)
    found: list[tuple[Mesh, tuple[int, int] | None]] = []
    at = 0
    while at < len(ranks):
        run = at + 1
        while run < len(ranks) and ranks[run] == ranks[run - 1] + 1:
            run += 1
        held = [indices[rank] for rank in ranks[at:run]]
        dims: tuple[int, int]
        placements: tuple[int, int] | None
        copies = next((i for i, index in enumerate(held) if index != held[0]), len(held))
        tile = list(range(shards))
        if shards == 1:
            dims, placements = (len(held), 1), None
        elif copies > 1 and held[: shards * copies] == [i for i in tile for _ in range(copies)]:
            dims, placements = (shards, copies), (dim, REPLICATE)
        elif held[:shards] == tile:
            times = 1
            while held[times * shards : (times + 1) * shards] == tile:
                times += 1
            dims, placements = (times, shards), (REPLICATE, dim)
        else:
            raise InexpressibleError(
                f"from worker rank {ranks[at]} on the ranks hold shards {held[:8]} of {shards}, "
                "an order that no mesh has"
            )
        found.append((Mesh(dims, ranks[at]), placements))
        at += dims[0] * dims[1]
    return found


def _wire(
    shape: tuple[int, ...], source: Layout, split: _Split, max_dims: int
) -> tuple[tuple[int, ...], Layout, int]:
    """The shape on the wire, the source layout in it, and the dim that the workers shard."""
    numel = prod(shape)
    whole = (split.base, split.numel) == (0, numel)
    if whole and len(shape) <= max_dims:
        # As it is, where the split falls on a dim of its own.
        if split.shards == 1:
            return shape, source, 0
        for dim, size in enumerate(shape):
            if prod(shape[dim:]) == split.period and size % split.shards == 0:
                return shape, source, dim

    mesh, period, shards, axis = _restricted(numel, shape, source, split)
    borders = {split.numel}
    if shards > 1:
        borders.add(period)
    if split.shards > 1:
        borders.add(split.period)
    ordered = [*sorted(borders, reverse=True), 1]
    if any(a % b for a, b in pairwise(ordered)):
        raise InexpressibleError(_crossing(split, period, shards))
    wire = tuple(a // b for a, b in pairwise(ordered))
    dims = {}
    for each, count in ((period, shards), (split.period, split.shards)):
        if count > 1:
            dims[each] = ordered.index(each)
            if wire[dims[each]] % count:
                raise InexpressibleError(_crossing(split, period, shards))
    if len(wire) > max_dims:
        raise InexpressibleError(f"it takes {len(wire)} dims on the wire, over {max_dims}")
    if shards == 1:
        sources = Layout(mesh, None)
    else:
        dim = dims[period]
        sources = Layout(mesh, (dim, REPLICATE) if axis == 0 else (REPLICATE, dim))
    return wire, sources, dims.get(split.period, 0)


def _crossing(split: _Split, period: int, shards: int) -> str:
    return (
        f"the workers' shards ({split.shards} in every {split.period} elements) cut across the "
        f"trainer's ({shards} in every {period})"
    )


def _restricted(
    numel: int, shape: tuple[int, ...], source: Layout, split: _Split
) -> tuple[Mesh, int, int, int]:
    """The trainer's split of the range alone: mesh, period, shards, sharded mesh axis.

    A range of a tensor lies evenly on the trainer's ranks only where it is made
    of whole shards, or lies inside of one.
    """
    mesh = source.mesh
    if source.split is None:
        return mesh, split.numel, 1, 0
    dim, shards = source.split
    assert source.placements is not None
    axis = 1 if source.placements[0] == REPLICATE else 0
    period = prod(shape[dim:])
    if shards == 1 or split.base % period == split.numel % period == 0:
        return mesh, period, shards, axis
    length = period // shards
    first, last = split.base // length, (split.base + split.numel - 1) // length
    if period == numel and (first == last or split.base % length == split.numel % length == 0):
        count = last - first + 1
        # On a second mesh axis the shards of the first row will do.
        inner = (
            Mesh((count, mesh.dims[1]), mesh.start + first * mesh.dims[1])
            if axis == 0
            else Mesh((1, count), mesh.start + first)
        )
        return inner, split.numel, count, axis
    raise InexpressibleError(
        f"the workers take elements [{split.base}, {split.base + split.numel}) of it by "
        f"themselves, which cuts across the trainer's {shards} shards"
    )
