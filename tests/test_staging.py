"""The memory that a plan says a run takes, against what a run is bound to."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.dtypes import nbytes
from m2ncompile.errors import BindError, PlanError
from m2ncompile.legs import legs_of
from m2ncompile.plan import Plan
from m2ncompile.plan_check import check
from m2ncompile.runtime.bind_trainer import bind_trainer
from m2ncompile.runtime.bind_worker import WorkerBinding, bind_worker
from m2ncompile.runtime.shards import held_as_planned as held_of
from m2ncompile.runtime.transports.m2n import pool_bytes
from m2ncompile.staging import BUFFERS, Reloading, staging_of
from tests.runs import DictTarget, experts_plan, params_of, varied_plan

seeds = st.integers(0, 10_000)


def bytes_of(numel: dict[str, int]) -> int:
    return BUFFERS * sum(nbytes(dtype, (count,)) for dtype, count in numel.items())


class Keeps(Reloading):
    """The engine that `DictTarget` is."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def kept(self, rank: int, param: str, loaded: Collection[str]) -> bool:
        return param in self.names


@given(seeds, st.booleans())
def test_it_is_what_a_run_is_bound_to(seed: int, keeping: bool) -> None:
    plan = varied_plan(seed, stacked=True)
    keeps = [param.name for param in plan.params][::2] if keeping else []
    stated = staging_of(plan, Keeps(keeps))
    for rank in range(2):
        binding = bind_trainer(plan, held_of(plan), rank)
        scratch = sum(nbytes(dtype, (numel,)) for dtype, numel in binding.scratch_numel.items())
        assert stated[rank].packed == bytes_of(dict(binding.packed_numel)) + scratch
    for worker in range(2):
        one: WorkerBinding = bind_worker(
            plan, DictTarget(params_of(plan, worker), keeps), 2 + worker
        )
        assert stated[2 + worker].unpacked == bytes_of(dict(one.apart_numel))
        assert stated[2 + worker].reloaded == one.staging_nbytes
        whole = 0
        for receive, leg in zip(one.receives, legs_of(plan), strict=True):
            if receive is not None and receive.route == "fallback":
                whole += nbytes(leg.dtype, leg.received_shape)
        assert stated[2 + worker].whole == whole


@pytest.mark.parametrize("stage_bytes", [1 << 28, 100])
def test_what_follows_each_other_in_a_parameter_is_received_there(stage_bytes: int) -> None:
    plan = experts_plan(12, stage_bytes=stage_bytes)
    binding = bind_worker(plan, DictTarget(params_of(plan, 0)), 2)
    stacks = [one for one in binding.receives if one is not None]
    assert all(len(one.parts) > 1 and not one.apart for one in stacks)
    assert plan.staging[2].unpacked == 0 and not binding.apart_numel


def test_what_does_not_is_received_apart() -> None:
    """A gap, another order, another parameter, another dtype."""
    plan = experts_plan(3)

    def unpacked(**changed: object) -> int:
        d = plan.destinations[plan.transfers[0].destinations[1]]
        index = plan.destinations.index(d)
        other = msgspec.structs.replace(d, **changed)
        destinations = (*plan.destinations[:index], other, *plan.destinations[index + 1 :])
        changed_plan = msgspec.structs.replace(plan, destinations=destinations)
        return staging_of(changed_plan, Reloading())[2].unpacked

    d = plan.destinations[plan.transfers[0].destinations[1]]
    assert isinstance(d.offset, int) and unpacked() == 0
    stack = BUFFERS * 3 * 24 * 2
    assert unpacked(offset=d.offset + 1) == stack
    assert unpacked(offset=d.offset + 24) == stack
    gates = plan.destinations[plan.transfers[1].destinations[0]]
    assert unpacked(landing=gates.landing) == stack
    first, *rest = plan.transfers
    turned = (type(first)(first.destinations[::-1]), *rest)
    turned_plan = msgspec.structs.replace(plan, transfers=turned)
    assert staging_of(turned_plan, Reloading())[2].unpacked == stack
    params = tuple(
        msgspec.structs.replace(p, geometry=len(plan.geometries) + i)
        for i, p in enumerate(plan.params)
    )
    geometries = (
        *plan.geometries,
        *(msgspec.structs.replace(plan.geometries[p.geometry], dtype=1) for p in plan.params),
    )
    converted = msgspec.structs.replace(
        plan, params=params, geometries=geometries, dtypes=("bfloat16", "float32")
    )
    assert staging_of(converted, Reloading())[2].unpacked == BUFFERS * 6 * 24 * 2


@given(seeds)
def test_the_largest_share_is_what_the_pool_must_hold(seed: int) -> None:
    plan = varied_plan(seed, stacked=True)
    assert max(one.share for one in plan.staging) == pool_bytes(legs_of(plan))
    legs = legs_of(plan)
    for rank, stated in enumerate(plan.staging):
        mine = [nbytes(leg.dtype, leg.sent_shape) for leg in legs if rank in leg.source.mesh.ranks]
        mine += [
            nbytes(leg.dtype, leg.received_shape)
            for leg in legs
            if rank in leg.destination.mesh.ranks
        ]
        assert stated.share == max(mine, default=0)


@given(seeds)
def test_the_largest_module_is_that_of_all_its_parameters(seed: int) -> None:
    plan = varied_plan(seed)
    for worker in range(2):
        params = params_of(plan, worker)
        binding = bind_worker(plan, DictTarget(params), 2 + worker)
        sizes: dict[str, int] = {}
        for group in binding.staged.values():
            for one in group:
                module = one.name.rpartition(".")[0]
                sizes[module] = sizes.get(module, 0) + one.nbytes
        assert plan.staging[2 + worker].module == max(sizes.values(), default=0)


def less(plan: Plan, rank: int, **values: int) -> Plan:
    staging = list(plan.staging)
    staging[rank] = msgspec.structs.replace(staging[rank], **values)
    return msgspec.structs.replace(plan, staging=tuple(staging))


def test_a_run_that_would_take_more_is_refused() -> None:
    plan = varied_plan(0, stacked=True)
    assert min(plan.staging[0].packed, plan.staging[2].unpacked, plan.staging[2].reloaded) > 0
    with pytest.raises(BindError, match=f"takes {plan.staging[0].packed} bytes, the plan says 7"):
        bind_trainer(less(plan, 0, packed=7), held_of(plan), 0)
    for what in ("unpacked", "reloaded"):
        takes = getattr(plan.staging[2], what)
        target = DictTarget(params_of(plan, 0), [param.name for param in plan.params])
        with pytest.raises(BindError, match=f"takes {takes} bytes, the plan says 7"):
            bind_worker(less(plan, 2, **{what: 7}), target, 2)


def test_it_is_there_for_every_rank() -> None:
    plan = varied_plan(0)
    with pytest.raises(PlanError, match="has 3 entries, there are 4 ranks"):
        check(msgspec.structs.replace(plan, staging=plan.staging[:-1]))
    with pytest.raises(PlanError, match=r"staging\[1\]: bytes out of range"):
        check(less(plan, 1, share=-1))
