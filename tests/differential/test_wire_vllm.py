"""Wire records and digests against vLLM's own: the same is accepted, the digests are equal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from vllm.distributed.weight_transfer import m2n_common as vllm_m2n
from vllm.distributed.weight_transfer.m2n_engine import M2NWeightTransferInitInfo

from m2ncompile.errors import WireError
from m2ncompile.layout import Mesh
from m2ncompile.wire import (
    SCHEMA_VERSION,
    WireParam,
    complete_digest,
    parse_wire_param,
    parse_wire_params,
    source_digest,
)

pytestmark = pytest.mark.engine

thorough = settings(max_examples=1000)

FIELDS = list(WireParam.__struct_fields__)

#: Whatever json.loads can return, and tuples, which some decoders return for arrays.
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers()
    | st.floats()
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)

#: Any code point, lone surrogates too.
texts = st.text(st.characters(exclude_categories=()), min_size=1)
names = texts | st.from_regex(r"model\.layers\.[0-9]{1,2}\.mlp\.up_proj\.weight", fullmatch=True)
sizes = st.integers(1, 2**40)
placements = st.one_of(
    st.none(),
    st.tuples(st.just(-1), st.integers(0, 3)),
    st.tuples(st.integers(0, 3), st.just(-1)),
)
params = st.builds(
    WireParam,
    name=names,
    dtype_name=st.sampled_from(["bfloat16", "float8_e4m3fn"]) | texts,
    shape=st.lists(sizes, min_size=1, max_size=4).map(tuple),
    src_mesh_dims=st.tuples(st.integers(1, 99), st.integers(1, 99)),
    src_placements=placements,
)
meshes = st.builds(Mesh, st.tuples(sizes, sizes), st.integers(0, 2**40))


@st.composite
def near_records(draw: st.DrawFn) -> dict[str, Any]:
    """A valid record, then perhaps one thing about it changed."""
    value: dict[str, Any] = draw(params).to_dict()
    changes = ["keep", "junk", "text", "element", "length", "drop", "add", "tuples"]
    match draw(st.sampled_from(changes)):
        case "junk":
            value[draw(st.sampled_from(FIELDS))] = draw(json_values)
        case "text":
            key = draw(st.sampled_from(["name", "dtype_name"]))
            value[key] = draw(st.sampled_from(["", " ", None, False, 0, 1, ["w"]]))
        case "element":
            key = draw(st.sampled_from(["shape", "src_mesh_dims", "src_placements"]))
            items = value[key] or [-1, 0]
            items[draw(st.integers(0, len(items) - 1))] = draw(
                st.sampled_from([True, False, 1.0, 0, -1, -2, 5, None, "1"])
            )
            value[key] = items
        case "length":
            key = draw(st.sampled_from(["shape", "src_mesh_dims", "src_placements"]))
            value[key] = draw(st.lists(st.integers(-1, 3), max_size=4))
        case "drop":
            del value[draw(st.sampled_from(FIELDS))]
        case "add":
            value[draw(st.sampled_from(["owners", "Name", "", "shape "]))] = draw(json_values)
        case "tuples":
            value = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    return value


def ours(value: object) -> WireParam | None:
    try:
        return parse_wire_param(value, "params[0]")
    except WireError:
        return None


def theirs(value: Any) -> vllm_m2n.M2NWireParam | None:
    try:
        return vllm_m2n.M2NWireParam.from_dict(value)
    except (ValueError, TypeError, AttributeError):
        return None


@thorough
@given(
    near_records()
    | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), json_values, max_size=6)
    | json_values
)
def test_records(value: object) -> None:
    mine, reference = ours(value), theirs(value)
    event(f"accepted: {mine is not None}")
    assert (mine is None) == (reference is None)
    if mine is not None and reference is not None:
        assert mine.to_dict() == reference.to_dict()
        assert source_digest([mine]) == vllm_m2n.source_plan_digest([reference])


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": b"\x04\x08"},
        {"shape": {4: None, 8: None}},
        {"shape": range(4, 6)},
        {"src_mesh_dims": {1: None, 2: None}},
        {"src_placements": {-1: None, 0: None}},
    ],
)
def test_the_one_difference(changes: dict[str, object]) -> None:
    """vLLM takes the items of anything iterable; here an array is a list or a tuple.

    No JSON text decodes to an iterable of ints that is neither, so it can't show
    in a handshake.
    """
    valid = WireParam("w", "bfloat16", (4, 8), (1, 2), (-1, 0)).to_dict()
    assert ours(valid | changes) is None
    assert theirs(valid | changes) is not None


@settings(max_examples=300)
@given(st.lists(near_records() | json_values, max_size=4), st.booleans())
def test_init_messages(values: list[Any], repeat: bool) -> None:
    """A worker takes the list of records with our digest exactly when we would."""
    if repeat:
        values = values + values[:1]
    try:
        mine = parse_wire_params(values)
    except WireError:
        mine = None
    message = M2NWeightTransferInitInfo(
        schema_version=SCHEMA_VERSION,
        master_address="localhost",
        master_port=1234,
        rank_offset=1,
        world_size=2,
        dst_mesh_dims=[1, 1],
        source_digest="none" if mine is None else source_digest(mine),
        params=values,
    )
    event(f"accepted: {mine is not None}, {len(values)} records")
    if mine is None:
        with pytest.raises((ValueError, TypeError)) as refused:
            message.parse_wire_params()
        assert "digest" not in str(refused.value)
    else:
        assert [p.to_dict() for p in message.parse_wire_params()] == [p.to_dict() for p in mine]


@settings(max_examples=300)
@given(st.lists(params, max_size=6), meshes, st.lists(placements, max_size=6))
def test_digests(
    plan: list[WireParam], mesh: Mesh, destinations: list[tuple[int, int] | None]
) -> None:
    source = source_digest(plan)
    assert source == vllm_m2n.source_plan_digest(
        [vllm_m2n.M2NWireParam.from_dict(p.to_dict()) for p in plan]
    )
    assert complete_digest(source, mesh, destinations) == vllm_m2n.complete_plan_digest(
        source, vllm_m2n.M2NMesh(mesh.dims, mesh.start), destinations
    )


@pytest.mark.parametrize("source", ["", "x", None, b"ab", 3])
def test_source_digests_that_are_none(source: Any) -> None:
    mesh = Mesh((1, 2), 1)
    try:
        mine = complete_digest(source, mesh, [])
    except WireError:
        mine = None
    try:
        reference = vllm_m2n.complete_plan_digest(source, vllm_m2n.M2NMesh((1, 2), 1), [])
    except ValueError:
        reference = None
    assert mine == reference


def test_schema_version() -> None:
    assert SCHEMA_VERSION == vllm_m2n.M2N_WIRE_SCHEMA_VERSION
