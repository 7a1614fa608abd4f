"""What a transport does, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from m2ncompile.legs import Leg
from m2ncompile.runtime.deadline import Deadline

if TYPE_CHECKING:
    import torch

__all__ = ["Transport"]


class Transport(Protocol):
    """Moves the legs of one plan for one rank.

    In order: `prepare`, which makes what is local; `identity` is agreed on;
    `connect`, which meets the other ranks; then, each sync, `run` for every leg
    in order, and `wait`. After an error only `close` is left.
    """

    @property
    def identity(self) -> str:
        """What all ranks must have alike: the kind, the version, whom it connects."""
        ...

    def detached(self) -> AbstractContextManager[object] | None:
        """What a thread must be inside of to run a sync for the caller; None for nothing."""
        ...

    def prepare(self, legs: Sequence[Leg]) -> None: ...

    def connect(self, deadline: Deadline) -> None: ...

    def run(
        self,
        leg: int,
        send: torch.Tensor | None,
        receive: torch.Tensor | None,
        deadline: Deadline,
    ) -> None:
        """Starts one leg; every rank of the communicator calls it, whatever its part is.

        `send` is this rank's shard of the source, `receive` takes its shard of the
        destination: both contiguous, and untouched by others until `wait`.
        """
        ...

    def fence(self, leg: int, deadline: Deadline) -> None:
        """`leg` and those before it are done before anything that is enqueued from now on.

        On a CPU the host waits for them; on a GPU the current stream does.
        """
        ...

    def wait(self, deadline: Deadline) -> None:
        """Returns when what was started is done: sent tensors may change, received may be read.

        Raises RuntimeError or RunError when it failed or the deadline passed.
        """
        ...

    def close(self) -> None:
        """Gives everything back, also in the middle of a leg; peers that wait get an error."""
        ...
