"""Which reader is picked, and the key of what it reads."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from m2ncompile.errors import InventoryError
from m2ncompile.inventory import TensorInfo, content_key, read_inventory


def write_safetensors(path: Path, *, size: int = 4, name: str = "a", metadata: str = "") -> None:
    header = json.dumps(
        {
            "__metadata__": {"note": metadata},
            name: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def write_manifest(path: Path) -> None:
    tensors = [["a", "uint8", [4]]]
    path.write_text(json.dumps({"format": "m2ncompile-manifest", "version": 1, "tensors": tensors}))


def test_a_file_is_a_manifest(tmp_path: Path) -> None:
    write_manifest(tmp_path / "tensors.json")
    inventory = read_inventory(tmp_path / "tensors.json")
    assert inventory.origin == "manifest"
    assert inventory.tensors == (TensorInfo("a", "uint8", (4,)),)


def test_safetensors_go_before_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    write_safetensors(tmp_path / "model.safetensors")
    assert read_inventory(tmp_path).origin == "safetensors"


def test_an_index_alone_is_a_checkpoint_with_missing_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InventoryError, match="not in the folder"):
        read_inventory(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "x.safetensors.index.json"])
@pytest.mark.parametrize("function", [read_inventory, content_key])
def test_a_file_of_a_checkpoint_is_no_manifest(tmp_path: Path, name: str, function: object) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(InventoryError, match="give its folder"):
        function(tmp_path / name)  # type: ignore[operator]


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="the folder holds nothing"):
        read_inventory(tmp_path)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_text("")
    expected = "expected a folder with .*; the folder holds pytorch_model.bin"
    with pytest.raises(InventoryError, match=expected):
        read_inventory(tmp_path)


@pytest.mark.parametrize("name", ["absent", "a\0b", "x" * 5000])
@pytest.mark.parametrize("function", [read_inventory, content_key])
def test_nothing_there(tmp_path: Path, name: str, function: object) -> None:
    with pytest.raises(InventoryError):
        function(tmp_path / name)  # type: ignore[operator]


# --- the key -----------------------------------------------------------------


def test_key_does_not_depend_on_the_place(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        write_safetensors(folder / "model.safetensors")
    assert content_key(tmp_path / "a") == content_key(tmp_path / "b")


def test_key_of_safetensors_follows_headers_and_not_data(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path)
    key = content_key(tmp_path)
    path.write_bytes(path.read_bytes()[:-4] + b"data")
    assert content_key(tmp_path) == key
    path.write_bytes(path.read_bytes()[:-1])
    cut = content_key(tmp_path)
    write_safetensors(path, size=5)
    wider = content_key(tmp_path)
    write_safetensors(path, name="b")
    renamed = content_key(tmp_path)
    assert len({key, cut, wider, renamed}) == 4


def test_key_of_shards_follows_the_index_and_each_header(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    shards = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate("ab", 1)}
    index.write_text(json.dumps({"weight_map": shards}))
    for name, file in shards.items():
        write_safetensors(tmp_path / file, name=name)
    keys = {content_key(tmp_path)}
    write_safetensors(tmp_path / shards["b"], name="b", size=9)
    keys.add(content_key(tmp_path))
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    keys.add(content_key(tmp_path))
    (tmp_path / "notes.txt").write_text("not of the checkpoint")
    keys.add(content_key(tmp_path))
    assert len(keys) == 3


def test_key_of_a_config_follows_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    key = content_key(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama" }')
    assert content_key(tmp_path) != key


def test_key_of_a_config_follows_the_transformers_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    keys = set()
    for version in ("5.19.0", "5.20.2"):
        monkeypatch.setattr("importlib.metadata.version", lambda _, v=version: v)
        keys.add(content_key(tmp_path))
    assert len(keys) == 2


def test_keys_of_different_kinds_differ(tmp_path: Path) -> None:
    write_manifest(tmp_path / "tensors.json")
    (tmp_path / "config.json").write_bytes((tmp_path / "tensors.json").read_bytes())
    assert content_key(tmp_path) != content_key(tmp_path / "tensors.json")


def test_key_of_damage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"123")
    with pytest.raises(InventoryError, match="expected 8 bytes of header length"):
        content_key(tmp_path)


def test_neither_import_nor_key_needs_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys; from pathlib import Path; from m2ncompile.inventory import content_key;"
        "content_key(Path(sys.argv[1]));"
        "assert not {'torch', 'transformers', 'safetensors', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_file_names_need_not_be_utf8(tmp_path: Path) -> None:
    path = os.fsdecode(bytes(tmp_path) + b"/\xff.safetensors")
    write_safetensors(Path(path))
    assert len(read_inventory(tmp_path).tensors) == 1
    assert content_key(tmp_path)
