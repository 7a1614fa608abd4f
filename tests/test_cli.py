"""The command as a user runs it: output, exit codes, and one readable message for bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import m2ncompile
from m2ncompile import __version__
from tests.plans import make_plan
from tests.test_split import destination, plan_in_parts

COMMAND = [sys.executable, "-c", "from m2ncompile.cli import main; main()"]
SPEC = """
[model]
path = "{model}"

[engine]
version = "0.33.0"
target = "cuda-sm90"
tp = 2

[trainer]
ranks = 2
layout = "fsdp"
"""


def run(*args: object, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    found = subprocess.run(
        [*COMMAND, *map(str, args)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"} | env,
    )
    assert found.returncode == code, found.stdout + found.stderr
    assert "Traceback" not in found.stderr
    return found


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_bytes(make_plan().encoded)
    return path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder with a small model's spec, built once into a store beside it."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "model").mkdir()
    source = Path(__file__).parents[1] / "plans" / "models" / "Qwen3-0.6B" / "config.json"
    config = json.loads(source.read_text()) | {"num_hidden_layers": 2}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "spec.toml").write_text(SPEC.format(model="model"))
    run("build", folder / "spec.toml", "--cache", folder / "cache")
    return folder


def test_version() -> None:
    assert run("--version").stdout == f"m2ncompile {__version__}\n"


def test_help_names_every_command_and_the_exit_codes() -> None:
    text = run("--help").stdout
    for word in ("build", "diff", "report", "show", "explain", "cache", "0 done, 1", "2 bad input"):
        assert word in text


@pytest.mark.parametrize("args", [["biuld"], ["build"], ["show"], ["build", "--no-such"]])
def test_usage_errors(args: list[str]) -> None:
    run(*args, code=2)


def test_show(plan_file: Path) -> None:
    text = run("show", plan_file).stdout
    plan = make_plan()
    for word in (
        plan.digest,
        plan.digests.program,
        "model.layers.{0..1}.down.weight  x2",
        "no live parameter has this name",
    ):
        assert word in text
    assert "\x1b" not in text


def test_show_json(plan_file: Path) -> None:
    document = json.loads(run("show", plan_file, "--json").stdout)
    assert document["schema"] == "m2ncompile.show/1"
    assert document["plan_digest"] == make_plan().digest
    assert document["summary"]["routes"] == [
        {"route": "direct", "tensors": 2, "nbytes": 128},
        {"route": "fallback", "tensors": 2, "nbytes": 80},
    ]
    assert document["summary"]["wire_bytes_per_worker"] == [144, 144]
    assert [f["name"] for f in document["families"]] == [
        "model.embed.weight",
        "model.layers.{0..1}.down.weight",
        "model.layers.0.norm.weight",
    ]


def test_explain(plan_file: Path) -> None:
    text = run("explain", plan_file, "model.layers.1.down.weight").stdout
    assert "route direct, collective 4 of 4" in text
    assert "worker 1: [0:2, 4:8] from trainer 0" in text
    assert "worker 1: [2:4, 4:8] from trainer 1" in text
    text = run("explain", plan_file, "model.embed.weight").stdout
    assert "not direct: no live parameter has this name" in text


def test_explain_json(plan_file: Path) -> None:
    document = json.loads(run("explain", plan_file, "model.layers.1.down.weight", "--json").stdout)
    assert document["schema"] == "m2ncompile.explain/1"
    assert document["destinations"][0]["parameter"] == "model.layers.1.down.weight"
    assert {"worker": 2, "box": [[0, 2], [0, 4]], "trainers": [0]} in (
        document["destinations"][0]["pieces"]
    )


def test_explain_and_show_what_goes_in_parts(tmp_path: Path) -> None:
    plan = plan_in_parts(destination((8, 4), 0), 16)
    path = tmp_path / "parts.plan.json"
    path.write_bytes(plan.encoded)
    text = run("explain", path, "w").stdout
    assert "route direct, in 2 parts of dim 1, collectives 1 to 2 of 2" in text
    (found,) = json.loads(run("explain", path, "w", "--json").stdout)["destinations"]
    assert found["collective"] == 0
    assert found["parts"] == [
        {"collective": 0, "dim": 1, "range": [0, 2]},
        {"collective": 1, "dim": 1, "range": [2, 4]},
    ]
    # 4 x 2 elements of 2 bytes, in two buffers, on either side and in the pool.
    assert "staging   32 B on a trainer rank, 32 B on a worker, and 32 B on each" in (
        run("show", path).stdout
    )


def test_explain_unknown_tensor(plan_file: Path) -> None:
    error = run("explain", plan_file, "model.layers.1.dwon.weight", code=2).stderr
    assert 'did you mean "model.layers.1.down.weight"?' in error


def test_show_damaged(plan_file: Path) -> None:
    data = bytearray(plan_file.read_bytes())
    data[200] ^= 1
    plan_file.write_bytes(data)
    assert "damaged" in run("show", plan_file, code=2).stderr


def test_show_nothing_there(tmp_path: Path) -> None:
    assert "no such file" in run("show", tmp_path / "none", code=2).stderr
    assert "no such plan" in run("show", "abcdef0123", code=2).stderr


def test_reader_that_goes_away(plan_file: Path) -> None:
    command = " ".join(f"'{part}'" for part in [*COMMAND, "show", str(plan_file)])
    found = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -c 1"], capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.engine
def test_hit_is_the_same_and_imports_neither_torch_nor_engine(built: Path) -> None:
    script = (
        "import sys; from m2ncompile.cli import app; "
        f"app.app(['build', {str(built / 'spec.toml')!r}, '--cache', {str(built / 'cache')!r}, "
        "'--json'], standalone_mode=False); "
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    (plan,) = json.loads(found.stdout)["plans"]
    assert plan["cached"] is True
    fresh = run("build", built / "spec.toml", "--no-cache", "--json").stdout
    (again,) = json.loads(fresh)["plans"]
    assert again["cached"] is False
    assert again["path"] is None
    same = set(plan) - {"cached", "path"}
    assert {key: plan[key] for key in same} == {key: again[key] for key in same}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("old", "new"),
    [("tp = 2", "tp = 1"), ("ranks = 2", "ranks = 4"), ("cuda-sm90", "cuda-sm80")],
)
def test_another_spec_is_a_miss(built: Path, tmp_path: Path, old: str, new: str) -> None:
    shutil.copytree(built, tmp_path / "copy")
    spec = tmp_path / "copy" / "spec.toml"
    document = run("build", spec, "--cache", tmp_path / "copy" / "cache", "--json").stdout
    assert json.loads(document)["plans"][0]["cached"] is True  # another folder is no other input
    spec.write_text(spec.read_text().replace(old, new))
    document = run("build", spec, "--cache", tmp_path / "copy" / "cache", "--json").stdout
    assert json.loads(document)["plans"][0]["cached"] is False


@pytest.mark.engine
def test_show_by_digest_and_cache_commands(built: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(built / "cache", cache)
    listed = json.loads(run("cache", "ls", "--cache", cache, "--json").stdout)
    assert listed["schema"] == "m2ncompile.cache.ls/1"
    (entry,) = listed["entries"]
    assert entry["digest"] in run("show", entry["digest"][:8], "--cache", cache).stdout
    assert "checked 1 plans" in run("cache", "verify", "--cache", cache).stdout
    (stored,) = (cache / "objects").rglob("*.json")
    data = bytearray(stored.read_bytes())
    data[100] ^= 4
    stored.write_bytes(data)
    assert str(stored) in run("cache", "verify", "--cache", cache, code=1).stderr
    run("cache", "verify", "--repair", "--cache", cache, code=1)
    assert "checked 0 plans" in run("cache", "verify", "--cache", cache).stdout
    assert "0 plans" in run("cache", "ls", "--cache", cache).stdout


@pytest.mark.engine
def test_damaged_store_heals_by_rebuilding(built: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(built / "cache", cache)
    (stored,) = (cache / "objects").rglob("*.json")
    good = stored.read_bytes()
    stored.write_bytes(good[:-5])
    document = json.loads(run("build", built / "spec.toml", "--cache", cache, "--json").stdout)
    assert document["plans"][0]["cached"] is False
    assert stored.read_bytes() == good


def test_cache_gc_by_age(tmp_path: Path) -> None:
    from m2ncompile.build import open_store

    store = open_store(tmp_path)
    digest = store.put(make_plan().encoded)
    os.utime(store.path(digest), (0, 0))
    assert (
        "would remove 1 plans"
        in run("cache", "gc", "--older", "30d", "--dry-run", "--cache", tmp_path).stdout
    )
    assert store.has(digest)
    assert "removed 1 plans" in run("cache", "gc", "--older", "30d", "--cache", tmp_path).stdout
    assert not store.has(digest)


@pytest.mark.parametrize("args", [["--keep", "lots"], ["--older", "5"]])
def test_cache_gc_bad_amounts(args: list[str], tmp_path: Path) -> None:
    assert "expected" in run("cache", "gc", *args, "--cache", tmp_path, code=2).stderr


def test_build_reports_every_bad_spec_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[model]\npth = 1")
    (tmp_path / "b.toml").write_text("[model")
    out = tmp_path / "out"
    error = run("build", tmp_path / "a.toml", tmp_path / "b.toml", "-o", out, code=2).stderr
    assert "did you mean `model.path`?" in error
    assert "b.toml: not valid TOML" in error
    assert not out.exists()


def spec_for(folder: Path, config: dict[str, Any], old: str = "", new: str = "") -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    spec = folder / "spec.toml"
    text = SPEC.format(model="model")
    assert old in text
    spec.write_text(text.replace(old, new) if old else text)
    return spec


@pytest.mark.engine
@pytest.mark.parametrize(
    ("change", "old", "new", "says"),
    [
        ({"architectures": ["NoSuchForCausalLM"], "model_type": "nope"}, "", "", "nope"),
        ({}, "tp = 2", "tp = 3", "16"),
        ({}, "0.33.0", "0.31.0", "vLLM 0.31.0 is not supported"),
        ({}, "ranks = 2", "ranks = 7", "151936 = 7 * 21705 + 1"),
        ({}, "tp = 2", 'tp = 2\nquantization = "fp9"', "fp9"),
        ({}, "tp = 2", 'tp = 2\nmoe_backend = "fp9"', "moe_backend: Input should be 'auto', 'tri"),
        (
            {},
            'layout = "fsdp"',
            'layout = "fsdp"\n[[trainer.rules]]\nmatch = "*.nope"\nplacements = "replicated"',
            "matches none of the",
        ),
    ],
)
def test_build_bad_input(
    tmp_path: Path, change: dict[str, Any], old: str, new: str, says: str
) -> None:
    source = Path(__file__).parents[1] / "plans" / "models" / "Qwen3-0.6B" / "config.json"
    config = json.loads(source.read_text()) | {"num_hidden_layers": 1} | change
    spec = spec_for(tmp_path, config, old, new)
    found = run("build", spec, "-o", tmp_path / "out", code=2)
    assert found.stderr.startswith("error: ")
    assert says in found.stderr
    assert found.stdout == ""
    assert not (tmp_path / "out").exists()


def test_build_without_vllm(tmp_path: Path, built: Path) -> None:
    """An interpreter that has only the core dependencies, as after a plain install."""
    site = tmp_path / "site"
    site.mkdir()
    for entry in core_files():
        (site / entry.name).symlink_to(entry)
    tensors = [["model.norm.weight", "bfloat16", [1024]]]
    manifest = {"format": "m2ncompile-manifest", "version": 1, "tensors": tensors}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    spec_path = tmp_path / "spec.toml"
    spec_path.write_text(
        SPEC.format(model=built / "model").replace(
            "[engine]", 'manifest = "manifest.json"\n[engine]'
        )
    )
    plan = tmp_path / "plan.json"
    plan.write_bytes(make_plan().encoded)
    for args, code in ((["show", str(plan)], 0), (["build", str(spec_path)], 2)):
        found = subprocess.run(
            [sys.executable, "-S", "-c", COMMAND[2], *args],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(site), "PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        )
        assert found.returncode == code, found.stderr
        assert "Traceback" not in found.stderr
    assert "pip install 'm2ncompile[vllm]'" in found.stderr


def core_files() -> set[Path]:
    """What a plain install lays down: this package and its dependencies' own."""
    wanted, found = {"msgspec", "rich", "typer"}, {Path(m2ncompile.__file__).parent}
    seen: set[str] = set()
    while wanted - seen:
        name = (wanted - seen).pop()
        seen.add(name)
        distribution = metadata.distribution(name)
        for line in distribution.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.add(requirement.name)
        for file in distribution.files or []:
            if file.parts[0] != "..":
                found.add(Path(str(distribution.locate_file(file.parts[0]))))
    return found


@pytest.mark.engine
def test_output_goes_where_asked(built: Path, tmp_path: Path) -> None:
    cache = ["--cache", built / "cache"]
    run("build", built / "spec.toml", *cache, "-o", tmp_path / "folder")
    run("build", built / "spec.toml", *cache, "-o", tmp_path / "file.json")
    written = (tmp_path / "folder" / "spec.plan.json").read_bytes()
    assert written == (tmp_path / "file.json").read_bytes()
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [
        "file.json",
        "spec.plan.json",
    ]
    blocked = tmp_path / "file.json" / "below"
    assert (
        "can't write the plan"
        in run("build", built / "spec.toml", *cache, "-o", blocked, code=2).stderr
    )


@pytest.mark.engine
def test_unwritable_store_warns_and_goes_on(built: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    found = run(
        "build", built / "spec.toml", "--cache", blocker / "cache", "-o", tmp_path / "plan.json"
    )
    assert "warning: the plan is not stored" in found.stderr
    assert (tmp_path / "plan.json").exists()
