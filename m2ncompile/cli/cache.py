"""`m2ncompile cache`."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from m2ncompile.cli.common import CacheOption, JsonOption, naming, print_json, size, store_at
from m2ncompile.cli.share import pull_command, push_command
from m2ncompile.errors import CheckError

__all__ = ["cache_app"]

cache_app = typer.Typer(help="Look at, clean and share the store of plans.", no_args_is_help=True)
cache_app.command("push")(push_command)
cache_app.command("pull")(pull_command)

_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]?)B?", text, re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f'expected bytes such as "500M" or "2G"; got "{text}"')
    return int(match[1]) * _SIZES[match[2].upper()]


def _age(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([smhd])", text)
    if match is None:
        raise typer.BadParameter(f'expected an age such as "12h" or "30d"; got "{text}"')
    return int(match[1]) * _AGES[match[2]]


@cache_app.command("ls")
def ls(cache: CacheOption = None, json: JsonOption = False) -> None:
    """List the stored plans, the most recently used first."""
    store = store_at(cache)
    entries = sorted(store.entries(), key=lambda entry: (-entry.last_used, entry.digest))
    if json:
        print_json(
            "m2ncompile.cache.ls/1",
            {"root": str(store.root), "entries": msgspec.to_builtins(entries)},
        )
        return
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
        print(f"{entry.digest}  {size(entry.nbytes):>10}  {used}  {len(entry.actions)} specs")
    print(f"{len(entries)} plans, {size(sum(e.nbytes for e in entries))}, in {store.root}")


@cache_app.command("explain")
def explain(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A spec file (TOML).")],
    cache: CacheOption = None,
    json: JsonOption = False,
) -> None:
    """Say whether a spec's plan is stored, and if not, what differs from the nearest entry."""
    from m2ncompile.missing import explain_lookup
    from m2ncompile.spec import load_spec

    with naming(spec):
        digest, why = explain_lookup(load_spec(spec), store_at(cache))
    if json:
        content = {"spec": str(spec), "plan": digest, "miss": msgspec.to_builtins(why)}
        print_json("m2ncompile.cache.explain/1", content)
    elif digest is not None:
        print(f"{spec}: stored as {digest}")
    elif why is None:
        print(f"{spec}: not stored, and nothing else is")
    else:
        print(f"{spec}: not stored; against the nearest entry, {why.plan or 'whose plan is gone'}:")
        print("\n".join(f"  {line}" for line in why.lines))


@cache_app.command("gc")
def gc(
    keep: Annotated[
        str | None,
        typer.Option(help="Remove least recently used plans until this fits, e.g. 500M."),
    ] = None,
    older: Annotated[
        str | None, typer.Option(help="Remove plans not used for this long, e.g. 30d.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    cache: CacheOption = None,
    json: JsonOption = False,
) -> None:
    """Remove plans by size or age, and what interrupted writers left behind."""
    result = store_at(cache).gc(
        keep_bytes=None if keep is None else _size(keep),
        keep_seconds=None if older is None else _age(older),
        now=time.time(),
        dry_run=dry_run,
    )
    if json:
        print_json("m2ncompile.cache.gc/1", {"dry_run": dry_run, **msgspec.to_builtins(result)})
        return
    verb = "would remove" if dry_run else "removed"
    for entry in result.removed:
        print(f"{verb} {entry.digest}  {size(entry.nbytes)}")
    print(
        f"{verb} {len(result.removed)} plans ({size(result.freed_bytes)}), {result.actions} "
        f"entries without a plan, {result.leftovers} leftovers; {size(result.kept_bytes)} kept"
        + (f" ({result.spared} of them for being used just now)" if result.spared else "")
    )


@cache_app.command("verify")
def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged.")] = False,
    cache: CacheOption = None,
    json: JsonOption = False,
) -> None:
    """Check every stored plan against its digest. Exit code 1 when damage is found."""
    store = store_at(cache)
    result = store.verify(repair=repair)
    if json:
        print_json(
            "m2ncompile.cache.verify/1",
            {"root": str(store.root), **msgspec.to_builtins(result)},
        )
    else:
        print(f"checked {result.objects} plans and {result.actions} entries in {store.root}")
        if result.repaired:
            print(f"removed {result.repaired} damaged files")
    if result.damage:
        raise CheckError(f"{store.root}: {len(result.damage)} files are damaged", result.damage)
