"""Legs as point-to-point messages."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.layout import REPLICATE, Layout, Mesh, local_shape, shard_box
from m2ncompile.legs import Leg
from m2ncompile.runtime.transports.routes import messages


def layouts(shape: tuple[int, ...], start: int, ranks: int) -> st.SearchStrategy[Layout]:
    options = [Layout(Mesh((1, ranks), start), None)]
    for dim, size in enumerate(shape):
        for shards in range(1, ranks + 1):
            if ranks % shards == 0 and size % shards == 0:
                groups = ranks // shards
                options.append(Layout(Mesh((shards, groups), start), (dim, REPLICATE)))
                options.append(Layout(Mesh((groups, shards), start), (REPLICATE, dim)))
    return st.sampled_from(options)


@st.composite
def legs(draw: st.DrawFn) -> Leg:
    size = st.sampled_from([1, 2, 3, 4, 6, 12])
    shape = tuple(draw(st.lists(size, min_size=1, max_size=3)))
    trainers, workers = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    source = draw(layouts(shape, draw(st.integers(0, 2)), trainers))
    return Leg("float32", 1, shape, source, draw(layouts(shape, 10, workers)))


@given(legs())
def test_every_element_of_every_destination_comes_once_and_is_the_right_one(leg: Leg) -> None:
    numbers = torch.arange(torch.Size(leg.shape).numel()).view(leg.shape)

    def shard(layout: Layout, rank: int) -> torch.Tensor:
        box = shard_box(layout, leg.shape, rank)
        assert box is not None
        return numbers[tuple(slice(a, b) for a, b in box)]

    received = {rank: torch.full(leg.received_shape, -1) for rank in leg.destination.mesh.ranks}
    assert leg.received_shape == local_shape(leg.destination, leg.shape)
    for message in messages(leg):
        sent = tuple(slice(a, b) for a, b in message.sent)
        into = received[message.receiver][tuple(slice(a, b) for a, b in message.received)]
        assert (into == -1).all()
        into.copy_(shard(leg.source, message.sender)[sent])
    for rank, got in received.items():
        assert torch.equal(got, shard(leg.destination, rank))


@given(legs())
def test_two_ranks_have_one_message_at_most(leg: Leg) -> None:
    """A transport tells messages apart by leg and peers alone."""
    pairs = Counter((message.sender, message.receiver) for message in messages(leg))
    assert set(pairs.values()) == {1}


@given(st.integers(1, 6), st.integers(1, 12))
def test_workers_are_dealt_out_among_trainers_that_hold_the_same(
    trainers: int, workers: int
) -> None:
    leg = Leg(
        "float32",
        1,
        (4,),
        Layout(Mesh((trainers, 1), 0), None),
        Layout(Mesh((workers, 1), 9), None),
    )
    loads = Counter({rank: 0 for rank in range(trainers)})
    loads.update(message.sender for message in messages(leg))
    assert max(loads.values()) - min(loads.values()) <= 1
