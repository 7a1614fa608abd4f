"""What goes by rows, from the shards of its members to what is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from m2ncompile.runtime.copies import copy_all, word_of
from m2ncompile.stacking import Rows

__all__ = ["pack_rows"]


def pack_rows(pieces: Sequence[torch.Tensor], packed: torch.Tensor, form: Rows) -> None:
    """Each of `pieces` is one rank's rows of a matrix, without gaps; so is all of `packed`."""
    rows, columns = pieces[0].shape
    if not form.cut:
        each = len(pieces) // form.blocks
        for block, out in enumerate(packed.view(form.blocks, rows, each, columns)):
            torch.stack(pieces[block * each : (block + 1) * each], 1, out=out)
        return
    if len(pieces) == 1:
        shares = pieces[0].view(rows, form.blocks, -1)
        copy_all([packed.view(form.blocks, rows, -1)], [shares.transpose(0, 1)])
        return
    # From tensors without gaps into a permuted whole: half the host's time that permuted
    # tensors take (torch 2.11).
    word = word_of((*pieces, packed), columns // form.blocks)
    blocks = packed.view(-1).view(word).view(form.blocks, rows, len(pieces), -1)
    parts = [piece.view(word).view(rows, form.blocks, -1) for piece in pieces]
    torch.stack(parts, 1, out=blocks.permute(1, 2, 0, 3))
