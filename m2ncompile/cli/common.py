"""What several commands share: options, opening a plan, output."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from m2ncompile.build import Trouble, open_store
from m2ncompile.errors import SpecError, StoreError
from m2ncompile.store import Store, default_root
from m2ncompile.units import size

if TYPE_CHECKING:
    from rich.console import Console

    from m2ncompile.remote import Remote


__all__ = [
    "CacheOption",
    "JsonOption",
    "PlanArgument",
    "RemoteOption",
    "cache_trouble",
    "console",
    "print_json",
    "remote_at",
    "size",
    "spec_files",
    "store_at",
]

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document with a versioned schema.")
]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        help="The store's folder (default: $M2NCOMPILE_CACHE, else a folder in the user's cache).",
    ),
]
RemoteOption = Annotated[
    str | None,
    typer.Option(
        "--remote",
        metavar="URL",
        envvar="M2NCOMPILE_REMOTE",
        help="A store shared by machines: file:///FOLDER, s3://, gs://, or http(s)://, read-only.",
    ),
]
PlanArgument = Annotated[
    str,
    typer.Argument(
        metavar="PLAN", help="A plan file, a URL, or the start of a digest in the store."
    ),
]


def store_at(root: Path | None) -> Store:
    return open_store(root or default_root())


def remote_at(url: str | None) -> Remote | None:
    if not url:
        return None
    from m2ncompile.remote import open_remote

    return open_remote(url)


def cache_trouble(required: bool) -> Trouble:
    """Warns of what a store, local or remote, could not do; where stores are required, raises."""

    def tell(what: str, why: StoreError) -> None:
        if required:
            raise why
        print(f"warning: {what}: {why}", file=sys.stderr)

    return tell


def spec_files(given: Iterable[Path]) -> list[Path]:
    """Files as they are, folders as the specs in them."""
    found: list[Path] = []
    for path in given:
        inside = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not inside:
            raise SpecError(f"{path}: the folder holds no spec (*.toml)")
        found += inside
    return found


def print_json(schema: str, content: dict[str, Any]) -> None:
    """One document on stdout; `schema` changes when keys change their meaning."""
    document = {"schema": schema, **content}
    text = msgspec.json.format(msgspec.json.encode(document), indent=2)
    sys.stdout.write(text.decode() + "\n")


def console() -> Console:
    from rich.console import Console

    # Tables must not wrap at 80 columns when a pipe has no width of its own.
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=True)
