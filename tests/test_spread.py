"""Layouts found for recorded pieces, checked element by element."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.compile.spread import Carried, InexpressibleError, carry
from m2ncompile.compile.strided import Dim, Piece, canonical, piece_of
from m2ncompile.layout import REPLICATE, Layout, Mesh, local_shape, shard_box

TRAINERS = 4


def flat(shape: tuple[int, ...], box: tuple[tuple[int, int], ...], base: int = 0) -> list[int]:
    """Row-major element numbers of a box."""
    found = []
    for index in product(*(range(a, b) for a, b in box)):
        number = 0
        for i, size in zip(index, shape, strict=True):
            number = number * size + i
        found.append(base + number)
    return found


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def shard_piece(shape: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> Piece:
    """The piece of a box of a row-major tensor, into a dense target."""
    local = tuple(b - a for a, b in box)
    offset = sum(a * s for (a, _), s in zip(box, strides(shape), strict=True))
    return piece_of(offset, 0, local, strides(shape), strides(local))


def read(piece: Piece) -> list[int]:
    return [
        piece.source + sum(i * d.source for i, d in zip(steps, piece.dims, strict=True))
        for steps in product(*(range(d.size) for d in piece.dims))
    ]


def check(shape: tuple[int, ...], source: Layout, pieces: dict[int, list[Piece]]) -> list[Carried]:
    """Carries `pieces` and checks every element on both sides of every transfer."""
    carried = carry(shape, source, pieces, 3)
    got: dict[int, list[int]] = {rank: [] for rank in pieces}
    for one in carried:
        assert len(one.shape) <= 3
        local_shape(one.source, one.shape)
        for rank, piece in zip(one.destination.mesh.ranks, one.pieces, strict=True):
            box = shard_box(one.destination, one.shape, rank)
            assert box is not None
            wire = flat(one.shape, box, one.base)
            assert wire == read(piece)  # in this very order: the receive buffer is the piece
            got[rank] += wire
        for rank in one.source.mesh.ranks:
            box = shard_box(one.source, one.shape, rank)
            held = shard_box(source, shape, rank)
            assert box is not None and held is not None
            assert set(flat(one.shape, box, one.base)) <= set(flat(shape, held))
    assert got == {rank: [e for p in found for e in read(p)] for rank, found in pieces.items()}
    return list(carried)


sources = st.sampled_from(
    [
        Layout(Mesh((TRAINERS, 1), 0), None),
        Layout(Mesh((TRAINERS, 1), 0), (0, REPLICATE)),
        Layout(Mesh((TRAINERS, 1), 0), (1, REPLICATE)),
        Layout(Mesh((2, 2), 0), (REPLICATE, 0)),
        Layout(Mesh((2, 2), 0), (0, REPLICATE)),
        Layout(Mesh((2, 2), 0), (REPLICATE, 1)),
    ]
)
meshes = st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (1, 1)])


@given(
    st.tuples(st.sampled_from([4, 8]), st.sampled_from([4, 8]), st.sampled_from([1, 2, 4])),
    sources,
    meshes,
    st.sampled_from([None, (0, -1), (-1, 0), (1, -1), (-1, 1), (2, -1)]),
)
def test_even_splits_are_found(
    shape: tuple[int, ...],
    source: Layout,
    dims: tuple[int, int],
    placements: tuple[int, int] | None,
) -> None:
    layout = Layout(Mesh(dims, TRAINERS), placements)
    if layout.split and shape[layout.split[0]] % layout.split[1]:
        return
    pieces = {}
    for rank in layout.mesh.ranks:
        box = shard_box(layout, shape, rank)
        assert box is not None
        pieces[rank] = [shard_piece(shape, box)]
    try:
        carried = check(shape, source, pieces)
    except InexpressibleError as error:
        assert "cut across" in str(error)
        # Only splits that interleave with the trainer's are out of reach.
        assert source.split is not None and layout.split is not None
        assert source.split[0] != layout.split[0] or shape[source.split[0]] == 1
        return
    assert len(carried) == 1


def rows(start: int, stop: int, shape: tuple[int, int], target: int = 0) -> Piece:
    return Piece(start * shape[1], target, canonical([Dim((stop - start) * shape[1], 1, 1)]))


FSDP = Layout(Mesh((TRAINERS, 1), 0), (0, REPLICATE))
DDP = Layout(Mesh((TRAINERS, 1), 0), None)


def test_kv_heads_are_held_by_groups() -> None:
    pieces = {4 + r: [rows(r // 2 * 4, r // 2 * 4 + 4, (8, 4))] for r in range(4)}
    (one,) = check((8, 4), FSDP, pieces)
    assert one.destination == Layout(Mesh((2, 2), 4), (0, REPLICATE))
    assert one.shape == (8, 4)


def test_replicas_of_groups_take_one_transfer_each() -> None:
    pieces = {4 + r: [rows(r // 2 % 2 * 4, r // 2 % 2 * 4 + 4, (8, 4))] for r in range(8)}
    first, second = check((8, 4), FSDP, pieces)
    assert first.destination.mesh == Mesh((2, 2), 4)
    assert second.destination.mesh == Mesh((2, 2), 8)


def test_an_expert_goes_to_its_rank_alone() -> None:
    (one,) = check((8, 4), FSDP, {6: [rows(0, 8, (8, 4))]})
    assert one.destination == Layout(Mesh((1, 1), 6), None)


def test_stacked_experts_regroup_dims() -> None:
    """[E, 2I, H], gate and up sharded over two ranks: the wire sees [2E, I * H]."""
    experts, inner, hidden = 4, 4, 2
    half = inner // 2 * hidden
    pieces = {
        4 + r: [Piece(r * half, 0, (Dim(2 * experts, inner * hidden, half), Dim(half, 1, 1)))]
        for r in range(2)
    }
    (one,) = check((experts, 2 * inner, hidden), FSDP, pieces)
    assert one.shape == (2 * experts, inner * hidden)
    assert one.destination.placements == (REPLICATE, 1)


def test_fused_rows_are_ranges_of_their_own() -> None:
    """q, k and v inside one tensor: three transfers where the trainer holds it whole."""
    pieces = {
        4 + r: [rows(8 * r, 8 * r + 8, (24, 2)), rows(16 + 2 * r, 18 + 2 * r, (24, 2), 16)]
        for r in range(2)
    }
    first, second = check((24, 2), DDP, pieces)
    assert (first.base, first.shape) == (0, (32,))
    assert (second.base, second.shape) == (32, (8,))


def test_a_range_of_whole_trainer_shards_comes_from_those_ranks() -> None:
    """Rows [8, 16) of 16 over four trainers lie on the last two."""
    pieces = {4 + r: [rows(8 + 4 * r, 12 + 4 * r, (16, 2))] for r in range(2)}
    (one,) = check((16, 2), FSDP, pieces)
    assert one.source == Layout(Mesh((2, 1), 2), (0, REPLICATE))


def test_a_range_inside_one_trainer_shard_comes_from_that_rank() -> None:
    (one,) = check((16, 2), FSDP, {4: [rows(5, 7, (16, 2))]})
    assert one.source == Layout(Mesh((1, 1), 1), None)


def test_fused_halves_come_from_the_ranks_that_hold_them() -> None:
    """Gate and up in one tensor: each half lies on two of the four trainers."""
    pieces = {4 + r: [Piece(8 * r, 0, (Dim(2, 16, 8), Dim(8, 1, 1)))] for r in range(2)}
    gate, up = check((16, 2), FSDP, pieces)
    assert gate.source.mesh == Mesh((2, 1), 0)
    assert up.source.mesh == Mesh((2, 1), 2)


def test_ranges_that_cut_across_trainers_go_block_by_block() -> None:
    """q, k, v of 4 rows each over trainers of 3 rows each: nothing lines up."""
    pieces = {
        4 + r: [
            rows(4 * part + 2 * r, 4 * part + 2 * r + 2, (12, 2), 4 * part) for part in range(3)
        ]
        for r in range(2)
    }
    carried = check((12, 2), FSDP, pieces)
    assert {one.source.mesh.size for one in carried} == {1}
    assert sum(prod(one.shape) for one in carried) == 24


def test_an_uneven_split_goes_rank_by_rank() -> None:
    """Seven rows over two workers, where the trainer shards the other dim."""
    columns = Layout(Mesh((TRAINERS, 1), 0), (1, REPLICATE))
    first, second = check((7, 4), columns, {4: [rows(0, 4, (7, 4))], 5: [rows(4, 7, (7, 4))]})
    assert (first.shape, second.shape) == ((4, 4), (3, 4))
    assert first.source.placements == second.source.placements == (1, REPLICATE)


def test_ranks_in_any_order() -> None:
    """Shards in an order that no mesh has take a transfer each."""
    pieces = {4 + r: [rows(i * 4, i * 4 + 4, (8, 2))] for r, i in enumerate([1, 0])}
    assert len(check((8, 2), FSDP, pieces)) == 4


def test_parts_that_only_some_workers_read() -> None:
    check((8, 2), FSDP, {4: [rows(0, 2, (8, 2))], 5: [rows(4, 6, (8, 2))]})
    check((8, 2), FSDP, {4: [rows(3, 6, (8, 2))]})
    check((8, 2), FSDP, {4: [rows(0, 8, (8, 2))], 5: []})


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 8)), min_size=1, max_size=3),
    st.sampled_from([FSDP, DDP, Layout(Mesh((2, 2), 0), (REPLICATE, 0))]),
)
def test_any_rows_can_be_had(wanted: list[tuple[int, int]], source: Layout) -> None:
    pieces = {
        4 + r: [rows(start, min(start + count, 16), (16, 3))]
        for r, (start, count) in enumerate(wanted)
    }
    check((16, 3), source, pieces)


@pytest.mark.parametrize(
    ("shape", "pieces", "says"),
    [
        ((8, 2), {4: [Piece(0, 0, (Dim(16, 0, 1),))]}, "repeats"),
        (
            (4, 4, 4),
            {
                4 + r: [Piece(r * 2, 0, (Dim(2, 32, 4), Dim(2, 4, 2), Dim(2, 1, 1)))]
                for r in range(2)
            },
            "two dims",
        ),
        ((8, 4), {4: [Piece(0, 0, (Dim(8, 4, 2), Dim(2, 1, 1)))]}, "not all of them"),
    ],
)
def test_what_no_collective_says(
    shape: tuple[int, ...], pieces: dict[int, list[Piece]], says: str
) -> None:
    with pytest.raises(InexpressibleError, match=says):
        carry(shape, Layout(Mesh((TRAINERS, 1), 0), (1, REPLICATE)), pieces, 3)
