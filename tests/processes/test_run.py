"""Runs of real processes over gloo: what arrives, and what is said when something fails.

Workers fill a `DictTarget`, which stands for an engine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import pytest
import torch

from m2ncompile.compile.assemble import assemble
from m2ncompile.errors import M2nCompileError, RunError
from m2ncompile.inventory import TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Mesh, local_shape
from m2ncompile.plan import Plan
from m2ncompile.routes import Destination, Landing, Param, Wire
from m2ncompile.runtime import api, control, session
from m2ncompile.runtime.shards import Held
from m2ncompile.runtime.trainer import Trainer
from m2ncompile.runtime.worker import Worker
from m2ncompile.verify.transfers import random_tensors
from tests.plans import make_inputs, make_plan
from tests.runs import (
    REASON,
    DictTarget,
    GivenShards,
    assert_same,
    expect,
    params_of,
    varied_plan,
)

#: Each process is forked from one that has torch, so that it starts at once.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.tensor", "m2ncompile.runtime.api", "tests.runs"]
)
#: Nothing may take longer; only what hangs does.
LIMIT = 60.0
#: Of a start, and of a sync that is to succeed.
TIMEOUT = 40.0
#: Of a sync that nobody may sit out: who waits for its end hangs.
ENDLESS = 10 * LIMIT
#: Of a sync that waits for a rank that is gone.
SHORT = 1.0
#: How long a process is stopped, in seconds: more than the others wait for it.
STOPPED = 15


class Seat(msgspec.Struct, frozen=True):
    """One process of a test. Trainers come first."""

    rank: int
    address: str
    folder: Path


class Outcome(msgspec.Struct, frozen=True):
    """What a process's job returned, or the error that it ended with."""

    exitcode: int | None
    result: object = None
    error: str | None = None


def run_ranks(folder: Path, *jobs: Callable[[Seat], object]) -> list[Outcome]:
    """Every job in a process of its own. Fails when one of them has not ended at the limit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    seats = [Seat(rank, address, folder) for rank in range(len(jobs))]
    processes: list[BaseProcess] = [
        SERVER.Process(target=_run_job, args=(job, seat))
        for job, seat in zip(jobs, seats, strict=True)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        hanging = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        assert not hanging, f"ranks {hanging} hang"
    finally:
        for process in processes:
            process.kill()
    outcomes = []
    for seat, process in zip(seats, processes, strict=True):
        path = _report(seat)
        found = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
        outcomes.append(Outcome(process.exitcode, found.get("result"), found.get("error")))
        path.unlink(missing_ok=True)
    return outcomes


def _report(seat: Seat) -> Path:
    return seat.folder / f"rank{seat.rank}.json"


def _run_job(job: Callable[[Seat], object], seat: Seat) -> None:
    torch.set_num_threads(1)
    session.GRACE = control._MARGIN = 1.0  # type: ignore[attr-defined]
    session._LOOK = 0.2  # type: ignore[attr-defined]
    try:
        found: dict[str, object] = {"result": job(seat)}
    except BaseException as error:
        text = str(error) if isinstance(error, M2nCompileError) else f"{type(error)}: {error}"
        found = {"error": text}
    _report(seat).write_bytes(msgspec.json.encode(found))


def results(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """Of jobs that must have ended well."""
    assert [one.error for one in outcomes] == [None] * len(outcomes)
    found = []
    for one in outcomes:
        assert isinstance(one.result, dict)
        found.append(one.result)
    return found


# --- a rank that syncs, with a fault


class Fault(msgspec.Struct, frozen=True):
    """`how` a rank fails in a sync after `leg` legs; None for before it, -1 for after it."""

    how: str
    sync: int
    leg: int | None


class Odd(GivenShards):
    """Shards that are not, from `sync` on, what they were when bound."""

    def __init__(self, plan: Plan, rank: int, odd: str, sync: int) -> None:
        super().__init__(plan, rank, random_tensors(plan, 0))
        self.sync, self._odd, self._from = 0, odd, sync

    def describe(self) -> Sequence[Held]:
        held = list(super().describe())
        return held[:1] + held[2:] if self._odd == "lacking" else held

    def items(self, whole: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        items = list(super().items(whole))
        if self.sync >= self._from:
            name, tensor = items[1]
            if self._odd == "order":
                items[1:3] = items[2], items[1]
            elif self._odd == "dtype":
                items[1] = name, tensor.double()
            elif self._odd == "strides":
                items[1] = name, tensor.t().contiguous().t()
            elif self._odd == "endless":
                threading.Event().wait()
            elif self._odd == "shape":
                items[1] = name, tensor[..., :-1]
            elif self._odd == "short":
                del items[-1]
            elif self._odd == "long":
                items.append(items[0])
        return iter(items)


def end_of(
    seat: Seat,
    plan: Plan,
    shards: GivenShards | None,
    start: float = TIMEOUT,
    engine: str = "0.33.0",
) -> Trainer | Worker:
    """This rank's end of a run, by the functions that a training loop calls."""
    trainers = plan.inputs.trainer.ranks
    if seat.rank < trainers:
        return api.trainer(plan, shards, address=seat.address, rank=seat.rank, timeout=start)
    worker = seat.rank - trainers
    target = DictTarget(params_of(plan, worker))
    target.version = engine
    return api.worker(plan, target, address=seat.address, rank=worker, timeout=start)


