from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.errors import WireError
from m2ncompile.layout import Mesh
from m2ncompile.wire import (
    SCHEMA_VERSION,
    WireParam,
    complete_digest,
    fragments,
    parse_wire_param,
    parse_wire_params,
    source_digest,
    source_digest_of,
)

Q_PROJ = WireParam(
    "model.layers.0.self_attn.q_proj.weight", "bfloat16", (4096, 4096), (1, 8), (-1, 0)
)
NORM = WireParam("model.norm.weight", "float32", (4096,), (2, 4), None)
#: Plain, quoted, non-ASCII, outside the BMP, a lone surrogate.
NAMES = ["a.b", 'q"\\\n', "größe", "\N{GRINNING FACE}", "\ud800"]


def record(**changes: object) -> dict[str, Any]:
    return {**Q_PROJ.to_dict(), **changes}


def problems(call: Callable[[], object]) -> list[tuple[str, str]]:
    with pytest.raises(WireError) as caught:
        call()
    return [(problem.where, problem.message) for problem in caught.value.problems]


class TestParsing:
    @pytest.mark.parametrize("param", [Q_PROJ, NORM])
    def test_round_trip(self, param: WireParam) -> None:
        decoded = json.loads(json.dumps(param.to_dict()))
        assert decoded == param.to_dict()
        assert parse_wire_param(decoded, "params[0]") == param

    def test_tuples_are_lists(self) -> None:
        value = record(shape=(4096, 4096), src_mesh_dims=(1, 8), src_placements=(-1, 0))
        assert parse_wire_param(value, "params[0]") == Q_PROJ

    def test_the_result_is_hashable(self) -> None:
        assert len({parse_wire_param(record(), "a"), parse_wire_param(record(), "b")}) == 1

    @pytest.mark.parametrize(
        ("changes", "where", "message"),
        [
            ({"name": ""}, "name", "expected a non-empty string, got ''"),
            ({"name": 3}, "name", "expected a non-empty string, got 3"),
            ({"dtype_name": ""}, "dtype_name", "expected a non-empty string, got ''"),
            ({"dtype_name": None}, "dtype_name", "expected a non-empty string, got None"),
            ({"shape": []}, "shape", "expected at least one dim, got an empty list"),
            ({"shape": 8}, "shape", "expected a list, got int"),
            ({"shape": "88"}, "shape", "expected a list, got str"),
            ({"shape": None}, "shape", "expected a list, got null"),
            ({"shape": [8, 0]}, "shape[1]", "expected a positive int, got 0"),
            ({"shape": [-8, 8]}, "shape[0]", "expected a positive int, got -8"),
            ({"shape": [8, True]}, "shape[1]", "expected a positive int, got True"),
            ({"shape": [8, 8.0]}, "shape[1]", "expected a positive int, got 8.0"),
            ({"src_mesh_dims": [8]}, "src_mesh_dims", "a mesh has 2 dims, got 1"),
            (
                {"src_mesh_dims": [8, True]},
                "src_mesh_dims",
                "mesh dim 1 must be an int of at least 1, got True",
            ),
            ({"src_mesh_dims": None}, "src_mesh_dims", "expected a list, got null"),
            (
                {"src_placements": [-1, False]},
                "src_placements",
                "placement 1 must be -1 (replicate) or a tensor dim, got False",
            ),
            (
                {"src_placements": [-1, -1]},
                "src_placements",
                "two replicating axes: write null (None) for a tensor that all ranks hold whole",
            ),
            (
                {"src_placements": [0, 1]},
                "src_placements",
                "placements [0, 1] shard both mesh axes, M2N can shard only one",
            ),
            ({"src_placements": {}}, "src_placements", "expected a list, got dict"),
            ({"src_placement": None}, "src_placement", "unknown key"),
        ],
    )
    def test_refuses(self, changes: dict[str, object], where: str, message: str) -> None:
        assert problems(lambda: parse_wire_param(record(**changes), "params[7]")) == [
            (f"params[7].{where}", message)
        ]

    @pytest.mark.parametrize("value", [None, [], "name", 3])
    def test_refuses_what_is_no_object(self, value: object) -> None:
        ((where, message),) = problems(lambda: parse_wire_param(value, "params[7]"))
        assert where == "params[7]"
        assert message.startswith("expected an object, got ")

    @pytest.mark.parametrize("key", list(Q_PROJ.to_dict()))
    def test_every_key_is_required(self, key: str) -> None:
        value = record()
        del value[key]
        assert problems(lambda: parse_wire_param(value, "p")) == [(f"p.{key}", "missing")]

    def test_a_misspelt_key_is_named(self) -> None:
        with pytest.raises(WireError, match=r"did you mean src_placements\?"):
            parse_wire_param(record(src_placement=None), "p")

    def test_one_error_lists_everything(self) -> None:
        value = record(
            dtype_name=1, shape=[0, True], src_mesh_dims=[0, 0], src_placements=[-2, None], rank=0
        )
        del value["name"]
        assert [where for where, _ in problems(lambda: parse_wire_param(value, "p"))] == [
            "p.name",
            "p.rank",
            "p.dtype_name",
            "p.shape[0]",
            "p.shape[1]",
            "p.src_mesh_dims",
            "p.src_mesh_dims",
            "p.src_placements",
            "p.src_placements",
        ]

    def test_lists_keep_their_order(self) -> None:
        values = [NORM.to_dict(), Q_PROJ.to_dict()]
        assert parse_wire_params(values) == (NORM, Q_PROJ)
        assert parse_wire_params([]) == ()

    def test_lists_collect_over_records_and_find_repeated_names(self) -> None:
        values = [record(), NORM.to_dict(), record(shape=[0]), 5, NORM.to_dict()]
        assert problems(lambda: parse_wire_params(values, "init")) == [
            ("init[2].shape[0]", "expected a positive int, got 0"),
            ("init[2].name", f"{Q_PROJ.name!r} is already at init[0]"),
            ("init[3]", "expected an object, got int"),
            ("init[4].name", f"{NORM.name!r} is already at init[1]"),
        ]

    @pytest.mark.parametrize("value", [None, {}, (), "[]"])
    def test_only_a_list_is_a_list(self, value: object) -> None:
        with pytest.raises(WireError, match="params: expected a list of wire records, got"):
            parse_wire_params(value)


