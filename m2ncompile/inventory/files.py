"""Bytes and JSON from files that may be damaged or hostile."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from m2ncompile.errors import InventoryError, Problem, Problems
from m2ncompile.inventory.checks import shown

__all__ = ["load_json", "open_regular", "read_bytes", "read_json"]


#: Without it, opening a pipe would wait for a writer.
_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)


def open_regular(path: Path) -> tuple[BinaryIO, int]:
    """The file, open, and its size in bytes; raises `OSError` for a pipe or folder too."""
    file = open(path, "rb", opener=lambda p, flags: os.open(p, flags | _NONBLOCK))  # noqa: SIM115
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise OSError(0, "not a regular file")
    return file, status.st_size


def read_bytes(path: Path, limit: int) -> bytes:
    """A whole file of at most `limit` bytes; raises `InventoryError`."""
    try:
        file, size = open_regular(path)
        with file:
            if size <= limit:
                return file.read(limit)
    except OSError as error:
        raise InventoryError(
            "can't read a file", [Problem(str(path), str(error.strerror))]
        ) from None
    raise InventoryError(
        "can't read a file", [Problem(str(path), f"{size} bytes, over the limit of {limit}")]
    )


def load_json(data: bytes) -> tuple[Any, list[str]]:
    """Parsed JSON, and the keys that stand in one object twice.

    Stricter than `json.loads`: NaN and infinities are refused, and nesting or
    digits beyond the interpreter's limits are errors like any other. Raises
    `ValueError` whose text says what the data is instead.
    """
    duplicates: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(items)
        if len(record) != len(items):
            counts = Counter(key for key, _ in items)
            duplicates.extend(key for key, count in counts.items() if count > 1)
        return record

    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=pairs,
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8: byte 0x{data[error.start]:02x} at {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, duplicates


def _refuse_constant(name: str) -> None:
    raise ValueError(f"no JSON: {name} is not a JSON value")


def _parse_int(digits: str) -> int:
    if len(digits) > 40:
        raise ValueError(f"not usable: it holds a number of {len(digits)} digits")
    return int(digits)


def read_json(path: Path, limit: int, title: str) -> Any:
    """The JSON of a whole file without duplicate keys; raises `InventoryError(title)`."""
    problems = Problems()
    try:
        value, duplicates = load_json(read_bytes(path, limit))
    except ValueError as error:
        raise InventoryError(title, [Problem(str(path), f"the file is {error}")]) from None
    for key in duplicates:
        problems.add(f"{path}: {shown(key)}", "the key is there twice")
    problems.raise_if_any(InventoryError, title)
    return value
