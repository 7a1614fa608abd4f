"""What a rank sends of its shard, element by element."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from m2ncompile.compile.spread import InexpressibleError, carry
from m2ncompile.compile.strided import Piece, piece_of
from m2ncompile.layout import REPLICATE, Layout, Mesh, local_shape, shard_box
from m2ncompile.views import View, contiguous, sent_view
from tests.runs import row_major

WHOLE = Layout(Mesh((4, 1), 0), None)


def slices(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


def layouts(shape: tuple[int, ...], start: int = 0) -> st.SearchStrategy[Layout]:
    """All ways for four ranks to hold a tensor: whole, sharded, HSDP in both orders."""
    options = [Layout(Mesh((4, 1), start), None)]
    for dim, size in enumerate(shape):
        for shards in (1, 2, 4):
            if size % shards == 0:
                options.append(Layout(Mesh((shards, 4 // shards), start), (dim, REPLICATE)))
                options.append(Layout(Mesh((4 // shards, shards), start), (REPLICATE, dim)))
    return st.sampled_from(options)


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3).map(tuple)


@st.composite
def wires(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, int, tuple[int, ...], Layout]:
    """A tensor, how it is held, and a range of it that is seen and sent in any way."""
    shape = draw(shapes)
    held = draw(layouts(shape))
    total = prod(shape)
    seen = draw(st.one_of(st.just(shape), shapes.filter(lambda seen: prod(seen) <= total)))
    base = draw(st.integers(0, total - prod(seen)))
    return shape, held, base, seen, draw(layouts(seen))


@given(wires())
@example(((2, 8), WHOLE, 0, (2, 8, 1), Layout(Mesh((1, 4), 0), (REPLICATE, 1))))  # gaps
@example(  # HSDP, sent as held, regrouped
    (
        (3, 8, 2),
        Layout(Mesh((2, 2), 0), (REPLICATE, 1)),
        16,
        (2, 2, 8),
        Layout(Mesh((2, 2), 0), (REPLICATE, 1)),
    )
)
def test_a_rank_sends_its_slice_of_the_wire_or_refuses(
    wire: tuple[tuple[int, ...], Layout, int, tuple[int, ...], Layout],
) -> None:
    shape, held, base, seen, sent = wire
    numbers = torch.arange(prod(shape))
    for rank in range(4):
        box, mine = shard_box(sent, seen, rank), shard_box(held, shape, rank)
        assert box is not None and mine is not None
        shard = numbers.view(shape)[slices(mine)].contiguous().clone()
        wanted = numbers[base : base + prod(seen)].view(seen)[slices(box)]
        try:
            view = sent_view(shape, held, base, seen, sent, rank)
        except ValueError as error:
            assert "it does not hold all of what it is to send" in str(error)
            # The rank lacks something, or what it holds is in no even steps.
            assert not held_in_even_steps(shape, held, seen, box, wanted, shard)
            continue
        assert view is not None
        got = shard.as_strided(view.shape, view.strides, view.offset)
        assert torch.equal(got, wanted)
        assert contiguous(view) == got.is_contiguous()


def held_in_even_steps(
    shape: tuple[int, ...],
    held: Layout,
    seen: tuple[int, ...],
    box: tuple[tuple[int, int], ...],
    wanted: torch.Tensor,
    shard: torch.Tensor,
) -> bool:
    """Whether a rank has all it is to send, and no dim of it steps from period to period unevenly.

    A period is what lies between two intervals of the tensor that a shard holds.
    """
    if not torch.isin(wanted, shard).all():
        return False
    if held.split is None:
        return True
    period = prod(shape[held.split[0] :])
    return all(
        b - a == 1 or step % period == 0 or step * (b - a - 1) < period // held.split[1]
        for (a, b), step in zip(box, row_major(seen), strict=True)
    )


@given(st.data())
def test_what_the_compiler_sends_is_never_refused(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    held, destination = data.draw(layouts(shape)), data.draw(layouts(shape, 4))
    pieces: dict[int, list[Piece]] = {}
    for rank in destination.mesh.ranks:
        box = shard_box(destination, shape, rank)
        assert box is not None
        local = tuple(b - a for a, b in box)
        first = sum(a * step for (a, _), step in zip(box, row_major(shape), strict=True))
        pieces[rank] = [piece_of(first, 0, local, row_major(shape), row_major(local))]
    try:
        carried = carry(shape, held, pieces, 3)
    except InexpressibleError:
        return
    for one in carried:
        for rank in one.source.mesh.ranks:
            view = sent_view(shape, held, one.base, one.shape, one.source, rank)
            assert view is not None
            assert view.shape == local_shape(one.source, one.shape)


def test_a_rank_outside_of_the_mesh_sends_nothing() -> None:
    sent = Layout(Mesh((2, 1), 0), None)
    assert sent_view((4,), WHOLE, 0, (4,), sent, 3) is None


def test_a_sender_that_holds_nothing_is_refused() -> None:
    held = Layout(Mesh((1, 2), 0), None)
    with pytest.raises(ValueError, match="it holds nothing of the tensor"):
        sent_view((4,), held, 0, (4,), WHOLE, 3)


def test_a_range_that_reaches_out_of_the_tensor_is_refused() -> None:
    held, sent = (Layout(Mesh((2, 1), 0), (1, REPLICATE)),) * 2
    assert sent_view((4, 2), held, 0, (4, 2), sent, 1) == View(0, (4, 1), (1, 1))
    with pytest.raises(ValueError, match="it does not hold all of what it is to send"):
        sent_view((4, 2), held, 0, (8, 2), sent, 1)


@pytest.mark.parametrize(
    ("view", "whether"),
    [
        (View(5, (2, 3), (3, 1)), True),
        (View(0, (2, 1, 3), (3, 99, 1)), True),  # a dim of one has no step
        (View(0, (2, 3), (4, 1)), False),
        (View(0, (3, 2), (1, 3)), False),
        (View(0, (2, 3), (3, 2)), False),
        (View(0, (), ()), True),
    ],
)
def test_contiguous(view: View, whether: bool) -> None:
    assert contiguous(view) is whether
