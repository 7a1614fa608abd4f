"""A plan by whatever a user has of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from m2ncompile.build import open_store
from m2ncompile.errors import PlanError, Problem, StoreError
from m2ncompile.plan import MAX_BYTES, Plan
from m2ncompile.plan_check import load, loads
from m2ncompile.remote.address import default_url, parse
from m2ncompile.store import Store, default_root

__all__ = ["is_there", "open_plan"]

#: Bytes asked for at once.
_CHUNK = 1 << 20


def open_plan(reference: str | Path, cache: Path | None = None, remote: str | None = None) -> Plan:
    """By file, by URL, or by the start of its digest (6 hex digits) in the store in `cache`.

    By all 64 digits, a plan that the store lacks comes from the store at the URL `remote`, by
    default `$M2NCOMPILE_REMOTE`, and is kept. A shorter start is not looked up there: anyone who
    may write there could add a plan that starts so.

    Raises PlanError or StoreError.
    """
    path, text = Path(reference), str(reference)
    if "://" in text:
        return loads(_fetched(text), text)
    if is_there(path):
        return load(path)
    start = text.lower()
    if len(start) >= 6 and all(c in "0123456789abcdef" for c in start):
        store = open_store(cache or default_root())
        url = remote or default_url()
        try:
            digest = store.resolve(start)
            return loads(store.get(digest), str(store.path(digest)))
        except StoreError:
            if url is None or len(start) != 64:
                raise
        return _from_remote(start, store, url)
    raise PlanError(
        f"{text}: no such file, and no digest in the store (6 or more hex digits). "
        "Build it: m2ncompile build SPEC"
    )


def is_there(path: Path) -> bool:
    """Whether a plan's file exists. Raises PlanError where the system does not tell."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise PlanError(f"{path}: can't read the plan: {error.strerror}") from None
    return True


def _from_remote(digest: str, store: Store, url: str) -> Plan:
    from m2ncompile.remote import open_remote
    from m2ncompile.sharing import fetch

    plan = fetch(open_remote(url), digest)
    if plan is None:
        problem = Problem(digest, f"no object in {store.root}, and none in {url}")
        raise StoreError("no such plan", [problem])
    with suppress(StoreError):  # a store that we may only read
        store.put(plan.encoded)
    return plan


def _fetched(url: str) -> bytes:
    import fsspec

    from m2ncompile.remote import time_limit
    from m2ncompile.remote.bounded import SilentError, bounded

    _check_no_credentials(url)
    # As one stream. Asked for the size first, fsspec's http takes any failure for absence.
    how: dict[str, Any] = {"block_size": 0, "size": 1} if _is_http(url) else {}

    def read(received: Callable[[int], None]) -> bytes:
        data = bytearray()
        files, path = fsspec.url_to_fs(url)
        with files.open(path, "rb", **how) as file:
            while chunk := file.read(min(_CHUNK, MAX_BYTES + 1 - len(data))):
                data += chunk
                received(len(chunk))
        return bytes(data)

    seconds = time_limit()
    try:
        return bounded(read, seconds)
    except SilentError as error:
        raise PlanError(f"{url}: can't read the plan: {error}") from None
    except ImportError as error:
        raise PlanError(f"{url}: can't read the plan", _missing_package(url, error)) from None
    except Exception as error:  # every protocol raises its own
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise PlanError(f"{url}: can't read the plan: {words}") from None


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _check_no_credentials(url: str) -> None:
    """As for a remote store; `url` may be a chain, as fsspec reads them."""
    for link in url.split("::"):
        protocol, _, rest = link.partition("://")
        _, at, host = rest.partition("/")[0].rpartition("@")
        if at:
            raise PlanError(
                f"{protocol}://{host}: a URL must not hold credentials; set them as the "
                "protocol's own library reads them, such as by AWS_PROFILE"
            )


def _missing_package(url: str, error: ImportError) -> tuple[Problem, ...]:
    """Names the extra, where one brings the protocol."""
    try:
        parse(url.partition("?")[0])
    except StoreError as why:
        return why.problems
    return (Problem(url, str(error)),)
