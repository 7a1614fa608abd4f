"""Changes of many tensors as few lines, without a line that says too much.

A line names a part of the tree of names that changed alike from its root to its
leaves (`model.layers.3.mlp.*`), and lines that differ in numbers alone are one
(`model.layers.{0..27}.mlp.*`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

from m2ncompile.families import families, number_range, numberless

__all__ = ["NameTree", "pattern"]

_MIXED = object()
#: Names of more parts hang on the root; real ones have about ten.
_DEPTH = 64


class NameTree:
    """The names of all tensors, split at their dots; each name once."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._prefixes: list[str] = [""]
        self._parents: list[int] = [-1]
        self._nodes: dict[str, int] = {"": 0}
        #: The node that each name hangs on: what precedes its last dot.
        self._homes = [
            self._node(name.rpartition(".")[0] if name.count(".") <= _DEPTH else "")
            for name in names
        ]
        self._leaves = [0] * len(self._parents)
        for home in self._homes:
            self._leaves[home] += 1
        for node in range(len(self._parents) - 1, 0, -1):  # parents precede their children
            self._leaves[self._parents[node]] += self._leaves[node]

    @cached_property
    def _families(self) -> list[str]:
        return [numberless(name) for name in self._names]

    def _node(self, prefix: str) -> int:
        if (known := self._nodes.get(prefix)) is not None:
            return known
        parent = self._node(prefix.rpartition(".")[0])
        node = self._nodes[prefix] = len(self._parents)
        self._prefixes.append(prefix)
        self._parents.append(parent)
        return node

    def groups(self, keys: Mapping[int, Hashable]) -> list[tuple[str, list[int]]]:
        """Names by index, grouped by their key; those without one did not change."""
        if not keys:
            return []
        held: list[object] = [None] * len(self._parents)
        seen = [False] * len(self._parents)
        for leaf, node in enumerate(self._homes):
            key: object = keys.get(leaf, _MIXED)  # unchanged: nothing above it is all changed
            while node >= 0:
                if not seen[node]:
                    seen[node], held[node] = True, key
                elif held[node] is _MIXED or held[node] == key:
                    break
                else:
                    held[node] = key = _MIXED
                node = self._parents[node]
        tops: dict[int, int] = {}
        members: dict[tuple[bool, int], list[int]] = {}
        for leaf in sorted(keys):
            top = self._top(self._homes[leaf], held, tops)
            whole = top >= 0 and self._leaves[top] > 1
            members.setdefault((whole, top if whole else leaf), []).append(leaf)
        rows = [
            (self._title(node) if whole else self._names[node], leaves)
            for (whole, node), leaves in members.items()
        ]
        by_part = _joint(rows, keys)
        kinds = Counter(
            keys[leaf] for leaf in {(self._families[k], keys[k]): k for k in keys}.values()
        )
        fewer = {key for key, groups in by_part.items() if kinds[key] < len(groups)}
        by_name = _joint(
            [(self._names[leaf], [leaf]) for leaf in sorted(keys) if keys[leaf] in fewer], keys
        )
        # Of each key whichever takes fewer lines: a part of the tree may cut a family in two.
        chosen = [group for key, groups in by_part.items() for group in by_name.get(key, groups)]
        return sorted(chosen, key=lambda group: group[1][0])

    def _title(self, node: int) -> str:
        return f"{self._prefixes[node]}.*" if node else "*"

    def _top(self, node: int, held: list[object], tops: dict[int, int]) -> int:
        """The highest node from `node` up below which all have one key; -1 where none has."""
        if (known := tops.get(node)) is None:
            top, above = -1, node
            while above >= 0 and held[above] is not _MIXED:
                top, above = above, self._parents[above]
            known = tops[node] = top
        return known


def _joint(
    rows: list[tuple[str, list[int]]], keys: Mapping[int, Hashable]
) -> dict[Hashable, list[tuple[str, list[int]]]]:
    """By key, (name, leaves) with the rows joined that differ in numbers alone."""
    found: dict[Hashable, list[tuple[str, list[int]]]] = {}
    for name, group in families(rows, name=lambda row: row[0], same=lambda row: keys[row[1][0]]):
        leaves = sorted(leaf for _, leaves in group for leaf in leaves)
        found.setdefault(keys[leaves[0]], []).append((name, leaves))
    return found


def pattern(names: Sequence[str]) -> str:
    """One expression for `names`: the family that they are, or what they begin with."""
    joint = families(names, name=str, same=lambda _: None)
    if len(joint) == 1:
        return joint[0][0]
    rows = [name.split(".") for name in names]
    parts = []
    for column in zip(*rows, strict=False):
        if len(set(column)) == 1:
            parts.append(column[0])
        elif all(part.isdecimal() and part.isascii() for part in column):
            parts.append(number_range(map(int, column)))
        else:
            break
    return ".".join([*parts, "*"])
