"""Picks the reader, and keys the cache on exactly what the reader reads."""

from __future__ import annotations

import os
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Literal

from m2ncompile.errors import InventoryError, Problem, Problems
from m2ncompile.inventory.config import CONFIG_LIMIT, from_config
from m2ncompile.inventory.files import read_bytes
from m2ncompile.inventory.manifest import MANIFEST_LIMIT, read_manifest
from m2ncompile.inventory.records import Inventory
from m2ncompile.inventory.safetensors import (
    INDEX_LIMIT,
    INDEX_SUFFIX,
    find_files,
    read_header,
    read_safetensors,
)

__all__ = ["content_key", "origin_of", "read_inventory"]

_TITLE = "can't read the model's tensors"


def read_inventory(folder_or_file: Path) -> Inventory:
    """The inventory of a manifest file, a folder of safetensors, or one with a config.

    A folder with both has its safetensors read: they are what is stored. Raises
    `InventoryError`.
    """
    match origin_of(folder_or_file):
        case "manifest":
            return read_manifest(folder_or_file)
        case "safetensors":
            return read_safetensors(folder_or_file)
        case "config":
            return from_config(folder_or_file)


def content_key(folder_or_file: Path) -> str:
    """SHA-256 over all that `read_inventory` depends on; needs no torch, reads no data.

    For safetensors: index, headers and sizes; for a config: its bytes and the
    transformers release; for a manifest: its bytes. Raises `InventoryError` for
    what can't be read; it does not check what the bytes say.
    """
    parts: list[bytes] = []
    problems = Problems()
    match origin_of(folder_or_file):
        case "manifest":
            parts.append(read_bytes(folder_or_file, MANIFEST_LIMIT))
        case "config":
            parts.append(read_bytes(folder_or_file / "config.json", CONFIG_LIMIT))
            try:
                parts.append(metadata.version("transformers").encode())
            except metadata.PackageNotFoundError:
                parts.append(b"none")
        case "safetensors":
            files = find_files(folder_or_file, problems)
            if files.index is not None and not problems:
                parts.append(read_bytes(files.index, INDEX_LIMIT))
            for name, path in files.paths.items():
                header = read_header(path, problems)
                if header is not None:
                    parts += [os.fsencode(name), header.text, str(header.data_size).encode()]
    problems.raise_if_any(InventoryError, "can't read the checkpoint")
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def origin_of(path: Path) -> Literal["manifest", "safetensors", "config"]:
    """Which reader `read_inventory` picks. Raises `InventoryError` where it finds none."""
    expected = "a folder with *.safetensors or config.json, or a manifest"
    try:
        if path.is_dir():
            names = sorted(os.listdir(path))
        elif path.exists():
            if path.name == "config.json" or path.name.endswith((".safetensors", INDEX_SUFFIX)):
                message = f"expected {expected}; this is a file of a checkpoint"
                raise InventoryError(_TITLE, [Problem(str(path), message, "give its folder")])
            return "manifest"
        else:
            raise InventoryError(_TITLE, [Problem(str(path), "no such file or folder")])
    except OSError as error:
        raise InventoryError(_TITLE, [Problem(str(path), f"{error.strerror}")]) from None
    if any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in names):
        return "safetensors"
    if "config.json" in names:
        return "config"
    listing = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    message = f"expected {expected}; the folder holds {listing or 'nothing'}"
    raise InventoryError(_TITLE, [Problem(str(path), message)])