def syncs(
    seat: Seat,
    plan: Plan,
    count: int = 3,
    fault: Fault | None = None,
    odd: tuple[str, int] | None = None,
    version: str | None = None,
    patience: float = SHORT,
    start: float = TIMEOUT,
    engine: str = "0.33.0",
) -> dict[str, object]:
    """Takes part in `count` syncs, checks them, and tells how it ended.

    `patience` bounds each sync. After a failure it tries once more.
    """
    tensors = random_tensors(plan, 0)
    shards = Odd(plan, seat.rank, *odd) if odd else GivenShards(plan, seat.rank, tensors)
    try:
        end = end_of(seat, plan, shards, start, engine)
    except M2nCompileError as error:
        return {"done": 0, "start": str(error)}
    end._session.timeout = patience
    for sync in range(1, count + 1):
        if isinstance(shards, Odd):
            shards.sync = sync
        fail = partial(_fail, fault, end) if fault and fault.sync == sync else _go_on
        try:
            fail(None, 0)
            _sync(end, seat, plan, shards, sync, version, fail)
            fail(-1, 0)
        except (RunError, KeyboardInterrupt) as error:
            with pytest.raises(RunError) as again:
                _sync(end, seat, plan, shards, sync, version, _go_on)
            return {
                "done": sync - 1,
                "error": str(error) or type(error).__name__,
                "again": str(again.value),
                "unusable": end.unusable,
            }
    end.close()
    return {"done": count}


def _sync(
    end: Trainer | Worker,
    seat: Seat,
    plan: Plan,
    shards: GivenShards,
    sync: int,
    version: str | None,
    progress: Callable[[int | None, int], None],
) -> None:
    tensors = random_tensors(plan, sync)
    if isinstance(end, Trainer):
        shards.tensors = tensors
        end.send(version, progress)
        return
    target = end._target
    assert isinstance(target, DictTarget)
    worker = seat.rank - plan.inputs.trainer.ranks
    params, whole = expect(plan, worker, target.params, tensors)
    end.receive(progress)
    assert_same(target.params, params)
    assert_same(target.whole, whole)


def _go_on(leg: int | None, of: int) -> None: ...


def _fail(fault: Fault, end: Trainer | Worker, leg: int | None, of: int) -> None:
    if leg != fault.leg:
        return
    if fault.how == "exit":
        os._exit(3)
    elif fault.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.how == "interrupt":
        signal.raise_signal(signal.SIGINT)  # to this thread, and so at once
    elif fault.how == "raise":
        raise ValueError("out of memory")
    elif fault.how == "stop":
        # Somebody else has to wake it.
        wake = f"sleep {STOPPED}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.how == "sleep":
        time.sleep(1)
    elif fault.how == "close":
        closing = threading.Thread(target=end.close)
        closing.start()
        closing.join()
    elif fault.how == "close soon":
        threading.Timer(0.5, end.close).start()


