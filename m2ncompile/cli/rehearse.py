"""`m2ncompile rehearse`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from m2ncompile.cli.common import CacheOption, JsonOption, PlanArgument, console, print_json, size
from m2ncompile.errors import CheckError, PlanError, Problem
from m2ncompile.opening import open_plan

if TYPE_CHECKING:
    from m2ncompile.plan import Plan
    from m2ncompile.runtime.rehearsal import RankReport

__all__ = ["rehearse_command"]


def rehearse_command(
    plan: PlanArgument,
    model: Annotated[
        Path, typer.Option(help="The folder of the model that the plan was made from.")
    ],
    syncs: Annotated[int, typer.Option(min=1, max=100, help="How often weights are sent.")] = 3,
    full: Annotated[
        bool, typer.Option("--full", help="At the model's own dims: every rank holds its part.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Of every phase and every sync, in seconds.")
    ] = 300.0,
    prepare: Annotated[
        Path | None,
        typer.Option(
            help="Only write what ranks need to this folder, for torchrun on several machines."
        ),
    ] = None,
    cache: CacheOption = None,
    json: JsonOption = False,
) -> None:
    """Run a plan between real processes on this machine, and compare with the model's own loaders.

    torchrun starts one process for each trainer rank and each worker. They hold random
    weights, at reduced dims by default, and move them over gloo; after every sync each worker
    compares its module bit by bit with one that loaded the same weights as usual. Exit code 1
    when something differs or fails.
    """
    opened = open_plan(plan, cache)
    with ExitStack() as stack:
        if prepare is None:
            folder = Path(stack.enter_context(TemporaryDirectory()))
        else:
            folder = prepare
            folder.mkdir(parents=True, exist_ok=True)
        run, sizes = _prepare(opened, model, folder, full)
        ranks = run.inputs.trainer.ranks + run.inputs.engine.workers
        if prepare is not None:
            print(
                f"{folder} is ready. Copy it to every machine, and start {ranks} processes:\n"
                f"  torchrun --nnodes N --nproc-per-node P --rdzv-backend c10d "
                f"--rdzv-endpoint HOST:PORT \\\n"
                f"    -m m2ncompile.runtime.rehearsal {folder} --syncs {syncs}"
            )
            return
        reports, log = _launch(folder, ranks, syncs, timeout)
    document = _document(opened, run, sizes, reports)
    if json:
        print_json("m2ncompile.rehearse/1", document)
    else:
        _print(run, document)
    problems = _problems(run, reports, ranks, log)
    if problems:
        raise CheckError(f"{run.inputs.model.name}: the rehearsal failed", problems)


def _prepare(
    plan: Plan, model: Path, folder: Path, full: bool
) -> tuple[Plan, dict[str, tuple[int, int]]]:
    """Writes the plan that is run and its config; returns it, and the sizes that were reduced."""
    from m2ncompile.compile.pipeline import config_digest
    from m2ncompile.verify.check import reduce_plan

    if full:
        if config_digest(model) != plan.inputs.model.config:
            raise PlanError(f"{model}: the plan was made from another model")
        shutil.copy(model / "config.json", folder / "config.json")
        run, sizes = plan, {}
    else:
        small = reduce_plan(plan, model, folder)
        run, sizes = small.plan, small.sizes
    (folder / "plan.json").write_bytes(run.encoded)
    return run, sizes


def _launch(
    folder: Path, ranks: int, syncs: int, timeout: float
) -> tuple[dict[int, RankReport], str]:
    """The reports of those ranks that wrote one, and what all of them printed."""
    from m2ncompile.runtime.rehearsal import RankReport

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "m2ncompile.runtime.rehearsal"]
    command += [str(folder), "--syncs", str(syncs), "--timeout", str(timeout)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    reports = {}
    for rank in range(ranks):
        path = folder / f"rank{rank}.json"
        if path.exists():
            reports[rank] = msgspec.json.decode(path.read_bytes(), type=RankReport)
    return reports, done.stdout


def _problems(plan: Plan, reports: dict[int, RankReport], ranks: int, log: str) -> list[Problem]:
    from m2ncompile.runtime.agree import rank_name

    found = []
    for rank in range(ranks):
        where = rank_name(rank, plan.inputs.trainer.ranks)
        report = reports.get(rank)
        if report is None:
            last = "\n    ".join(log.strip().splitlines()[-15:])
            found.append(Problem(where, f"its process died; the last it said:\n    {last}"))
        elif report.error is not None:
            found.append(Problem(where, report.error))
        else:
            found += [Problem(where, difference) for difference in report.differences]
    return found


def _document(
    plan: Plan,
    run: Plan,
    sizes: dict[str, tuple[int, int]],
    reports: dict[int, RankReport],
) -> dict[str, Any]:
    return {
        "plan_digest": plan.digest,
        "model": plan.inputs.model.name,
        "reduced": sizes,
        "tensors": len(run.tensors),
        "collectives": len(run.transfers),
        "ranks": [msgspec.to_builtins(reports[rank]) for rank in sorted(reports)],
    }


def _share(route: dict[str, Any] | None) -> str:
    return "-" if route is None else f"{route['tensors']} ({size(route['nbytes'])})"


def _print(plan: Plan, document: dict[str, Any]) -> None:
    from rich.table import Table

    from m2ncompile.runtime.agree import rank_name

    out = console()
    out.print(f"{document['model']}, plan {document['plan_digest']}")
    sizes = ", ".join(f"{key} {a} -> {b}" for key, (a, b) in document["reduced"].items())
    out.print(f"  reduced   {sizes or '(full size)'}", markup=False)
    out.print(f"  {document['tensors']} tensors in {document['collectives']} transfers\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rank", "bytes", "direct", "reload", "fallback", "seconds of each sync"):
        table.add_column(column, justify="left" if column == "rank" else "right")
    table.add_column("compared", justify="right")
    trainers = plan.inputs.trainer.ranks
    for rank in document["ranks"]:
        last = rank["syncs"][-1] if rank["syncs"] else None
        routes = {route["route"]: route for route in last["routes"]} if last else {}
        table.add_row(
            rank_name(rank["rank"], trainers),
            size(last["nbytes"]) if last else "-",
            *(_share(routes.get(name)) for name in ("direct", "reload", "fallback")),
            ", ".join(f"{sync['seconds']:.3f}" for sync in rank["syncs"]) or "-",
            f"{rank['compared']:,}" if rank["rank"] >= trainers else "-",
        )
    out.print(table)
    unprocessed = {
        why: path for rank in document["ranks"] for path, why in rank["unprocessed"].items()
    }
    for why, path in unprocessed.items():
        out.print(f"\nNot processed after loading here, {path} and the like: {why}", markup=False)
    if all(not rank["differences"] and rank["error"] is None for rank in document["ranks"]):
        elements = sum(rank["compared"] for rank in document["ranks"])
        out.print(f"\npassed: {elements:,} elements equal to the bit after each sync")
