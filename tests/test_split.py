"""What is too large to be staged goes in parts."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.compile.assemble import assemble
from m2ncompile.compile.split import split
from m2ncompile.dtypes import nbytes
from m2ncompile.errors import PlanError
from m2ncompile.inventory import TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Limits, Mesh, local_shape
from m2ncompile.legs import legs_of
from m2ncompile.plan import Plan, PlanPart, PlanTransfer
from m2ncompile.plan_check import check
from m2ncompile.routes import Destination, Landing, Param, Reason, Wire
from m2ncompile.views import narrowed
from tests.plans import make_inputs
from tests.runs import varied_plan

ROWS = Layout(Mesh((2, 1), 0), (0, REPLICATE))
REASON = Reason("processed", "the engine processes it after loading")


def destination(
    shape: tuple[int, ...], dim: int | None, source: Layout = ROWS, fallback: bool = False
) -> Destination:
    """From two trainers to two workers that shard `dim`."""
    layout = Layout(Mesh((1, 2), 2), None if dim is None else (REPLICATE, dim))
    local = local_shape(layout, shape)
    landing = Landing(Param("w", "bfloat16", local), (0,), ((prod(local), 1),))
    if fallback:
        return Destination(0, Wire(0, shape, source), "fallback", layout, None, REASON)
    return Destination(0, Wire(0, shape, source), "direct", layout, landing, None)


def parts(d: Destination, stage_bytes: int) -> list[PlanPart | None]:
    tensor = TensorInfo("w", "bfloat16", d.wire.shape)
    found = split([tensor], [d], [(0,)], Limits(stage_bytes=stage_bytes))
    assert all(transfer.destinations == (0,) for transfer in found)
    return [transfer.part for transfer in found]


def plan_in_parts(d: Destination, stage_bytes: int) -> Plan:
    tensor = TensorInfo("w", "bfloat16", d.wire.shape)
    limits = Limits(stage_bytes=stage_bytes)
    inputs = msgspec.structs.replace(make_inputs(), limits=limits)
    return assemble(inputs, [tensor], [d.wire.source], [d], split([tensor], [d], [(0,)], limits))


def test_what_fits_stays_whole() -> None:
    assert parts(destination((8, 4), 0), 32) == [None]


def test_what_does_not_is_cut_along_the_first_dim_that_nobody_shards() -> None:
    assert parts(destination((8, 4), 0), 31) == [PlanPart(1, 0, 2), PlanPart(1, 2, 2)]
    assert parts(destination((8, 4, 6), 0), 64) == [PlanPart(1, n, 1) for n in range(4)]
    whole = Layout(Mesh((2, 1), 0), None)
    assert parts(destination((8, 4), None, whole), 32) == [PlanPart(0, 0, 4), PlanPart(0, 4, 4)]
    assert parts(destination((8, 4), None, fallback=True), 32) == [
        PlanPart(1, 0, 2),
        PlanPart(1, 2, 2),
    ]


def test_a_dim_too_short_to_be_enough_is_not_the_one() -> None:
    # Half a megabyte each: not even one of the two rows fits.
    whole = Layout(Mesh((2, 1), 0), None)
    assert parts(destination((2, 1 << 18), None, whole), 1 << 18) == [
        PlanPart(1, n << 16, 1 << 16) for n in range(4)
    ]


def test_the_last_dim_is_cut_between_runs() -> None:
    found = parts(destination((2, 1000), 0), 300)
    assert [part.size for part in found if part] == [128] * 7 + [104]


def test_what_is_sharded_along_every_dim_stays_whole() -> None:
    assert parts(destination((8, 4), 1), 8) == [None]


def test_what_lies_unevenly_stays_whole() -> None:
    d = destination((4, 6), 0)
    assert d.landing is not None
    landing = msgspec.structs.replace(d.landing, dims=((2, 100), (2, 10), (3, 1)))
    assert parts(msgspec.structs.replace(d, landing=landing), 8) == [None]


def test_stacks_stay_as_they_are() -> None:
    tensors = [TensorInfo(name, "bfloat16", (8, 4)) for name in "ab"]
    ds = [msgspec.structs.replace(destination((8, 4), 0), tensor=i) for i in range(2)]
    assert split(tensors, ds, [(0, 1)], Limits(stage_bytes=8)) == (PlanTransfer((0, 1)),)


@given(st.integers(0, 10_000))
def test_no_rank_stages_more_than_it_may_where_a_part_can_be_made(seed: int) -> None:
    plan = varied_plan(seed, stacked=True)
    most = plan.inputs.limits.stage_bytes
    for transfer, leg in zip(plan.transfers, legs_of(plan), strict=True):
        if transfer.part is not None:
            share = max(prod(leg.sent_shape), prod(leg.received_shape))
            assert nbytes(leg.dtype, (share,)) <= most


def test_varied_plans_have_parts_of_every_kind() -> None:
    routes = set()
    for seed in range(60):
        plan = varied_plan(seed, stacked=True)
        routes |= {
            plan.destinations[t.destinations[0]].route for t in plan.transfers if t.part is not None
        }
    assert routes == {"direct", "reload", "fallback"}


# --- where a part lies


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.booleans()), min_size=1, max_size=4),
    st.data(),
)
def test_narrowed_is_what_slicing_gives(
    grouping: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """A strided box, seen in any grouping of its dims."""
    sizes = tuple(size for size, _ in grouping)
    # Gaps after some dims, so that they can't be joined.
    strides, step = [0] * len(sizes), 1
    for i in reversed(range(len(sizes))):
        strides[i] = step
        step *= sizes[i] + grouping[i][1]
    memory = torch.arange(step + 7)
    box = memory.as_strided(sizes, strides, 5)
    shape = data.draw(st.sampled_from(groupings(sizes)))
    seen = box.contiguous().view(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    size = data.draw(st.integers(1, shape[dim] - start))
    try:
        view = narrowed(5, tuple(zip(sizes, strides, strict=True)), shape, dim, start, size)
    except ValueError:
        assert shape not in (sizes, *splits(sizes))
        return
    got = memory.as_strided(view.shape, view.strides, view.offset)
    assert torch.equal(got.flatten(), seen.narrow(dim, start, size).flatten())


def groupings(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The box as it is, with neighbours joined, and with a dim in two."""
    joined = [(*sizes[:i], sizes[i] * sizes[i + 1], *sizes[i + 2 :]) for i in range(len(sizes) - 1)]
    return [sizes, *joined, *splits(sizes)]


