import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's stores."""
    monkeypatch.delenv("M2NCOMPILE_REMOTE", raising=False)
    monkeypatch.setenv("M2NCOMPILE_CACHE", str(tmp_path / "m2ncompile-cache"))


@pytest.fixture
def models() -> Path:
    """The folder of real models' configs."""
    return ROOT / "plans" / "models"


os.environ.setdefault("HF_HUB_OFFLINE", "1")
