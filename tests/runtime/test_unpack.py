"""What is received apart, to where it goes, in few copies."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.runtime.bind_worker import Part, Receive
from m2ncompile.runtime.copies import Copies, copy_all
from m2ncompile.runtime.unpack import unpacking
from m2ncompile.verify.transfers import bits
from m2ncompile.views import View


def receive(*views: tuple[str, View], rows: int = 0) -> Receive:
    parts = tuple(Part(index, into, view) for index, (into, view) in enumerate(views))
    return Receive("direct", parts, apart=True, rows=rows)


def launches(copies: Copies) -> int:
    return sum(len(targets) for targets, _ in copies._fused.values()) + len(copies._converted)


def test_members_at_one_distance_are_one_copy() -> None:
    """As the gates of experts, with their ups between them."""
    param = torch.zeros(4 * 2 * 6, dtype=torch.bfloat16)
    views = [("w", View(12 * expert, (6,), (1,))) for expert in range(4)]
    buffer = torch.arange(24, dtype=torch.bfloat16).view(4, 6)
    copies = unpacking(receive(*views), buffer, {"w": param})
    assert launches(copies) == 1
    copies.run()
    assert torch.equal(param.view(4, 2, 6)[:, 0], buffer)
    assert not param.view(4, 2, 6)[:, 1].any()


def test_members_elsewhere_are_copies_of_their_own() -> None:
    params = {name: torch.zeros(100, dtype=torch.bfloat16) for name in "ab"}
    starts = [("a", 0), ("a", 10), ("a", 30), ("b", 40), ("b", 20), ("a", 60)]
    buffer = torch.arange(36, dtype=torch.bfloat16).view(6, 6)
    one = receive(*((into, View(start, (6,), (1,))) for into, start in starts))
    copies = unpacking(one, buffer, params)
    assert launches(copies) == 5  # the first two are one
    copies.run()
    for row, (into, start) in zip(buffer, starts, strict=True):
        assert torch.equal(params[into][start : start + 6], row)


@pytest.mark.parametrize("shape", [(4, 6), (2, 2, 6), (4, 2, 3), (1, 4, 6), (4, 6, 1)])
def test_rows_of_each_member_are_put_together(shape: tuple[int, ...]) -> None:
    param = torch.zeros(3, 24, dtype=torch.float32)
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    views = [("w", View(24 * member, shape, strides)) for member in range(3)]
    buffer = torch.arange(72, dtype=torch.float32).view(4, 3, 6)
    unpacking(receive(*views, rows=4), buffer.view(4, 18), {"w": param}).run()
    assert torch.equal(param.view(3, 4, 6), buffer.transpose(0, 1))


@given(
    sizes=st.lists(st.integers(1, 6), min_size=0, max_size=3),
    gap=st.integers(0, 3),
    offset=st.integers(0, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.int64]),
)
def test_copies_are_exact_however_memory_lies(
    sizes: list[int], gap: int, offset: int, dtype: torch.dtype
) -> None:
    """With gaps between rows, from any element on: seen as wide words or not."""
    strides = [prod(size + gap for size in sizes[dim + 1 :]) for dim in range(len(sizes))]
    reach = offset + 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    noise = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (2, reach, dtype.itemsize), generator=noise, dtype=torch.uint8)
    memory, other = raw.view(dtype).squeeze(-1)
    source = other.clone().as_strided(sizes, strides, offset)
    expected, got = memory.clone(), memory.clone()
    expected.as_strided(sizes, strides, offset).copy_(source)
    copy_all([got.as_strided(sizes, strides, offset)], [source])
    assert torch.equal(bits(got), bits(expected))  # and nothing beside it


def test_another_dtype_converts() -> None:
    target, source = torch.zeros(4, dtype=torch.float32), torch.arange(4, dtype=torch.bfloat16)
    copy_all([target], [source])
    assert torch.equal(target, source.float())
