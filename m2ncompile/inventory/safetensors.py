"""The inventory from a folder of safetensors files: headers only, no torch.

The format (https://huggingface.co/docs/safetensors, "Format"): 8 bytes, the
header's length as a little-endian unsigned integer; the header, a JSON object
of `name -> {dtype, shape, data_offsets: [begin, end]}` and an optional
`__metadata__` of strings; the data, which the tensors' byte ranges tile.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from m2ncompile.dtypes import SAFETENSORS
from m2ncompile.errors import InventoryError, Problems
from m2ncompile.inventory.checks import check_tensor, shown
from m2ncompile.inventory.files import load_json, open_regular, read_json
from m2ncompile.inventory.records import Inventory, TensorInfo, natural_key

__all__ = ["Files", "Header", "find_files", "read_header", "read_safetensors"]

#: Bytes of one header, as in the safetensors library.
HEADER_LIMIT = 100_000_000
#: Bytes of an index.
INDEX_LIMIT = 256 * 2**20

INDEX_SUFFIX = ".safetensors.index.json"
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")
_DAMAGED = "the file is damaged or its download incomplete: fetch it again"


class Files(msgspec.Struct, frozen=True):
    """The files that make up a checkpoint, by the names an index gives them.

    `listed` is the index's tensor -> file; None where there is no index.
    """

    paths: dict[str, Path]
    index: Path | None = None
    listed: dict[str, str] | None = None


class Header(msgspec.Struct, frozen=True):
    """A header's bytes, not yet parsed, and the bytes of data that follow it."""

    text: bytes
    data_size: int


def read_safetensors(folder: Path) -> Inventory:
    """Every tensor of the checkpoint in `folder`, from its files' headers.

    One file, or several with an index. Raises `InventoryError` with everything
    that is wrong in a header, between two files, or between file and index.
    """
    problems = Problems()
    files = find_files(folder, problems)
    found: dict[str, tuple[TensorInfo, str]] = {}
    damaged: set[str] = set()
    for file, path in files.paths.items():
        before = len(problems)
        header = read_header(path, problems)
        tensors = [] if header is None else _parse(header, str(path), problems)
        if len(problems) > before:
            damaged.add(file)
        for tensor in tensors:
            _, other = found.setdefault(tensor.name, (tensor, file))
            if other != file:
                problems.add(
                    f"{path}: {shown(tensor.name)}",
                    f"the tensor is also in {other}",
                    "one of the files is of another checkpoint; remove it",
                )
    if files.listed is not None:
        _compare(files, found, damaged, problems)
    if not found and not problems:
        problems.add(str(folder), "the checkpoint holds no tensor")
    problems.raise_if_any(InventoryError, "can't read the checkpoint")
    tensors = sorted((tensor for tensor, _ in found.values()), key=lambda t: natural_key(t.name))
    return Inventory("safetensors", tuple(tensors))


def find_files(folder: Path, problems: Problems) -> Files:
    """Which files of `folder` hold the checkpoint; no tensor is looked at.

    With an index, the files it names; otherwise `model.safetensors` or the only
    one there is.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        problems.add(str(folder), f"can't list the folder: {error.strerror}")
        return Files({})
    weights = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    main = f"model{INDEX_SUFFIX}"
    if main in indexes or len(indexes) == 1:
        return _indexed(folder, main if main in indexes else indexes[0], weights, problems)
    shards = [name for name in weights if _SHARD.search(name)]
    single = "model.safetensors"
    if indexes:
        message = f"several indexes and none is {main}: {', '.join(indexes)}"
        problems.add(str(folder), message, "keep one")
    elif shards:
        message = f"{shards[0]} is one of several files, and there is no *{INDEX_SUFFIX}"
        problems.add(str(folder), message, f"fetch {main}: it says which tensor is where")
    elif single in weights or len(weights) == 1:
        chosen = single if single in weights else weights[0]
        return Files({chosen: folder / chosen})
    else:
        expected = f"{single}, one other *.safetensors, or an index"
        problems.add(str(folder), f"expected {expected}; got {', '.join(weights) or 'none'}")
    return Files({})


def _indexed(folder: Path, index: str, weights: list[str], problems: Problems) -> Files:
    """The files that an index names, checked as names and against the folder."""
    path = folder / index
    try:
        raw = read_json(path, INDEX_LIMIT, "can't read the index")
    except InventoryError as error:
        problems.extend(error.problems)
        return Files({}, path)
    before = len(problems)
    listed = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(listed, dict) or not listed:
        message = f"expected an object of tensor: file; got {shown(listed)}"
        problems.add(f"{path}: weight_map", message)
        return Files({}, path)
    for name, file in listed.items():
        if not isinstance(file, str):
            problems.add(f"{path}: {shown(name)}", f"expected a file name; got {shown(file)}")
    if len(problems) > before:
        return Files({}, path)
    examples = {file: name for name, file in reversed(listed.items())}
    paths: dict[str, Path] = {}
    for file, name in sorted(examples.items()):
        where = f"{path}: {shown(name)}"
        if not file.endswith(".safetensors") or "\0" in file:
            problems.add(where, f"expected the name of a safetensors file; got {shown(file)}")
        elif os.path.isabs(file) or ".." in re.split(r"[/\\]", file):
            problems.add(where, f"{shown(file)} leaves the folder")
        elif not os.path.exists(folder / file):
            message = f"the index names {shown(file)}, which is not in the folder"
            problems.add(where, message, "fetch the missing file")
        else:
            paths[file] = folder / file
    for file in weights:
        if file not in paths and (_SHARD.search(file) or file == "model.safetensors"):
            problems.add(
                str(folder / file),
                f"the file is not named by {index}",
                "it is left from another checkpoint, or the index is; remove what is stale",
            )
    return Files(paths, path, listed)


def read_header(path: Path, problems: Problems) -> Header | None:
    """The header of one file, or None after saying why it can't be one."""
    try:
        file, size = open_regular(path)
        with file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                message = f"expected 8 bytes of header length; the file has {len(prefix)}"
            elif length > HEADER_LIMIT:
                message = f"the header's length {length} is over the limit of {HEADER_LIMIT}"
                if prefix == b"version ":
                    problems.add(str(path), "the file is a Git LFS pointer", "run `git lfs pull`")
                    return None
            elif length > size - 8:
                message = f"the header has {length} bytes; the file holds {size - 8} after byte 8"
            else:
                return Header(file.read(length), size - 8 - length)
        problems.add(str(path), message, _DAMAGED)
    except OSError as error:
        problems.add(str(path), f"can't read the file: {error.strerror}")
    return None


