"""A plan by whatever a user has of it."""

from __future__ import annotations

from pathlib import Path

from m2ncompile.build import open_store
from m2ncompile.errors import PlanError
from m2ncompile.plan import MAX_BYTES, Plan
from m2ncompile.plan_check import load, loads
from m2ncompile.store import default_root

__all__ = ["open_plan"]


def open_plan(reference: str | Path, cache: Path | None = None) -> Plan:
    """By file, by URL, or by the start of its digest (6 hex digits) in the store in `cache`.

    Raises PlanError or StoreError.
    """
    path, text = Path(reference), str(reference)
    if "://" in text:
        return loads(_fetched(text), text)
    if path.exists():
        return load(path)
    if len(text) >= 6 and all(c in "0123456789abcdef" for c in text):
        store = open_store(cache or default_root())
        digest = store.resolve(text)
        return loads(store.get(digest), str(store.path(digest)))
    raise PlanError(
        f"{text}: no such file, and no digest in the store (6 or more hex digits). "
        "Build it: m2ncompile build SPEC"
    )


def _fetched(url: str) -> bytes:
    import fsspec

    try:
        with fsspec.open(url, "rb") as file:
            data: bytes = file.read(MAX_BYTES + 1)
    except Exception as error:  # every protocol raises its own
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise PlanError(f"{url}: can't read the plan: {words}") from None
    return data
