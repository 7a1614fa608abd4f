"""`m2ncompile build --locked` and `--frozen`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from m2ncompile.build import Trouble
from m2ncompile.cli.common import naming, print_json
from m2ncompile.cli.diff import print_difference
from m2ncompile.cli.progress import progress_bar
from m2ncompile.diff import Difference
from m2ncompile.diff.words import headline
from m2ncompile.errors import CheckError, M2nCompileError
from m2ncompile.locking import check_frozen, check_locked, plan_beside, stale_error
from m2ncompile.remote import Remote
from m2ncompile.store import Store

__all__ = ["check_plans"]


def check_plans(
    specs: Sequence[Path],
    output: Path | None,
    store: Store | None,
    remote: Remote | None,
    trouble: Trouble,
    *,
    frozen: bool,
    json: bool,
) -> None:
    """Checks every spec's plan, then exits with 2 for a bad input, else with 1 for a stale plan."""
    results: list[dict[str, Any]] = []
    worst = 0
    for spec in specs:
        path = plan_beside(spec, output, several=len(specs) > 1)
        result: dict[str, Any] = {"spec": str(spec), "path": str(path), "fresh": False}
        try:
            if frozen:
                with naming(spec):
                    stale = _frozen(spec, path, result)
            else:
                with naming(spec), progress_bar(spec.name) as progress:
                    difference = check_locked(
                        spec, path, store, progress, remote=remote, trouble=trouble
                    )
                stale = _locked(spec, path, difference, result)
            if stale is not None:
                raise stale
            result["fresh"] = True
            if not json:
                print(
                    f"{path}: {'fits' if frozen else 'is what'} {spec}"
                    + ("" if frozen else " gives")
                )
        except M2nCompileError as error:
            if not json and isinstance(result.get("difference"), Difference):
                print_difference(result["difference"])
            print(f"error: {error}", file=sys.stderr)
            result["error"] = str(error)
            worst = max(worst, error.exit_code)
        results.append(result)
    if json:
        mode = "frozen" if frozen else "locked"
        print_json("m2ncompile.locked/1", {"mode": mode, "plans": msgspec.to_builtins(results)})
    if worst:
        raise typer.Exit(worst)


def _locked(
    spec: Path, path: Path, difference: Difference | None, result: dict[str, Any]
) -> CheckError | None:
    result["inputs"] = () if difference is None else difference.inputs
    result["difference"] = difference
    if difference is None:
        return None
    return stale_error(spec, path, difference.inputs, headline(difference))


def _frozen(spec: Path, path: Path, result: dict[str, Any]) -> CheckError | None:
    found = check_frozen(spec, path)
    result |= {
        "inputs": found.changes,
        "plan_digest": found.plan.digest,
        "program_digest": found.plan.digests.program,
    }
    if not found.changes:
        return None
    count = len(found.changes)
    what = f"{count} input{'' if count == 1 else 's'} changed since it was built"
    return stale_error(spec, path, found.changes, what)
