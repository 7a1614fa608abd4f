"""What a worker binding needs of an inference engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from m2ncompile.plan import Plan

if TYPE_CHECKING:
    import torch

__all__ = ["Form", "Target"]


class Form(msgspec.Struct, frozen=True):
    """A parameter as the loaders see it: torch's dtype name, local shape, strides."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Target(Protocol):
    """One worker's module inside its engine.

    A sync is `begin`, then `load` for each parameter that goes by reload, and
    at most one `load_weights`, then `finish` or, after a failure, `abandon`.
    Meanwhile the module can't be used.
    """

    version: str
    #: As `engine.target` in a spec; None where it does not matter, in a rehearsal.
    platform: str | None
    device: torch.device

    def check(self, plan: Plan) -> None:
        """Raises BindError where the module is not as `plan` assumes in what forms don't tell.

        Such as a kernel that reads a parameter otherwise than it is loaded.
        """
        ...

    def live(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers that the kernels read, under all of their names."""
        ...

    def held(self, name: str) -> torch.Tensor | None:
        """One of `live` as of now, without a search: it is asked for many in each sync."""
        ...

    def load_form(self, name: str) -> Form | None:
        """A parameter in load format, None if there is none of the name."""
        ...

    def kept(self, name: str, loaded: Collection[str]) -> bool:
        """Whether what `load` gets for `name` is read until `finish`.

        Otherwise it is done with as soon as all that is in `loaded` of the same
        module has been loaded.
        """
        ...

    def begin(self, reloaded: Collection[str], everything: bool) -> None:
        """Takes the modules of the parameters in `reloaded`, or all, back to load format."""
        ...

    def load(self, name: str, value: torch.Tensor) -> None:
        """A whole parameter in load format; processed once its module is complete."""
        ...

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """The engine's own loaders, for whole checkpoint tensors."""
        ...

    def finish(self) -> None:
        """Processes what is left, and derives again what depends on any weights."""
        ...

    def abandon(self) -> None:
        """After a failure: the module has all its tensors again, with old values or new ones."""
        ...

    def synchronize(self) -> None:
        """Waits for the device."""
        ...
