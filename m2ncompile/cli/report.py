"""`m2ncompile report`."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from m2ncompile.cli.common import (
    CacheOption,
    JsonOption,
    PlanArgument,
    RemoteOption,
    print_json,
    size,
)
from m2ncompile.errors import StoreError
from m2ncompile.opening import open_plan

__all__ = ["report_command"]

#: Of the report, what `--json` prints.
_FIGURES = ("summary", "layers", "traffic", "staging")


def report_command(
    plan: PlanArgument,
    against: Annotated[
        str | None, typer.Option(metavar="OTHER", help="An earlier plan: say what changed since.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The page's file (default: PLAN's, .report.html)."),
    ] = None,
    cache: CacheOption = None,
    remote: RemoteOption = None,
    json: JsonOption = False,
) -> None:
    """Write a plan as one HTML page that works offline: routes, traffic, every tensor's shards."""
    from m2ncompile.report import page, report

    opened = open_plan(plan, cache, remote)
    before = None if against is None else open_plan(against, cache, remote)
    made = report(opened, before)
    text = page(made).encode()
    path = output or _beside(plan, opened.digest)
    if any(path.exists() and path.samefile(p) for p in (plan, against) if p and Path(p).exists()):
        raise StoreError(f"{path}: the page would take the plan's place; choose another file")
    _write(path, text)
    if json:
        changes = made.changes
        print_json(
            "m2ncompile.report/1",
            {
                "path": str(path),
                "nbytes": len(text),
                "plan_digest": made.digest,
                **{name: msgspec.to_builtins(getattr(made, name)) for name in _FIGURES},
                "against": None
                if changes is None
                else {
                    "plan_digest": changes.plans[0],
                    "same_program": changes.same_program,
                    "changed_tensors": len(changes.marks),
                },
            },
        )
    else:
        print(f"{path}: {size(len(text))}")


def _beside(reference: str, digest: str) -> Path:
    """A plan file's name with another ending, beside it; else here."""
    path = Path(reference)
    if "://" in reference:
        path = Path(path.name)
    elif not path.exists():
        return Path(f"{digest[:12]}.report.html")
    return path.with_name(path.name.removesuffix(".json").removesuffix(".plan") + ".report.html")


def _write(path: Path, text: bytes) -> None:
    """A reader never sees half a page. Raises StoreError."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(text)
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise StoreError(f"{path}: can't write the page: {error.strerror}") from None
