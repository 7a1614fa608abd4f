"""`m2ncompile diff`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from m2ncompile.build import build
from m2ncompile.cli.common import (
    CacheOption,
    JsonOption,
    RemoteOption,
    cache_trouble,
    console,
    naming,
    print_json,
    remote_at,
    size,
    store_at,
)
from m2ncompile.cli.progress import progress_bar
from m2ncompile.errors import CheckError, Problem
from m2ncompile.opening import open_plan

if TYPE_CHECKING:
    from m2ncompile.diff import Difference, Trip
    from m2ncompile.plan import Plan

__all__ = ["diff_command", "print_difference"]

_SIDE = "A plan file, a URL, the start of a digest in the store, or a spec (.toml)."


def diff_command(
    before: Annotated[str, typer.Argument(metavar="A", help=_SIDE)],
    after: Annotated[str, typer.Argument(metavar="B", help=_SIDE)],
    fail_on: Annotated[
        str | None,
        typer.Option(
            help="Gates, such as fallback-bytes+1%,new-fallback: exit 1 only if one does not hold."
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a comment for a pull request.")
    ] = False,
    cache: CacheOption = None,
    remote: RemoteOption = None,
    json: JsonOption = False,
) -> None:
    """Say what changed between two plans, first of all whether they run the same program.

    A spec stands for its plan: from the store, or built now. Exit codes: 0 the program is the
    same (with --fail-on: all gates hold), 1 it differs (a gate does not hold), 2 bad input.
    """
    from m2ncompile.diff import check_comparable, compare, parse_gates, tripped
    from m2ncompile.diff import markdown as as_markdown

    if json and markdown:
        raise typer.BadParameter("--json and --markdown exclude each other")
    gates = None if fail_on is None else parse_gates(fail_on)
    one, other = (_plan(reference, cache, remote) for reference in (before, after))
    check_comparable(one, other)
    difference = compare(one, other)
    trips = tripped(difference, gates or ())
    if json:
        trip_records = None if gates is None else msgspec.to_builtins(trips)
        content = {**msgspec.to_builtins(difference), "tripped": trip_records}
        print_json("m2ncompile.diff/1", content)
    elif markdown:
        print(as_markdown(difference, trips))
    else:
        print_difference(difference, trips)
    if trips:
        problems = [Problem(trip.gate, trip.message) for trip in trips]
        raise CheckError(f"{other.inputs.model.name}: gates do not hold", problems)
    if gates is None and not difference.same_program:
        raise typer.Exit(1)


def _plan(reference: str, cache: Path | None, remote: str | None) -> Plan:
    if not reference.endswith(".toml") or "://" in reference:
        return open_plan(reference, cache, remote)
    spec = Path(reference)
    with naming(spec), progress_bar(spec.name) as progress:
        built = build(
            spec,
            store_at(cache),
            progress,
            remote=remote_at(remote),
            trouble=cache_trouble(required=False),
        )
    return built.plan


def print_difference(difference: Difference, trips: Sequence[Trip] = ()) -> None:
    from rich.table import Table
    from rich.text import Text

    from m2ncompile.diff.words import amount_rows, headline, input_rows, notes, sections

    out = console()

    def table(title: str, rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
        grid = Table(box=None, pad_edge=False, show_header=False)
        for column in range(len(rows[0])):
            grid.add_column(
                justify="right" if column in right else "left",
                overflow="fold",
                no_wrap=column in right,
            )
        for row in rows:
            grid.add_row(*(Text(_line(cell)) for cell in row))
        out.print()
        out.print(Text(title, style="bold"))
        out.print(grid)

    out.print(Text(headline(difference), style="bold"))
    plans, programs = (
        " -> ".join(digest[:12] for digest in pair)
        for pair in (difference.plans, difference.programs)
    )
    out.print(f"{_line(difference.model)}: plan {plans}, program {programs}")
    if difference.inputs:
        table("inputs", [("  " + path, a, "->", b) for path, a, b in input_rows(difference)])
    changed = [row for row in amount_rows(difference) if row[3]]
    if changed:
        table("amounts", [("  " + n, a, "->", b, c) for n, a, b, c in changed], (1, 3, 4))
    before, after = difference.wire_bytes_per_worker
    if before != after and len(set(before) | set(after)) > 2:
        rows = [
            (
                f"  worker {rank}",
                *(size(s[rank]) if rank < len(s) else "-" for s in (before, after)),
            )
            for rank in range(max(len(before), len(after)))
        ]
        table("wire bytes", [(name, a, "->", b) for name, a, b in rows[:16]], (1, 3))
        if len(rows) > 16:
            out.print(f"  ... and {len(rows) - 16} more workers")
    for note in notes(difference):
        out.print()
        out.print(note)
    for title, groups in sections(difference):
        table(
            title,
            [
                (
                    f"  {group.name}",
                    f"x{group.tensors}",
                    size(group.nbytes),
                    group.before or "",
                    "->" if group.before and group.after else "",
                    group.after or "",
                )
                for group in groups
            ],
            (1, 2),
        )
    if difference.reasons:
        table("reasons", [(f"  {reason.code}", reason.text) for reason in difference.reasons])
    for trip in trips:
        out.print(f"\ngate {trip.gate}: {trip.message}")


def _line(text: str) -> str:
    """One line, whatever a plan calls its tensors."""
    return "".join(c if c.isprintable() else "?" for c in text)
