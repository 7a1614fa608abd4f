"""Whole runs in one process, a thread for each rank, against `deliver` and `land`."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

import pytest
import torch
from torch.distributed import HashStore

from m2ncompile.compile.assemble import assemble
from m2ncompile.errors import RunError
from m2ncompile.inventory import TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Mesh
from m2ncompile.plan import Plan
from m2ncompile.routes import Destination, Landing, Param, Route, Wire
from m2ncompile.runtime.control import StoreControl
from m2ncompile.runtime.stats import SyncStats
from m2ncompile.runtime.trainer import Trainer
from m2ncompile.runtime.transports.local import LocalHub, LocalTransport
from m2ncompile.runtime.worker import Worker
from m2ncompile.verify.transfers import random_tensors
from tests.plans import make_inputs, make_plan
from tests.runs import (
    DictTarget,
    GivenShards,
    assert_same,
    expect,
    experts_plan,
    failures,
    params_of,
    together,
    varied_plan,
)

TIMEOUT = 60.0


class Run:
    """All ranks of a plan, over a hub."""

    def __init__(self, plan: Plan, targets: Sequence[DictTarget] | None = None) -> None:
        engine, ranks = plan.inputs.engine, plan.inputs.trainer.ranks
        self.plan, world = plan, ranks + engine.workers
        store, hub = HashStore(), LocalHub(world)
        tensors = random_tensors(plan, 0)
        self.shards = [GivenShards(plan, rank, tensors) for rank in range(ranks)]
        self.targets = targets or [DictTarget(params_of(plan, w)) for w in range(engine.workers)]

        def make(rank: int) -> Trainer | Worker:
            control, transport = StoreControl(store, rank, world), LocalTransport(hub, rank)
            if rank < ranks:
                return Trainer(
                    lambda: plan,
                    self.shards[rank],
                    control,
                    transport,
                    trainers=ranks,
                    timeout=TIMEOUT,
                )
            target = self.targets[rank - ranks]
            return Worker(lambda: plan, target, control, transport, trainers=ranks, timeout=TIMEOUT)

        made = together([lambda rank=rank: make(rank) for rank in range(world)])
        self.trainers = [one for one in made if isinstance(one, Trainer)]
        self.workers = [one for one in made if isinstance(one, Worker)]

    def sync(self, tensors: Sequence[torch.Tensor], version: str | None = None) -> list[SyncStats]:
        for shards in self.shards:
            shards.tensors = tensors
        sends = [lambda t=t: t.send(version) for t in self.trainers]
        return together([*sends, *(w.receive for w in self.workers)])

    def check_syncs(self, steps: Sequence[int]) -> None:
        """Syncs other weights each time; every bit of every worker must be as delivered."""
        for step in steps:
            tensors = random_tensors(self.plan, step)
            expected = [
                expect(self.plan, number, target.params, tensors)
                for number, target in enumerate(self.targets)
            ]
            self.sync(tensors)
            for target, (params, whole) in zip(self.targets, expected, strict=True):
                assert_same(target.params, params)
                assert_same(target.whole, whole)


def test_direct_and_fallback_over_several_syncs() -> None:
    Run(make_plan()).check_syncs([1, 2, 3])


@pytest.mark.parametrize("seed", range(24))
def test_any_plan_gives_what_its_transfers_deliver(seed: int) -> None:
    plan = varied_plan(seed, trainers=(1, 2, 4)[seed % 3], workers=(1, 2, 4)[seed // 3 % 3])
    Run(plan).check_syncs([1, 2])


@pytest.mark.parametrize("seed", range(12))
def test_stacks_give_what_their_transfers_deliver(seed: int) -> None:
    workers = (1, 2, 4)[seed % 3]
    plan = varied_plan(seed, workers=workers, tensors=9, stacked=True)
    assert any(len(transfer.destinations) > 1 for transfer in plan.transfers)
    Run(plan).check_syncs([1, 2])


@pytest.mark.parametrize("route", ["direct", "reload"])
@pytest.mark.parametrize("stage_bytes", [1 << 28, 100])
def test_experts_received_where_they_lie(route: Route, stage_bytes: int) -> None:
    Run(experts_plan(12, route, stage_bytes)).check_syncs((1, 2))


def test_the_varied_plans_have_every_route_and_form() -> None:
    """Else the test above shows less than it says."""
    found = set()
    for seed in range(24):
        plan = varied_plan(seed, trainers=(1, 2, 4)[seed % 3], workers=(1, 2, 4)[seed // 3 % 3])
        for d in plan.destinations:
            found.add(d.route)
            sent = plan.geometries[plan.wires[d.wire].geometry]
            tensor = plan.geometries[plan.tensors[d.tensor].geometry]
            found |= {"part"} if sent.shape != tensor.shape else set()
            found |= (
                {"packed"} if plan.wires[d.wire].source != plan.tensors[d.tensor].source else set()
            )
            found |= {"apiece"} if isinstance(d.offset, tuple) else set()
            if d.landing is None:
                continue
            landing = plan.landings[d.landing]
            strided = len(landing.dims) > 1
            param = plan.geometries[plan.params[landing.param].geometry]
            found |= {f"{d.route} strided"} if strided else set()
            found |= {f"{d.route} cast"} if param.dtype != sent.dtype else set()
    assert found == {
        *("direct", "reload", "fallback", "part", "apiece"),
        *("direct strided", "reload strided", "direct cast", "reload cast", "packed"),
    }


@pytest.mark.parametrize("seed", range(4))
def test_what_the_engine_keeps_until_the_end_is_not_written_over(seed: int) -> None:
    plan = varied_plan(seed, tensors=18)
    targets = []
    for worker in range(2):
        params = params_of(plan, worker)
        targets.append(DictTarget(params, keeps=[*params][::2]))
    Run(plan, targets).check_syncs([1, 2])


def test_versions_are_counted_or_given_and_reach_the_workers() -> None:
    run = Run(make_plan())
    assert [worker.version for worker in run.workers] == [None, None]
    for given, version in ((None, "1"), ("step 7", "step 7"), (None, "3")):
        stats = run.sync(random_tensors(run.plan, 1), given)
        assert {one.version for one in stats} == {version}
        assert {worker.version for worker in run.workers} == {version}


def test_stats_count_what_each_rank_sent_or_received() -> None:
    run = Run(make_plan())  # two trainers hold halves; two workers
    first, second, *workers = run.sync(random_tensors(run.plan, 1))
    direct, fallback = 2 * 4 * 8 * 2 // 2, 8 * 4 * 2 + 4 * 4  # bytes of each worker
    assert first.nbytes == second.nbytes == (2 * 4 * 8 * 2 + fallback) // 2
    for stats in workers:
        routes = {route.route: (route.tensors, route.nbytes) for route in stats.routes}
        assert routes == {"direct": (2, direct), "fallback": (2, fallback)}
        assert stats.nbytes == direct + fallback
    assert all(0 <= stats.agreeing <= stats.seconds for stats in (first, second, *workers))


def test_progress_is_told_after_every_leg() -> None:
    run = Run(make_plan())
    seen: list[list[tuple[int, int]]] = [[] for _ in range(4)]
    told = [lambda done, of, n=n: seen[n].append((done, of)) for n in range(4)]
    together(
        [
            *(lambda t=t, n=n: t.send(progress=told[n]) for n, t in enumerate(run.trainers)),
            *(lambda w=w, n=n: w.receive(told[n + 2]) for n, w in enumerate(run.workers)),
        ]
    )
    assert seen == [[(leg, 4) for leg in range(1, 5)]] * 4


def test_buffers_are_made_once_and_addresses_stay() -> None:
    run = Run(varied_plan(3))
    before = [{n: p.data_ptr() for n, p in t.params.items()} for t in run.targets]
    staging = [worker._staging.data_ptr() for worker in run.workers]
    run.check_syncs([1, 2])
    assert [{n: p.data_ptr() for n, p in t.params.items()} for t in run.targets] == before
    assert [worker._staging.data_ptr() for worker in run.workers] == staging


def test_an_error_on_one_rank_is_everyones_and_ends_the_run() -> None:
    run = Run(make_plan())
    run.check_syncs([1])

    def refuse(name: str) -> None:
        raise ValueError(f"no room for {name}")

    run.targets[1].load_weights = lambda tensors: [refuse(n) for n, _ in tensors]  # type: ignore[method-assign,assignment,func-returns-value]
    errors = failures([*(t.send for t in run.trainers), *(w.receive for w in run.workers)])
    assert len(set(errors)) == 1
    assert 'the sync of version "2" failed' in errors[0]
    assert "worker 1: ValueError: no room for model.embed.weight" in errors[0]
    assert run.targets[1].abandoned == 1
    assert [worker.version for worker in run.workers] == ["1", "1"]
    ends: list[Trainer | Worker] = [*run.trainers, *run.workers]
    for end in ends:
        assert end.unusable is not None
        assert "no room for" in end.unusable
        assert "weights may be partly those of version 2" in end.unusable
    for error in failures([*(t.send for t in run.trainers), *(w.receive for w in run.workers)]):
        assert "this run has ended" in error and "no room for" in error


def test_an_engine_that_does_not_begin_while_data_is_under_way() -> None:
    run = Run(make_plan())

    def refuse(reloaded: Collection[str], everything: bool) -> None:
        raise ValueError("it sleeps")

    run.targets[0].begin = refuse  # type: ignore[method-assign]
    errors = failures([*(t.send for t in run.trainers), *(w.receive for w in run.workers)])
    assert len(set(errors)) == 1
    assert "worker 0: ValueError: it sleeps" in errors[0]
    assert all(one.unusable for one in [*run.trainers]) and all(w.unusable for w in run.workers)


def test_a_parameter_put_elsewhere_between_syncs_is_noticed_before_data_moves() -> None:
    run = Run(make_plan())
    run.check_syncs([1])
    name = "model.layers.0.down.weight"
    before = run.targets[1].params[name].clone()
    run.targets[1].params[name] = before.clone()
    errors = failures([*(t.send for t in run.trainers), *(w.receive for w in run.workers)])
    assert len(set(errors)) == 1
    assert "the sync did not begin; no data was moved" in errors[0]
    assert (
        f"worker 1: 1 of its parameters are not in the memory, or of the shape, that they had "
        f"at the start, such as {name}" in errors[0]
    )
    assert torch.equal(run.targets[1].params[name], before)


def test_a_closed_run_says_so() -> None:
    run = Run(make_plan())
    run.trainers[0].close()
    assert run.trainers[0].unusable == "it was closed"
    with pytest.raises(RunError, match="this run has ended: it was closed"):
        run.trainers[0].send()


def test_an_engine_of_another_version_is_refused_on_every_rank() -> None:
    plan = make_plan()
    targets = [DictTarget(params_of(plan, worker)) for worker in range(2)]
    targets[1].version = "0.34.0"
    with pytest.raises(RunError) as caught:
        Run(plan, targets)
    text = "worker 1: the plan is for vLLM 0.33.0, this worker runs 0.34.0"
    assert text in str(caught.value)


def test_another_platform_is_refused_on_every_rank() -> None:
    plan = make_plan()
    targets = [DictTarget(params_of(plan, worker)) for worker in range(2)]
    targets[0].platform, targets[1].platform = "cuda-sm90", "cuda-sm100"
    with pytest.raises(RunError) as caught:
        Run(plan, targets)
    text = "worker 1: the plan is for cuda-sm90, this worker runs on cuda-sm100; build it with"
    assert text in str(caught.value) and "worker 0" not in str(caught.value)


def test_a_run_closed_by_another_thread_in_a_sync_gives_its_store_back() -> None:
    run = Run(make_plan())

    def close(done: int, of: int) -> None:
        closing = threading.Thread(target=run.workers[1].close)
        closing.start()
        closing.join()

    calls = [*(t.send for t in run.trainers), run.workers[0].receive]
    errors = failures([*calls, lambda: run.workers[1].receive(close)])
    assert len(set(errors)) == 1
    assert "worker 1: it was closed during the sync" in errors[0]
    assert not hasattr(run.workers[1]._session.control, "_store")
    with pytest.raises(RunError, match=r"this run has ended: .*it was closed during the sync"):
        run.workers[1].receive()


def test_two_threads_of_a_rank_do_not_sync_at_once() -> None:
    run = Run(make_plan())
    second: list[str] = []

    def again(done: int, of: int) -> None:
        second.extend(failures([run.workers[0].receive]))

    calls = [*(t.send for t in run.trainers), run.workers[1].receive]
    together([*calls, lambda: run.workers[0].receive(again)])
    assert set(second) == {"another thread of this rank is in a sync, or closed the run"}


class Slow(DictTarget):
    """Stands for an engine that takes long to begin."""

    def begin(self, reloaded: Collection[str], everything: bool) -> None:
        time.sleep(0.2)
        super().begin(reloaded, everything)


def test_a_packed_piece_stays_until_it_is_sent() -> None:
    """Columns of two tensors go through one buffer, and nobody takes the first in time."""
    shape, whole = (4, 4), Layout(Mesh((2, 1), 0), None)
    columns = Layout(Mesh((2, 1), 0), (1, REPLICATE))
    wire = Wire(0, (*shape, 1), columns)
    destinations = []
    for index, name in enumerate("ab"):
        landing = Landing(Param(name, "float32", shape), (0,), ((16, 1),))
        layout = Layout(Mesh((1, 1), 2), None)
        destinations.append(Destination(index, wire, "direct", layout, landing, None))
    tensors = [TensorInfo(name, "float32", shape) for name in "ab"]
    plan = assemble(make_inputs(tp=1), tensors, [whole] * 2, destinations)
    Run(plan, [Slow(params_of(plan, 0))]).check_syncs([1, 2])
