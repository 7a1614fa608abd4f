"""Point-to-point messages over gloo, two ranks in two threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed import HashStore

from m2ncompile.errors import RunError
from m2ncompile.layout import REPLICATE, Layout, Mesh
from m2ncompile.legs import Leg
from m2ncompile.runtime.deadline import Deadline
from m2ncompile.runtime.transports import torch as module
from m2ncompile.runtime.transports.torch import TorchTransport
from tests.runs import failures, together

WHOLE, ONE = Layout(Mesh((1, 1), 0), None), Layout(Mesh((1, 1), 1), None)
SECONDS = 60.0


def leg(*shape: int) -> Leg:
    return Leg("float32", 1, shape, WHOLE, ONE)


#: More than are under way at once, of several sizes.
LEGS = [leg(1 + number % 3, 4) for number in range(3 * module._WINDOW)]


@pytest.fixture
def pair() -> Iterator[list[TorchTransport]]:
    store = HashStore()
    ends = [TorchTransport(store, rank, 2) for rank in range(2)]
    for end in ends:
        end.prepare(LEGS)
    together([lambda end=end: end.connect(Deadline(SECONDS)) for end in ends])
    yield ends
    for end in ends:
        end.close()


def send_all(end: TorchTransport, tensors: list[torch.Tensor]) -> None:
    for number, tensor in enumerate(tensors):
        end.run(number, tensor, None, Deadline(SECONDS))
    end.wait(Deadline(SECONDS))


def receive_all(end: TorchTransport) -> list[torch.Tensor]:
    found = [torch.empty(one.received_shape) for one in LEGS]
    for number, tensor in enumerate(found):
        end.run(number, None, tensor, Deadline(SECONDS))
    end.wait(Deadline(SECONDS))
    return found


def test_more_legs_than_are_under_way_at_once(pair: list[TorchTransport]) -> None:
    for turn in range(2):
        tensors = [torch.full(one.shape, turn + number / 8) for number, one in enumerate(LEGS)]
        _, found = together([lambda t=tensors: send_all(pair[0], t), lambda: receive_all(pair[1])])
        assert found is not None
        assert all(map(torch.equal, found, tensors))


@pytest.mark.parametrize("columns", [1, 0])
def test_pieces_cut_out_of_tensors_on_both_sides(columns: int) -> None:
    """Columns of rows, and rows of columns: more of them than there are slots for copies."""
    store = HashStore()
    source = Layout(Mesh((2, 1), 0), (columns, REPLICATE))
    destination = Layout(Mesh((2, 1), 2), (1 - columns, REPLICATE))
    legs = [Leg("int64", 1, (4, 6), source, destination)] * (2 * module._WINDOW + 1)
    tensors = [torch.arange(24).view(4, 6) + 100 * number for number in range(len(legs))]

    def half(layout: Layout, tensor: torch.Tensor, place: int) -> torch.Tensor:
        assert layout.split is not None
        return tensor.chunk(2, layout.split[0])[place].contiguous()

    def rank(number: int) -> bool:
        end = TorchTransport(store, number, 4)
        end.prepare(legs)
        end.connect(Deadline(SECONDS))
        place, deadline = number % 2, Deadline(SECONDS)
        if number < 2:
            for index, tensor in enumerate(tensors):
                end.run(index, half(source, tensor, place), None, deadline)
            end.wait(deadline)
            return True
        found = [torch.full(one.received_shape, -1) for one in legs]
        for index, buffer in enumerate(found):
            end.run(index, None, buffer, deadline)
        end.wait(deadline)
        wanted = [half(destination, tensor, place) for tensor in tensors]
        return all(map(torch.equal, found, wanted))

    assert together([lambda n=n: rank(n) for n in range(4)]) == [True] * 4


def test_what_was_under_way_when_it_was_closed_is_not_taken_for_done(
    pair: list[TorchTransport],
) -> None:
    pair[1].run(0, None, torch.empty(1, 4), Deadline(SECONDS))
    pair[1].close()
    assert failures([lambda: pair[1].wait(Deadline(SECONDS))]) == ["it was closed"]
    again = torch.empty(1, 4)
    assert failures([lambda: pair[1].run(0, None, again, Deadline(SECONDS))]) == ["it was closed"]
    pair[1].close()


def test_a_wait_ends_at_its_deadline(pair: list[TorchTransport]) -> None:
    pair[1].run(0, None, torch.empty(1, 4), Deadline(SECONDS))
    with pytest.raises((RuntimeError, RunError)):
        pair[1].wait(Deadline(0.2))


def test_identities_differ_by_what_they_connect() -> None:
    store = HashStore()
    one, other = TorchTransport(store, 0, 2), TorchTransport(store, 0, 3)
    assert one.identity == "torch gloo, 2 ranks"
    assert other.identity == "torch gloo, 3 ranks"
    cuda = TorchTransport(store, 0, 2, torch.device("cuda"))
    assert cuda.identity == "torch nccl, 2 ranks"
