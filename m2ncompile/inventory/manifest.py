"""A manifest: an inventory as a file, where neither checkpoint nor config is at hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from m2ncompile.decode import Violations, convert_all
from m2ncompile.errors import InventoryError, Problems
from m2ncompile.inventory.checks import check_tensor, shown
from m2ncompile.inventory.files import read_json
from m2ncompile.inventory.records import Inventory, Missing, TensorInfo, natural_key

__all__ = ["MANIFEST_LIMIT", "read_manifest", "write_manifest"]

#: Bytes; 140,000 tensors take some 12 MB.
MANIFEST_LIMIT = 256 * 2**20


class _Missing(Missing, frozen=True):
    @staticmethod
    def violations(values: Mapping[str, Any]) -> Violations:
        for key in ("tensors", "nbytes"):
            if not 0 <= values.get(key, 0) < 2**63:
                yield key, f"expected 0 or more, below 2**63; got {values[key]}"


class _Manifest(msgspec.Struct, frozen=True):
    format: Literal["m2ncompile-manifest"]
    version: Literal[1]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    missing: tuple[_Missing, ...] = ()


def read_manifest(path: Path) -> Inventory:
    """The inventory in the JSON file `path`.

    ```json
    {"format": "m2ncompile-manifest", "version": 1, "tensors": [
    ["lm_head.weight", "bfloat16", [151936, 1024]]]}
    ```

    An optional `missing` lists `Missing` records. Raises `InventoryError` with every violation.
    """
    title = "can't read the manifest"
    raw = read_json(path, MANIFEST_LIMIT, title)
    problems = Problems()
    manifest = convert_all(raw, _Manifest, str(path), problems)
    tensors = _tensors(raw, path, problems)
    problems.raise_if_any(InventoryError, title)
    assert manifest is not None
    tensors.sort(key=lambda t: natural_key(t.name))
    missing = tuple(Missing(**msgspec.structs.asdict(entry)) for entry in manifest.missing)
    return Inventory("manifest", tuple(tensors), missing)


def _tensors(raw: object, path: Path, problems: Problems) -> list[TensorInfo]:
    """The rows that have the form of a tensor, whatever else is wrong, checked."""
    rows = raw.get("tensors") if isinstance(raw, dict) else None
    if rows == []:
        problems.add(f"{path}: tensors", "the manifest lists no tensor")
    tensors: dict[str, TensorInfo] = {}
    for index, row in enumerate(rows if isinstance(rows, list) else ()):
        try:
            tensor = TensorInfo(*msgspec.convert(row, tuple[str, str, tuple[int, ...]]))
        except msgspec.ValidationError:
            continue
        where = f"{path}: tensors[{index}] {shown(tensor.name)}"
        check_tensor(tensor, where, problems)
        if tensors.setdefault(tensor.name, tensor) is not tensor:
            problems.add(where, "the tensor is listed twice")
    return list(tensors.values())


def write_manifest(inventory: Inventory) -> bytes:
    """The manifest of `inventory`: canonical bytes, one tensor a line."""

    def lines(rows: Iterable[msgspec.Struct]) -> bytes:
        return b",\n".join(msgspec.json.encode(row) for row in rows)

    parts = [b'{"format":"m2ncompile-manifest","version":1,"tensors":[\n', lines(inventory.tensors)]
    if inventory.missing:
        parts += [b'\n],"missing":[\n', lines(inventory.missing)]
    return b"".join([*parts, b"\n]}\n"])
