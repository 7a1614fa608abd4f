"""A difference as a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from m2ncompile.diff.gates import Trip
from m2ncompile.diff.records import Difference, Group
from m2ncompile.diff.words import amount_rows, headline, input_rows, notes, sections
from m2ncompile.units import size

__all__ = ["markdown"]

#: GitHub refuses a comment of over 65,536 characters: rows a table, characters a cell.
_ROWS = 12
_CELL = 160


def markdown(difference: Difference, trips: Sequence[Trip] = ()) -> str:
    """GitHub's Markdown; the first line says whether the program is the same."""
    title = headline(difference)
    lines = [f"**{title[0].upper()}{title[1:]}** ({_code(difference.model)})", ""]
    if trips:
        lines += ["Gates that do not hold:", ""]
        lines += [f"- {_code(trip.gate)}: {_plain(trip.message)}" for trip in trips]
        lines.append("")
    if difference.empty:
        return "\n".join(lines)
    if difference.inputs:
        lines += _table(
            ("input", "before", "after"),
            ([_code(path), _code(a), _code(b)] for path, a, b in input_rows(difference)),
            len(difference.inputs),
        )
    lines += _table(
        ("", "before", "after", "change"),
        ([name, a, b, change] for name, a, b, change in amount_rows(difference)),
        len(difference.amounts),
    )
    for note in notes(difference):
        lines.append(f"- {_plain(note)}")
    if lines[-1]:
        lines.append("")
    for section, groups in sections(difference):
        lines += ["<details>", f"<summary>{section}: {_total(groups)}</summary>", ""]
        lines += _table(
            ("tensors", "count", "bytes", "before", "after"),
            (
                [_code(g.name), f"{g.tensors:,}", size(g.nbytes), _text(g.before), _text(g.after)]
                for g in groups
            ),
            len(groups),
        )
        lines += ["</details>", ""]
    for reason in difference.reasons[:_ROWS]:
        lines.append(f"- {_code(reason.code)}: {_plain(reason.text)}")
    if difference.reasons:
        lines.append("")
    lines.append(
        f"Plan {_code(difference.plans[0][:12])} to {_code(difference.plans[1][:12])}, program "
        f"{_code(difference.programs[0][:12])} to {_code(difference.programs[1][:12])}."
    )
    return "\n".join(lines)


def _total(groups: Iterable[Group]) -> str:
    count = sum(group.tensors for group in groups)
    return f"{count:,} tensor{'' if count == 1 else 's'}"


def _table(head: Sequence[str], rows: Iterable[list[str]], count: int) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for number, row in enumerate(rows):
        if number == _ROWS and count > _ROWS + 1:
            lines += ["", f"... and {count - _ROWS} more"]
            break
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, ""]


def _text(text: str | None) -> str:
    return "" if text is None else _plain(text)


def _code(text: str) -> str:
    """A code span: nothing in it means anything, a table's bar included."""
    return f"`{_line(text).replace('`', chr(39)).replace('|', chr(92) + '|') or ' '}`"


def _plain(text: str) -> str:
    """Text that is only text."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|~@!" else c for c in _line(text))


def _line(text: str) -> str:
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= _CELL else f"{line[: _CELL - 3]}..."
