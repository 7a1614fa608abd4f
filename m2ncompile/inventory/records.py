"""The inventory: what a checkpoint holds, and what it holds that we can't list."""

from __future__ import annotations

import re
from functools import cached_property
from hashlib import sha256
from typing import Literal

import msgspec

from m2ncompile.dtypes import nbytes

__all__ = ["Inventory", "Missing", "TensorInfo", "natural_key"]


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """One checkpoint tensor.

    `dtype` is a torch name (`bfloat16`); `shape` is the global shape in
    elements, empty for a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)


class Missing(msgspec.Struct, frozen=True):
    """Tensors that a stored checkpoint has (or may have) and the inventory leaves out.

    `kind`: `mtp` for multi-token-prediction layers that transformers does not
    model, `buffer` for stored buffers that are no parameters, `tied` for a
    second name of a tensor that is listed. `names` is a glob over the names.
    `tensors` and `nbytes` are 0 where the config does not tell how many there are.
    """

    kind: Literal["mtp", "buffer", "tied"]
    names: str
    tensors: int
    nbytes: int
    reason: str


class Inventory(msgspec.Struct, frozen=True, dict=True):
    """Every tensor of a checkpoint, in natural order of names, each name once.

    `origin` says how it was read.
    """

    origin: Literal["safetensors", "config", "manifest"]
    tensors: tuple[TensorInfo, ...]
    missing: tuple[Missing, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the tensors alone: equal however they were read."""
        return sha256(msgspec.json.encode(self.tensors)).hexdigest()


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key under which `layers.2` comes before `layers.10`."""
    return [
        (0, int(part), part) if part.isdecimal() and part.isascii() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]
