"""`m2ncompile show`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from m2ncompile.cli.common import (
    CacheOption,
    JsonOption,
    PlanArgument,
    RemoteOption,
    console,
    print_json,
    size,
)
from m2ncompile.cli.text import placement_text, target_text
from m2ncompile.dtypes import nbytes
from m2ncompile.families import families
from m2ncompile.opening import open_plan
from m2ncompile.plan_check import layouts_of
from m2ncompile.summary import summarize

if TYPE_CHECKING:
    from m2ncompile.plan import Plan

__all__ = ["show_command"]


def show_command(
    plan: PlanArgument,
    cache: CacheOption = None,
    remote: RemoteOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a plan does: inputs, routes with reasons, tensors by family."""
    opened = open_plan(plan, cache, remote)
    if json:
        print_json("m2ncompile.show/1", _document(opened))
    else:
        _print(opened)


def _rows(plan: Plan) -> list[dict[str, Any]]:
    """One row per family of tensors that are treated alike."""
    layouts = layouts_of(plan)
    grouped = families(
        plan.destinations,
        name=lambda d: plan.tensors[d.tensor].name,
        same=lambda d: (
            plan.tensors[d.tensor].geometry,
            plan.tensors[d.tensor].source,
            d.wire,
            d.route,
            d.layout,
            d.reason,
        ),
    )
    rows = []
    for name, members in grouped:
        first = members[0]
        wire = plan.wires[first.wire]
        geometry = plan.geometries[wire.geometry]
        dtype = plan.dtypes[geometry.dtype]
        rows.append(
            {
                "name": name,
                "tensors": len(members),
                "dtype": dtype,
                "shape": geometry.shape,
                "nbytes": len(members) * nbytes(dtype, geometry.shape),
                "route": first.route,
                "source": placement_text(layouts[wire.source]),
                "destination": placement_text(layouts[first.layout]),
                "reason": None if first.reason is None else plan.reasons[first.reason].code,
            }
        )
    return rows


def _document(plan: Plan) -> dict[str, Any]:
    return {
        "plan_digest": plan.digest,
        "digests": plan.digests,
        "inputs": plan.inputs,
        "summary": msgspec.to_builtins(summarize(plan)),
        "families": _rows(plan),
    }


def _print(plan: Plan) -> None:
    from rich.table import Table

    out = console()
    inputs, summary = plan.inputs, summarize(plan)
    out.print(f"{inputs.model.name} ({inputs.model.architecture}), plan {plan.digest}")
    out.print(
        f"  trainer   {inputs.trainer.ranks} ranks, {inputs.trainer.layout}"
        + (f" + {len(inputs.trainer.rules)} rules" if inputs.trainer.rules else "")
    )
    out.print(f"  workers   {target_text(inputs.engine)}")
    out.print(
        f"  tensors   {summary.tensors}, {size(summary.nbytes)}, listed from {inputs.model.origin}"
    )
    for missing in inputs.model.missing:
        out.print(f"  not sent  {missing.names}: {missing.reason}")
    out.print(
        f"  wire      {summary.collectives} collectives, "
        f"{size(max(summary.wire_bytes_per_worker))} to each worker"
    )
    first = inputs.trainer.ranks
    staging = summary.staging_bytes_per_rank
    out.print(
        f"  staging   {size(max(staging[:first]))} on a trainer rank, {size(max(staging[first:]))} "
        f"on a worker, and {size(summary.pool_bytes)} on each for NCCL M2N"
    )
    out.print(f"  program   {plan.digests.program}")
    out.print(f"  source    {plan.digests.source}")
    out.print(f"  complete  {plan.digests.complete}")

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("tensor", "dtype", "shape", "bytes", "route", "trainer", "workers", "reason"):
        table.add_column(
            column,
            justify="right" if column == "bytes" else "left",
            overflow="fold",
            no_wrap=column not in ("tensor", "reason"),
        )
    for row in _rows(plan):
        count = f"  x{row['tensors']}" if row["tensors"] > 1 else ""
        table.add_row(
            row["name"] + count,
            row["dtype"],
            "x".join(map(str, row["shape"])) or "scalar",
            size(row["nbytes"]),
            row["route"],
            row["source"],
            row["destination"],
            row["reason"] or "",
        )
    out.print()
    out.print(table)
    if summary.reasons:
        out.print("\nReasons")
        for reason in summary.reasons:
            out.print(
                f"  {reason.code}: {reason.tensors} tensors, {size(reason.nbytes)}: {reason.text}"
            )
