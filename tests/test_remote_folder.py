"""A `file://` remote whose folder is not there: no empty store, but for who pushes."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2ncompile.build import action_key, build, open_store
from m2ncompile.errors import StoreError
from m2ncompile.plan_check import load
from m2ncompile.remote import open_remote
from m2ncompile.sharing import push
from m2ncompile.spec import load_spec
from tests.test_cli import run

ROOT = Path(__file__).parents[1]
SPEC_FILE = ROOT / "plans" / "gpt2-fsdp4-tp2.toml"
PLAN = load(ROOT / "plans" / "gpt2-fsdp4-tp2.plan.json")
KEY = action_key(load_spec(SPEC_FILE))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there"


def strict(what: str, why: StoreError) -> None:
    raise why


def quiet(stage: str, done: int, total: int) -> None:
    pass


def test_reading_is_an_error(root: Path) -> None:
    for args in (
        ("cache", "pull"),
        ("cache", "pull", SPEC_FILE),
        ("cache", "pull", PLAN.digest[:8]),
        ("build", SPEC_FILE, "--require-cache"),
    ):
        error = run(*args, "--remote", root.as_uri(), code=2).stderr
        assert f"the remote store\n  {root}: no such folder\n    check the URL" in error
    assert (
        PLAN.digest in run("cache", "pull", PLAN.digest, "--remote", root.as_uri(), code=2).stderr
    )
    assert not root.exists()


def test_a_folder_without_plans_is_an_empty_store(root: Path) -> None:
    root.mkdir(parents=True)
    assert "pulled 0 plans" in run("cache", "pull", "--remote", root.as_uri()).stdout
    remote = open_remote(root.as_uri())
    assert (remote.lookup(KEY), remote.get(PLAN.digest), remote.digests()) == (None, None, [])


def test_a_push_makes_the_folder(root: Path) -> None:
    remote = open_remote(root.as_uri())
    foreseen = push(remote, PLAN.digest, PLAN.encoded, [KEY], dry_run=True)
    assert not root.exists()
    assert push(remote, PLAN.digest, PLAN.encoded, [KEY]) == foreseen
    assert open_remote(root.as_uri()).lookup(KEY) == PLAN.digest


def test_a_build_that_pushes_makes_the_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m2ncompile.compile.pipeline.build_plan", lambda spec, progress: PLAN)
    remote, store = open_remote(root.as_uri()), open_store(tmp_path / "store")
    built = build(SPEC_FILE, store, quiet, remote=remote, push=True, trouble=strict)
    assert built.pushed
    assert open_remote(root.as_uri()).lookup(KEY) == PLAN.digest


def test_a_folder_that_goes_away_is_noticed(root: Path) -> None:
    push(open_remote(root.as_uri()), PLAN.digest, PLAN.encoded, [KEY])
    remote = open_remote(root.as_uri())
    assert remote.lookup(KEY) == PLAN.digest
    assert remote.get("0" * 64) is None
    root.rename(root.with_name("elsewhere"))
    with pytest.raises(StoreError, match="can't read the remote store"):
        remote.lookup(KEY)
    assert remote.lost
