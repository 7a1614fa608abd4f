"""The safetensors header reader, against the library and against damage."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2ncompile.dtypes import ITEMSIZE, SAFETENSORS, nbytes
from m2ncompile.errors import InventoryError
from m2ncompile.inventory import Inventory, TensorInfo, natural_key, read_safetensors

SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

#: What is in GOOD: 4 x 2 bfloat16 and 3 float32.
GOOD_HEADER: dict[str, Any] = {
    "a.weight": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "F32", "shape": [3], "data_offsets": [16, 28]},
}


def pack(header: dict[str, Any] | str | bytes, data: int = 28) -> bytes:
    """The bytes of a file with this header and so much data."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header)) + header + bytes(data)


def changed(name: str, **entries: Any) -> dict[str, Any]:
    return {**GOOD_HEADER, name: {**GOOD_HEADER[name], **entries}}


def read_one(folder: Path, content: bytes) -> Inventory:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return read_safetensors(folder)


def refusal(folder: Path) -> str:
    """The text of the error; anything but an `InventoryError` fails the test."""
    with pytest.raises(InventoryError) as caught:
        read_safetensors(folder)
    return str(caught.value)


def shard(folder: Path, weight_map: dict[str, Any], files: dict[str, list[str]]) -> None:
    """A sharded checkpoint: the index says `weight_map`, the files hold `files`."""
    for file, names in files.items():
        header = {
            name: {"dtype": "U8", "shape": [2], "data_offsets": [2 * i, 2 * i + 2]}
            for i, name in enumerate(names)
        }
        (folder / file).write_bytes(pack(header, 2 * len(names)))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# --- what the library writes -------------------------------------------------

names = st.text(
    st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=30
).filter(lambda name: name != "__metadata__")
entries = st.tuples(
    st.sampled_from(sorted(SAFETENSORS)), st.lists(st.integers(1, 5), max_size=4).map(tuple)
)


