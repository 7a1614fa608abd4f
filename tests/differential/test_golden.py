"""The checked-in plans, byte for byte: what a change to the compiler changes shows up as a diff.

After a wanted change: `make golden`, and read the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from m2ncompile.compile.pipeline import build_plan
from m2ncompile.plan_check import load
from m2ncompile.spec import load_spec

PLANS = Path(__file__).parents[2] / "plans"
SPECS = sorted(PLANS.glob("*.toml"))


@pytest.mark.engine
@pytest.mark.parametrize("spec", SPECS, ids=lambda path: path.stem)
def test_rebuilds_to_the_same_bytes(spec: Path) -> None:
    golden = spec.with_suffix(".plan.json")
    assert build_plan(load_spec(spec)).encoded == golden.read_bytes()


@pytest.mark.parametrize("spec", SPECS, ids=lambda path: path.stem)
def test_checked_in_plans_are_sound(spec: Path) -> None:
    assert load(spec.with_suffix(".plan.json")).inputs.model.name == spec_model(spec)


def spec_model(spec: Path) -> str | None:
    return load_spec(spec).model.name


def test_every_plan_has_its_spec() -> None:
    assert {p.name.removesuffix(".plan.json") for p in PLANS.glob("*.plan.json")} == {
        spec.stem for spec in SPECS
    }