class TestDigests:
    """The fixed digests were computed with vLLM 0.33.0."""

    def test_source_bytes(self) -> None:
        text = (
            '{"params":[{"dtype_name":"bfloat16","name":"model.layers.0.self_attn.q_proj.weight",'
            '"shape":[4096,4096],"src_mesh_dims":[1,8],"src_placements":[-1,0]},'
            '{"dtype_name":"float32","name":"model.norm.weight",'
            '"shape":[4096],"src_mesh_dims":[2,4],"src_placements":null}],"schema_version":2}'
        )
        assert source_digest([Q_PROJ, NORM]) == sha256(text.encode()).hexdigest()

    def test_fixed_source_digests(self) -> None:
        assert SCHEMA_VERSION == 2
        assert (
            source_digest([]) == "0ca9b9afd90801b3b40b59a5133aa3e5fa26c856b5d972ddf365d99f9342eef9"
        )
        assert (
            source_digest([Q_PROJ, NORM])
            == "528d3a6e309660856557a358237822d4b8590c12a4ad867f414bc1d4c63481cc"
        )
        odd = [WireParam(name, "int8", (1,), (1, 1), None) for name in NAMES]
        assert (
            source_digest(odd) == "1503b6a7c715b9ff5de63a9c33200489b13b5b288b927801d9618d53ea048e19"
        )

    def test_fixed_complete_digest(self) -> None:
        source = source_digest([Q_PROJ, NORM])
        assert (
            complete_digest(source, Mesh((1, 4), 8), [(-1, 0), None])
            == "728b69d798574aae61fb617b3758458a52d0cb8ebd2c2248b7bbaa7107939eb6"
        )

    def test_order_matters(self) -> None:
        assert source_digest([Q_PROJ, NORM]) != source_digest([NORM, Q_PROJ])

    @pytest.mark.parametrize("count", [1, 2, 1023, 1024, 1025, 2048, 2500])
    def test_long_plans(self, count: int) -> None:
        params = [
            WireParam(f"experts.{i}", "bfloat16", (i % 7 + 1, 8), (1, 2), ((-1, 0), None)[i % 2])
            for i in range(count)
        ]
        text = json.dumps(
            {"schema_version": 2, "params": [p.to_dict() for p in params]},
            sort_keys=True,
            separators=(",", ":"),
        )
        expected = sha256(text.encode()).hexdigest()
        assert source_digest(iter(params)) == expected
        assert expected == source_digest_of(
            (p.name, fragments(p.dtype_name, p.shape, p.src_mesh_dims, p.src_placements))
            for p in params
        )

    @given(st.text())
    def test_fragments_surround_the_name(self, name: str) -> None:
        before, after = fragments("bfloat16", (4, 8), (2, 1), (1, -1))
        assert json.loads(before + json.dumps(name) + after) == {
            "name": name,
            "dtype_name": "bfloat16",
            "shape": [4, 8],
            "src_mesh_dims": [2, 1],
            "src_placements": [1, -1],
        }

    @pytest.mark.parametrize(
        ("mesh", "placements"),
        [
            (Mesh((4, 1), 8), [(-1, 0), None]),
            (Mesh((1, 4), 9), [(-1, 0), None]),
            (Mesh((1, 4), 8), [None, (-1, 0)]),
            (Mesh((1, 4), 8), [(0, -1), None]),
        ],
    )
    def test_complete_digest_covers_the_destination(
        self, mesh: Mesh, placements: list[tuple[int, int] | None]
    ) -> None:
        reference = complete_digest("ab", Mesh((1, 4), 8), [(-1, 0), None])
        assert complete_digest("ab", mesh, placements) != reference
        assert complete_digest("ba", Mesh((1, 4), 8), [(-1, 0), None]) != reference

    @pytest.mark.parametrize("value", ["", None, b"ab"])
    def test_complete_digest_needs_a_source_digest(self, value: Any) -> None:
        with pytest.raises(WireError, match="must be a non-empty string, got"):
            complete_digest(value, Mesh((1, 1)), [])
