import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.repositories import git

ROOT = Path(__file__).parent.parent

# Shells have their background jobs ignore it, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test is about how fast the machine is.
settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's stores."""
    monkeypatch.delenv("M2NCOMPILE_REMOTE", raising=False)
    monkeypatch.setenv("M2NCOMPILE_CACHE", str(tmp_path / "m2ncompile-cache"))


@pytest.fixture
def models() -> Path:
    """The folder of real models' configs."""
    return ROOT / "plans" / "models"


@pytest.fixture(scope="session")
def checked_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a small model's spec and its plan, and beside it the store."""
    from tests.test_cli import SPEC, run

    folder = tmp_path_factory.mktemp("checked-in")
    model = folder / "repo" / "plans" / "model"
    model.mkdir(parents=True)
    config = json.loads((ROOT / "plans" / "models" / "Qwen3-0.6B" / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    (folder / "repo" / "plans" / "policy.toml").write_text(SPEC.format(model="model"))
    plans = folder / "repo" / "plans"
    run("build", plans, "-o", plans, "--cache", folder / "cache")
    git(folder / "repo", "init", "-q", "-b", "main")
    git(folder / "repo", "add", "-A")
    git(folder / "repo", "commit", "-q", "-m", "Plans")
    return folder


@pytest.fixture
def repo(checked_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to change; `m2ncompile` is on the path, its store knows the plan."""
    from tests.test_cli import COMMAND

    shutil.copytree(checked_in, tmp_path / "copy")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    script = bin_folder / "m2ncompile"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("M2NCOMPILE_CACHE", str(tmp_path / "copy" / "cache"))
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "T")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "t@example.org")
    return tmp_path / "copy" / "repo"


os.environ.setdefault("HF_HUB_OFFLINE", "1")
