"""The inputs of a plan by key path, and where two sets of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from m2ncompile.diff.records import InputChange

__all__ = ["input_changes", "input_paths"]


def input_paths(record: Any) -> dict[str, Any]:
    """`{"engine.tp": 4, "trainer.rules[0].match": "*.bias", ...}`.

    Lists of tables are walked, other lists are one value.
    """
    found: dict[str, Any] = {}
    _walk("", msgspec.to_builtins(record), found)
    return found


def _walk(path: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _walk(f"{path}.{key}" if path else key, item, found)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            _walk(f"{path}[{index}]", item, found)
    elif value != [] and value != ():  # an empty list has no entry, as an empty list of tables
        found[path] = list(value) if isinstance(value, tuple) else value


def input_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[InputChange, ...]:
    """Where two sets of key paths differ, in the order of the paths."""
    return tuple(
        InputChange(path, before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    )
