"""The plan file: records, canonical bytes, digests.

`docs/plan-format.md` describes the file field by field. Reading a plan needs
neither torch nor the engine. This module knows the file's form;
`plan_check.py` knows what makes its content consistent.
"""

from __future__ import annotations

import re
from functools import cached_property
from hashlib import sha256
from typing import Literal

import msgspec

from m2ncompile.errors import PlanError
from m2ncompile.inventory.records import Missing
from m2ncompile.layout import Limits, Mesh, Placements
from m2ncompile.routes import Reason, Route
from m2ncompile.spec import EngineSpec, ResolverSpec, TrainerSpec

__all__ = [
    "FORMAT",
    "MAX_BYTES",
    "Digests",
    "Format",
    "Inputs",
    "ModelInput",
    "Plan",
    "PlanDestination",
    "PlanGeometry",
    "PlanLanding",
    "PlanLayout",
    "PlanParam",
    "PlanPart",
    "PlanStaging",
    "PlanTensor",
    "PlanTransfer",
    "PlanWire",
    "decode",
    "digest_of",
    "encode",
    "program_digest",
]

#: A file beyond this is refused unread; 140,000 tensors take about 20 MB.
MAX_BYTES = 1 << 28


class Format(msgspec.Struct, frozen=True):
    name: Literal["m2ncompile-plan"]
    #: Readers refuse a major that they don't know, and read any minor.
    major: int
    minor: int


FORMAT = Format("m2ncompile-plan", 1, 0)


class ModelInput(msgspec.Struct, frozen=True):
    """The model that the plan was made from.

    `config` is the SHA-256 of its canonical config, `inventory` of its list of
    tensors; `missing` names what a stored checkpoint has beyond that list.
    """

    name: str
    architecture: str
    config: str
    inventory: str
    origin: Literal["safetensors", "config", "manifest"]
    exclude: tuple[str, ...]
    missing: tuple[Missing, ...]


class Inputs(msgspec.Struct, frozen=True):
    """All that the content follows from."""

    compiler: str
    model: ModelInput
    engine: EngineSpec
    trainer: TrainerSpec
    resolver: ResolverSpec
    limits: Limits


class Digests(msgspec.Struct, frozen=True):
    """SHA-256, hex. `source` and `complete` are vLLM's, wire schema version 2.

    `complete` is None for a plan that vLLM's own backend can't express.
    """

    program: str
    source: str
    complete: str | None


class PlanLayout(msgspec.Struct, frozen=True, array_like=True):
    mesh: int
    placements: Placements | None


class PlanGeometry(msgspec.Struct, frozen=True, array_like=True):
    dtype: int
    shape: tuple[int, ...]


class PlanTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    name: str
    geometry: int
    source: int


class PlanParam(msgspec.Struct, frozen=True, array_like=True):
    """A live parameter in load format: its local geometry, its strides where not row-major."""

    name: str
    geometry: int
    stride: tuple[int, ...] | None


class PlanWire(msgspec.Struct, frozen=True, array_like=True):
    """What of a tensor a transfer moves: from element `base`, as row-major `geometry`.

    `source` is the layout of that range on the trainer.
    """

    base: int
    geometry: int
    source: int


class PlanLanding(msgspec.Struct, frozen=True, array_like=True):
    """How a shard lies in a live parameter's storage: (size, stride) dims, in elements."""

    param: int
    dims: tuple[tuple[int, int], ...]


