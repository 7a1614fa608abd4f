"""`m2ncompile build`."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import suppress
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
    print_json,
    remote_at,
    size,
    spec_files,
    store_at,
)
from m2ncompile.cli.progress import progress_bar
from m2ncompile.errors import M2nCompileError, StoreError
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
            with progress_bar(spec.name) as progress:
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


def _write(built: Built, spec: Path, output: Path | None, several: bool) -> Path | None:
    """Write the plan as asked; a reader never sees half a file."""
    if output is None:
        return built.path
    path = plan_beside(spec, output, several)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(built.plan.encoded)
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise StoreError(f"{path}: can't write the plan: {error.strerror}") from None
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
