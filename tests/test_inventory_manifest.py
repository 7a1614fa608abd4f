"""Manifests: what is written is read back, and nothing else is accepted."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2ncompile.dtypes import ITEMSIZE
from m2ncompile.errors import InventoryError
from m2ncompile.inventory import (
    Inventory,
    Missing,
    TensorInfo,
    natural_key,
    read_manifest,
    write_manifest,
)

GOOD: dict[str, Any] = {
    "format": "m2ncompile-manifest",
    "version": 1,
    "tensors": [["b.10", "bfloat16", [4, 2]], ["b.9", "float32", []]],
}
MISSING = {"kind": "tied", "names": "lm_head.*", "tensors": 1, "nbytes": 8, "reason": "a reason"}


def read(folder: Path, content: Any) -> Inventory:
    path = folder / "manifest.json"
    if not isinstance(content, bytes):
        content = json.dumps(content).encode()
    path.write_bytes(content)
    return read_manifest(path)


def refusal(folder: Path, content: Any) -> str:
    with pytest.raises(InventoryError) as caught:
        read(folder, content)
    return str(caught.value)


tensor_names = st.text(
    st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=20
)
shapes = st.lists(st.integers(1, 2**20), max_size=2).map(tuple)
tensors = st.builds(TensorInfo, tensor_names, st.sampled_from(sorted(ITEMSIZE)), shapes)
missing = st.builds(
    Missing,
    kind=st.sampled_from(["mtp", "buffer", "tied"]),
    names=st.text(max_size=9),
    tensors=st.integers(0, 2**60),
    nbytes=st.integers(0, 2**60),
    reason=st.text(max_size=9),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    listed=st.lists(tensors, min_size=1, max_size=8, unique_by=lambda t: t.name),
    gaps=st.lists(missing, max_size=3),
)
def test_round_trip(tmp_path: Path, listed: list[TensorInfo], gaps: list[Missing]) -> None:
    listed.sort(key=lambda t: natural_key(t.name))
    inventory = Inventory("safetensors", tuple(listed), tuple(gaps))
    written = write_manifest(inventory)
    found = read(tmp_path, written)
    assert found.origin == "manifest"
    assert found.tensors == inventory.tensors
    assert found.missing == inventory.missing
    assert found.digest == inventory.digest
    assert write_manifest(found) == written


def test_bytes_are_one_tensor_a_line() -> None:
    inventory = Inventory(
        "config",
        (TensorInfo("a", "uint8", (2, 3)), TensorInfo("b", "float32", ())),
        (Missing(**MISSING),),
    )
    assert write_manifest(inventory) == (
        b'{"format":"m2ncompile-manifest","version":1,"tensors":[\n'
        b'["a","uint8",[2,3]],\n'
        b'["b","float32",[]]\n'
        b'],"missing":[\n'
        b'{"kind":"tied","names":"lm_head.*","tensors":1,"nbytes":8,"reason":"a reason"}\n'
        b"]}\n"
    )


def test_order_in_the_file_does_not_matter(tmp_path: Path) -> None:
    assert [t.name for t in read(tmp_path, GOOD).tensors] == ["b.9", "b.10"]


def test_missing_is_optional(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD).missing == ()
    assert read(tmp_path, {**GOOD, "missing": [MISSING]}).missing == (Missing(**MISSING),)


def row(*entries: Any) -> dict[str, Any]:
    return {**GOOD, "tensors": [["a", "uint8", [1]], list(entries)]}


REFUSED: dict[str, tuple[Any, str]] = {
    "not json": (b"{", "no JSON"),
    "not utf-8": (b'{"\xff"', "no UTF-8"),
    "nan": (b'{"format": NaN}', "NaN"),
    "deep": (b"[" * 200_000, "nested too deeply"),
    "a list": ([], "(top level): expected a table or object; got []"),
    "another format": (
        {**GOOD, "format": "plan"},
        "format: expected \"m2ncompile-manifest\"; got 'plan'",
    ),
    "another version": ({**GOOD, "version": 2}, "version: expected 1; got 2"),
    "a version that is a boolean": ({**GOOD, "version": True}, "version: expected 1; got True"),
    "unknown key": ({**GOOD, "tensor": []}, "tensor: unknown key; valid here: format, version"),
    "no tensors key": (
        {"format": "m2ncompile-manifest", "version": 1},
        "tensors: required key is missing",
    ),
    "tensors is no list": ({**GOOD, "tensors": 1}, "tensors: Expected `array`, got `int`"),
    "key twice": (json.dumps(GOOD)[:-1].encode() + b', "tensors": []}', "'tensors': the key"),
    "no tensor": ({**GOOD, "tensors": []}, "tensors: the manifest lists no tensor"),
    "row too short": (row("b", "uint8"), "tensors[1]"),
    "row too long": (row("b", "uint8", [1], "junk"), "tensors[1]"),
    "name is no string": (row(1, "uint8", [1]), "tensors[1][0]"),
    "size is no int": (row("b", "uint8", [1.5]), "tensors[1][2][0]"),
    "size is a string": (row("b", "uint8", ["1"]), "tensors[1][2][0]"),
    "size is a boolean": (row("b", "uint8", [True]), "tensors[1][2][0]"),
    "unknown dtype": (row("b", "bfloat61", [1]), 'did you mean "bfloat16"?'),
    "size 0": (row("b", "uint8", [2, 0]), "tensors[1] 'b': shape [2, 0] has the size 0"),
    "negative size": (row("b", "uint8", [-2]), "has the size -2"),
    "overflow": (row("b", "uint8", [2**40, 2**40]), "more than 2**59 elements"),
    "empty name": (row("", "uint8", [1]), "the tensor's name is empty"),
    "control character": (row("b\t", "uint8", [1]), "control character U+0009"),
    "tensor twice": (row("a", "uint8", [1]), "tensors[1] 'a': the tensor is listed twice"),
    "missing of no kind": ({**GOOD, "missing": [{**MISSING, "kind": "x"}]}, "missing[0].kind"),
    "missing with more": ({**GOOD, "missing": [{**MISSING, "a": 1}]}, "missing[0].a: unknown key"),
    "negative count": (
        {**GOOD, "missing": [{**MISSING, "tensors": -1}]},
        "missing[0].tensors: expected 0 or more, below 2**63; got -1",
    ),
    "count too large": (
        {**GOOD, "missing": [{**MISSING, "nbytes": 2**63}]},
        "missing[0].nbytes: expected 0 or more, below 2**63; got 9223372036854775808",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    content, expected = REFUSED[case]
    assert expected in refusal(tmp_path, content)


def test_truncation_at_every_length(tmp_path: Path) -> None:
    content = write_manifest(Inventory("config", (TensorInfo("a", "uint8", (2,)),)))
    for length in range(len(content) - 1):
        assert "manifest.json" in refusal(tmp_path, content[:length])


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    rows = [["a", "x", [1]], ["b", "uint8", [0]], ["c", "uint8", [1]], ["c", "uint8", [1]]]
    text = refusal(tmp_path, {**GOOD, "tensors": rows})
    for index in (0, 1, 3):
        assert f"tensors[{index}]" in text


def test_what_is_wrong_outside_the_tensors_hides_nothing_in_them(tmp_path: Path) -> None:
    rows = [["a", "x", [1]], ["b", "uint8", ["1"]], ["c", "uint8"], ["d", "uint8", [0]]]
    content = {
        "format": "plan",
        "version": 2,
        "tensors": [*rows, ["e", "uint8", [2]], ["e", "uint8", [2]]],
        "missing": [{**MISSING, "kind": "mpt", "nbytes": -1}, 3],
        "tensor": [],
    }
    with pytest.raises(InventoryError) as caught:
        read(tmp_path, content)
    found = [p.where.removeprefix(f"{tmp_path / 'manifest.json'}: ") for p in caught.value.problems]
    assert sorted(found) == [
        "format",
        "missing[0].kind",
        "missing[0].nbytes",
        "missing[1]",
        "tensor",
        "tensors[0] 'a'",
        "tensors[1][2][0]",
        "tensors[2]",
        "tensors[3] 'd'",
        "tensors[5] 'e'",
        "version",
    ]
    assert 'did you mean "mtp"?' in str(caught.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="No such file"):
        read_manifest(tmp_path / "absent.json")