def same(outcomes: Sequence[dict[str, object]], key: str = "error") -> str:
    """What all of them say alike."""
    said = {str(one.get(key)) for one in outcomes}
    assert len(said) == 1, said
    return said.pop()


def check_ended(outcomes: Sequence[dict[str, object]], done: int, *parts: str) -> None:
    """All survivors did `done` syncs, then raised one error with `parts`; and again, why."""
    assert [one["done"] for one in outcomes] == [done] * len(outcomes)
    error = same(outcomes)
    for part in parts:
        assert part in error, error
    for one in outcomes:
        assert str(one["again"]).startswith("this run has ended: ")
        assert str(one["unusable"]) in str(one["again"])
        for part in parts:
            assert " ".join(part.split()) in str(one["unusable"])


# --- what arrives


@pytest.mark.parametrize(("seed", "trainers", "workers"), [(1, 2, 2), (3, 1, 3), (5, 3, 1)])
def test_several_syncs_arrive_bit_for_bit(
    tmp_path: Path, seed: int, trainers: int, workers: int
) -> None:
    plan = varied_plan(seed, trainers, workers)
    job = partial(syncs, plan=plan, patience=TIMEOUT)
    for one in results(run_ranks(tmp_path, *[job] * (trainers + workers))):
        assert one == {"done": 3}


class Net(torch.nn.Module):
    """Evenly split by two ranks but for `odd`; `norm` and `odd` have one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 12, bias=False)
        self.down = torch.nn.Linear(12, 8, bias=False)
        self.norm = torch.nn.LayerNorm(8, bias=False)
        self.odd = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.down(torch.relu(self.up(x)))) * self.odd.sum()
        return y


def plan_of_net(sources: dict[str, Layout]) -> Plan:
    """Sent to two workers: `up` and `down` are split, `up` reloaded into a longer one."""
    shapes = {"odd": (5,), "up.weight": (12, 8), "down.weight": (8, 12), "norm.weight": (8,)}
    whole = Layout(Mesh((2, 1), 2), None)
    layouts = {
        "odd": whole,
        "up.weight": Layout(Mesh((1, 2), 2), (REPLICATE, 0)),
        "down.weight": Layout(Mesh((1, 2), 2), (REPLICATE, 1)),
        "norm.weight": whole,
    }
    destinations = []
    for index, (name, shape) in enumerate(shapes.items()):
        wire = Wire(0, shape, sources[name])
        local = local_shape(layouts[name], shape)
        if name == "odd":
            destinations.append(Destination(index, wire, "fallback", whole, None, REASON))
        elif name == "up.weight":
            landing = Landing(Param(name, "float32", (8, 10)), (0,), ((6, 10), (8, 1)))
            destinations.append(Destination(index, wire, "reload", layouts[name], landing, REASON))
        else:
            dense = ((torch.Size(local).numel(), 1),)
            landing = Landing(Param(name, "float32", local), (0,), dense)
            destinations.append(Destination(index, wire, "direct", layouts[name], landing, None))
    tensors = [TensorInfo(name, "float32", shape) for name, shape in shapes.items()]
    inputs = make_inputs(trainers=2, tp=2)
    return assemble(inputs, tensors, [sources[name] for name in shapes], destinations)


ROWS = Layout(Mesh((2, 1), 0), (0, REPLICATE))
COLUMNS = Layout(Mesh((1, 2), 0), (REPLICATE, 1))
WHOLE = Layout(Mesh((2, 1), 0), None)


def trains(seat: Seat, kind: str, plan: Plan, steps: int) -> object:
    """Trains over a device mesh of both trainers, and sends after each step."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    dist.init_process_group(
        "gloo", init_method=f"file://{seat.folder}/group", rank=seat.rank, world_size=2
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    net = Net()
    if kind == "fsdp":
        fully_shard(net, mesh=mesh)
    else:
        placements = {"up": Shard(0), "down": Shard(1), "norm": Replicate()}
        for name, placement in placements.items():
            module = net.get_submodule(name)
            local = distribute_tensor(module.weight.detach(), mesh, [placement])
            module.weight = torch.nn.Parameter(local)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    trainer = api.trainer(plan, net, address=seat.address, timeout=TIMEOUT)
    for step in range(1, steps + 1):
        if kind == "fsdp":
            net(torch.randn(4, 8)).square().mean().backward()
        else:
            for parameter in net.parameters():
                parameter.grad = parameter.detach() * 0.1 * step
        optimizer.step()
        optimizer.zero_grad()
        full = {
            name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            for name, parameter in net.named_parameters()
        }
        if seat.rank == 0:
            torch.save([full[t.name].detach() for t in plan.tensors], seat.folder / f"{step}.pt")
        if kind == "fsdp":
            with torch.no_grad():
                net(torch.randn(4, 8))  # an evaluation, after which FSDP2's root stays whole
        trainer.send()
    trainer.close()
    dist.destroy_process_group()
    return {"sent": steps}


