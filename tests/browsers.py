"""A real browser for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

__all__ = ["executable", "launched"]

_NAMES = ("chromium", "google-chrome", "chromium-browser")
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def executable() -> str:
    """The browser that M2NCOMPILE_BROWSER names, which has to be there, else one that is found."""
    named = os.environ.get("M2NCOMPILE_BROWSER")
    if named is not None:
        if not os.access(named, os.X_OK):
            pytest.fail(f"M2NCOMPILE_BROWSER: no executable {named!r}")
        return named
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("no browser: apt-get install chromium, or name one in M2NCOMPILE_BROWSER")
    return found


@contextmanager
def launched() -> Iterator[Browser]:
    """Skips where there is no browser, but for one that is named."""
    path = executable()
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield opened
        opened.close()
