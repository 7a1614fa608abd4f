"""`m2ncompile verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from m2ncompile.cli.common import (
    CacheOption,
    JsonOption,
    PlanArgument,
    RemoteOption,
    console,
    print_json,
)
from m2ncompile.cli.progress import progress_bar
from m2ncompile.errors import CheckError
from m2ncompile.opening import open_plan

if TYPE_CHECKING:
    from m2ncompile.plan import Plan

__all__ = ["verify_command"]


def verify_command(
    plan: PlanArgument,
    model: Annotated[
        Path,
        typer.Option(help="The folder of the model that the plan was made from."),
    ],
    cache: CacheOption = None,
    remote: RemoteOption = None,
    json: JsonOption = False,
) -> None:
    """Run a plan on real data at reduced dims and compare with the model's own loaders.

    Exit code 1 when something differs.
    """
    opened = open_plan(plan, cache, remote)
    from m2ncompile.verify import verify

    with progress_bar(opened.inputs.model.name) as progress:
        found = verify(opened, model, progress)
    document = {
        "plan_digest": opened.digest,
        "model": opened.inputs.model.name,
        "workers": opened.inputs.engine.workers,
        "passed": not found.problems,
        **msgspec.to_builtins(found),
    }
    if json:
        print_json("m2ncompile.verify/1", document)
    else:
        _print(opened, document)
    if found.problems:
        raise CheckError(
            f"{opened.inputs.model.name}: the plan does not do what the model's loaders do",
            found.problems,
        )


def _print(plan: Plan, document: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    out.print(f"{document['model']} ({plan.inputs.model.architecture}), plan {plan.digest}")
    sizes = ", ".join(f"{key} {a} -> {b}" for key, (a, b) in document["reduced"].items())
    out.print(f"  reduced   {sizes}")
    for note in document["notes"]:
        out.print(f"  adjusted  {note}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("module", "class", "routes", "tensors", "workers", "elements", "after loading"):
        right = column in ("tensors", "workers", "elements")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in document["modules"]:
        count = f"  x{row['modules']}" if row["modules"] > 1 else ""
        table.add_row(
            (row["name"] or "(model)") + count,
            row["kind"],
            ", ".join(row["routes"]) or "(not loaded)",
            str(row["tensors"]),
            str(row["ranks"]),
            f"{row['elements']:,}",
            {None: "nothing to do", True: "compared", False: "not run"}[row["processed"]],
        )
    out.print()
    out.print(table)
    unchecked = [f"  {row['name']}: {row['why']}" for row in document["unchecked"]]
    reasons: dict[str, list[str]] = {}
    for row in document["modules"]:
        if row["why"]:
            reasons.setdefault(row["why"], []).append(row["kind"])
    unchecked += [
        f"  after loading, {', '.join(dict.fromkeys(kinds))}: {why}"
        for why, kinds in reasons.items()
    ]
    if unchecked:
        out.print("\nNot checked")
        for line in unchecked:
            out.print(line)
    elements = sum(row["elements"] for row in document["modules"])
    if document["passed"]:
        out.print(
            f"\npassed: {document['tensors']} tensors to {document['workers']} workers, "
            f"{elements:,} elements equal to the bit"
        )
