"""A transport that there is not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

from m2ncompile.errors import RunError
from m2ncompile.legs import Leg
from m2ncompile.runtime.deadline import Deadline

if TYPE_CHECKING:
    import torch

__all__ = ["AbsentTransport"]


class AbsentTransport:
    """Its `prepare` raises RunError with `why`; nothing else of it is called but `close`."""

    identity = ""

    def __init__(self, why: str) -> None:
        self._why = why

    def detached(self) -> AbstractContextManager[object] | None:
        return None

    def prepare(self, legs: Sequence[Leg]) -> NoReturn:
        raise RunError(self._why)

    def connect(self, deadline: Deadline) -> None: ...

    def run(
        self,
        leg: int,
        send: torch.Tensor | None,
        receive: torch.Tensor | None,
        deadline: Deadline,
    ) -> None: ...

    def fence(self, leg: int, deadline: Deadline) -> None: ...

    def wait(self, deadline: Deadline) -> None: ...

    def close(self) -> None: ...