def _parse(header: Header, where: str, problems: Problems) -> list[TensorInfo]:
    """The tensors of one header; what is wrong with them goes to `problems`."""
    if not header.text.startswith(b"{"):
        got = shown(header.text[:8].decode("latin-1"))
        problems.add(where, f"the header must begin with {{; it begins with {got}", _DAMAGED)
        return []
    try:
        raw, duplicates = load_json(header.text)
    except ValueError as error:
        problems.add(where, f"the header is {error}", _DAMAGED)
        return []
    for name in duplicates:
        problems.add(f"{where}: {shown(name)}", "the key is in the header twice")
    metadata = raw.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ):
        problems.add(f"{where}: __metadata__", f"expected strings; got {shown(metadata)}")
    tensors: list[TensorInfo] = []
    spans: list[tuple[int, int, str]] = []
    for name, entry in raw.items():
        at = f"{where}: {shown(name)}"
        before = len(problems)
        parsed = _parse_entry(name, entry, at, problems)
        if parsed is None:
            continue
        tensor, begin, end = parsed
        tensors.append(tensor)
        spans.append((begin, end, name))
        if len(problems) == before and end - begin != tensor.nbytes:
            problems.add(
                at,
                f"{tensor.dtype} {list(tensor.shape)} takes {tensor.nbytes} bytes;"
                f" data_offsets [{begin}, {end}] span {end - begin}",
                _DAMAGED,
            )
    if len(tensors) == len(raw):
        _check_tiling(spans, header.data_size, where, problems)
    return tensors


def _parse_entry(
    name: str, entry: Any, at: str, problems: Problems
) -> tuple[TensorInfo, int, int] | None:
    """One header entry as (tensor, begin, end); None when it is no such thing."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        problems.add(
            at, f"expected an object of dtype, shape, data_offsets; got {shown(entry)}", _DAMAGED
        )
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    before = len(problems)
    if not isinstance(dtype, str) or dtype not in SAFETENSORS:
        problems.add(at, f"unknown dtype {shown(dtype)}; known: {', '.join(SAFETENSORS)}")
    if not _are_sizes(shape):
        problems.add(at, f"expected a shape of sizes >= 0; got {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        problems.add(at, f"expected data_offsets [begin, end], begin <= end; got {shown(offsets)}")
    if len(problems) > before:
        return None
    tensor = TensorInfo(name, SAFETENSORS[dtype], tuple(shape))
    check_tensor(tensor, at, problems)
    return tensor, offsets[0], offsets[1]


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_tiling(
    spans: list[tuple[int, int, str]], size: int, where: str, problems: Problems
) -> None:
    """The tensors' bytes follow each other without hole or overlap, to the file's end."""
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            what = "overlaps the tensor before it" if begin < reached else "leaves a hole before it"
            problems.add(
                f"{where}: {shown(name)}",
                f"its data begins at {begin}, where {reached} is expected: it {what}",
                _DAMAGED,
            )
        reached = max(reached, end)
    if reached != size:
        problems.add(
            where,
            f"the tensors take {reached} bytes of data; the file holds {size}"
            f" ({abs(reached - size)} {'missing' if reached > size else 'too many'})",
            _DAMAGED,
        )


def _compare(
    files: Files,
    found: dict[str, tuple[TensorInfo, str]],
    damaged: set[str],
    problems: Problems,
) -> None:
    """Index and headers name the same tensors in the same files."""
    listed = files.listed or {}
    for name, file in listed.items():
        if name not in found:
            if file in damaged or file not in files.paths:
                continue  # said already
            problems.add(f"{files.index}: {shown(name)}", f"{file} does not hold the tensor")
        elif found[name][1] != file:
            problems.add(
                f"{files.index}: {shown(name)}",
                f"the index says {file}; the tensor is in {found[name][1]}",
            )
    for name, (_, file) in found.items():
        if name not in listed:
            problems.add(
                f"{files.paths[file]}: {shown(name)}", f"{files.index} does not list the tensor"
            )