def library(content: bytes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What the safetensors library reads; raises `SafetensorError`."""
    return {
        name: (SAFETENSORS[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in safetensors.deserialize(content)
    }


def as_dict(inventory: Inventory) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in inventory.tensors}


@settings(max_examples=100, suppress_health_check=SHARED)
@given(
    tensors=st.dictionaries(names, entries, min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_reads_what_the_library_reads(
    tmp_path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], order: Random
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    laid_out = list(tensors.items())
    order.shuffle(laid_out)
    for name, (dtype, shape) in laid_out:
        begin, end = end, end + nbytes(SAFETENSORS[dtype], shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    content = pack(header, end)
    inventory = read_one(tmp_path, content)
    assert as_dict(inventory) == library(content)
    assert [t.name for t in inventory.tensors] == sorted(tensors, key=natural_key)


@settings(max_examples=300, suppress_health_check=SHARED)
@given(position=st.integers(0), byte=st.integers(0, 255), drop=st.booleans())
def test_refuses_what_the_library_refuses(
    tmp_path: Path, position: int, byte: int, drop: bool
) -> None:
    """One byte changed or dropped: refused, or read as the library reads it."""
    damaged = bytearray(pack(GOOD_HEADER))
    position %= len(damaged)
    damaged[position : position + 1] = b"" if drop else bytes([byte])
    try:
        inventory = read_one(tmp_path, bytes(damaged))
    except InventoryError:
        return
    assert as_dict(inventory) == library(bytes(damaged))


def test_element_types_agree_with_their_sizes() -> None:
    assert set(SAFETENSORS.values()) == set(ITEMSIZE)


def test_good_file_by_hand(tmp_path: Path) -> None:
    inventory = read_one(tmp_path, pack(GOOD_HEADER))
    assert inventory.origin == "safetensors"
    assert inventory.missing == ()
    assert inventory.nbytes == 28
    assert inventory.tensors == (
        TensorInfo("a.weight", "bfloat16", (4, 2)),
        TensorInfo("b", "float32", (3,)),
    )


def test_header_may_be_padded_and_out_of_order(tmp_path: Path) -> None:
    backwards = dict(reversed(GOOD_HEADER.items()))
    padded = pack(json.dumps(backwards) + " " * 40)
    assert read_one(tmp_path, padded) == read_one(tmp_path, pack(GOOD_HEADER))


def test_scalars_have_an_empty_shape(tmp_path: Path) -> None:
    header = {"s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}
    assert read_one(tmp_path, pack(header, 4)).tensors == (TensorInfo("s", "float32", ()),)


def test_any_single_file_and_symlinks(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(pack(GOOD_HEADER))
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "weights.safetensors").symlink_to(blob)
    assert len(read_safetensors(folder).tensors) == 2


# --- damage ------------------------------------------------------------------


def test_truncation_at_every_length(tmp_path: Path) -> None:
    content = pack(GOOD_HEADER)
    for length in range(len(content)):
        (tmp_path / "model.safetensors").write_bytes(content[:length])
        assert str(tmp_path / "model.safetensors") in refusal(tmp_path)


def test_every_byte_of_the_header_flipped(tmp_path: Path) -> None:
    """A flip may give another valid file, never anything but an inventory or the error."""
    content = pack(GOOD_HEADER)
    refused = 0
    for position in range(len(content) - 28):
        damaged = bytearray(content)
        damaged[position] ^= 0x80
        try:
            read_one(tmp_path, bytes(damaged))
        except InventoryError:
            refused += 1
    assert refused == len(content) - 28


@settings(max_examples=200, suppress_health_check=SHARED)
@given(content=st.binary(max_size=64))
def test_no_bytes_end_in_a_traceback(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refusal(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=200, suppress_health_check=SHARED)
@given(junk=json_values, key=st.sampled_from(["dtype", "shape", "data_offsets", None]))
def test_junk_in_an_entry_is_refused(tmp_path: Path, junk: Any, key: str | None) -> None:
    header = {**GOOD_HEADER, "b": junk} if key is None else changed("b", **{key: junk})
    if header == GOOD_HEADER:
        return
    (tmp_path / "model.safetensors").write_bytes(pack(header))
    assert "'b'" in refusal(tmp_path) or "JSON" in refusal(tmp_path)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "expected 8 bytes of header length; the file has 0"),
    "huge length": (struct.pack("<Q", 2**63) + b"{}", "over the limit of 100000000"),
    "length past the end": (struct.pack("<Q", 90) + b"{}", "the header has 90 bytes; the file"),
    "git lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "git lfs pull",
    ),
    "no object": (pack("[1]", 0), "must begin with {"),
    "leading space": (pack(" {}", 0), "must begin with {"),
    "no tensor": (pack("{}", 0), "holds no tensor"),
    "not json": (pack("{abc", 0), "no JSON: Expecting property name"),
    "not utf-8": (pack(b'{"\xff": 1}', 0), "no UTF-8: byte 0xff at 2"),
    "nan": (pack('{"a": NaN}', 0), "NaN is not a JSON value"),
    "deep": (pack('{"a":' + "[" * 200_000, 0), "nested too deeply"),
    "deep but closed": (pack('{"a":' + "[" * 900 + "]" * 900 + "}", 0), "expected an object of"),
    "long number": (pack('{"a":' + "9" * 5000 + "}", 0), "a number of 5000 digits"),
    "trailing garbage": (pack(json.dumps(GOOD_HEADER) + "x"), "no JSON: Extra data"),
    "twice": (
        pack(json.dumps(GOOD_HEADER)[:-1] + ', "b": ' + json.dumps(GOOD_HEADER["b"]) + "}"),
        "'b': the key is in the header twice",
    ),
    "overlap": (
        pack(changed("b", data_offsets=[12, 24]), 24),
        "'b': its data begins at 12, where 16 is expected: it overlaps the tensor before it",
    ),
    "hole": (
        pack(changed("b", data_offsets=[20, 32]), 32),
        "'b': its data begins at 20, where 16 is expected: it leaves a hole before it",
    ),
    "data too short": (
        pack(GOOD_HEADER, 27),
        "28 bytes of data; the file holds 27 (1 missing)",
    ),
    "data too long": (
        pack(GOOD_HEADER, 30),
        "28 bytes of data; the file holds 30 (2 too many)",
    ),
    "wrong size": (
        pack(changed("b", shape=[4])),
        "'b': float32 [4] takes 16 bytes; data_offsets [16, 28] span 12",
    ),
    "unknown dtype": (pack(changed("b", dtype="F4")), "'b': unknown dtype 'F4'; known: BOOL"),
    "size 0": (pack(changed("b", shape=[0, 3])), "'b': shape [0, 3] has the size 0"),
    "negative size": (pack(changed("b", shape=[-3])), "expected a shape of sizes >= 0; got [-3]"),
    "boolean size": (pack(changed("b", shape=[True, 3])), "got [True, 3]"),
    "fractional size": (pack(changed("b", shape=[3.0])), "got [3.0]"),
    "overflowing shape": (pack(changed("b", shape=[2**40, 2**40])), "more than 2**59 elements"),
    "overflowing rank": (pack(changed("b", shape=[2**62] * 50_000)), "more than 2**59 elements"),
    "offsets reversed": (pack(changed("b", data_offsets=[28, 16])), "begin <= end; got [28, 16]"),
    "three offsets": (pack(changed("b", data_offsets=[16, 20, 28])), "got [16, 20, 28]"),
    "negative offset": (pack(changed("b", data_offsets=[-4, 8])), "got [-4, 8]"),
    "no dtype": (
        pack({"b": {"shape": [1], "data_offsets": [0, 1]}}, 1),
        "expected an object of dtype, shape, data_offsets",
    ),
    "unknown key": (pack(changed("b", codec="zstd")), "expected an object of dtype, shape"),
    "metadata": (pack({**GOOD_HEADER, "__metadata__": {"a": 1}}), "__metadata__: expected strings"),
    "empty name": (pack({"": GOOD_HEADER["a.weight"]}, 16), "the tensor's name is empty"),
    "newline in a name": (
        pack({"a\nb": GOOD_HEADER["a.weight"]}, 16),
        "holds the control character U+000A",
    ),
    "surrogate in a name": (
        pack('{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
        "lone surrogate",
    ),
    "long name": (pack({"9" * 5000: GOOD_HEADER["a.weight"]}, 16), "has 5000 characters"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file(tmp_path: Path, case: str) -> None:
    content, expected = HOSTILE[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    text = refusal(tmp_path)
    assert expected in text
    assert text.isprintable() or text.replace("\n", "").isprintable()


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    header = {**changed("b", dtype="F4"), "c": 1}
    header["a.weight"] = {**GOOD_HEADER["a.weight"], "shape": [4, 3]}
    (tmp_path / "model.safetensors").write_bytes(pack(header))
    text = refusal(tmp_path)
    for name in ("'a.weight'", "'b'", "'c'"):
        assert name in text


def test_many_duplicates_take_no_square_time(tmp_path: Path) -> None:
    entry = '"b":' + json.dumps(GOOD_HEADER["b"])
    names = ",".join(f'"k{i}":1' for i in range(100_000))
    (tmp_path / "model.safetensors").write_bytes(pack(f"{{{entry},{entry},{names},{names}}}"))
    assert "twice" in refusal(tmp_path)


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a regular file" in refusal(tmp_path)


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert "can't read the file" in refusal(tmp_path)


# --- several files -----------------------------------------------------------

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_sharded(tmp_path: Path) -> None:
    shard(tmp_path, {"a.10": ONE, "a.9": TWO, "b": TWO}, {ONE: ["a.10"], TWO: ["a.9", "b"]})
    # Of another format beside it: what an index does not name is not looked at.
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    assert [t.name for t in read_safetensors(tmp_path).tensors] == ["a.9", "a.10", "b"]


def test_an_index_by_another_name(tmp_path: Path) -> None:
    shard(tmp_path, {"a": ONE}, {ONE: ["a"]})
    other = tmp_path / "consolidated.safetensors.index.json"
    (tmp_path / "model.safetensors.index.json").rename(other)
    assert len(read_safetensors(tmp_path).tensors) == 1


def write_index(content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(content)


def sharded(weight_map: dict[str, Any], files: dict[str, list[str]]) -> Callable[[Path], Any]:
    return lambda folder: shard(folder, weight_map, files)


def both(*steps: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def run(folder: Path) -> None:
        for step in steps:
            step(folder)

    return run


MISMATCHED: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing file": (
        sharded({"a": ONE, "b": TWO}, {ONE: ["a"]}),
        [f"'b': the index names '{TWO}', which is not in the folder"],
    ),
    "in two files": (
        sharded({"a": ONE, "b": TWO}, {ONE: ["a", "b"], TWO: ["b"]}),
        [f"{TWO}: 'b': the tensor is also in {ONE}"],
    ),
    "in the other file": (
        sharded({"a": ONE, "b": TWO}, {ONE: ["b"], TWO: ["a"]}),
        [
            f"'a': the index says {ONE}; the tensor is in {TWO}",
            f"'b': the index says {TWO}; the tensor is in {ONE}",
        ],
    ),
    "in no file": (
        sharded({"a": ONE, "b": ONE}, {ONE: ["a"]}),
        [f"'b': {ONE} does not hold the tensor"],
    ),
    "not in the index": (
        sharded({"a": ONE}, {ONE: ["a", "b"]}),
        [f"{ONE}: 'b': ", "does not list the tensor"],
    ),
    "shard not in the index": (
        sharded({"a": ONE}, {ONE: ["a"], TWO: ["b"]}),
        [f"{TWO}: the file is not named by model.safetensors.index.json"],
    ),
    "single file and index": (
        sharded({"a": ONE}, {ONE: ["a"], "model.safetensors": ["a"]}),
        ["model.safetensors: the file is not named by"],
    ),
    "path outside": (
        sharded({"a": "../a.safetensors", "b": "/b.safetensors", "c": "x\\..\\c.safetensors"}, {}),
        ["'../a.safetensors' leaves", "'/b.safetensors' leaves", "c.safetensors' leaves"],
    ),
    "no file name": (
        sharded({"a": "", "b": "x\0.safetensors", "c": "pytorch_model.bin"}, {}),
        ["got ''", "got 'x\\x00.safetensors'", "got 'pytorch_model.bin'"],
    ),
    "file is no string": (sharded({"a": 1}, {}), ["'a': expected a file name; got 1"]),
    "no weight_map": (write_index("{}"), ["weight_map: expected an object"]),
    "empty weight_map": (write_index('{"weight_map": {}}'), ["weight_map: expected an object"]),
    "index is a list": (write_index("[]"), ["weight_map: expected an object"]),
    "index is not json": (write_index("{"), ["the file is no JSON"]),
    "index names a tensor twice": (
        both(
            sharded({"a": ONE}, {ONE: ["a"]}),
            write_index(f'{{"weight_map": {{"a": "{ONE}", "a": "{ONE}"}}}}'),
        ),
        ["'a': the key is there twice"],
    ),
    "shards without index": (
        both(
            sharded({"a": ONE}, {ONE: ["a"], TWO: ["b"]}),
            lambda folder: (folder / "model.safetensors.index.json").unlink(),
        ),
        [f"{ONE} is one of several files", "fetch model.safetensors.index.json"],
    ),
    "several files without index": (
        lambda folder: [
            (folder / f"{name}.safetensors").write_bytes(pack(GOOD_HEADER)) for name in "ab"
        ],
        ["expected model.safetensors", "got a.safetensors, b.safetensors"],
    ),
    "several indexes": (
        lambda folder: [
            (folder / f"{name}.safetensors.index.json").write_text("{}") for name in "ab"
        ],
        ["several indexes and none is model.safetensors.index.json"],
    ),
    "nothing": (lambda folder: None, ["got none"]),
    "damaged shard": (
        both(
            sharded({"a": ONE, "b": TWO}, {ONE: ["a"], TWO: ["b"]}),
            lambda folder: (folder / TWO).write_bytes(b"123"),
        ),
        [f"{TWO}: expected 8 bytes"],
    ),
}


@pytest.mark.parametrize("case", MISMATCHED)
def test_files_and_index_disagree(tmp_path: Path, case: str) -> None:
    arrange, expected = MISMATCHED[case]
    arrange(tmp_path)
    text = refusal(tmp_path)
    for part in expected:
        assert part in text


def test_one_cause_is_one_problem(tmp_path: Path) -> None:
    """A damaged file is not also blamed for the tensors it should hold."""
    MISMATCHED["damaged shard"][0](tmp_path)
    with pytest.raises(InventoryError) as caught:
        read_safetensors(tmp_path)
    assert len(caught.value.problems) == 1


def test_no_such_folder(tmp_path: Path) -> None:
    assert "can't list the folder" in refusal(tmp_path / "absent")
