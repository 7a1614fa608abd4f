"""Many copies as few kernels, exact to the bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

__all__ = ["Copies", "copy_all"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Copies:
    """Copies between memory that stays, to be made again and again.

    Each source goes to its target, of equal shape. Another dtype converts, as `copy_` does.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._converted: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fused: defaultdict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]]
        self._fused = defaultdict(lambda: ([], []))
        for target, source in zip(targets, sources, strict=True):
            if target.dtype != source.dtype:
                self._converted.append((target, source))
                continue
            words = _words(target, source)
            for side, one in zip(self._fused[words[0].dtype], words, strict=True):
                side.append(one)

    def run(self) -> None:
        for target, source in self._converted:
            target.copy_(source)
        for targets, sources in self._fused.values():
            torch._foreach_copy_(targets, sources)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """As `Copies`, once."""
    Copies(targets, sources).run()


def _words(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as integers, of as many bytes as both can be seen in.

    Integers since the fused kernel computes in float32 and has one NaN for all (torch 2.11,
    CUDA); wide ones since strided copies take their time by element.
    """
    for dtype in _INTEGERS:
        if dtype.itemsize % target.element_size() == 0 and all(
            _fits(one, dtype.itemsize // one.element_size()) for one in (target, source)
        ):
            return target.view(dtype), source.view(dtype)
    # Without a last dim of unit stride, element by element.
    bits = next(one for one in _INTEGERS if one.itemsize == target.element_size())
    return target.view(bits), source.view(bits)


def _fits(tensor: torch.Tensor, ratio: int) -> bool:
    """Whether it can be seen as elements that are `ratio` times as large."""
    if tensor.dim() == 0 or ratio == 1:
        return ratio == 1
    *outer, last = tensor.stride()
    return last == 1 and not any(
        count % ratio for count in (*outer, tensor.shape[-1], tensor.storage_offset())
    )