def serves(seat: Seat, plan: Plan, steps: int) -> object:
    """Receives, and compares with what the trainers gathered."""
    target = DictTarget(params_of(plan, seat.rank - 2))
    worker = api.worker(plan, target, address=seat.address, rank=seat.rank - 2, timeout=TIMEOUT)
    before = None
    for step in range(1, steps + 1):
        initial = {name: value.clone() for name, value in target.params.items()}
        worker.receive()
        tensors = torch.load(seat.folder / f"{step}.pt")
        assert before is None or not any(map(torch.equal, before, tensors))
        before = tensors
        params, whole = expect(plan, seat.rank - 2, initial, tensors)
        assert_same(target.params, params)
        assert_same(target.whole, whole)
    worker.close()
    return {"sent": steps}


@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel"])
def test_a_module_between_optimizer_steps(tmp_path: Path, kind: str) -> None:
    """FSDP2, with a tensor that it splits unevenly and all gather; or DTensors over a mesh."""
    split = {"up.weight": ROWS, "odd": WHOLE}
    if kind == "fsdp":
        sources = {**split, "down.weight": ROWS, "norm.weight": ROWS}
    else:
        sources = {**split, "down.weight": COLUMNS, "norm.weight": WHOLE}
    plan = plan_of_net(sources)
    trainer = partial(trains, kind=kind, plan=plan, steps=3)
    worker = partial(serves, plan=plan, steps=3)
    for one in results(run_ranks(tmp_path, trainer, trainer, worker, worker)):
        assert one == {"sent": 3}


# --- what is said when something fails


RANKS = ("trainer 0", "trainer 1", "worker 0", "worker 1")


def start_errors(folder: Path, *jobs: Callable[[Seat], object]) -> str:
    """What every rank says of a start that failed."""
    outcomes = results(run_ranks(folder, *jobs))
    assert [one["done"] for one in outcomes] == [0] * len(jobs)
    text = same(outcomes, "start")
    assert text.startswith("the run can't start; no data was moved\n")
    return text


def tensors_with(*, rows: int = 8, dim: int | None = 1) -> list[tuple]:  # type: ignore[type-arg]
    """`make_plan`'s tensors, but for the rows of the first and the route of the second."""
    return [
        ("model.embed.weight", "bfloat16", (rows, 4), None),
        ("model.layers.0.down.weight", "bfloat16", (4, 8), dim),
        ("model.layers.0.norm.weight", "float32", (4,), None),
        ("model.layers.1.down.weight", "bfloat16", (4, 8), 1),
    ]


@pytest.mark.parametrize("rank", range(4))
def test_a_plan_of_another_model_on_one_rank(tmp_path: Path, rank: int) -> None:
    other = make_plan(tensors_with(rows=16))
    jobs = [partial(syncs, plan=other if n == rank else make_plan()) for n in range(4)]
    text = start_errors(tmp_path, *jobs)
    assert f"{RANKS[rank]}: its source is {other.digests.source[:60]}, most ranks have" in text


def test_a_plan_of_other_routes_on_one_rank(tmp_path: Path) -> None:
    """The sources agree; what vLLM's own backend compares would, too, were it not for the route."""
    other = make_plan(tensors_with(dim=None))
    jobs = [partial(syncs, plan=other if n == 2 else make_plan()) for n in range(4)]
    assert "worker 0: its destination is" in start_errors(tmp_path, *jobs)


