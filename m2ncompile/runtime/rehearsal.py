"""One rank of a rehearsal: the real runtime over gloo, real vLLM modules, random weights.

`m2ncompile rehearse` starts them on one machine. Across machines torchrun does:
`m2ncompile rehearse PLAN --model FOLDER --prepare DIR`, DIR copied to each, then there

    torchrun --nnodes N --nproc-per-node P --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        -m m2ncompile.runtime.rehearsal DIR --syncs 3

Trainer ranks come first. Every rank prints what it saw, and writes it to DIR/rank<i>.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from m2ncompile.errors import M2nCompileError, PlanError
from m2ncompile.layout import shard_box
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of, load
from m2ncompile.runtime.agree import rank_name
from m2ncompile.runtime.control import StoreControl
from m2ncompile.runtime.rendezvous import meet
from m2ncompile.runtime.shards import Held, held_as_planned
from m2ncompile.runtime.stats import SyncStats
from m2ncompile.runtime.trainer import Trainer
from m2ncompile.runtime.transports.torch import TorchTransport
from m2ncompile.runtime.worker import Worker
from m2ncompile.verify.transfers import bits, random_tensors

__all__ = ["Difference", "RandomShards", "RankReport", "main"]


class Difference(msgspec.Struct, frozen=True):
    """A tensor that is not as it should be after sync number `sync`, and how."""

    name: str
    sync: int
    message: str

    def __str__(self) -> str:
        return f"{self.name}, sync {self.sync}: {self.message}"


class RankReport(msgspec.Struct, frozen=True):
    """What one rank saw. `compared` and `differences` count on workers alone.

    `unprocessed` are modules whose processing after loading did not run here,
    with the reason.
    """

    rank: int
    syncs: tuple[SyncStats, ...] = ()
    compared: int = 0
    differences: tuple[Difference, ...] = ()
    unprocessed: dict[str, str] = {}
    error: str | None = None


class RandomShards:
    """This rank's shards of `random_tensors`, as the plan has them lie; others each step."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.step = 0
        self._plan, self._rank = plan, rank

    def describe(self) -> Sequence[Held]:
        return held_as_planned(self._plan)

    def items(self, whole: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        layouts = layouts_of(self._plan)
        tensors = random_tensors(self._plan, self.step)
        for entry, tensor in zip(self._plan.tensors, tensors, strict=True):
            box = shard_box(layouts[entry.source], tuple(tensor.shape), self._rank)
            assert box is not None
            yield entry.name, tensor[tuple(slice(a, b) for a, b in box)].contiguous()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="as prepared: plan.json and config.json")
    parser.add_argument("--syncs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--store", help="HOST:PORT of a store that is there, without torchrun")
    options = parser.parse_args(arguments)
    if options.store is None:
        store, rank, world = next(dist.rendezvous("env://"))
    else:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = meet(options.store, max(rank, 1), options.timeout)  # rank 0 does not open it
    wait = True
    try:
        report = _run(options.folder, store, rank, world, options.syncs, options.timeout)
    except M2nCompileError as error:
        report = RankReport(rank, error=str(error))
        wait = getattr(error, "agreed", False)
    path = options.folder / f"rank{rank}.json"
    path.with_suffix(".tmp").write_bytes(msgspec.json.encode(report))
    path.with_suffix(".tmp").rename(path)
    # One write a line: several ranks share the output.
    sys.stdout.write(_words(options.folder, report) + "\n")
    sys.stdout.flush()
    if wait:
        # torchrun stops the others as soon as one exits with an error.
        store.set(f"reported/{rank}", b"")
        with suppress(RuntimeError):
            every = [f"reported/{one}" for one in range(world)]
            store.wait(every, timedelta(seconds=options.timeout))
    if report.error is not None or report.differences:
        sys.exit(1)


def _words(folder: Path, report: RankReport) -> str:
    """A report for those who started the ranks with torchrun."""
    with suppress(M2nCompileError):
        where = rank_name(report.rank, load(folder / "plan.json").inputs.trainer.ranks)
        if report.error is not None:
            return f"{where}: {report.error}"
        if report.differences:
            return "\n  ".join((f"{where}: differences", *map(str, report.differences)))
        what = f"{report.compared:,} elements equal to the bit" if report.compared else "all sent"
        return f"{where}: {what} (syncs: {len(report.syncs)})"
    return f"rank {report.rank}: {report.error}"


