"""`m2ncompile report`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from m2ncompile.cli.common import (
    CacheOption,
    JsonOption,
    PlanArgument,
    RemoteOption,
    holds_plan,
    print_json,
    size,
    write_file,
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
    if _is_plan(path, [p for p in (plan, against) if p]):
        raise StoreError(f"{path}: the page would take the plan's place; choose another file")
    write_file(path, text, "the page")
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


def _is_plan(path: Path, given: Iterable[str]) -> bool:
    if not os.path.isfile(path):
        return False
    try:
        same = any(os.path.samefile(path, p) for p in given if os.path.exists(p))
        return same or holds_plan(path)
    except OSError as error:
        raise StoreError(f"{path}: can't write the page: {error.strerror}") from None