def test_another_plan_of_the_same_program(tmp_path: Path) -> None:
    plan, other = make_plan(), make_plan(inputs=make_inputs(name="renamed"))
    assert plan.digests.program == other.digests.program and plan.digest != other.digest
    jobs = [partial(syncs, plan=other if n == 1 else plan) for n in range(4)]
    text = start_errors(tmp_path, *jobs)
    assert f"trainer 1: its plan is {other.digest[:60]}, most ranks have" in text


@pytest.mark.parametrize("rank", [1, 2])
def test_a_plan_for_fewer_ranks_on_one_rank(tmp_path: Path, rank: int) -> None:
    other = make_plan(inputs=make_inputs(tp=1))
    jobs = [partial(syncs, plan=other if n == rank else make_plan()) for n in range(4)]
    text = start_errors(tmp_path, *jobs)
    assert f"{RANKS[rank]}: it counts 3 ranks in all, not 4" in text


def test_a_plan_for_fewer_ranks_on_rank_0(tmp_path: Path) -> None:
    """It does not wait for the last rank, which may find nobody, or nobody any more."""
    other = make_plan(inputs=make_inputs(tp=1))
    jobs = [
        partial(syncs, plan=make_plan() if n else other, start=TIMEOUT if n < 3 else 1.0)
        for n in range(4)
    ]
    *counted, last = results(run_ranks(tmp_path, *jobs))
    text = same(counted, "start")
    assert "trainer 1: it counts 4 ranks in all, not 3" in text
    gone = "trainer 0's control plane", "rank 0, which hosts the control plane"
    assert last["start"] == text or any(words in str(last["start"]) for words in gone)


def test_an_engine_of_another_version_on_one_rank(tmp_path: Path) -> None:
    jobs = [partial(syncs, plan=make_plan()) for _ in range(4)]
    jobs[3] = partial(syncs, plan=make_plan(), engine="0.34.0")
    text = start_errors(tmp_path, *jobs)
    assert "worker 1: the plan is for vLLM 0.33.0, this worker runs 0.34.0" in text


def test_a_tensor_that_one_trainer_lacks(tmp_path: Path) -> None:
    jobs = [
        partial(syncs, plan=make_plan(), odd=("lacking", 0) if rank == 1 else None)
        for rank in range(4)
    ]
    text = start_errors(tmp_path, *jobs)
    assert "trainer 1: the trainer does not hold what the plan assumes" in text
    assert "model.layers.0.down.weight: the trainer has no such tensor" in text


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("order", "the source gave out model.layers.0.norm.weight as number 1; when it was bound"),
        ("dtype", "model.layers.0.down.weight: the source gave out torch.float64 [2, 8], it must"),
        ("shape", "model.layers.0.down.weight: the source gave out torch.bfloat16 [2, 7], it must"),
        ("strides", "model.layers.0.down.weight: its shard has strides [1, 2], not row-major"),
        ("short", "the source gave out 3 tensors, and 4 when it was bound"),
        ("long", "the source gave out model.embed.weight after its last tensor"),
    ],
)
def test_a_source_that_changes(tmp_path: Path, odd: str, words: str) -> None:
    jobs = [
        partial(syncs, plan=make_plan(), odd=(odd, 2) if rank == 1 else None, patience=ENDLESS)
        for rank in range(4)
    ]
    outcomes = results(run_ranks(tmp_path, *jobs))
    check_ended(outcomes, 1, 'the sync of version "2" failed', f"trainer 1: {words}")


@pytest.mark.parametrize(
    ("rank", "leg"), [(0, None), (0, 1), (0, -1), (1, 1), (2, None), (2, 4), (3, 1), (3, -1)]
)
def test_a_rank_that_dies(tmp_path: Path, rank: int, leg: int | None) -> None:
    """Before a sync, during it, with its last transfer, after it: by a signal, or by itself."""
    fault = Fault("kill" if rank % 2 else "exit", 2, leg)
    jobs = [partial(syncs, plan=make_plan(), fault=fault if n == rank else None) for n in range(4)]
    outcomes = run_ranks(tmp_path, *jobs)
    assert outcomes.pop(rank).exitcode == (-signal.SIGKILL if rank % 2 else 3)
    done = 2 if leg == -1 else 1
    survivors = results(outcomes)
    if rank:
        check_ended(survivors, done, f"{RANKS[rank]}: it did not answer", "or is gone")
        return
    for one in survivors:  # each for itself: nobody is left to tell them what all say
        check_ended([one], done, "rank 0, which hosts the control plane, did not answer")


