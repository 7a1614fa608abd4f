"""Which tensor of one plan is which of another: by name, else by geometry and position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Sequence

import msgspec

from m2ncompile.families import numbers

__all__ = ["Matches", "match"]


class Matches(msgspec.Struct, frozen=True):
    """Pairs of indices in both lists, in the order of the second; `renamed` by another name.

    `moved` are those of the renamed, in the second, that are not at the same place.
    """

    same: list[tuple[int, int]]
    renamed: list[tuple[int, int]]
    moved: frozenset[int]
    removed: list[int]
    added: list[int]


def match(
    before: Sequence[str],
    after: Sequence[str],
    geometry_before: Sequence[Hashable],
    geometry_after: Sequence[Hashable],
) -> Matches:
    """Tensors of one name are one; of the rest, those that only their name tells apart.

    A removed and an added tensor are one renamed where equally many were removed and added of
    one geometry and one position, and then in their order. Position is the layer (all numbers in
    the name) and the neighbours; what is left is tried again by layer alone, by neighbours
    alone, and by geometry alone. The rest stays removed and added: nothing is guessed where the
    counts disagree.
    """
    place = {name: index for index, name in enumerate(before)}
    same = [(place[name], index) for index, name in enumerate(after) if name in place]
    if len(same) == len(before) == len(after):
        return Matches(same, [], frozenset(), [], [])
    names = set(after)
    removed = [index for index, name in enumerate(before) if name not in names]
    added = [index for index, name in enumerate(after) if name not in place]
    gap_before, gap_after = _gaps(before, names), _gaps(after, place.keys())
    layer_before = {index: numbers(before[index]) for index in removed}
    layer_after = {index: numbers(after[index]) for index in added}
    renamed: list[tuple[int, int]] = []
    moved: set[int] = set()
    for by_layer, by_gap in ((True, True), (True, False), (False, True), (False, False)):

        def keys(
            geometry: Sequence[Hashable],
            layer: dict[int, tuple[int, ...]],
            gap: list[int],
            by_layer: bool = by_layer,
            by_gap: bool = by_gap,
        ) -> Callable[[int], Hashable]:
            return lambda i: (geometry[i], by_layer and layer[i], by_gap and gap[i])

        pairs = _pairs(
            removed,
            added,
            keys(geometry_before, layer_before, gap_before),
            keys(geometry_after, layer_after, gap_after),
        )
        renamed += pairs
        if not (by_layer and by_gap):
            moved |= {b for _, b in pairs}
        gone, come = {a for a, _ in pairs}, {b for _, b in pairs}
        removed = [index for index in removed if index not in gone]
        added = [index for index in added if index not in come]
    renamed.sort(key=lambda pair: pair[1])
    return Matches(same, renamed, frozenset(moved), removed, added)


def _gaps(names: Sequence[str], common: Container[str]) -> list[int]:
    """For each name, how many common names precede it."""
    found, count = [], 0
    for name in names:
        found.append(count)
        count += name in common
    return found


def _pairs(
    removed: list[int],
    added: list[int],
    key_before: Callable[[int], Hashable],
    key_after: Callable[[int], Hashable],
) -> list[tuple[int, int]]:
    groups: defaultdict[Hashable, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for index in removed:
        groups[key_before(index)][0].append(index)
    for index in added:
        groups[key_after(index)][1].append(index)
    return [
        pair
        for gone, come in groups.values()
        if len(gone) == len(come)
        for pair in zip(gone, come, strict=True)
    ]
