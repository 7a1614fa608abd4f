"""The plan file: canonical bytes, digests, and that nothing damaged or inconsistent is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.errors import LayoutError, PlanError
from m2ncompile.plan import MAX_BYTES, Plan, decode, digest_of, encode
from m2ncompile.plan_check import load, loads
from m2ncompile.routes import Reason
from m2ncompile.wire import WireParam, complete_digest, source_digest
from tests.plans import make_inputs, make_plan

names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
tensors = st.lists(
    st.tuples(
        names,
        st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"]),
        st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=3).map(tuple),
        st.sampled_from([None, 0]),
    ),
    unique_by=lambda t: t[0],
    min_size=1,
    max_size=8,
)


def resealed(data: bytes) -> bytes:
    """`data` with a digest line that fits its content."""
    body = data[: data.rindex(b'"digest":"')]
    return body + b'"digest":"%s"\n}\n' % sha256(body).hexdigest().encode()


def edited(plan: Plan, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The plan's file after `edit` on its parsed JSON, with a valid digest line."""
    document = json.loads(plan.encoded)
    edit(document)
    del document["digest"]
    text = json.dumps(document).encode()
    return resealed(text[:-1] + b',"digest":""\n}\n')


@given(tensors)
def test_round_trip(found: Any) -> None:
    plan = make_plan(found)
    again = loads(plan.encoded)
    assert again == plan
    assert encode(again) == again.encoded == plan.encoded
    assert digest_of(plan.encoded) == plan.digest


def test_one_record_a_line() -> None:
    plan = make_plan()
    lines = plan.encoded.decode().splitlines()
    assert '["model.layers.0.down.weight",1,0],' in lines
    assert '[1,1,"direct",2,0,0,null],' in lines
    assert json.loads(plan.encoded)["digest"] == plan.digest


def test_every_flipped_byte_is_found() -> None:
    data = make_plan().encoded
    for position in range(len(data)):
        for bit in (0, 5):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises(PlanError):
                loads(bytes(flipped))


def test_every_truncation_is_found() -> None:
    data = make_plan().encoded
    for length in range(len(data)):
        with pytest.raises(PlanError, match=r"cut short|damaged"):
            loads(data[:length])
    with pytest.raises(PlanError):
        loads(data + b"\n")


def test_newer_major_is_refused_naming_its_compiler() -> None:
    data = resealed(make_plan().encoded.replace(b'"major":1', b'"major":2'))
    with pytest.raises(PlanError, match=r"plan format 2\.0.*reads 1\.x.*0\.1\.0"):
        loads(data)


def test_newer_minor_is_read() -> None:
    plan = make_plan()

    def edit(document: dict[str, Any]) -> None:
        document["format"]["minor"] = 7
        for table in document.values():
            for entry in table if isinstance(table, list) else ():
                if isinstance(entry, list):
                    entry.append("more")
        extend(document)

    def extend(record: dict[str, Any]) -> None:
        for value in list(record.values()):
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, dict):
                    extend(inner)
        record["later"] = {"nested": [1, 2]}

    data = edited(plan, edit)
    later = loads(data)
    for table in plan.__struct_fields__:
        if table not in ("format", "digest"):
            assert getattr(later, table) == getattr(plan, table), table
    # Its digest is of all that is in the file, also of what this reader does not know.
    assert later.encoded == data and later.digest != plan.digest
    assert msgspec.structs.replace(later, tensors=later.tensors).encoded != data


@pytest.mark.parametrize("rest", ['"digest":', '"\\ud800":0', "[" * 100_000])
def test_a_wrong_value_before_broken_json_is_one_error(rest: str) -> None:
    head = '"format":{"name":"m2ncompile-plan","major":1,"minor":0},'
    with pytest.raises(PlanError, match="Expected"):
        loads(resealed(f'{{{head}"digests":1,{rest}"digest":""\n}}\n'.encode()))


def test_foreign_files() -> None:
    for body in (b"{", b'{"format":{"name":"other","major":1,"minor":0},', b"[]", b"\xff", b""):
        with pytest.raises(PlanError):
            loads(resealed(body + b'"digest":"'))