def failing(rank: int, fault: Fault, plan: Plan | None = None) -> list[Callable[[Seat], object]]:
    """Four ranks, one of which has a fault that the others hear of at once."""
    job = partial(syncs, plan=plan or make_plan(), patience=ENDLESS)
    return [partial(job, fault=fault) if n == rank else job for n in range(4)]


@pytest.mark.parametrize("leg", [None, 2])
def test_rank_0_is_stopped(tmp_path: Path, leg: int | None) -> None:
    """Its connections stay, and nothing comes over them."""
    jobs = [partial(syncs, plan=make_plan()) for _ in range(4)]
    jobs[0] = partial(syncs, plan=make_plan(), fault=Fault("stop", 2, leg))
    outcomes = results(run_ranks(tmp_path, *jobs))[1:]
    check_ended(outcomes, 1, "rank 0, which hosts the control plane, did not answer in time")


def test_a_source_that_never_comes_back(tmp_path: Path) -> None:
    """As one whose collective waits for a trainer that has failed."""
    jobs = [partial(syncs, plan=make_plan(), odd=("nothing", 9)) for _ in range(4)]
    jobs[0] = partial(syncs, plan=make_plan(), odd=("endless", 2))
    outcomes = results(run_ranks(tmp_path, *jobs))
    check_ended(outcomes, 1, "trainer 0: the transfer did not end within 1 s, and goes on")


@pytest.mark.parametrize("rank", range(4))
def test_an_error_in_the_middle_of_a_sync(tmp_path: Path, rank: int) -> None:
    outcomes = results(run_ranks(tmp_path, *failing(rank, Fault("raise", 2, 2))))
    check_ended(
        outcomes, 1, 'the sync of version "2" failed', f"{RANKS[rank]}: ValueError: out of memory"
    )
    for one in outcomes:
        assert "weights may be partly those of version 2" in str(one["unusable"])


@pytest.mark.parametrize(("rank", "leg"), [(0, 2), (0, 4), (1, 4), (2, 2), (3, 4)])
def test_an_interrupt(tmp_path: Path, rank: int, leg: int) -> None:
    """SIGINT on one rank, in the middle of a sync or when all is under way."""
    outcomes = results(run_ranks(tmp_path, *failing(rank, Fault("interrupt", 2, leg))))
    interrupted = outcomes.pop(rank)
    assert interrupted["done"] == 1
    assert interrupted["error"] == "KeyboardInterrupt"
    assert "KeyboardInterrupt; weights may be partly" in str(interrupted["again"])
    check_ended(outcomes, 1, f"{RANKS[rank]}: it left: KeyboardInterrupt")


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_closing_from_another_thread_between_transfers(tmp_path: Path, rank: int) -> None:
    outcomes = results(run_ranks(tmp_path, *failing(rank, Fault("close", 2, 2))))
    check_ended(outcomes, 1, f"{RANKS[rank]}: it was closed during the sync")


def test_closing_from_another_thread_while_it_waits(tmp_path: Path) -> None:
    """A worker waits for a trainer that does not come."""
    jobs = failing(2, Fault("close soon", 2, 1))
    jobs[0] = partial(syncs, plan=make_plan(), patience=ENDLESS, fault=Fault("sleep", 2, 1))
    outcomes = results(run_ranks(tmp_path, *jobs))
    check_ended(outcomes, 1, "worker 0: it was closed during the sync")


def test_closing_after_the_last_transfer_is_not_taken_for_a_sync(tmp_path: Path) -> None:
    """Nothing may be left of what was under way when `wait` is called."""
    outcomes = results(run_ranks(tmp_path, *failing(3, Fault("close", 2, 4))))
    check_ended(outcomes, 1, "worker 1: it was closed during the sync")


