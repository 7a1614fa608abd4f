"""Strided maps against element-by-element enumeration."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.compile.strided import Dim, Piece, canonical, merged, piece_of


def elements(pieces: list[Piece] | tuple[Piece, ...]) -> list[tuple[int, int]]:
    """Every (source, target) element, in no order."""
    found = []
    for piece in pieces:
        for steps in product(*(range(dim.size) for dim in piece.dims)):
            found.append(
                (
                    piece.source
                    + sum(i * d.source for i, d in zip(steps, piece.dims, strict=True)),
                    piece.target
                    + sum(i * d.target for i, d in zip(steps, piece.dims, strict=True)),
                )
            )
    return sorted(found)


dims = st.lists(
    st.builds(Dim, st.integers(1, 3), st.integers(0, 12), st.integers(0, 12)), max_size=3
)
pieces = st.builds(Piece, st.integers(0, 20), st.integers(0, 20), dims.map(canonical))


@given(dims)
def test_canonical_is_the_same_map(found: list[Dim]) -> None:
    assert elements([Piece(0, 0, canonical(found))]) == elements([Piece(0, 0, tuple(found))])
    assert canonical(canonical(found)) == canonical(found)


@given(st.lists(pieces, max_size=6))
def test_merging_loses_and_adds_nothing(found: list[Piece]) -> None:
    joined = merged(found)
    assert elements(joined) == elements(found)
    assert len(joined) <= len(found)


def test_stacked_experts_are_one_piece() -> None:
    """256 copies of [E, 2I, H] into another [E, 2I/4, H] come out as one box."""
    experts, inner, hidden, tp = 8, 16, 4, 4
    copies = [
        piece_of(
            (2 * e + half) * inner * hidden + 2 * (inner // tp) * hidden,
            (2 * e + half) * (inner // tp) * hidden,
            (inner // tp, hidden),
            (hidden, 1),
            (hidden, 1),
        )
        for half in (0, 1)
        for e in range(experts)
    ]
    (joined,) = merged(copies)
    assert joined.dims == (
        Dim(2 * experts, inner * hidden, inner // tp * hidden),
        Dim(inner // tp * hidden, 1, 1),
    )
    assert joined.dense


def test_dense_means_one_run_in_source_order() -> None:
    assert Piece(0, 7, (Dim(4, 8, 4), Dim(4, 1, 1))).dense
    assert not Piece(0, 0, (Dim(4, 8, 8), Dim(4, 1, 1))).dense
    assert not Piece(0, 0, (Dim(4, 4, 1), Dim(4, 1, 4))).dense
    assert Piece(3, 3, ()).dense