def test_deep_nesting_ends_in_an_error() -> None:
    body = b'{"later":' + b"[" * 100_000
    with pytest.raises(PlanError, match="not valid JSON"):
        loads(resealed(body + b'"digest":"'))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(PlanError, match="at most"):
        load(path)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        load(tmp_path / "none")
    with pytest.raises(PlanError, match="Is a directory"):
        load(tmp_path)


def _set(*keys: Any) -> Callable[[dict[str, Any]], None]:
    *path, last, value = keys

    def edit(document: dict[str, Any]) -> None:
        target: Any = document
        for key in path:
            target = target[key]
        target[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (_set("geometries", 0, 0, 9), "dtype 9 is outside of dtypes"),
        (_set("geometries", 0, 1, [0, 4]), "sizes out of range"),
        (_set("geometries", 0, 1, [2**50, 4]), "sizes out of range"),
        (_set("geometries", 0, 1, [True, 4]), "Expected `int`, got `bool`"),
        (_set("dtypes", 0, "bf16"), "no known dtype"),
        (_set("dtypes", 1, "bfloat16"), "repeats an earlier entry"),
        (_set("layouts", 0, 0, 5), "mesh 5 is outside of meshes"),
        (_set("layouts", 0, 1, [0, 0]), "shard both mesh axes"),
        (_set("meshes", 0, 0, [0, 2]), "at least 1"),
        (_set("meshes", 1, 1, 1), "outside of the worker ranks"),
        (_set("meshes", 0, 1, 1), "outside of the trainer ranks"),
        (_set("tensors", 0, 1, 9), "geometry 9 is outside of geometries"),
        (_set("tensors", 0, 2, -1), "source -1 is outside of layouts"),
        (_set("tensors", 0, 0, "model.layers.0.norm.weight"), "stands 2 times"),
        (_set("tensors", 0, 0, ""), 'name "" stands'),
        (_set("destinations", 0, 0, 1), "model.embed.weight has no destination"),
        (_set("destinations", 0, 0, 99), "tensor 99 is outside of tensors"),
        (_set("destinations", 0, 1, 99), "wire 99 is outside of wires"),
        (_set("destinations", 0, 2, "direct"), "a direct route has a landing with an offset"),
        (_set("destinations", 0, 2, "reload"), "a direct route has a landing with an offset"),
        (_set("destinations", 0, 2, "sideways"), "Invalid enum value"),
        (_set("destinations", 1, 4, None), "a direct route has a landing with an offset"),
        (_set("destinations", 1, 5, None), "a direct route has a landing with an offset"),
        (_set("destinations", 0, 5, 0), "a direct route has a landing with an offset"),
        (_set("destinations", 1, 5, [0, 0]), "neither one nor 2 that differ"),
        (_set("destinations", 1, 5, [0, 1, 2]), "neither one nor 2 that differ"),
        (_set("destinations", 1, 5, [0, 1]), "reaches outside of model.layers.0.down.weight"),
        (_set("destinations", 1, 5, []), "neither one nor 2 that differ"),
        (_set("destinations", 1, 5, -1), "reaches outside of model.layers.0.down.weight"),
        (_set("destinations", 1, 5, 1), "reaches outside of model.layers.0.down.weight"),
        (_set("destinations", 1, 4, 1), "landings[0]: no destination uses it"),
        (_set("destinations", 0, 6, 7), "reason 7 is outside of reasons"),
        (_set("destinations", 0, 1, 1), "wires[0]: no destination uses it"),
        (_set("wires", 0, 0, 1), "its wire is elements [1, 33) of 32"),
        (_set("wires", 0, 0, -1), "its wire is elements [-1, 31) of 32"),
        (_set("wires", 0, 2, 1), "outside of the trainer ranks"),
        (_set("landings", 0, 1, [[8, 1]]), "its landing has 8 elements, its shards have 16"),
        (_set("landings", 0, 1, [[16, -1]]), "dims out of range"),
        (_set("landings", 0, 1, [[0, 1]]), "dims out of range"),
        (_set("landings", 0, 1, [[16, 2]]), "reaches outside of"),
        (_set("params", 0, 2, [1]), "strides do not fit [4, 4]"),
        (_set("params", 0, 1, 9), "geometry 9 is outside of geometries"),
        (_set("transfers", 0, [[1]]), "destination 1 is carried 2 times"),
        (_set("transfers", 0, [[]]), "transfers[0]: carries no destination"),
        (_set("transfers", 0, [[99]]), "destination 99 is carried"),
        (_set("transfers", [[[0, 1]], [[2]], [[3]]]), "transfers[0]: its destinations differ"),
        (_set("transfers", [[[0]], [[1, 3, 2]]]), "transfers[1]: its destinations differ"),
        (_set("layouts", 2, 1, [-1, 0]), "digests.program"),
        (_set("geometries", 0, 1, [7, 4]), "7 = 2 * 3 + 1"),
        (_set("tensors", 0, 0, "other"), "digests.source"),
        (_set("digests", "complete", "0" * 64), "digests.complete"),
        (_set("inputs", "trainer", "ranks", 0), "Expected `int` >= 1"),
        (_set("inputs", "limits", "max_dims", 1), "a transfer takes 1 to 1"),
    ],
)
def test_inconsistent_content_is_found(edit: Any, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        loads(edited(make_plan(), edit))
    assert says in str(caught.value)


def test_order_of_transfers_is_part_of_the_program() -> None:
    def swap(document: dict[str, Any]) -> None:
        transfers = document["transfers"]
        transfers[0], transfers[1] = transfers[1], transfers[0]

    with pytest.raises(PlanError, match=r"digests\.program"):
        loads(edited(make_plan(), swap))


def test_program_ignores_what_does_not_execute() -> None:
    plan = make_plan()
    other = make_plan(inputs=make_inputs(name="renamed"), reason=Reason("loader", "another reason"))
    assert other.digest != plan.digest
    assert other.digests == plan.digests
    routed = make_plan([("model.embed.weight", "bfloat16", (8, 4), 0)])
    fallen = make_plan([("model.embed.weight", "bfloat16", (8, 4), None)])
    assert routed.digests.program != fallen.digests.program


def test_wire_digests_are_those_of_the_records() -> None:
    plan = make_plan()
    records = [
        WireParam(t.name, plan.dtypes[g.dtype], g.shape, (2, 1), (0, -1))
        for t in plan.tensors
        for g in [plan.geometries[t.geometry]]
    ]
    source = source_digest(records)
    placements = [plan.layouts[d.layout].placements for d in plan.destinations]
    assert plan.digests.source == source
    assert plan.digests.complete == complete_digest(source, plan.meshes[1], placements)


def test_what_no_transfer_can_carry_is_listed_by_name() -> None:
    with pytest.raises(LayoutError) as caught:
        make_plan([("a", "bfloat16", (3, 4), None), ("b", "bool", (2,), None)])
    assert [p.where for p in caught.value.problems] == ["a", "b"]


def test_same_bytes_in_any_process(tmp_path: Path) -> None:
    script = (
        "import sys; from tests.plans import make_plan; "
        "sys.stdout.buffer.write(make_plan().encoded)"
    )
    root = Path(__file__).parents[1]
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "LC_ALL": locale},
            capture_output=True,
            check=True,
        ).stdout
        for seed, locale in [("0", "C"), ("1", "C.UTF-8"), ("77", "POSIX")]
    }
    assert found == {make_plan().encoded}


def test_reading_needs_neither_torch_nor_engine(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(make_plan().encoded)
    script = (
        "import sys; from pathlib import Path; from m2ncompile.plan_check import load; "
        f"load(Path({str(path)!r})); "
        "sys.exit(bool({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_decode_alone_checks_no_content() -> None:
    """`decode` is for bytes just written; readers use `loads`, which checks."""
    data = edited(make_plan(), _set("tensors", 0, 0, "other"))
    assert decode(data).tensors[0].name == "other"
    with pytest.raises(PlanError):
        loads(data)


def test_numbers_are_bounded() -> None:
    data = edited(make_plan(), _set("geometries", 0, 1, [2**70, 4]))
    with pytest.raises(PlanError):
        loads(data)
    assert msgspec.json.decode(data)["geometries"][0][1][0] > 2**64
