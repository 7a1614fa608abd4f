"""`m2ncompile build`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from m2ncompile.build import Built, build
from m2ncompile.cli.common import (
    CacheOption,
    JsonOption,
    RemoteOption,
    cache_trouble,
    holds_plan,
    naming,
    print_json,
    remote_at,
    size,
    spec_files,
    store_at,
    write_file,
)
from m2ncompile.cli.progress import progress_bar
from m2ncompile.errors import M2nCompileError, Problems, StoreError
from m2ncompile.locking import plan_beside
from m2ncompile.spec import load_spec
from m2ncompile.store import Store
from m2ncompile.summary import summarize

__all__ = ["build_command"]


def build_command(
    specs: Annotated[
        list[Path],
        typer.Argument(metavar="SPEC...", help="Spec files (TOML), or folders of them."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Also write each plan here: a folder, or a file when there is one spec.",
        ),
    ] = None,
    locked: Annotated[
        bool,
        typer.Option(
            "--locked",
            help="Write nothing; exit 1 unless the plan file is what the spec gives. The file is "
            "that of -o, else NAME.plan.json beside NAME.toml.",
        ),
    ] = False,
    frozen: Annotated[
        bool,
        typer.Option(
            "--frozen",
            help="As --locked without an engine: exit 1 unless the inputs recorded in the plan "
            "file are those of the spec.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say why a plan was not in the store.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither read nor write any store.")
    ] = False,
    cache: CacheOption = None,
    remote: RemoteOption = None,
    push: Annotated[
        bool,
        typer.Option("--push", help="Upload the plans that the remote store did not have."),
    ] = False,
    require_cache: Annotated[
        bool,
        typer.Option(
            "--require-cache",
            help="Stop with exit code 2 where a store, local or remote, can't be read or written, "
            "or a remote plan is refused, in place of a warning.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compile specs to plans. A plan whose inputs are known comes from the store, or the remote.

    With several specs, one that fails does not stop the rest; the exit code is 2.
    """
    if locked and frozen:
        raise typer.BadParameter("--locked and --frozen exclude each other")
    if no_cache and (push or require_cache):
        raise typer.BadParameter("--no-cache excludes --push and --require-cache")
    if push and (locked or frozen):
        raise typer.BadParameter("--locked and --frozen write nothing: they exclude --push")
    if push and not remote:
        raise typer.BadParameter("--push needs --remote or M2NCOMPILE_REMOTE")
    specs = spec_files(specs)
    if output is not None:
        _check_targets(specs, output, written=not (locked or frozen))
    store = None if no_cache else store_at(cache)
    shared = None if no_cache or frozen else remote_at(remote)
    if push and shared is not None:
        shared.check_writable()
    trouble = cache_trouble(require_cache)
    if locked or frozen:
        from m2ncompile.cli.locked import check_plans

        check_plans(specs, output, store, shared, trouble, frozen=frozen, json=json)
        return
    results: list[dict[str, Any]] = []
    failed = False
    for spec in specs:
        try:
            with naming(spec), progress_bar(spec.name) as progress:
                built = build(spec, store, progress, remote=shared, push=push, trouble=trouble)
            written = _write(built, spec, output, several=len(specs) > 1)
        except M2nCompileError as error:
            if require_cache and isinstance(error, StoreError):
                raise
            print(f"error: {error}", file=sys.stderr)
            failed = True
            continue
        result = _result(spec, built, written)
        results.append(result)
        why = _miss(spec, built, store) if verbose else []
        if verbose:
            result["miss"] = why
        if not json:
            _print(result, built)
            for line in why:
                print(f"  miss          {line}")
    if json:
        print_json("m2ncompile.build/1", {"plans": results})
    if failed:
        raise typer.Exit(2)


def _miss(spec: Path, built: Built, store: Store | None) -> list[str]:
    """Why the plan was compiled, in lines."""
    if built.hit or store is None:
        return []
    from m2ncompile.missing import describe

    if built.miss is None:
        return ["the store had no plan"]
    return describe(built.miss, load_spec(spec), store).lines


def _check_targets(specs: Sequence[Path], output: Path, written: bool) -> None:
    """Refuses an output that would cost a spec, another file, or another spec's plan."""
    if output.suffix == ".toml":
        raise StoreError(
            f"{output}: plans are not written to a spec's name. A shell gives -o only the first "
            "file of a pattern: name a folder"
        )
    problems = Problems()
    owners: dict[str, Path] = {}
    for spec in specs:
        path = plan_beside(spec, output, several=len(specs) > 1)
        owner = owners.setdefault(os.path.realpath(path), spec)
        if os.path.realpath(owner) != os.path.realpath(spec):
            problems.add(str(path), f"would be the plan of {owner} and of {spec}")
        elif written and (why := _kept(path)):
            problems.add(str(path), why, "choose another file, or remove it")
    problems.raise_if_any(StoreError, "plans can't be written so; nothing was built")


def _kept(path: Path) -> str | None:
    """Why a file must not be replaced, if so."""
    try:
        if os.path.isfile(path) and path.stat().st_size and not holds_plan(path):
            return "is there and is no plan"
    except OSError as error:
        return f"can't be read: {error.strerror}"
    return None


def _write(built: Built, spec: Path, output: Path | None, several: bool) -> Path | None:
    if output is None:
        return built.path
    path = plan_beside(spec, output, several)
    write_file(path, built.plan.encoded, "the plan")
    return path


def _result(spec: Path, built: Built, written: Path | None) -> dict[str, Any]:
    plan = built.plan
    summary = summarize(plan)
    return {
        "spec": str(spec),
        "path": None if written is None else str(written),
        "cached": built.hit,
        "from_remote": built.from_remote,
        "pushed": built.pushed,
        "plan_digest": plan.digest,
        "program_digest": plan.digests.program,
        "source_digest": plan.digests.source,
        "complete_digest": plan.digests.complete,
        "model": plan.inputs.model.name,
        **msgspec.to_builtins(summary),
    }


def _print(result: dict[str, Any], built: Built) -> None:
    total = result["nbytes"]
    received = result["wire_bytes_per_worker"]
    origin = " (from remote)" if built.from_remote else " (cached)" if built.hit else ""
    lines = [f"{result['spec']}: {result['model']}{origin}"]
    for route in result["routes"]:
        share = 100 * route["nbytes"] / total
        lines.append(
            f"  {route['route']:<10}{route['tensors']:>8} tensors  "
            f"{size(route['nbytes']):>10}  {share:5.1f}%"
        )
    span = size(max(received))
    if min(received) != max(received):
        span = f"{size(min(received))} to {span}"
    lines += [
        f"  collectives   {result['collectives']}",
        f"  wire/worker   {span} (model: {size(total)})",
        f"  plan          {result['plan_digest']}",
        f"  program       {result['program_digest']}",
        f"  source        {result['source_digest']}",
        f"  complete      {result['complete_digest'] or '(not expressible by vLLM)'}",
        f"  written to    {result['path'] or '(not written)'}",
    ]
    if built.pushed:
        lines.append("  pushed        it is in the remote store")
    print("\n".join(lines))
