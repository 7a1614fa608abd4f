"""Names that differ in numbers alone, as one line.

`model.layers.0.mlp.up_proj.weight` ... `model.layers.27...` become
`model.layers.{0..27}.mlp.up_proj.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

__all__ = ["families", "number_range", "numberless", "numbers"]

T = TypeVar("T")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)|(?<=\.)\d+$")


def families(
    items: Iterable[T], name: Callable[[T], str], same: Callable[[T], Hashable]
) -> list[tuple[str, list[T]]]:
    """Groups `items` whose names agree but for whole numbers between dots, and that are `same`.

    Groups come in the order of their first item, each with the joint name. The
    ranges in it are those of each number by itself: a group need not hold every
    combination.
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault((numberless(name(item)), same(item)), []).append(item)
    return [(_joint([name(item) for item in group]), group) for group in groups.values()]


def numberless(text: str) -> str:
    """`text` with `{}` for each whole number between dots."""
    return _NUMBER.sub("{}", text)


def numbers(text: str) -> tuple[int, ...]:
    """The whole numbers between dots in `text`, in order."""
    return tuple(map(int, _NUMBER.findall(text)))


def number_range(numbers: Iterable[int]) -> str:
    """`3`, `{0..27}` or `{0..3,5,8..9}`."""
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(ordered) == 1:
        return str(ordered[0])
    return "{" + ",".join(f"{a}" if a == b else f"{a}..{b}" for a, b in runs) + "}"


def _joint(names: list[str]) -> str:
    columns = zip(*map(numbers, names), strict=True)
    ranges = [number_range(column) for column in columns]
    return _NUMBER.sub(lambda _: ranges.pop(0), names[0])
