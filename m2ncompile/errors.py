"""What goes wrong, said once and in full.

Every error a user can cause is an `M2nCompileError`: a title, then one line per
`Problem`. Stages collect problems and raise them together, so that one run
shows all there is to mend. The command line prints the text and exits with
`exit_code`; it never prints a traceback for one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import msgspec

from m2ncompile.families import families, numberless

__all__ = [
    "BindError",
    "CheckError",
    "EngineError",
    "InventoryError",
    "LayoutError",
    "M2nCompileError",
    "PlanError",
    "Problem",
    "Problems",
    "RunError",
    "SpecError",
    "StoreError",
    "WireError",
    "nearest",
]


class Problem(msgspec.Struct, frozen=True):
    """One violation.

    `where` names the file, key path, tensor or rank; `message` says what was
    expected and what was got; `fix`, where there is one, what to do.
    """

    where: str
    message: str
    fix: str | None = None

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}"
        return f"{text}\n    {self.fix}" if self.fix else text


class M2nCompileError(Exception):
    """Base of every error that is the input's fault, not the program's."""

    exit_code = 2
    #: Lines shown; the rest are counted. `problems` has them all.
    shown = 20

    def __init__(self, title: str, problems: Iterable[Problem] = ()) -> None:
        self.title = title
        self.problems = tuple(problems)
        super().__init__(title)

    def __reduce__(self) -> tuple[type[M2nCompileError], tuple[str, tuple[Problem, ...]]]:
        return type(self), (self.title, self.problems)  # whole across processes

    def __str__(self) -> str:
        # A wrong rule on 46,000 tensors is a few lines: alike but for layer numbers.
        alike = families(
            self.problems,
            name=lambda problem: problem.where,
            same=lambda problem: (numberless(problem.message), numberless(problem.fix or "")),
        )
        lines = [self.title]
        for where, group in alike[: self.shown]:
            count = f" ({len(group)} of them)" if len(group) > 1 else ""
            lines.append(f"  {Problem(where + count, group[0].message, group[0].fix)}")
        if len(alike) > self.shown:
            lines.append(f"  ... and {len(alike) - self.shown} more")
        return "\n".join(lines)


class SpecError(M2nCompileError):
    """The spec can't be read or says something impossible."""


class InventoryError(M2nCompileError):
    """The checkpoint, config or manifest can't be read or contradicts itself."""


class LayoutError(M2nCompileError):
    """A layout does not fit its tensor or is more than the transport can say."""


class WireError(M2nCompileError):
    """A wire record is malformed."""


class EngineError(M2nCompileError):
    """The inference engine is absent, unsupported, or refuses the model."""


class PlanError(M2nCompileError):
    """A plan file is damaged, of another format, or inconsistent."""


class StoreError(M2nCompileError):
    """The store can't be read or written."""


class CheckError(M2nCompileError):
    """A check that was asked for ran, and failed."""

    exit_code = 1


class BindError(M2nCompileError):
    """The live process does not hold what the plan assumes."""


class RunError(M2nCompileError):
    """Ranks do not agree, or a sync failed.

    `agreed` says that every rank that still answers raises the same.
    """

    exit_code = 1
    agreed = False


class Problems:
    """Collects problems, then raises them together."""

    def __init__(self) -> None:
        self._items: list[Problem] = []

    def __bool__(self) -> bool:
        return bool(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, where: str, message: str, fix: str | None = None) -> None:
        self._items.append(Problem(where, message, fix))

    def extend(self, problems: Iterable[Problem]) -> None:
        self._items.extend(problems)

    def raise_if_any(self, error: type[M2nCompileError], title: str) -> None:
        if self._items:
            raise error(title, self._items)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The entry of `known` most like `word`, or None when none comes close."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return match[0] if match else None
