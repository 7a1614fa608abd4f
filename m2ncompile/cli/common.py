"""What several commands share: options, opening a plan, output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from m2ncompile.build import open_store
from m2ncompile.store import Store, default_root
from m2ncompile.units import size

if TYPE_CHECKING:
    from rich.console import Console


__all__ = [
    "CacheOption",
    "JsonOption",
    "PlanArgument",
    "console",
    "print_json",
    "size",
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
PlanArgument = Annotated[
    str,
    typer.Argument(
        metavar="PLAN", help="A plan file, a URL, or the start of a digest in the store."
    ),
]


def store_at(root: Path | None) -> Store:
    return open_store(root or default_root())


def print_json(schema: str, content: dict[str, Any]) -> None:
    """One document on stdout; `schema` changes when keys change their meaning."""
    document = {"schema": schema, **content}
    text = msgspec.json.format(msgspec.json.encode(document), indent=2)
    sys.stdout.write(text.decode() + "\n")


def console() -> Console:
    from rich.console import Console

    # Tables must not wrap at 80 columns when a pipe has no width of its own.
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=True)
