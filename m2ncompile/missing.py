"""Why the store does not have a plan, in words: against the nearest plan that it has."""

from __future__ import annotations

import msgspec

from m2ncompile.build import action_key
from m2ncompile.diff import InputChange
from m2ncompile.errors import M2nCompileError
from m2ncompile.inputs import spec_changes
from m2ncompile.plan_check import loads
from m2ncompile.spec import Spec
from m2ncompile.store import Change, Miss, Store

__all__ = ["Explanation", "describe", "explain_lookup"]

#: What the components of a key stand for.
_COMPONENTS = {
    "spec": "the spec",
    "config": "the model's config.json",
    "tensors": "the list of tensors, or what it is read with",
    "compiler": "m2ncompile's own code",
}


class Explanation(msgspec.Struct, frozen=True):
    """`changes` are the key's components that differ from the nearest entry's.

    `plan` is that entry's plan, None where the store lost it; `inputs` are the recorded inputs in
    which it differs from the spec.
    """

    changes: tuple[Change, ...]
    plan: str | None
    inputs: tuple[InputChange, ...]

    @property
    def lines(self) -> list[str]:
        """One a component, with the inputs that it stands for where they are known."""
        if not self.changes:
            return ["these very inputs were built before; the plan was removed or damaged"]
        found = []
        for change in self.changes:
            if change.name in _COMPONENTS:
                text = f"{change.name} changed ({_COMPONENTS[change.name]})"
            else:
                text = f"{change.name} changed: {change.before} -> {change.now}"
            found.append(text)
            if change.name == "spec":
                found += [
                    f"  {one.path}: {_value(one.before)} -> {_value(one.after)}"
                    for one in self.inputs
                    if not one.path.startswith(("compiler", "model.config", "model.inventory"))
                ]
        return found


def explain_lookup(spec: Spec, store: Store) -> tuple[str | None, Explanation | None]:
    """The digest of the stored plan of `spec`; else why there is none, if any other is stored."""
    key = action_key(spec)
    digest = store.lookup(key)
    if digest is not None:
        return digest, None
    miss = store.explain(key)
    return None, None if miss is None else describe(miss, spec, store)


def describe(miss: Miss, spec: Spec, store: Store) -> Explanation:
    """A miss with the inputs by name, as far as the nearest plan tells."""
    try:
        digest = store.lookup(miss.nearest)
        if digest is None:
            return Explanation(miss.changes, None, ())
        plan = loads(store.get(digest), str(store.path(digest)))
        return Explanation(miss.changes, digest, spec_changes(plan, spec))
    except M2nCompileError:
        return Explanation(miss.changes, None, ())


def _value(value: object) -> str:
    return "absent" if value is None else msgspec.json.encode(value).decode()
