"""Gates: what may change at most.

A list of gates is `GATE,GATE,...`. A gate is the name of a flag, or of an amount
with how much it may grow: `fallback-bytes+1%`, `wire-bytes+100M`, `collectives`
(not at all). Bytes may end in K, M or G, decimal. `docs/ci.md` lists the names.
"""

from __future__ import annotations

import re
from fractions import Fraction

import msgspec

from m2ncompile.diff.records import Difference
from m2ncompile.errors import PlanError, Problems, nearest

__all__ = ["AMOUNTS", "FLAGS", "Gate", "Trip", "parse_gates", "tripped"]

#: Totals of a `Difference` that may be bounded.
AMOUNTS = (
    "fallback-bytes",
    "reload-bytes",
    "direct-bytes",
    "wire-bytes",
    "staging-bytes",
    "model-bytes",
    "collectives",
    "tensors",
)
FLAGS = {
    "program": "what runs differs",
    "new-fallback": "a tensor falls back that did not before",
    "inputs": "an input differs",
    "format": "the plan format differs",
}
_GATE = re.compile(r"([a-z-]+)(?:\+(\d{1,15}(?:\.\d{1,6})?)([KMG%]?))?")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


class Gate(msgspec.Struct, frozen=True):
    """`text` as written; an amount may grow by `growth` times its first value, plus `more`."""

    text: str
    name: str
    growth: Fraction = Fraction(0)
    more: Fraction = Fraction(0)


class Trip(msgspec.Struct, frozen=True):
    """A gate that does not hold, and why."""

    gate: str
    message: str


def parse_gates(text: str) -> tuple[Gate, ...]:
    """Raises PlanError listing every gate that is not known or not well-formed."""
    problems = Problems()
    gates = []
    for part in (part.strip() for part in text.split(",")):
        match = _GATE.fullmatch(part)
        name = re.match(r"[^+]*", part)[0] if part else ""  # type: ignore[index]
        if name not in AMOUNTS and name not in FLAGS:
            close = nearest(name, (*AMOUNTS, *FLAGS))
            problems.add(
                f'"{part}"',
                f"no such gate; known: {', '.join((*AMOUNTS, *FLAGS))}",
                f'did you mean "{close}"?' if close else None,
            )
        elif match is None or (name in FLAGS and match[2] is not None):
            expected = (
                f'"{name}" by itself'
                if name in FLAGS
                else f'"{name}", "{name}+1%", "{name}+100" or "{name}+1.5M"'
            )
            problems.add(f'"{part}"', f"expected {expected}")
        elif match[3] == "%":
            gates.append(Gate(part, name, growth=Fraction(match[2]) / 100))
        else:
            more = Fraction(match[2] or 0) * _UNITS[match[3] or ""]
            gates.append(Gate(part, name, more=more))
    problems.raise_if_any(PlanError, "--fail-on is not a list of gates")
    return tuple(gates)


def tripped(difference: Difference, gates: tuple[Gate, ...]) -> tuple[Trip, ...]:
    """The gates that do not hold, in their order."""
    return tuple(
        Trip(gate.text, why) for gate in gates if (why := _why(difference, gate)) is not None
    )


def _why(difference: Difference, gate: Gate) -> str | None:
    if gate.name in AMOUNTS:
        amount = difference.amount(gate.name)
        allowed = amount.before * (1 + gate.growth) + gate.more
        if amount.after <= allowed:
            return None
        grown = amount.after - amount.before
        share = f" ({100 * grown / amount.before:+.2f}%)" if amount.before else ""
        return f"{gate.name} grew from {amount.before:,} to {amount.after:,}{share}"
    if gate.name == "new-fallback":
        count = sum(group.tensors for group in difference.new_fallback)
        if not count:
            return None
        names = ", ".join(group.name for group in difference.new_fallback[:3])
        rest = ", ..." if len(difference.new_fallback) > 3 else ""
        return f"{count:,} tensors fall back that did not before: {names}{rest}"
    holds = {
        "program": difference.same_program,
        "inputs": not difference.inputs,
        "format": difference.formats[0] == difference.formats[1],
    }
    return None if holds[gate.name] else FLAGS[gate.name]
