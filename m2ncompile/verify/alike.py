"""Whether a plan and its reduced form treat tensors alike, family by family.

What is shown for the reduced plan holds for the other only where both move a tensor
by the same route, for the same reason, between the same layouts.
"""

from __future__ import annotations

import msgspec

from m2ncompile.errors import Problem
from m2ncompile.families import families
from m2ncompile.layout import REPLICATE, Layout
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of

__all__ = ["Unchecked", "compare_treatments"]


class Unchecked(msgspec.Struct, frozen=True):
    """Tensors of the plan that the reduced one says nothing of, and why."""

    name: str
    tensors: int
    why: str


class _Treatment(msgspec.Struct, frozen=True):
    """`held` is how the tensor lies on the trainer, `source` how the part that is sent does."""

    held: Layout
    route: str
    reason: str | None
    whole: bool
    source: Layout
    destination: Layout

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        part = "" if self.whole else "a part of it "
        return f"{self.route}{reason}: {part}from {_text(self.source)} to {_text(self.destination)}"


class _Item(msgspec.Struct, frozen=True):
    """One destination of either plan; `treatment` is a place in a table of both."""

    name: str
    reduced: bool
    treatment: int


def compare_treatments(plan: Plan, reduced: Plan) -> tuple[list[Unchecked], list[Problem]]:
    """What only `plan` has, and treatments that only one of the two has of a family.

    Tensors that no tensor of their family lies on the reduced trainer alike with (a
    rule for one layer) are not checked; all others must find their like.
    """
    unchecked, problems = [], []
    table: dict[_Treatment, int] = {}
    items = [*_items(plan, False, table), *_items(reduced, True, table)]
    treatments = tuple(table)
    for _, family in families(items, name=lambda i: i.name, same=lambda i: None):
        held = {
            side: {treatments[i.treatment].held for i in family if i.reduced is side}
            for side in (False, True)
        }
        for name, alike in families(family, name=lambda i: i.name, same=lambda i: i.treatment):
            if len({item.reduced for item in alike}) == 2:
                continue
            side, how = alike[0].reduced, treatments[alike[0].treatment]
            if how.held in held[not side]:
                which = "its reduced form" if side else "the plan"
                problems.append(Problem(name, f"only {which} moves it as {how}"))
            elif not side:
                why = (
                    f"no tensor of this family lies on the reduced trainer as {_text(how.held)}"
                    if held[True]
                    else "the reduced model, listed from its config, has no tensor of this name"
                )
                unchecked.append(Unchecked(name, len({item.name for item in alike}), why))
    return unchecked, problems


def _items(plan: Plan, reduced: bool, table: dict[_Treatment, int]) -> list[_Item]:
    layouts = layouts_of(plan)
    known: dict[tuple[object, ...], int] = {}
    items = []
    for d in plan.destinations:
        tensor, wire = plan.tensors[d.tensor], plan.wires[d.wire]
        key = (d.route, d.reason, d.wire, d.layout, tensor.geometry, tensor.source)
        if key not in known:
            treatment = _Treatment(
                held=layouts[tensor.source],
                route=d.route,
                reason=None if d.reason is None else plan.reasons[d.reason].code,
                whole=(wire.base, wire.geometry) == (0, tensor.geometry),
                source=layouts[wire.source],
                destination=layouts[d.layout],
            )
            known[key] = table.setdefault(treatment, len(table))
        items.append(_Item(tensor.name, reduced, known[key]))
    return items


def _text(layout: Layout) -> str:
    ranks = layout.mesh.ranks
    where = f"ranks [{ranks.start}, {ranks.stop})"
    if layout.placements is None:
        return f"{where}, whole"
    codes = ("copies" if code == REPLICATE else f"dim {code}" for code in layout.placements)
    axes = zip(layout.mesh.dims, codes, strict=True)
    return f"{where} as " + " x ".join(f"{size} ({code})" for size, code in axes)
