"""The wheel builds, holds the package alone, and its command runs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT],
        check=True,
        capture_output=True,
    )
    assert len(list(out.glob("*.tar.gz"))) == 1
    (found,) = out.glob("*.whl")
    return found


def test_wheel_holds_the_package_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"m2ncompile"}
    assert "m2ncompile/py.typed" in names
    kept = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "m2ncompile").rglob("*")
        if path.suffix in (".py", ".html", ".css", ".js")
    }
    assert kept <= set(names)
    assert "m2ncompile/report/page.html" in kept


def test_installed_command_runs(wheel: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path, wheel],
        check=True,
        capture_output=True,
    )
    found = subprocess.run(
        [sys.executable, tmp_path / "bin" / "m2ncompile", "--version"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith("m2ncompile ")