def _run(
    folder: Path, store: dist.Store, rank: int, world: int, syncs: int, timeout: float
) -> RankReport:
    plan = load(folder / "plan.json")
    trainers, workers = plan.inputs.trainer.ranks, plan.inputs.engine.workers
    if world != trainers + workers:
        raise PlanError(
            f"the plan has {trainers} trainer ranks and {workers} workers, so start "
            f"{trainers + workers} processes; these are {world}"
        )
    control = StoreControl(store, rank, world)
    transport = TorchTransport(store, rank, world)
    if rank < trainers:
        shards = RandomShards(plan, rank)
        trainer = Trainer(
            lambda: plan, shards, control, transport, trainers=trainers, timeout=timeout
        )
        stats = []
        for shards.step in range(1, syncs + 1):
            stats.append(trainer.send())
        trainer.close()
        return RankReport(rank, tuple(stats))
    return _receive(plan, folder, rank - trainers, control, transport, syncs, timeout)


def _receive(
    plan: Plan,
    folder: Path,
    worker_rank: int,
    control: StoreControl,
    transport: TorchTransport,
    syncs: int,
    timeout: float,
) -> RankReport:
    from m2ncompile.engine.processing import disable, process
    from m2ncompile.engine.processing import load as load_weights
    from m2ncompile.engine.vllm_meta import MetaEngine
    from m2ncompile.runtime.vllm_target import VllmTarget

    torch.set_num_threads(1)
    engine = MetaEngine(plan.inputs.engine, folder)
    dtype: torch.dtype = getattr(torch, engine.dtype)
    names = [tensor.name for tensor in plan.tensors]

    def loaded(model: torch.nn.Module, step: int) -> dict[str, str]:
        _fill(model)
        load_weights(model, zip(names, random_tensors(plan, step), strict=True))
        outcomes = process(model, dtype)
        return {path: why for path, why in outcomes.items() if why is not None}

    # What is written directly is not processed on the target; a CPU may pack it.
    direct = {
        plan.params[plan.landings[d.landing].param].name.rpartition(".")[0]
        for d in plan.destinations
        if d.route == "direct" and d.landing is not None
    }
    with engine.worker(worker_rank, device="cpu") as model:
        disable(model, (path for path in direct if _has(model, path)))
        unprocessed = loaded(model, 0)
    expected = []
    for step in range(1, syncs + 1):
        with engine.worker(worker_rank, device="cpu") as model:
            disable(model, (path for path in {*direct, *unprocessed} if _has(model, path)))
            loaded(model, step)
            expected.append(_memory(model))

    stats, compared = [], 0
    differences: list[Difference] = []
    with engine.worker(worker_rank, device="cpu") as model:
        disable(model, (path for path in {*direct, *unprocessed} if _has(model, path)))
        loaded(model, 0)
        addresses = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        target = VllmTarget(
            model,
            engine.model_config,
            torch.device("cpu"),
            plan.inputs.engine.version,
            rehearsed=True,
        )
        worker = Worker(
            lambda: plan,
            target,
            control,
            transport,
            trainers=plan.inputs.trainer.ranks,
            timeout=timeout,
        )
        for number in range(syncs):
            stats.append(worker.receive())
            got, wanted = _memory(model), expected[number]
            for name in sorted(got.keys() | wanted.keys()):
                difference = _difference(got.get(name), wanted.get(name))
                if difference is None:
                    compared += got[name].numel()
                else:
                    differences.append(Difference(name, number + 1, difference))
            for name, tensor in model.named_parameters():
                if addresses.get(name) != tensor.data_ptr():
                    differences.append(Difference(name, number + 1, "it has moved in memory"))
        worker.close()
    rank = plan.inputs.trainer.ranks + worker_rank
    return RankReport(rank, tuple(stats), compared, tuple(differences), unprocessed)


def _difference(got: torch.Tensor | None, wanted: torch.Tensor | None) -> str | None:
    """Between what a sync left and what `load_weights` makes, both as bits."""
    if got is None or wanted is None:
        return "it is gone" if got is None else "load_weights makes no such tensor"
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"it is {list(got.shape)}, load_weights makes {list(wanted.shape)}"
    if torch.equal(got, wanted):
        return None
    count = int((got != wanted).sum())
    return f"{count:,} of {got.numel():,} elements are not what load_weights makes"


def _has(model: torch.nn.Module, path: str) -> bool:
    return path in dict(model.named_modules())


def _fill(model: torch.nn.Module) -> None:
    """A pattern where nothing is loaded, so that it compares equal."""
    with torch.no_grad():
        for param in model.parameters():
            if not param.is_meta:
                memory = torch.empty(0, dtype=torch.uint8)
                memory.set_(param.untyped_storage())
                memory.fill_(0)


def _memory(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every tensor of every module, as bits."""
    from m2ncompile.engine.processing import own_tensors

    return {
        f"{path}.{name}".lstrip("."): bits(tensor).clone()
        for path, module in model.named_modules()
        for name, tensor in own_tensors(module).items()
        if not tensor.is_meta
    }


if __name__ == "__main__":
    main()
