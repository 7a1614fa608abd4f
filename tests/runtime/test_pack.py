"""Matrices that go by rows, as they are packed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.runtime.pack import pack_rows
from m2ncompile.stacking import Rows
from m2ncompile.verify.transfers import bits

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn)


def at(memory: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Part of `memory` that starts anywhere, as a trainer's shard of a flat parameter does."""
    numel = torch.Size(shape).numel()
    return memory[offset : offset + numel].view(shape)


@given(
    rows=st.integers(1, 3),
    share=st.integers(1, 9),
    each=st.integers(1, 3),
    form=st.builds(Rows, st.integers(1, 3), st.booleans()),
    dtype=st.sampled_from(DTYPES),
    offsets=st.lists(st.integers(0, 9), min_size=10, max_size=10),
)
def test_packed_rows(
    rows: int, share: int, each: int, form: Rows, dtype: torch.dtype, offsets: list[int]
) -> None:
    members = each if form.cut else each * form.blocks
    columns = share * form.blocks if form.cut else share
    memory = torch.randint(0, 256, (4096,), dtype=torch.uint8).view(dtype)
    pieces = [
        at(memory, 100 * member + offset, (rows, columns))
        for member, offset in zip(range(members), offsets, strict=False)
    ]
    packed = at(torch.zeros(4096, dtype=dtype), offsets[-1], (members * rows * columns,))
    scratch = at(torch.zeros(4096, dtype=dtype), offsets[-2], tuple(packed.shape))
    pack_rows(pieces, packed, form, scratch)
    got = packed.view(form.blocks, rows, -1, columns // form.blocks if form.cut else columns)
    for block, kept in enumerate(got):
        for index, member in enumerate(kept.unbind(1)):
            wanted = (
                pieces[index].chunk(form.blocks, 1)[block]
                if form.cut
                else pieces[block * each + index]
            )
            assert torch.equal(bits(member), bits(wanted))