def splits(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [(*sizes[:i], 2, 2, *sizes[i + 1 :]) for i, size in enumerate(sizes) if size == 4]


# --- a plan's parts are checked


def changed(plan: Plan, change: Callable[[list[PlanTransfer]], None]) -> Plan:
    transfers = list(plan.transfers)
    change(transfers)
    return msgspec.structs.replace(plan, transfers=tuple(transfers))


def test_parts_that_do_not_make_up_the_whole_are_refused() -> None:
    plan = plan_in_parts(destination((8, 4), 0), 16)
    assert [t.part for t in plan.transfers] == [PlanPart(1, 0, 2), PlanPart(1, 2, 2)]

    def missing(transfers: list[PlanTransfer]) -> None:
        del transfers[1]

    def twice(transfers: list[PlanTransfer]) -> None:
        transfers[1] = transfers[0]

    def swapped(transfers: list[PlanTransfer]) -> None:
        transfers.reverse()

    def longer(transfers: list[PlanTransfer]) -> None:
        transfers[1] = PlanTransfer((0,), PlanPart(1, 2, 3))

    def sharded(transfers: list[PlanTransfer]) -> None:
        transfers[:] = [PlanTransfer((0,), PlanPart(0, start, 4)) for start in (0, 4)]

    def outside(transfers: list[PlanTransfer]) -> None:
        transfers[:] = [PlanTransfer((0,), PlanPart(2, 0, 4))]

    def also_whole(transfers: list[PlanTransfer]) -> None:
        transfers.append(PlanTransfer((0,)))

    for change, message in (
        (missing, "do not make up dim 1"),
        (twice, "do not make up dim 1"),
        (swapped, "do not make up dim 1"),
        (longer, "do not make up dim 1"),
        (sharded, "goes in parts of dim 0, which"),
        (outside, "goes in parts of dim 2, it has 2 dims"),
        (also_whole, "destination 0 is carried 2 times"),
    ):
        with pytest.raises(PlanError, match=message):
            check(changed(plan, change))


def test_parts_of_a_stack_are_refused() -> None:
    plan = varied_plan(3, stacked=True)
    index = next(i for i, t in enumerate(plan.transfers) if len(t.destinations) > 1)

    def cut(transfers: list[PlanTransfer]) -> None:
        transfers[index] = PlanTransfer(transfers[index].destinations, PlanPart(0, 0, 1))

    with pytest.raises(PlanError, match="carries parts of several destinations"):
        check(changed(plan, cut))


def test_a_part_that_its_parameter_does_not_hold_evenly_is_refused() -> None:
    d = destination((4, 6), 0)
    plan = plan_in_parts(d, 12)
    dims = ((2, 100), (2, 10), (3, 1))
    landing = msgspec.structs.replace(plan.landings[0], dims=dims)
    room = msgspec.structs.replace(plan.params[0], stride=(200, 1))
    broken = msgspec.structs.replace(plan, landings=(landing,), params=(room,))
    with pytest.raises(PlanError, match="goes in parts of dim 1, but in its parameter"):
        check(broken)
