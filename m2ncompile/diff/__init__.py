"""Two plans compared: what changed in what was asked for, and in what runs."""

from m2ncompile.diff.compare import check_comparable, compare, marks
from m2ncompile.diff.gates import Gate, Trip, parse_gates, tripped
from m2ncompile.diff.inputs import input_changes, input_paths
from m2ncompile.diff.markdown import markdown
from m2ncompile.diff.records import Amount, Difference, Group, InputChange, Stacks

__all__ = [
    "Amount",
    "Difference",
    "Gate",
    "Group",
    "InputChange",
    "Stacks",
    "Trip",
    "check_comparable",
    "compare",
    "input_changes",
    "input_paths",
    "markdown",
    "marks",
    "parse_gates",
    "tripped",
]
