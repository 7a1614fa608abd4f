"""What `compare` returns. Everything is a pair: of the first plan, of the second."""

from __future__ import annotations

from typing import Any

import msgspec

from m2ncompile.routes import Reason

__all__ = ["SECTIONS", "Amount", "Difference", "Group", "InputChange", "Stacks"]


class InputChange(msgspec.Struct, frozen=True):
    """An input that differs, by its key path; None where one plan lacks it."""

    path: str
    before: Any
    after: Any


class Group(msgspec.Struct, frozen=True):
    """Tensors with one change, by their joint name: `model.layers.{0..27}.mlp.*`.

    `*` stands for every tensor below; ranges are those of each number by itself.
    `before` and `after` say what changed; None where one plan lacks the tensors.
    """

    name: str
    tensors: int
    nbytes: int
    before: str | None
    after: str | None


class Amount(msgspec.Struct, frozen=True):
    """A total of both plans. Bytes are bytes; `wire-bytes` is what the busiest worker receives."""

    name: str
    before: int
    after: int


class Stacks(msgspec.Struct, frozen=True):
    """How many collectives carry `size` tensors together, where that differs."""

    size: int
    before: int
    after: int


class Difference(msgspec.Struct, frozen=True):
    """What differs between two plans; sections are empty where nothing does.

    `routes` covers changed reasons too. `sources` and `destinations` are layouts, each relative
    to the first rank of its side; `landings` the places in live parameters. `new_fallback` has
    every tensor that falls back in the second plan and did not, or was not, in the first.
    `reordered` tells that tensors of both are sent in another order. `reasons` explains the codes
    that `routes` and `new_fallback` name.
    """

    same_program: bool
    model: str
    plans: tuple[str, str]
    programs: tuple[str, str]
    formats: tuple[str, str]
    inputs: tuple[InputChange, ...]
    added: tuple[Group, ...]
    removed: tuple[Group, ...]
    renamed: tuple[Group, ...]
    reshaped: tuple[Group, ...]
    retyped: tuple[Group, ...]
    routes: tuple[Group, ...]
    new_fallback: tuple[Group, ...]
    sources: tuple[Group, ...]
    destinations: tuple[Group, ...]
    landings: tuple[Group, ...]
    stacks: tuple[Stacks, ...]
    reordered: bool
    amounts: tuple[Amount, ...]
    wire_bytes_per_worker: tuple[tuple[int, ...], tuple[int, ...]]
    reasons: tuple[Reason, ...]

    @property
    def empty(self) -> bool:
        """Whether the plans are one and the same file."""
        return self.plans[0] == self.plans[1]

    def amount(self, name: str) -> Amount:
        return next(amount for amount in self.amounts if amount.name == name)


#: Sections of groups, in the order in which they are shown, with their titles.
SECTIONS = {
    "added": "tensors added",
    "removed": "tensors removed",
    "renamed": "tensors renamed (same dtype, shape and position)",
    "reshaped": "tensors reshaped",
    "retyped": "tensors of another dtype",
    "routes": "routes",
    "sources": "layouts on the trainer",
    "destinations": "layouts on the workers",
    "landings": "places in live parameters",
}
