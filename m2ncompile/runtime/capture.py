"""What a live trainer holds, as the manifest that a spec's `model.manifest` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from m2ncompile.inventory import Inventory, TensorInfo, natural_key, write_manifest
from m2ncompile.runtime.shards import saved

if TYPE_CHECKING:
    from torch import nn

__all__ = ["capture"]


def capture(module: nn.Module) -> bytes:
    """A manifest of what the module saves, under its own names, global shapes, once each.

    Where those are not the checkpoint's names (transformers 5 stacks experts), this is what
    to build from: a trainer sends what it has.
    """
    tensors = [
        TensorInfo(name, str(p.dtype).removeprefix("torch."), tuple(p.shape))
        for name, p in saved(module)
    ]
    return write_manifest(
        Inventory("manifest", tuple(sorted(tensors, key=lambda t: natural_key(t.name))))
    )
