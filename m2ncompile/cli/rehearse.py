"""`m2ncompile rehearse`."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
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
    refusal,
    size,
)
from m2ncompile.cli.progress import progress_bar
from m2ncompile.errors import CheckError, PlanError, Problem, StoreError
from m2ncompile.families import number_range
from m2ncompile.opening import open_plan

if TYPE_CHECKING:
    from m2ncompile.plan import Plan
    from m2ncompile.runtime.launch import Ended
    from m2ncompile.verify.check import Reduced

__all__ = ["rehearse_command"]


def rehearse_command(
    plan: PlanArgument,
    model: Annotated[
        Path, typer.Option(help="The folder of the model that the plan was made from.")
    ],
    syncs: Annotated[int, typer.Option(min=1, max=9, help="How often weights are sent.")] = 3,
    full: Annotated[
        bool, typer.Option("--full", help="At the model's own dims: every rank holds its part.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Of every phase and every sync, in seconds.")
    ] = 300.0,
    prepare: Annotated[
        Path | None,
        typer.Option(
            help="Only write what ranks need to this folder, for torchrun on several machines, "
            "and print its command."
        ),
    ] = None,
    cache: CacheOption = None,
    remote: RemoteOption = None,
    json: JsonOption = False,
) -> None:
    """Run a plan between real processes on this machine, and compare with the model's own loaders.

    One process for each trainer rank and each worker. They hold random weights, at
    reduced dims by default, and move them over gloo; after every sync each worker
    compares its module bit by bit with one that loaded the same weights as usual.
    Exit code 1 when something differs or fails.
    """
    opened = open_plan(plan, cache, remote)
    name = opened.inputs.model.name
    ranks = opened.inputs.trainer.ranks + opened.inputs.engine.workers
    if prepare is not None:
        try:
            prepare.mkdir(parents=True, exist_ok=True)
            _prepare(opened, model, prepare, full)
        except OSError as error:
            raise StoreError(f"{prepare}: can't be prepared: {refusal(error)}") from None
        _print_command(prepare, ranks, syncs, timeout, json)
        return
    from m2ncompile.runtime.launch import run_ranks

    with TemporaryDirectory() as scratch, progress_bar(name) as progress:
        folder = Path(scratch)
        run = _prepare(opened, model, folder, full)
        ended = run_ranks(folder, ranks, syncs, timeout, progress)
    problems = _problems(run.plan, ended)
    document = {
        "plan_digest": opened.digest,
        "model": name,
        "reduced": run.sizes,
        "notes": run.notes,
        "tensors": len(run.plan.tensors),
        "collectives": len(run.plan.transfers),
        "syncs": syncs,
        "passed": not problems,
        "ranks": [msgspec.to_builtins(one.report) for one in ended if one.report is not None],
        "problems": msgspec.to_builtins(problems),
    }
    if json:
        print_json("m2ncompile.rehearse/1", document)
    else:
        _print(run.plan, document)
    if problems:
        raise CheckError(f"{name}: the rehearsal failed", problems)


def _prepare(plan: Plan, model: Path, folder: Path, full: bool) -> Reduced:
    """Writes the plan that is run and its model's config to `folder`."""
    from m2ncompile.inventory import config_digest
    from m2ncompile.verify.check import Reduced, reduce_plan

    if not full:
        run = reduce_plan(plan, model, folder)
    elif config_digest(model) != plan.inputs.model.config:
        raise PlanError(f"{model}: the plan was made from another model")
    else:
        shutil.copy(model / "config.json", folder / "config.json")
        run = Reduced(plan, {}, ())
    for old in folder.glob("rank*.json"):
        old.unlink()
    (folder / "plan.json").write_bytes(run.plan.encoded)
    return run


def _print_command(folder: Path, ranks: int, syncs: int, timeout: float, json: bool) -> None:
    machines = 2 if ranks % 2 == 0 else 1
    command = (
        f"torchrun --nnodes {machines} --nproc-per-node {ranks // machines} --rdzv-backend c10d "
        "--rdzv-endpoint HOST:PORT -m m2ncompile.runtime.rehearsal "
        f"{shlex.quote(str(folder))} --syncs {syncs} --timeout {timeout:g}"
    )
    if json:
        document = {"folder": str(folder), "processes": ranks, "command": command}
        print_json("m2ncompile.rehearse-prepare/1", document)
        return
    print(
        f"{folder} is ready. Copy it to every machine, and run on each at the same time:\n\n"
        f"  {command}\n\n"
        f"HOST:PORT is one of the machines and a free port there. --nnodes times --nproc-per-node "
        f"must be {ranks}.\nEvery rank prints what it saw, and writes it to "
        f"{folder}/rank<i>.json on its machine."
    )


def _problems(plan: Plan, ended: list[Ended]) -> list[Problem]:
    """What failed, once each: most failures are all ranks' alike."""
    from m2ncompile.runtime.agree import rank_name

    found: list[Problem] = []
    errors: dict[str, list[str]] = {}
    wrong: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for rank, one in enumerate(ended):
        where = rank_name(rank, plan.inputs.trainer.ranks)
        if one.died is not None:
            last = "".join(f"\n    {line}" for line in one.printed.strip().splitlines()[-15:])
            said = f"; the last it printed:{last}" if last else ", and had printed nothing"
            found.append(Problem(where, one.died + said))
        elif one.report is None:
            continue  # stopped since another failed
        elif one.report.error is not None:
            errors.setdefault(one.report.error, []).append(where)
        else:
            for difference in one.report.differences:
                wrong.setdefault((difference.name, difference.message), []).append(
                    (where, difference.sync)
                )
    for error, ranks in errors.items():
        everyone = "every rank" if len(ranks) == len(ended) else ", ".join(ranks)
        found.append(Problem(everyone, error.replace("\n", "\n    ")))
    for (name, message), seen in wrong.items():
        workers = ", ".join(dict.fromkeys(where for where, _ in seen))
        syncs = number_range(sync for _, sync in seen)
        found.append(Problem(name, f"{message} ({workers}; sync {syncs})"))
    return found


def _share(route: dict[str, Any] | None) -> str:
    return "-" if route is None else f"{route['tensors']} ({size(route['nbytes'])})"


def _print(plan: Plan, document: dict[str, Any]) -> None:
    from rich.table import Table

    from m2ncompile.runtime.agree import rank_name

    out = console()
    out.print(f"{document['model']}, plan {document['plan_digest']}")
    sizes = ", ".join(f"{key} {a} -> {b}" for key, (a, b) in document["reduced"].items())
    out.print(f"  reduced   {sizes or '(full size)'}")
    for note in document["notes"]:
        out.print(f"  adjusted  {note}")
    out.print(f"  sent      {document['tensors']} tensors in {document['collectives']} transfers\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = (
        "rank",
        "bytes a sync",
        "direct",
        "reload",
        "fallback",
        "seconds of each",
        "compared",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "rank" else "right")
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
    if any(rank["syncs"] for rank in document["ranks"]):
        out.print(table)
    unprocessed = {
        why: path for rank in document["ranks"] for path, why in rank["unprocessed"].items()
    }
    for why, path in unprocessed.items():
        out.print(
            f"\nCompared as loaded, for this machine can't process it after loading: {path} "
            f"and the like ({why})"
        )
    if document["passed"]:
        elements = sum(rank["compared"] for rank in document["ranks"])
        out.print(
            f"\npassed: {elements:,} elements compared, all equal to the bit "
            f"(syncs: {document['syncs']})"
        )
