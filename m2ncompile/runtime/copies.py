"""Many copies as one kernel, exact to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["copy_all"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source to its target, of equal shape; all targets have one dtype, as all sources.

    Another dtype converts, as `copy_` does.
    """
    if targets[0].dtype != sources[0].dtype:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return
    # As integers: the fused kernel computes in float32 and has one NaN for all (torch 2.11, CUDA).
    bits = _INTEGERS[targets[0].element_size()]
    torch._foreach_copy_(
        [target.view(bits) for target in targets], [source.view(bits) for source in sources]
    )
