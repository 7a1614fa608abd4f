"""All ranks in one process, a thread each: tensors are handed over, not sent."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from m2ncompile.errors import RunError
from m2ncompile.legs import Leg
from m2ncompile.runtime.deadline import Deadline
from m2ncompile.runtime.transports.routes import messages

if TYPE_CHECKING:
    import torch

__all__ = ["LocalHub", "LocalTransport"]


class LocalHub:
    """What the ranks of one process share."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.changed = threading.Condition()
        #: (leg, sender) -> its shard, and how many messages of it are not taken yet.
        self.offered: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
        self.closed_by: int | None = None


class LocalTransport:
    """One rank's end of a hub."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self._hub, self._rank = hub, rank
        self._legs: Sequence[Leg] = ()
        self._offers: list[int] = []

    @property
    def identity(self) -> str:
        return f"local, {self._hub.world} ranks"

    def detached(self) -> None:
        return None

    def prepare(self, legs: Sequence[Leg]) -> None:
        self._legs = legs

    def connect(self, deadline: Deadline) -> None:
        pass

    def run(
        self,
        leg: int,
        send: torch.Tensor | None,
        receive: torch.Tensor | None,
        deadline: Deadline,
    ) -> None:
        every = messages(self._legs[leg])
        hub = self._hub
        if send is not None:
            count = sum(message.sender == self._rank for message in every)
            if count:
                with hub.changed:
                    hub.offered[leg, self._rank] = send, count
                    hub.changed.notify_all()
                self._offers.append(leg)
        if receive is not None:
            for message in every:
                if message.receiver != self._rank:
                    continue
                key = leg, message.sender
                with hub.changed:
                    self._until(key, offered=True, deadline=deadline)
                    shard, count = hub.offered[key]
                    target = receive[tuple(slice(a, b) for a, b in message.received)]
                    target.copy_(shard[tuple(slice(a, b) for a, b in message.sent)])
                    if count == 1:
                        del hub.offered[key]
                    else:
                        hub.offered[key] = shard, count - 1
                    hub.changed.notify_all()

    def fence(self, leg: int, deadline: Deadline) -> None:
        with self._hub.changed:
            while self._offers and self._offers[0] <= leg:
                self._until((self._offers[0], self._rank), offered=False, deadline=deadline)
                del self._offers[0]

    def wait(self, deadline: Deadline) -> None:
        if self._offers:
            self.fence(self._offers[-1], deadline)

    def _until(self, key: tuple[int, int], offered: bool, deadline: Deadline) -> None:
        """Waits until a shard is there, or gone. The hub's lock is held."""
        hub = self._hub
        hub.changed.wait_for(
            lambda: (key in hub.offered) == offered or hub.closed_by is not None,
            timeout=deadline.remaining,
        )
        if (key in hub.offered) != offered:
            if hub.closed_by is not None:
                raise RunError(f"rank {hub.closed_by} left")
            raise RunError(f"the transfer did not end within {deadline.seconds:g} s")

    def close(self) -> None:
        with self._hub.changed:
            if self._hub.closed_by is None:
                self._hub.closed_by = self._rank
            self._hub.changed.notify_all()
