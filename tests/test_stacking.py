"""Stacks: several wires as one transfer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.layout import REPLICATE, Layout, Mesh, shard_box
from m2ncompile.stacking import stacked

SOURCE = Layout(Mesh((4, 1), 0), (0, REPLICATE))


def one_rank(rank: int) -> Layout:
    return Layout(Mesh((1, 1), rank), None)


@given(
    count=st.integers(2, 6),
    dim=st.sampled_from([None, 0, 1]),
    ranks=st.sampled_from([1, 2, 4]),
)
def test_equal_layouts_go_one_dim_deeper(count: int, dim: int | None, ranks: int) -> None:
    """Every rank holds of every member what it would hold of the member alone."""
    placements = None if dim is None else (REPLICATE, dim)
    layout = Layout(Mesh((2, ranks), 4), placements)
    stack = stacked((8, 12), SOURCE, [layout] * count)
    assert stack.shape == (count, 8, 12)
    for alone, together in ((SOURCE, stack.source), (layout, stack.destination)):
        for rank in alone.mesh.ranks:
            box = shard_box(together, stack.shape, rank)
            assert box is not None
            assert box[0] == (0, count) and box[1:] == shard_box(alone, (8, 12), rank)


def test_whole_on_consecutive_ranks() -> None:
    stack = stacked((8, 12), SOURCE, [one_rank(r) for r in (5, 5, 6, 6, 7, 7)])
    assert stack.shape == (6, 8, 12)
    for place, rank in enumerate((5, 6, 7)):
        box = shard_box(stack.destination, stack.shape, rank)
        assert box == ((2 * place, 2 * place + 2), (0, 8), (0, 12))
    assert shard_box(stack.destination, stack.shape, 4) is None


def test_one_is_itself() -> None:
    stack = stacked((8,), SOURCE, [one_rank(6)])
    assert (stack.shape, stack.source, stack.destination) == ((8,), SOURCE, one_rank(6))


@pytest.mark.parametrize(
    ("layouts", "says"),
    [
        ([one_rank(5), one_rank(7)], "consecutive ranks, in order"),
        ([one_rank(6), one_rank(5)], "consecutive ranks, in order"),
        ([one_rank(5), one_rank(6), one_rank(5)], "consecutive ranks, in order"),
        ([one_rank(5), one_rank(5), one_rank(6)], "same number on each rank"),
        ([one_rank(5), Layout(Mesh((2, 1), 5), None)], "differently on several ranks"),
        (
            [Layout(Mesh((1, 2), 4), (REPLICATE, 0)), Layout(Mesh((1, 2), 4), (REPLICATE, 1))],
            "differently on several ranks",
        ),
    ],
)
def test_what_is_no_stack(layouts: list[Layout], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        stacked((8, 8), SOURCE, layouts)
