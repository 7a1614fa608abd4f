"""Plans that are checked in beside their specs: whether they are still what the specs say.

`check_locked` builds again and compares. `check_frozen` needs no engine, and
compares all that a plan records and that can be known without one.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import msgspec

from m2ncompile.build import Trouble, build, tolerated
from m2ncompile.diff import Difference, InputChange, compare
from m2ncompile.errors import CheckError, PlanError, Problem
from m2ncompile.inputs import spec_changes
from m2ncompile.opening import is_there
from m2ncompile.plan import Plan
from m2ncompile.plan_check import load
from m2ncompile.progress import Progress
from m2ncompile.remote import Remote
from m2ncompile.spec import load_spec
from m2ncompile.store import Store

__all__ = [
    "Frozen",
    "check_frozen",
    "check_locked",
    "plan_beside",
    "stale_error",
]


class Frozen(msgspec.Struct, frozen=True):
    """A checked-in plan; `changes` are the inputs in which its spec differs by now."""

    plan: Plan
    changes: tuple[InputChange, ...]


def plan_beside(spec: Path, output: Path | None, several: bool) -> Path:
    """Where the plan of `spec` is kept: `output`, a file or a folder, else beside the spec."""
    name = f"{spec.stem}.plan.json"
    if output is None:
        return spec.with_name(name)
    into_folder = several or os.path.isdir(output) or not (output.suffix or os.path.exists(output))
    return output / name if into_folder else output


def check_locked(
    spec: Path,
    plan: Path,
    store: Store | None,
    progress: Progress,
    *,
    remote: Remote | None = None,
    trouble: Trouble = tolerated,
) -> Difference | None:
    """None where building `spec` gives the plan file to the byte; else what differs.

    Reads `store` and `remote` as `build` does, and writes nothing. Raises an M2nCompileError for
    a plan that can't be read and a spec that can't be built.
    """
    before = _checked_in(spec, plan)
    after = build(spec, store, progress, record=False, remote=remote, trouble=trouble).plan
    return None if before.encoded == after.encoded else compare(before, after)


def check_frozen(spec: Path, plan: Path) -> Frozen:
    """The plan file, and where it no longer fits `spec`; needs neither torch nor engine.

    What only an engine knows stays unchecked: its class of the model, and the list of tensors
    where that follows from the config (which is checked). Raises an M2nCompileError for a plan
    or a spec that can't be read.
    """
    checked_in = _checked_in(spec, plan)
    return Frozen(checked_in, spec_changes(checked_in, load_spec(spec)))


def stale_error(spec: Path, plan: Path, changes: tuple[InputChange, ...], what: str) -> CheckError:
    """The error for a plan that is not what its spec says, naming each input that differs."""
    rebuild = f"rebuild it: {_build_command(spec, plan)}"
    problems = [
        Problem(change.path, f"{_shown(change.before)} in the plan, {_shown(change.after)} now")
        for change in changes
    ]
    if not problems:
        problems = [
            Problem(
                "inputs",
                "none that a plan records differs; the code of m2ncompile, of the engine, of "
                "torch or of transformers does",
            )
        ]
    last = problems.pop()
    problems.append(Problem(last.where, last.message, rebuild))
    return CheckError(f"{plan}: stale: {what}", problems)


def _checked_in(spec: Path, plan: Path) -> Plan:
    if not is_there(plan):
        raise PlanError(
            f"{plan}: there is no plan for {spec}. Build it: {_build_command(spec, plan)}"
        )
    return load(plan)


def _build_command(spec: Path, plan: Path) -> str:
    return shlex.join(["m2ncompile", "build", str(spec), "-o", str(plan)])


def _shown(value: Any) -> str:
    return "absent" if value is None else msgspec.json.encode(value).decode()
