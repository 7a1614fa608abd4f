"""A trainer that drives an engine: whatever fails, the engine is left ready for the next update.

The engine stands for vLLM's control plane, which refuses a second update and workers that have
a run already; its workers are real ones.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from m2ncompile.errors import RunError
from m2ncompile.plan import Plan
from m2ncompile.runtime import api, control, driven, session
from m2ncompile.runtime.driven import DrivenTrainer
from m2ncompile.runtime.worker import Worker
from m2ncompile.verify.transfers import random_tensors
from tests.runs import DictTarget, GivenShards, assert_same, expect, params_of, varied_plan

#: Far more than a test takes: what waits for it fails the test.
TIMEOUT = 600.0


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_MARGIN", 1.0)
    for module in (session, driven):
        monkeypatch.setattr(module, "GRACE", 2.0)


class Engine:
    """The four calls of vLLM's client, over two workers."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.calls, self.updating = plan, list[str](), False
        self.fails: dict[str, str] = {}
        self.workers: list[Worker] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if (why := self.fails.pop(name, None)) is not None:
            raise RuntimeError(why)

    def _both(self, action: Callable[[int], object]) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return [one.result() for one in [pool.submit(action, rank) for rank in range(2)]]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init")
        address = f"{init_info['master_address']}:{init_info['master_port']}"
        targets = [DictTarget(params_of(self.plan, rank)) for rank in range(2)]
        self.workers = self._both(
            lambda rank: api.worker(
                self.plan, targets[rank], address=address, rank=rank, timeout=TIMEOUT
            )
        )

    def start_weight_update(self) -> None:
        assert not self.updating, "an update is under way"
        self._call("start")
        self.updating = True

    def update_weights(self, update_info: Any) -> None:
        self._call("update")
        self._both(lambda rank: self.workers[rank].receive())

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.updating = False
        self._call(f"finish {weight_version}")


class Run:
    """Two trainers and the engine."""

    def __init__(self) -> None:
        self.plan = varied_plan(5)
        self.engine = Engine(self.plan)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.shards = [GivenShards(self.plan, rank, []) for rank in range(2)]
        self.trainers: list[DrivenTrainer] = self.together(
            lambda rank: api.trainer(
                self.plan,
                self.shards[rank],
                address=self.address,
                rank=rank,
                client=self.engine,
                timeout=TIMEOUT,
            )
        )

    def together(self, action: Callable[[int], Any]) -> list[Any]:
        """What each trainer returns, or the error that it raises."""

        def outcome(rank: int) -> Any:
            try:
                return action(rank)
            except RunError as error:
                return str(error)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(outcome, range(2)))

    def send(self, step: int) -> list[Any]:
        tensors = random_tensors(self.plan, step)
        for shards in self.shards:
            shards.tensors = tensors
        return self.together(lambda rank: self.trainers[rank].send())

    def arrived(self, step: int) -> None:
        for rank, worker in enumerate(self.engine.workers):
            target = worker._target
            assert isinstance(target, DictTarget)
            clean = {name: torch.zeros_like(value) for name, value in target.params.items()}
            params, _ = expect(self.plan, rank, clean, random_tensors(self.plan, step))
            written = {name: value for name, value in params.items() if value.any()}
            assert written
            assert_same({n: v for n, v in target.params.items() if n in written}, written)


@pytest.fixture
def run() -> Iterator[Run]:
    one = Run()
    assert one.engine.calls == ["init"]
    yield one
    one.together(lambda rank: one.trainers[rank].close())


def test_every_send_is_a_whole_update(run: Run) -> None:
    for step in (1, 2):
        assert [stats.version for stats in run.send(step)] == [str(step)] * 2
    assert run.engine.calls[1:] == ["start", "update", "finish 1", "start", "update", "finish 2"]


@pytest.mark.parametrize("call", ["start", "finish 1"])
def test_what_the_engine_refuses_all_hear_and_may_try_again(run: Run, call: str) -> None:
    run.engine.fails[call] = "not now"
    first, second = run.send(1)
    assert first == second and "RuntimeError: not now" in first
    assert not run.engine.updating
    assert [trainer.unusable for trainer in run.trainers] == [None, None]
    assert [stats.nbytes > 0 for stats in run.send(2)] == [True, True]
    assert run.engine.calls[-1].startswith("finish ")


def test_an_update_that_the_engine_breaks_off_ends_the_run(run: Run) -> None:
    run.engine.fails["update"] = "out of memory"
    first, second = run.send(1)
    assert first == second and "update_weights: RuntimeError: out of memory" in first
    assert run.engine.calls[1:] == ["start", "update", "finish None"]
    calls = len(run.engine.calls)
    for text in run.send(2):
        assert text.startswith("this run has ended: ")
    assert len(run.engine.calls) == calls  # it is not asked again


def test_a_trainer_that_closes_ends_the_others_at_once(run: Run) -> None:
    run.send(1)
    run.trainers[1].close()
    with pytest.raises(RunError, match="trainer 1: it closed the run"):
        run.trainers[0].send()
    assert not run.engine.updating
    assert "it closed the run" in str(run.trainers[0].unusable)


def test_what_one_trainer_cant_send_ends_the_update(run: Run) -> None:
    run.send(1)
    error = run.together(
        lambda rank: run.trainers[rank].send(progress=None if rank == 0 else broken)
    )
    assert len(set(error)) == 1 and "trainer 1: ValueError: a hook" in error[0]
    assert not run.engine.updating and run.engine.calls[-1] == "finish None"


def broken(leg: int, of: int) -> None:
    raise ValueError("a hook")


def test_the_address_is_free_again_when_all_are_closed(run: Run) -> None:
    run.send(1)
    run.together(lambda rank: run.trainers[rank].close())
    for worker in run.engine.workers:
        worker.close()
    run.engine.workers.clear()
    host, port = run.address.split(":")
    with socket.create_server((host, int(port))):
        pass
