"""What goes by rows, from the shards of its members to what is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from m2ncompile.runtime.copies import copy_all
from m2ncompile.stacking import Rows

__all__ = ["pack_rows"]


def pack_rows(
    pieces: Sequence[torch.Tensor],
    packed: torch.Tensor,
    form: Rows,
    scratch: torch.Tensor | None = None,
) -> None:
    """Each of `pieces` is one rank's rows of a matrix, without gaps; so is all of `packed`.

    `scratch` is as large, for columns of several matrices.
    """
    rows, columns = pieces[0].shape
    if not form.cut:
        each = len(pieces) // form.blocks
        for block, out in enumerate(packed.view(form.blocks, rows, each, columns)):
            torch.stack(pieces[block * each : (block + 1) * each], 1, out=out)
        return
    members = pieces[0]
    if len(pieces) > 1:
        # To cut each by itself takes the host ten times as long as to cut all together.
        assert scratch is not None
        members = scratch.view(rows, len(pieces), columns)
        torch.stack(pieces, 1, out=members)
    shares = members.view(rows, len(pieces), form.blocks, -1)
    copy_all([packed.view(form.blocks, rows, len(pieces), -1)], [shares.permute(2, 0, 1, 3)])
