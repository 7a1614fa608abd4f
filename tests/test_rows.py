"""Stacks by rows: which they are, and that a plan can say no others."""

from __future__ import annotations

from math import prod

import pytest
from msgspec.structs import replace

from m2ncompile.compile.assemble import assemble
from m2ncompile.compile.rows import by_rows
from m2ncompile.errors import PlanError
from m2ncompile.inventory import TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Mesh, local_shape
from m2ncompile.legs import legs_of
from m2ncompile.plan import Plan, PlanPart, PlanTransfer
from m2ncompile.plan_check import check
from m2ncompile.routes import Destination, Landing, Param, Reason, Route, Wire
from m2ncompile.stacking import Rows, rows_of, stacked
from tests.plans import make_inputs
from tests.runtime.test_run_local import Run

SHAPE = (8, 12)


def layout(kind: str, ranks: range) -> Layout:
    """All of it, or its rows or columns over all or (`pairs`) over groups that hold the same."""
    if kind == "whole":
        return Layout(Mesh((len(ranks), 1), ranks.start), None)
    groups = 2 if kind.endswith("pairs") else 1
    mesh = Mesh((groups, len(ranks) // groups), ranks.start)
    return Layout(mesh, (REPLICATE, 0 if kind.startswith("rows") else 1))


def make_plan(
    source: Layout,
    where: list[Layout],
    route: Route = "direct",
    dims: tuple[tuple[int, int], ...] | None = None,
    together: bool = True,
    shape: tuple[int, ...] = SHAPE,
) -> Plan:
    """A tensor to each of `where`, all as one stack; side by side in one parameter (`together`)."""
    infos, destinations = [], []
    for index, layout in enumerate(where):
        infos.append(TensorInfo(f"t{index}.w", "bfloat16", shape))
        local = local_shape(layout, shape)
        numel = prod(local)
        reach = 1 + sum((n - 1) * step for n, step in dims or ((numel, 1),))
        if together:
            param, start = Param("all.w", "bfloat16", (len(where) * reach,)), index * reach
        else:
            param, start = Param(f"p{index}.w", "bfloat16", (reach,)), 0
        landing = Landing(param, (start,), dims or ((numel, 1),))
        wire = Wire(0, shape, source)
        destinations.append(Destination(index, wire, route, layout, landing, None))
    inputs = make_inputs(
        trainers=source.mesh.size, tp=max(one.mesh.ranks.stop for one in where) - source.mesh.size
    )
    transfers = by_rows(destinations, [PlanTransfer(tuple(range(len(where))))])
    return assemble(inputs, infos, [source] * len(infos), destinations, transfers)


def one_rank(rank: int) -> Layout:
    return Layout(Mesh((1, 1), rank), None)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("sent", "trainers"),
    [("whole", 1), ("whole", 2), ("rows", 1), ("rows", 2), ("rows", 4), ("rows pairs", 4)],
)
@pytest.mark.parametrize("lands", ["whole", "rows", "columns", "rows pairs", "columns pairs"])
def test_every_rank_gets_its_shards(lands: str, sent: str, trainers: int, together: bool) -> None:
    source = layout(sent, range(trainers))
    target = layout(lands, range(trainers, trainers + 4))
    plan = make_plan(source, [target] * 3, together=together)
    # Whole members to whole members are one run of memory as they are.
    whole = sent == "whole" or source.split == (0, 1)
    assert plan.transfers[0].by_rows == (not (whole and lands == "whole"))
    Run(plan).check_syncs((1, 2))


@pytest.mark.parametrize("sent", ["whole", "rows"])
@pytest.mark.parametrize(
    ("lands", "dims"),
    [("whole", None), ("rows", None), ("columns", None), ("columns", ((8, 10), (3, 1)))],
)
def test_one_alone(lands: str, sent: str, dims: tuple[tuple[int, int], ...] | None) -> None:
    """From rows, or all of it, to columns: packed for who gets it, received where it goes."""
    plan = make_plan(layout(sent, range(2)), [layout(lands, range(2, 6))], dims=dims)
    assert plan.transfers[0].by_rows == (lands == "columns")
    assert (plan.staging[0].packed > 0) == (lands == "columns")
    assert (plan.staging[2].unpacked > 0) == (dims is not None)
    Run(plan).check_syncs((1, 2))


@pytest.mark.parametrize("sent", ["whole", "rows"])
@pytest.mark.parametrize("each", [1, 3])
def test_members_of_consecutive_ranks(sent: str, each: int) -> None:
    source = layout(sent, range(2))
    plan = make_plan(source, [one_rank(2 + index // each) for index in range(4 * each)])
    assert plan.transfers[0].by_rows == (sent == "rows")
    Run(plan).check_syncs((1, 2))


@pytest.mark.parametrize(
    ("dims", "rows"),
    [
        (((8, 6), (6, 1)), True),
        (((8, 10), (6, 1)), True),  # rows with gaps
        (((2, 40), (4, 8), (6, 1)), True),  # in two groups
        (((48, 2),), True),  # every other element
        (((8, 1), (6, 8)), True),  # transposed
        (((3, 16), (16, 1)), False),  # runs that are no rows
    ],
)
def test_however_rows_lie_in_the_parameter(dims: tuple[tuple[int, int], ...], rows: bool) -> None:
    source, target = layout("rows", range(2)), layout("columns", range(2, 4))
    plan = make_plan(source, [target] * 3, dims=dims)
    assert plan.transfers[0].by_rows == rows
    Run(plan).check_syncs((1, 2))


def test_one_run_of_memory_between_any_two_ranks() -> None:
    """What makes it worth while: no rank's shard is cut inside of another's rows."""
    source = layout("rows", range(2))
    for lands, shape, first in (
        ("whole", (8, 36), None),
        ("rows", (8, 36), 0),
        ("columns", (4, 8, 9), 0),
    ):
        plan = make_plan(source, [layout(lands, range(2, 6))] * 3)
        (leg,) = legs_of(plan)
        assert leg.shape == shape
        assert leg.destination.split == (None if first is None else (0, 4))
        assert leg.source.split == (len(shape) - 2, 2)


def test_sharded_columns_are_no_rows() -> None:
    source = layout("columns", range(2))
    plan = make_plan(source, [layout("rows", range(2, 4))] * 3)
    assert not plan.transfers[0].by_rows
    with pytest.raises(ValueError, match="not sent by rows"):
        rows_of(SHAPE, source, [layout("rows", range(2, 4))] * 3)


def test_vectors_are_no_rows() -> None:
    plan = make_plan(layout("rows", range(2)), [layout("whole", range(2, 4))] * 3, shape=(8,))
    assert not plan.transfers[0].by_rows


def test_forms_say_what_a_block_has() -> None:
    source = layout("rows", range(2))
    assert rows_of(SHAPE, source, [layout("rows", range(2, 6))] * 2) == Rows(1)
    assert rows_of(SHAPE, source, [layout("columns", range(2, 6))] * 2) == Rows(4, cut=True)
    assert rows_of(SHAPE, source, [one_rank(2), one_rank(3)]) == Rows(2)
    with pytest.raises(ValueError, match="consecutive ranks"):
        rows_of(SHAPE, source, [one_rank(3), one_rank(2)])


def test_one_shard_is_said_as_a_copy() -> None:
    """NCCL M2N gathers what is sharded, be it over one rank."""
    stack = stacked(SHAPE, layout("rows", range(1)), [layout("columns", range(1, 2))] * 2)
    assert (stack.source.placements, stack.destination.placements) == (None, None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda plan: [PlanTransfer((0,), None, True), PlanTransfer((1, 2))],
            "its wires are not sent by rows",
        ),
        (
            lambda plan: [PlanTransfer((0, 1, 2), None, True)],
            "its wires are not sent by rows",
        ),
    ],
)
def test_a_plan_that_can_not_go_by_rows_is_refused(change: object, says: str) -> None:
    plan = make_plan(layout("columns", range(2)), [layout("rows", range(2, 4))] * 3)
    assert callable(change)
    broken = replace(plan, transfers=tuple(change(plan)))
    with pytest.raises(PlanError, match=says):
        check(broken)


def test_a_part_by_rows_is_refused() -> None:
    plan = make_plan(layout("rows", range(2)), [layout("columns", range(2, 4))])
    parts = tuple(PlanTransfer((0,), PlanPart(0, start, 4), True) for start in (0, 4))
    with pytest.raises(PlanError, match="a part does not go by rows"):
        check(replace(plan, transfers=parts))


def test_what_falls_back_by_rows_is_refused() -> None:
    plan = make_plan(layout("rows", range(2)), [layout("whole", range(2, 4))] * 3)
    fallen = tuple(
        replace(d, route="fallback", landing=None, offset=None, reason=0) for d in plan.destinations
    )
    reasons = (Reason("test", "for the test"),)
    with pytest.raises(PlanError, match="what falls back does not go by rows"):
        check(replace(plan, destinations=fallen, reasons=reasons, params=(), landings=()))


def test_a_plan_whose_landings_have_no_rows_is_refused() -> None:
    dims = ((3, 16), (16, 1))
    plan = make_plan(layout("rows", range(2)), [layout("columns", range(2, 4))] * 3, dims=dims)
    broken = replace(plan, transfers=(PlanTransfer((0, 1, 2), None, True),))
    with pytest.raises(PlanError, match="do not lie by rows"):
        check(broken)


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        (((0, 1), (48, 1)), "a dim has 0 elements"),
        (((-8, 6), (6, 1)), "a dim has -8 elements"),
        ((), "its dims hold too little"),
    ],
)
def test_landings_that_are_none_are_refused(dims: tuple[tuple[int, int], ...], says: str) -> None:
    plan = make_plan(layout("rows", range(2)), [layout("columns", range(2, 4))] * 3)
    broken = replace(plan, landings=(replace(plan.landings[0], dims=dims),))
    with pytest.raises(PlanError, match=says):
        check(broken)


@pytest.mark.parametrize("shape", [(), (8,), (2, 4, 12)])
def test_what_is_no_matrix_does_not_go_by_rows(shape: tuple[int, ...]) -> None:
    plan = make_plan(layout("whole", range(2)), [layout("whole", range(2, 4))] * 3)
    other = (*plan.geometries, replace(plan.geometries[0], shape=shape))
    wires = tuple(replace(wire, geometry=len(other) - 1) for wire in plan.wires)
    together = (PlanTransfer((0, 1, 2), None, True),)
    with pytest.raises(PlanError, match="only matrices go by rows"):
        check(replace(plan, geometries=other, wires=wires, transfers=together))