class PlanDestination(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The integers index their tables, except for `offset`.

    `offset` is where the landing starts in the parameter's storage, in elements:
    one for all ranks of the mesh, or one each. `fallback` has no landing,
    `direct` no reason.
    """

    tensor: int
    wire: int
    route: Route
    layout: int
    landing: int | None
    offset: int | tuple[int, ...] | None
    reason: int | None

    def offset_at(self, place: int) -> int:
        """Where the shard of the mesh's rank number `place` starts; not for `fallback`."""
        assert self.offset is not None
        return self.offset if isinstance(self.offset, int) else self.offset[place]


class PlanPart(msgspec.Struct, frozen=True, array_like=True):
    """The indices `[start, start + size)` along `dim` of a wire; neither side shards that dim."""

    dim: int
    start: int
    size: int


class PlanTransfer(msgspec.Struct, frozen=True, array_like=True):
    """One collective: the destinations it serves, as one stack (`stacking.py`) where several.

    `part` is None where it moves all of them; one destination alone may go in parts.
    `by_rows` is the form of the stack.
    """

    destinations: tuple[int, ...]
    part: PlanPart | None = None
    by_rows: bool = False


class PlanStaging(msgspec.Struct, frozen=True, array_like=True):
    """What a rank needs besides its tensors, in bytes; a run uses no more.

    `packed` is for what is copied together to be sent (two of the largest, and one more of columns
    of several), `unpacked` for what is received apart,
    `reloaded` for parameters on their way to the engine's reload, `whole` for tensors that
    fall back. `share` is the largest that the rank has of one transfer, which NCCL M2N stages
    in a pool of its own. `module` is the largest module that the engine makes anew, in load
    format: its own memory, not the run's.
    """

    packed: int
    unpacked: int
    reloaded: int
    whole: int
    share: int
    module: int


class Plan(msgspec.Struct, frozen=True, dict=True):
    """A whole plan; integers in the records index the tables, which come first."""

    format: Format
    inputs: Inputs
    digests: Digests
    dtypes: tuple[str, ...]
    meshes: tuple[Mesh, ...]
    layouts: tuple[PlanLayout, ...]
    geometries: tuple[PlanGeometry, ...]
    params: tuple[PlanParam, ...]
    wires: tuple[PlanWire, ...]
    landings: tuple[PlanLanding, ...]
    reasons: tuple[Reason, ...]
    tensors: tuple[PlanTensor, ...]
    destinations: tuple[PlanDestination, ...]
    transfers: tuple[PlanTransfer, ...]
    #: By communicator rank.
    staging: tuple[PlanStaging, ...]

    @cached_property
    def encoded(self) -> bytes:
        """The file: as it was read, or the canonical bytes of a plan made here."""
        return encode(self)

    @property
    def digest(self) -> str:
        """The plan's address: SHA-256 of the file up to its last line."""
        return digest_of(self.encoded)


#: Tables and records, written one entry a line.
_LISTS = Plan.__struct_fields__[3:]
#: What executes; `destinations` enters without its reasons.
_PROGRAM = (
    "dtypes",
    "meshes",
    "layouts",
    "geometries",
    "params",
    "wires",
    "landings",
    "tensors",
    "transfers",
)
_TRAILER = re.compile(rb'"digest":"([0-9a-f]{64})"\n}\n')
_TRAILER_BYTES = len('"digest":""\n}\n') + 64

_encoder = msgspec.json.Encoder(order="sorted")
_decoder = msgspec.json.Decoder(Plan)


def encode(plan: Plan) -> bytes:
    """The canonical bytes: fixed order of sections, sorted keys, one record a line."""
    lines = [b"{", b'"format":%s,' % _encoder.encode(plan.format)]
    for name in ("inputs", "digests"):
        entries = [
            b'"%s":%s' % (key.encode(), _encoder.encode(value))
            for key, value in sorted(msgspec.structs.asdict(getattr(plan, name)).items())
        ]
        lines.append(b'"%s":{' % name.encode())
        lines += _separated(entries)
        lines.append(b"},")
    for name in _LISTS:
        lines.append(b'"%s":[' % name.encode())
        lines += _separated([_encoder.encode(record) for record in getattr(plan, name)])
        lines.append(b"],")
    body = b"\n".join(lines) + b"\n"
    return body + b'"digest":"%s"\n}\n' % sha256(body).hexdigest().encode()


def _separated(entries: list[bytes]) -> list[bytes]:
    return [entry + b"," for entry in entries[:-1]] + entries[-1:]


def digest_of(data: bytes, where: str = "plan") -> str:
    """The plan digest of a file's bytes, after checking that they are whole.

    Raises PlanError naming `where` for bytes that are cut short or changed
    anywhere.
    """
    if len(data) > MAX_BYTES:
        raise PlanError(f"{where}: {len(data)} bytes; a plan has at most {MAX_BYTES}")
    trailer = _TRAILER.fullmatch(data[-_TRAILER_BYTES:])
    if trailer is None:
        raise PlanError(
            f"{where}: does not end in a plan's digest line; the file is cut short or no plan"
        )
    actual = sha256(memoryview(data)[:-_TRAILER_BYTES]).hexdigest()
    if actual != trailer[1].decode():
        raise PlanError(
            f"{where}: damaged: its content has digest {actual[:16]}..., its last line says "
            f"{trailer[1][:16].decode()}...; rebuild it or fetch it again"
        )
    return actual


def program_digest(plan: Plan) -> str:
    """SHA-256 of what executes: equal for plans that run the same whatever made them."""
    digest = sha256()
    for name in _PROGRAM:
        digest.update(_encoder.encode(getattr(plan, name)))
    digest.update(
        _encoder.encode(
            [(d.tensor, d.wire, d.route, d.layout, d.landing, d.offset) for d in plan.destinations]
        )
    )
    return digest.hexdigest()


def decode(data: bytes, where: str = "plan") -> Plan:
    """A plan from a file's bytes; its content is not checked yet (`plan_check.load`).

    Raises PlanError for damage, another format, an unknown major version, and
    values of the wrong type or range.
    """
    digest_of(data, where)
    try:
        plan = _decoder.decode(data)
    except msgspec.ValidationError as error:
        _check_format(data, where)  # says more, where the format is the cause
        raise PlanError(f"{where}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{where}: not valid JSON: {error}") from None
    if plan.format.major != FORMAT.major:
        _check_format(data, where)
    # A later minor version's file has fields that this reader drops: its bytes stay as they are.
    plan.__dict__["encoded"] = data
    return plan


def _check_format(data: bytes, where: str) -> None:
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if head.format.name != FORMAT.name:
        raise PlanError(f'{where}: format is "{head.format.name}", expected "{FORMAT.name}"')
    if head.format.major != FORMAT.major:
        raise PlanError(
            f"{where}: plan format {head.format.major}.{head.format.minor}; this m2ncompile "
            f"reads {FORMAT.major}.x. Rebuild the plan, or install the release that wrote it "
            f"({head.inputs.compiler})"
        )


class _AnyFormat(msgspec.Struct, frozen=True):
    name: str
    major: int
    minor: int


class _AnyInputs(msgspec.Struct, frozen=True):
    compiler: str = "unknown"


class _Head(msgspec.Struct, frozen=True):
    format: _AnyFormat
    inputs: _AnyInputs = _AnyInputs()