def test_trainers_that_send_other_versions(tmp_path: Path) -> None:
    jobs = [partial(syncs, plan=make_plan(), version=f"step {min(n, 1)}") for n in range(4)]
    outcomes = results(run_ranks(tmp_path, *jobs))
    check_ended(
        outcomes,
        0,
        "the sync did not begin; no data was moved",
        'trainer 0: it sends version "step 0"',
        'trainer 1: it sends version "step 1"',
    )


@pytest.mark.parametrize(("rank", "count"), [(2, 1), (0, 1), (1, 1)])
def test_a_rank_that_takes_part_in_fewer_syncs(tmp_path: Path, rank: int, count: int) -> None:
    """A worker that is behind, or trainers that stop: the others wait no longer than they may."""
    jobs = [partial(syncs, plan=make_plan(), count=count if n == rank else 2) for n in range(4)]
    outcomes = results(run_ranks(tmp_path, *jobs))
    assert outcomes.pop(rank) == {"done": count}
    check_ended(outcomes, 1, f"{RANKS[rank]}: it closed the run")


def late(seat: Seat, plan: Plan, delays: Sequence[float]) -> object:
    """One sync, after a while."""
    end = end_of(seat, plan, GivenShards(plan, seat.rank, random_tensors(plan, 1)))
    end._session.timeout = SHORT
    time.sleep(delays[seat.rank])
    with pytest.raises(RunError) as caught:
        end.send() if isinstance(end, Trainer) else end.receive()
    (seat.folder / f"told{seat.rank}").touch()
    while len(list(seat.folder.glob("told*"))) < 4:
        time.sleep(0.01)
    return {"error": str(caught.value)}


def test_a_worker_that_comes_when_the_others_gave_up(tmp_path: Path) -> None:
    jobs = [partial(late, plan=make_plan(), delays=(0.0, 0.0, 1.5, 0.0))] * 4
    outcomes = results(run_ranks(tmp_path, *jobs))
    assert "worker 0: it did not answer within 1 s, or is gone" in same(outcomes)


def test_a_worker_that_gave_up_before_the_others_came(tmp_path: Path) -> None:
    jobs = [partial(late, plan=make_plan(), delays=(2.3, 2.3, 0.0, 2.3))] * 4
    outcomes = results(run_ranks(tmp_path, *jobs))
    worker = outcomes.pop(2)
    assert "rank 0, which hosts the control plane, did not answer" in str(worker["error"])
    assert "worker 0: it left: rank 0, which hosts the control plane" in same(outcomes)


def slow(seat: Seat, plan: Plan, seconds: float) -> object:
    """One sync, of ranks that come one after the other and then take their time."""
    end = end_of(seat, plan, GivenShards(plan, seat.rank, random_tensors(plan, 1)))
    end._session.timeout = seconds

    def progress(leg: int, of: int) -> None:
        if leg == of:
            time.sleep(0.7 * seconds)

    time.sleep(0.7 * seconds if seat.rank == 1 else 0)
    end.send(progress=progress) if isinstance(end, Trainer) else end.receive(progress)
    end.close()
    return {"done": 1}


def test_the_wait_for_all_is_not_taken_off_the_transfer(tmp_path: Path) -> None:
    jobs = [partial(slow, plan=make_plan(), seconds=4.0)] * 4
    assert results(run_ranks(tmp_path, *jobs)) == [{"done": 1}] * 4


def again(seat: Seat, plan: Plan) -> dict[str, object]:
    """A sync that fails, then other ends at the same address, and what they do."""
    odd = "dtype" if seat.rank == 1 else "nothing"
    end = end_of(seat, plan, Odd(plan, seat.rank, odd, 0))
    with pytest.raises(RunError, match='version "1" failed'):
        end.send() if isinstance(end, Trainer) else end.receive()
    end.close()
    opened = seat.folder / "opened"
    if seat.rank:
        while not opened.exists():
            time.sleep(0.01)
    else:
        threading.Timer(0.5, opened.touch).start()
    return syncs(seat, plan, count=2, patience=TIMEOUT)


def test_a_new_run_at_the_same_address_after_a_failure(tmp_path: Path) -> None:
    for one in results(run_ranks(tmp_path, *[partial(again, plan=varied_plan(2))] * 4)):
        assert one == {"done": 2}
