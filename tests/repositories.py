"""Repositories with checked-in plans, and the commands that run in them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

__all__ = ["blocks", "git", "listing", "sh"]


def git(folder: Path, *args: str) -> str:
    environment = os.environ | {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "T"), ("EMAIL", "t@example.org"))
    }
    return subprocess.run(
        ["git", *args], cwd=folder, check=True, capture_output=True, text=True, env=environment
    ).stdout


def sh(command: str, folder: Path, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    found = subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | env,
    )
    assert found.returncode == code, f"{command}\n{found.stdout}{found.stderr}"
    assert "Traceback" not in found.stderr
    return found


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
