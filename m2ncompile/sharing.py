"""Plans between a store and a remote one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import msgspec

from m2ncompile.build import action_key
from m2ncompile.errors import M2nCompileError, PlanError, Problem, StoreError
from m2ncompile.inputs import spec_changes
from m2ncompile.plan import Plan
from m2ncompile.plan_check import loads
from m2ncompile.remote import Remote
from m2ncompile.spec import Spec
from m2ncompile.store import ActionKey, Store

__all__ = ["Pulled", "Pushed", "fetch", "fetch_for", "pull_digest", "pull_spec", "push"]


class Pushed(msgspec.Struct, frozen=True):
    """What a push of one plan wrote, or would write: the object or not, and how many actions."""

    digest: str
    nbytes: int
    written: bool
    actions: int


def push(
    remote: Remote, digest: str, data: bytes, keys: Iterable[ActionKey], *, dry_run: bool = False
) -> Pushed:
    """Uploads a plan, and after it the actions that lead to it; what is there and sound is left.

    Raises StoreError.
    """
    missing = not remote.holds(digest)
    if missing and not dry_run:
        remote.put(digest, data)
    new = [key for key in keys if not remote.leads(key, digest)]
    if not dry_run:
        for key in new:
            remote.record(key, digest)
    return Pushed(digest, len(data), missing, len(new))


def fetch(remote: Remote, digest: str) -> Plan | None:
    """The remote plan of this digest, checked; None where it is not there. Raises StoreError."""
    data = remote.get(digest)
    if data is None:
        return None
    where = remote.address.where("objects", digest)
    try:
        return loads(data, where)
    except PlanError as error:
        problems = error.problems or [Problem(where, error.title)]
        raise StoreError(f"the remote store's plan {digest} can't be used", problems) from None


def fetch_for(spec: Spec, key: ActionKey, store: Store | None, remote: Remote) -> Plan | None:
    """The plan that the remote has for a spec, or None; its bytes from `store` where it has them.

    An action is only a claim. So the inputs that the plan itself records are compared with those
    of the spec. Raises StoreError for a plan of other inputs, too.
    """
    digest = remote.lookup(key)
    if digest is None:
        return None
    plan = _stored(store, digest) or fetch(remote, digest)
    if plan is None:
        return None
    if changes := spec_changes(plan, spec):
        where = remote.address.where("actions", key.digest)
        expected = f"expected a plan of the spec's inputs, got the plan {digest}, which differs in"
        names = ", ".join(change.path for change in changes)
        fix = "who may write there replaces it: m2ncompile cache push"
        raise StoreError("the remote store is wrong", [Problem(where, f"{expected} {names}", fix)])
    return plan


class Pulled(msgspec.Struct, frozen=True):
    """A plan that the store now has; `fetched` says that it had not before."""

    digest: str
    fetched: bool


def pull_digest(digest: str, store: Store, remote: Remote, *, dry_run: bool = False) -> Pulled:
    """Brings a plan alone; without its spec, no action could be checked. Raises StoreError."""
    if _stored(store, digest) is not None:
        return Pulled(digest, False)
    if not dry_run:
        plan = fetch(remote, digest)
        if plan is None:
            where = remote.address.where("objects", digest)
            raise StoreError("no such plan", [Problem(where, "no such object")])
        store.put(plan.encoded)
    return Pulled(digest, True)


def pull_spec(
    spec: Spec, name: str, store: Store, remote: Remote, *, dry_run: bool = False
) -> Pulled:
    """Brings the plan of a spec, called `name` in errors, and its action. Raises StoreError."""
    key = action_key(spec)
    digest = store.lookup(key)
    if digest is not None:
        return Pulled(digest, False)
    plan = fetch_for(spec, key, store, remote)
    if plan is None:
        message = f"the remote store has no plan of its inputs (key {key.digest})"
        raise StoreError("no such plan", [Problem(name, message, "push it from where it is built")])
    if not dry_run:
        store.record(key, store.put(plan.encoded))
    return Pulled(plan.digest, True)


def _stored(store: Store | None, digest: str) -> Plan | None:
    if store is not None:
        with suppress(M2nCompileError):
            return loads(store.get(digest))
    return None
