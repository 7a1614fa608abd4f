"""The inputs that a plan records, against those of a spec; needs neither torch nor engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2ncompile import __version__
from m2ncompile.diff import InputChange, input_changes, input_paths
from m2ncompile.inventory import config_digest, origin_of, read_inventory
from m2ncompile.plan import Plan
from m2ncompile.spec import Spec

__all__ = ["known_inputs", "spec_changes"]


def spec_changes(plan: Plan, spec: Spec) -> tuple[InputChange, ...]:
    """The recorded inputs in which `spec` (from `load_spec`) differs, as far as known here."""
    after = known_inputs(spec)
    before = input_paths(plan.inputs)
    unknown = ["model.architecture"]
    if after["model.origin"] == "config" == before["model.origin"]:
        unknown += ["model.inventory", "model.missing"]
    return input_changes(_without(before, unknown), _without(after, unknown))


def known_inputs(spec: Spec) -> dict[str, Any]:
    """What a plan of `spec` will record, by key path, but for what only an engine knows."""
    model = Path(spec.model.path)
    listing = Path(spec.model.manifest) if spec.model.manifest else model
    known: dict[str, Any] = {
        "compiler": __version__,
        "model.name": spec.model.name,
        "model.config": config_digest(model),
        "model.origin": origin_of(listing),
    }
    if spec.model.exclude:
        known["model.exclude"] = list(spec.model.exclude)
    if known["model.origin"] != "config":
        inventory = read_inventory(listing)
        known["model.inventory"] = inventory.digest
        known |= input_paths({"model": {"missing": list(inventory.missing)}})
    for section in ("engine", "trainer", "resolver", "limits"):
        known |= input_paths({section: getattr(spec, section)})
    return known


def _without(paths: Mapping[str, Any], unknown: list[str]) -> dict[str, Any]:
    return {
        path: value
        for path, value in paths.items()
        if not any(path == one or path.startswith((f"{one}.", f"{one}[")) for one in unknown)
    }
