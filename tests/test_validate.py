"""The validator: overlaps by enumeration, aligned dims, and that it catches every mutation."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.compile.strided import Dim, Piece, canonical
from m2ncompile.compile.validate import overlapping, same_map

dims = st.lists(
    st.builds(Dim, st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), max_size=3
).map(canonical)
pieces = st.builds(Piece, st.integers(0, 9), st.integers(0, 24), dims)


def targets(piece: Piece) -> set[int]:
    return {
        piece.target + sum(i * d.target for i, d in zip(steps, piece.dims, strict=True))
        for steps in product(*(range(d.size) for d in piece.dims))
    }


@given(st.lists(pieces, max_size=5))
def test_no_overlap_is_missed(found: list[Piece]) -> None:
    reported = {frozenset(pair) for pair in overlapping(list(enumerate(found)))}
    for i, a in enumerate(found):
        for j, b in enumerate(found[:i]):
            if targets(a) & targets(b):
                assert frozenset((i, j)) in reported


def test_interleaved_rows_and_columns_do_not_overlap() -> None:
    """gpt-oss: gate and up in every other row, or in every other column."""
    rows = [Piece(0, half * 8, (Dim(5, 8, 16), Dim(8, 1, 1))) for half in (0, 1)]
    columns = [Piece(0, half, (Dim(6, 10, 20), Dim(10, 1, 2))) for half in (0, 1)]
    dense = [Piece(0, 8 * i, (Dim(8, 1, 1),)) for i in range(4)]
    for group in (rows, columns, dense):
        assert overlapping(list(enumerate(group))) == []


def copies(found: list[Piece]) -> list[tuple[int, int]]:
    return sorted(
        (
            piece.source + sum(i * d.source for i, d in zip(steps, piece.dims, strict=True)),
            piece.target + sum(i * d.target for i, d in zip(steps, piece.dims, strict=True)),
        )
        for piece in found
        for steps in product(*(range(d.size) for d in piece.dims))
    )


@given(st.lists(pieces, max_size=3), st.lists(pieces, max_size=3))
def test_different_maps_are_told_apart(a: list[Piece], b: list[Piece]) -> None:
    if same_map(a, b):
        assert set(copies(a)) == set(copies(b))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=4), st.integers(1, 5))
def test_maps_cut_otherwise_are_the_same(runs: list[tuple[int, int]], cut: int) -> None:
    """The same copies in other parts, which need not join to the same pieces."""
    whole, parts, start = [], [], 0
    for gap, length in runs:
        start += gap
        whole.append(Piece(start, 100 + start, canonical([Dim(length, 1, 1)])))
        for at in range(0, length, cut):
            size = min(cut, length - at)
            parts.append(Piece(start + at, 100 + start + at, canonical([Dim(size, 1, 1)])))
        start += length
    assert same_map(whole, parts)
    if whole:
        assert not same_map(whole, [p._replace(target=p.target + 1) for p in parts])
