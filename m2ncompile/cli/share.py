"""`m2ncompile cache push` and `m2ncompile cache pull`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from m2ncompile.cli.common import (
    CacheOption,
    JsonOption,
    RemoteOption,
    naming,
    print_json,
    remote_at,
    size,
    spec_files,
    store_at,
)
from m2ncompile.errors import M2nCompileError, Problem, StoreError
from m2ncompile.opening import is_there
from m2ncompile.store import Store

if TYPE_CHECKING:
    from m2ncompile.remote import Remote

__all__ = ["pull_command", "push_command"]


def push_command(
    plans: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PLAN|SPEC",
            help="Plan files, starts of digests in the store, specs (.toml) or folders of them; "
            "by default all that the store has.",
        ),
    ] = None,
    remote: RemoteOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    cache: CacheOption = None,
    json: JsonOption = False,
) -> None:
    """Upload plans and what leads to them to the remote store.

    What is there is read, and replaced if it is damaged. An entry that leads to another plan is
    replaced.
    """
    shared = _required(remote)
    shared.check_writable()
    from m2ncompile.sharing import Pushed, push

    store = store_at(cache)
    keys = {entry.digest: entry.actions for entry in store.entries()}
    pushed: list[Pushed] = []
    problems: list[Problem] = []
    for digest, data in _local(plans, store, keys, problems):
        done = push(shared, digest, data, keys.get(digest, ()), dry_run=dry_run)
        pushed.append(done)
        if done.written and not json:
            print(f"{'would push' if dry_run else 'pushed'} {digest}  {size(done.nbytes)}")
    written = [one for one in pushed if one.written]
    actions = sum(one.actions for one in pushed)
    if json:
        content = {"remote": shared.address.url, "dry_run": dry_run}
        print_json("m2ncompile.cache.push/1", {**content, "plans": msgspec.to_builtins(pushed)})
    else:
        print(
            f"{'would push' if dry_run else 'pushed'} {len(written)} plans "
            f"({size(sum(one.nbytes for one in written))}) and {actions} entries "
            f"to {shared.address.url}; {len(pushed) - len(written)} plans were there"
        )
    if problems:
        raise StoreError(f"{len(problems)} plans were not pushed", problems)


def _local(
    references: list[str] | None,
    store: Store,
    stored: Iterable[str],
    problems: list[Problem],
) -> Iterator[tuple[str, bytes]]:
    """Plans by digest and bytes; what can't be read goes to `problems`."""
    from m2ncompile.build import action_key
    from m2ncompile.plan_check import load
    from m2ncompile.spec import load_spec

    digests = [] if references else sorted(stored)
    files: dict[str, bytes] = {}
    for reference in references or ():
        path = Path(reference)
        specs: list[Path] = []
        with _noted(reference, problems):
            if _names_specs(path):
                specs = spec_files([path])
            elif is_there(path):
                plan = load(path)
                files[plan.digest] = plan.encoded
            else:
                digests.append(store.resolve(reference))
        for spec in specs:
            with _noted(str(spec), problems), naming(spec):
                digest = store.lookup(action_key(load_spec(spec)))
                if digest is None:
                    fix = f"build it: m2ncompile build {spec}"
                    problems.append(Problem(str(spec), "its plan is not in the store", fix))
                else:
                    digests.append(digest)
    yield from files.items()
    for digest in dict.fromkeys(digests):
        try:
            data = store.get(digest)
        except StoreError as error:
            problems.extend(error.problems)
        else:
            yield digest, data


def pull_command(
    plans: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIGEST|SPEC",
            help="Starts of digests (over http all 64 digits), specs (.toml) or folders of them; "
            "by default all plans that the remote has.",
        ),
    ] = None,
    remote: RemoteOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would come.")] = False,
    cache: CacheOption = None,
    json: JsonOption = False,
) -> None:
    """Fetch plans from the remote store.

    Only a spec brings the entry that leads to its plan, since only then can it be checked.
    """
    shared = _required(remote)
    from m2ncompile.sharing import Pulled, pull_digest, pull_spec
    from m2ncompile.spec import load_spec

    store = store_at(cache)
    pulled: list[Pulled] = []
    problems: list[Problem] = []
    steps: list[Callable[[], Pulled]] = []
    for reference in plans or ():
        if _names_specs(Path(reference)):
            for spec in spec_files([Path(reference)]):
                loaded = load_spec(spec)
                steps.append(partial(pull_spec, loaded, str(spec), store, shared, dry_run=dry_run))
        else:
            digest = shared.resolve(reference)
            steps.append(partial(pull_digest, digest, store, shared, dry_run=dry_run))
    if not plans:
        for digest in shared.digests():
            steps.append(partial(pull_digest, digest, store, shared, dry_run=dry_run))
    for step in steps:
        try:
            done = step()
        except StoreError as error:
            if shared.lost:
                raise
            problems.extend(error.problems)
            continue
        pulled.append(done)
        if done.fetched and not json:
            print(f"{'would pull' if dry_run else 'pulled'} {done.digest}")
    fetched = sum(one.fetched for one in pulled)
    if json:
        content = {"remote": shared.address.url, "dry_run": dry_run}
        print_json("m2ncompile.cache.pull/1", {**content, "plans": msgspec.to_builtins(pulled)})
    else:
        print(
            f"{'would pull' if dry_run else 'pulled'} {fetched} plans from {shared.address.url}; "
            f"{len(pulled) - fetched} were in {store.root}"
        )
    if problems:
        raise StoreError(f"{len(problems)} plans were not pulled", problems)


def _required(remote: str | None) -> Remote:
    shared = remote_at(remote)
    if shared is None:
        raise typer.BadParameter("expected --remote URL, or M2NCOMPILE_REMOTE")
    return shared


def _names_specs(path: Path) -> bool:
    return path.suffix == ".toml" or os.path.isdir(path)


@contextmanager
def _noted(where: str, problems: list[Problem]) -> Iterator[None]:
    """What is wrong with one of several plans goes to `problems`."""
    try:
        yield
    except M2nCompileError as error:
        text = str(error).removeprefix(f"{where}: ")
        problems.append(Problem(where, text.replace("\n", "\n    ")))
