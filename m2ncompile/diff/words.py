"""A difference in words, for any medium."""

from __future__ import annotations

from typing import Any

import msgspec

from m2ncompile.diff.records import SECTIONS, Difference, Group
from m2ncompile.units import size

__all__ = ["amount_rows", "headline", "input_rows", "notes", "sections", "value_text"]


def headline(difference: Difference) -> str:
    """Whether the program is the same, and what else there is to say in one line."""
    if difference.empty:
        return "same program: the plans are identical"
    count = len(difference.inputs)
    inputs = f"{count} input{'' if count == 1 else 's'} changed" if count else "no input changed"
    if difference.same_program:
        rest = "" if not difference.routes else "; reasons for routes differ"
        return f"same program: {inputs}, and nothing that runs{rest}"
    return f"the program differs: {inputs}"


def input_rows(difference: Difference) -> list[tuple[str, str, str]]:
    return [(one.path, value_text(one.before), value_text(one.after)) for one in difference.inputs]


def value_text(value: Any) -> str:
    """JSON, a digest cut short."""
    if value is None:
        return "-"
    text = msgspec.json.encode(value).decode()
    if isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef"):
        return f"{value[:12]}..."
    return text if len(text) <= 160 else f"{text[:157]}..."


def amount_rows(difference: Difference) -> list[tuple[str, str, str, str]]:
    """Every total: name, before, after, growth."""
    return [
        (
            amount.name,
            _amount(amount.name, amount.before),
            _amount(amount.name, amount.after),
            _growth(amount.before, amount.after),
        )
        for amount in difference.amounts
    ]


def _amount(name: str, value: int) -> str:
    return size(value) if name.endswith("bytes") else f"{value:,}"


def _growth(before: int, after: int) -> str:
    if before == after:
        return ""
    return f"{100 * (after - before) / before:+.1f}%" if before else "new"


def sections(difference: Difference) -> list[tuple[str, tuple[Group, ...]]]:
    """The sections that hold something, with their titles."""
    found = ((title, getattr(difference, name)) for name, title in SECTIONS.items())
    return [(title, groups) for title, groups in found if groups]


def notes(difference: Difference) -> list[str]:
    """What is neither an input nor a group of tensors."""
    found = []
    if difference.formats[0] != difference.formats[1]:
        found.append(f"plan format {difference.formats[0]} -> {difference.formats[1]}")
    found += [
        f"collectives of {stacks.size} tensor{'' if stacks.size == 1 else 's'}: "
        f"{stacks.before:,} -> {stacks.after:,}"
        for stacks in difference.stacks
    ]
    if difference.reordered:
        found.append("tensors of both plans are sent in another order")
    if not difference.same_program and not (
        found
        or sections(difference)
        or any(a.before != a.after for a in difference.amounts)
        or difference.inputs
    ):
        found.append("only the order or the form of records differs")
    return found
