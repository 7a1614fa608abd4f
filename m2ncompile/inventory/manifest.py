"""A manifest: an inventory as a file, where neither checkpoint nor config is at hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from m2ncompile.errors import InventoryError, Problem, Problems
from m2ncompile.inventory.checks import check_tensor, shown
from m2ncompile.inventory.files import read_json
from m2ncompile.inventory.records import Inventory, Missing, TensorInfo, natural_key

__all__ = ["MANIFEST_LIMIT", "read_manifest", "write_manifest"]

#: Bytes; 140,000 tensors take some 12 MB.
MANIFEST_LIMIT = 256 * 2**20


class _Missing(Missing, frozen=True, forbid_unknown_fields=True):
    pass


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["m2ncompile-manifest"]
    version: Literal[1]
    tensors: list[tuple[str, str, tuple[int, ...]]]
    missing: list[_Missing] = []


def read_manifest(path: Path) -> Inventory:
    """The inventory in the JSON file `path`.

    ```json
    {"format": "m2ncompile-manifest", "version": 1, "tensors": [
    ["lm_head.weight", "bfloat16", [151936, 1024]]]}
    ```

    An optional `missing` lists `Missing` records. Raises `InventoryError`.
    """
    raw = read_json(path, MANIFEST_LIMIT, "can't read the manifest")
    try:
        manifest = msgspec.convert(raw, _Manifest, strict=True)
    except msgspec.ValidationError as error:
        fix = "`m2ncompile.inventory.write_manifest` writes one from any other inventory"
        raise InventoryError(
            "can't read the manifest", [Problem(str(path), str(error), fix)]
        ) from None
    problems = Problems()
    seen: set[str] = set()
    tensors = [TensorInfo(*row) for row in manifest.tensors]
    for index, tensor in enumerate(tensors):
        where = f"{path}: $.tensors[{index}] {shown(tensor.name)}"
        check_tensor(tensor, where, problems)
        if tensor.name in seen:
            problems.add(where, "the tensor is listed twice")
        seen.add(tensor.name)
    if not tensors:
        problems.add(f"{path}: $.tensors", "the manifest lists no tensor")
    for index, entry in enumerate(manifest.missing):
        if entry.tensors < 0 or entry.nbytes < 0:
            problems.add(f"{path}: $.missing[{index}]", "a count is negative")
    problems.raise_if_any(InventoryError, "can't read the manifest")
    tensors.sort(key=lambda t: natural_key(t.name))
    missing = tuple(Missing(**msgspec.structs.asdict(entry)) for entry in manifest.missing)
    return Inventory("manifest", tuple(tensors), missing)


def write_manifest(inventory: Inventory) -> bytes:
    """The manifest of `inventory`: canonical bytes, one tensor a line."""

    def lines(rows: Iterable[msgspec.Struct]) -> bytes:
        return b",\n".join(msgspec.json.encode(row) for row in rows)

    parts = [b'{"format":"m2ncompile-manifest","version":1,"tensors":[\n', lines(inventory.tensors)]
    if inventory.missing:
        parts += [b'\n],"missing":[\n', lines(inventory.missing)]
    return b"".join([*parts, b"\n]}\n"])
