"""The records and digests that a trainer and vLLM's `nccl_m2n` backend agree on.

One record per tensor says what the trainer sends and where it lies on the
trainer's ranks, whose mesh starts at rank 0. The digests are SHA-256 over
canonical JSON (sorted keys, no spaces, ASCII) and equal vLLM 0.33.0's byte for
byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from json.encoder import encode_basestring_ascii
from reprlib import repr as brief
from typing import Any, cast

import msgspec

from m2ncompile.errors import Problems, WireError, nearest
from m2ncompile.layout import Mesh, Placements, is_int, mesh_errors, placement_errors

__all__ = [
    "SCHEMA_VERSION",
    "Fragments",
    "WireParam",
    "complete_digest",
    "fragments",
    "parse_wire_param",
    "parse_wire_params",
    "source_digest",
    "source_digest_of",
]

#: vLLM's `M2N_WIRE_SCHEMA_VERSION`.
SCHEMA_VERSION = 2

#: A record's JSON before and after the name.
Fragments = tuple[str, str]


class WireParam(msgspec.Struct, frozen=True):
    """One tensor as the trainer announces it: global shape, source mesh and placements."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    src_mesh_dims: tuple[int, int]
    src_placements: Placements | None

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {
            "name": self.name,
            "dtype_name": self.dtype_name,
            "shape": list(self.shape),
            "src_mesh_dims": list(self.src_mesh_dims),
            "src_placements": None if self.src_placements is None else list(self.src_placements),
        }


def parse_wire_param(value: object, where: str) -> WireParam:
    """Read one JSON-decoded record; `where` is its place, for the error.

    Raises WireError with everything that is wrong with it.
    """
    problems = Problems()
    param = _parse(value, where, problems)
    problems.raise_if_any(WireError, "malformed wire record")
    return cast(WireParam, param)


def parse_wire_params(values: object, where: str = "params") -> tuple[WireParam, ...]:
    """Read a list of JSON-decoded records, in order.

    Raises WireError with everything that is wrong with any of them, repeated
    names included.
    """
    if not isinstance(values, list):
        raise WireError(f"{where}: expected a list of wire records, got {_kind(values)}")
    problems = Problems()
    params: list[WireParam] = []
    first_at: dict[str, int] = {}
    for index, value in enumerate(values):
        if (param := _parse(value, f"{where}[{index}]", problems)) is not None:
            params.append(param)
        name = value.get("name") if isinstance(value, Mapping) else None
        if isinstance(name, str) and (first := first_at.setdefault(name, index)) != index:
            problems.add(f"{where}[{index}].name", f"{name!r} is already at {where}[{first}]")
    problems.raise_if_any(WireError, "malformed wire records")
    return tuple(params)


def fragments(
    dtype_name: str, shape: Sequence[int], mesh_dims: Sequence[int], placements: Placements | None
) -> Fragments:
    """The JSON of a record before and after its name.

    Equal for all tensors of one geometry and layout, so worth keeping.
    """
    return (
        f'{{"dtype_name":{_json(dtype_name)},"name":',
        f',"shape":{_json(shape)},"src_mesh_dims":{_json(mesh_dims)}'
        f',"src_placements":{_json(placements)}}}',
    )


def source_digest_of(items: Iterable[tuple[str, Fragments]]) -> str:
    """Digest of a source plan from each tensor's name and `fragments`, in plan order.

    For callers that hold interned geometries: they call `fragments` once for
    each and need no `WireParam` per tensor.
    """
    digest = sha256(b'{"params":[')
    rest = iter(items)
    separator = b""
    # In batches: buffers of megabytes cost more in page faults than the hashing does.
    while batch := [
        f"{before}{encode_basestring_ascii(name)}{after}"
        for name, (before, after) in islice(rest, 1024)
    ]:
        digest.update(separator)
        digest.update(",".join(batch).encode())
        separator = b","
    digest.update(f'],"schema_version":{SCHEMA_VERSION}}}'.encode())
    return digest.hexdigest()


def source_digest(params: Iterable[WireParam]) -> str:
    """Digest of the ordered source plan, the same on every rank."""
    known: dict[object, Fragments] = {}

    def items() -> Iterable[tuple[str, Fragments]]:
        for param in params:
            key = (param.dtype_name, param.shape, param.src_mesh_dims, param.src_placements)
            if (found := known.get(key)) is None:
                found = known[key] = fragments(*key)
            yield param.name, found

    return source_digest_of(items())


def complete_digest(source_digest: str, mesh: Mesh, placements: Sequence[Placements | None]) -> str:
    """Digest of the source plan together with its destination.

    `placements` holds the destination placements of each tensor over `mesh`,
    in the source plan's order.
    """
    if not isinstance(source_digest, str) or not source_digest:
        raise WireError(f"the source digest must be a non-empty string, got {brief(source_digest)}")
    agreed = {
        "destination_mesh": {"dims": mesh.dims, "start_rank": mesh.start},
        "destination_placements": list(placements),
        "schema_version": SCHEMA_VERSION,
        "source_digest": source_digest,
    }
    return sha256(_json(agreed).encode()).hexdigest()


def _parse(value: object, where: str, problems: Problems) -> WireParam | None:
    """The record, or None after adding what is wrong to `problems`."""
    if not isinstance(value, Mapping):
        problems.add(where, f"expected an object, got {_kind(value)}")
        return None
    before = len(problems)
    fields = WireParam.__struct_fields__
    for key in fields:
        if key not in value:
            problems.add(f"{where}.{key}", "missing")
    for key in value:
        if key not in fields:
            near = nearest(str(key), fields)
            problems.add(f"{where}.{key}", "unknown key", f"did you mean {near}?" if near else None)

    for key in ("name", "dtype_name"):
        if key in value and (not isinstance(value[key], str) or not value[key]):
            problems.add(f"{where}.{key}", f"expected a non-empty string, got {brief(value[key])}")

    shape = _sequence(value, "shape", where, problems)
    if shape is not None:
        if not shape:
            problems.add(f"{where}.shape", "expected at least one dim, got an empty list")
        for dim, size in enumerate(shape):
            if not is_int(size) or size < 1:
                problems.add(f"{where}.shape[{dim}]", f"expected a positive int, got {brief(size)}")

    dims = _sequence(value, "src_mesh_dims", where, problems)
    if dims is not None:
        for error in mesh_errors(dims):
            problems.add(f"{where}.src_mesh_dims", error)

    placements = None
    if value.get("src_placements") is not None:
        placements = _sequence(value, "src_placements", where, problems)
        if placements is not None:
            for error in placement_errors(placements):
                problems.add(f"{where}.src_placements", error)

    if len(problems) > before:
        return None
    return WireParam(
        value["name"],
        value["dtype_name"],
        cast(tuple[int, ...], shape),
        cast(tuple[int, int], dims),
        cast(Placements | None, placements),
    )


def _sequence(
    value: Mapping[Any, Any], key: str, where: str, problems: Problems
) -> tuple[object, ...] | None:
    if key not in value:
        return None
    if not isinstance(value[key], list | tuple):
        problems.add(f"{where}.{key}", f"expected a list, got {_kind(value[key])}")
        return None
    return tuple(value[key])


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
