"""What a training loop calls: `trainer(...)` and `worker(...)`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from m2ncompile.errors import M2nCompileError, RunError
from m2ncompile.opening import open_plan
from m2ncompile.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from m2ncompile.runtime.driven import DrivenTrainer
    from m2ncompile.runtime.driver import Client, Driver
    from m2ncompile.runtime.target import Target
    from m2ncompile.runtime.trainer import Trainer
    from m2ncompile.runtime.transports.base import Transport
    from m2ncompile.runtime.worker import Worker

__all__ = ["TIMEOUT", "trainer", "transport_of", "worker"]

T = TypeVar("T")

#: How long a phase of the start, or of a sync, may take, in seconds.
TIMEOUT = 300.0
#: Stores of runs that did not come about, for those who come later, while this process lives.
_kept: list[Store] = []


def _plan(plan: Plan | str | Path) -> Plan:
    return plan if isinstance(plan, Plan) else open_plan(plan)


def transport_of(
    name: str,
    store: Store,
    rank: int,
    world: int,
    device: torch.device,
    unique_id: str | None = None,
) -> Transport:
    """A transport by name. One that there is not says so in `prepare`, where all ranks hear it."""
    if name == "torch":
        from m2ncompile.runtime.transports.torch import TorchTransport

        return TorchTransport(store, rank, world, device)
    if name == "m2n":
        from m2ncompile.runtime.transports.m2n import M2nTransport

        return M2nTransport(store, rank, world, device, unique_id=unique_id)
    from m2ncompile.runtime.transports.absent import AbsentTransport

    return AbsentTransport(f'there is no transport "{name}"; known: m2n, torch')


def _told(make: Callable[[], T], address: str, rank: int, timeout: float) -> T:
    """What `make` returns; where it fails, the others are told instead of left waiting."""
    try:
        return make()
    except (M2nCompileError, TypeError) as error:
        from m2ncompile.runtime.agree import Envelope
        from m2ncompile.runtime.control import StoreControl
        from m2ncompile.runtime.rendezvous import meet

        envelope = Envelope("source", 0, "", str(error))
        with suppress(M2nCompileError, RuntimeError):
            store = meet(address, rank, timeout)
            StoreControl(store, rank, rank + 1).leave(str(error), msgspec.json.encode(envelope))
            _kept.append(store)
        raise


def _check_rank(rank: int, ranks: int, side: str) -> None:
    if not 0 <= rank < ranks:
        raise RunError(f"{side} rank {rank}: the plan has {ranks} {side} ranks, counted from 0")


def trainer(
    plan: Plan | str | Path,
    source: Any,
    *,
    address: str,
    rank: int | None = None,
    client: Client | None = None,
    device: torch.device | str = "cpu",
    transport: str = "torch",
    timeout: float = TIMEOUT,
    worker_plan: str | None = None,
    nccl_unique_id_b64: str | None = None,
    stock: bool = False,
) -> Trainer | DrivenTrainer:
    """This trainer rank's end of a run; all trainer ranks and all workers make theirs at once.

    `source` is the module (plain, FSDP2, DTensors), or a WeightSource of vLLM's that yields
    local shards. `address` is `host:port` of rank 0, which opens it; `rank` counts trainers,
    torch.distributed's where it is not given. Shards lie on `device`. With a `client` of
    vLLM's (HTTP, Ray, or any object with its four methods), given on every rank, rank 0 also
    drives the engine: its workers get the plan, unless `worker_plan` is where they find it,
    and every `send` is a whole update there. `nccl_unique_id_b64` is for `transport="m2n"`: an
    id that all ranks have already, where rank 0 is not to make one. With `stock` its workers run
    vLLM's own `nccl_m2n` backend, and the plan is one of the `vllm` resolver.

    Raises PlanError or StoreError for the plan, and RunError, the same on all ranks,
    for whatever keeps any of them from starting.
    """
    import torch
    import torch.distributed as dist

    from m2ncompile.runtime.control import StoreControl
    from m2ncompile.runtime.driven import DrivenTrainer
    from m2ncompile.runtime.driver import Driver, worker_init_info
    from m2ncompile.runtime.rendezvous import meet, split_address
    from m2ncompile.runtime.shards import shards_of
    from m2ncompile.runtime.trainer import Trainer

    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    found = _plan(plan) if stock else _told(lambda: _plan(plan), address, rank, timeout)
    trainers = found.inputs.trainer.ranks
    world = trainers + found.inputs.engine.workers
    _check_rank(rank, trainers, "trainer")
    if stock:
        from m2ncompile.runtime.stock import StockSession

        if client is None:
            raise RunError("stock workers take part in a sync from inside of a client's calls")
        if nccl_unique_id_b64 is not None:
            raise RunError("stock workers meet at the address, and get NCCL's id there")
        host, port = split_address(address)
        session = StockSession(client, host, port, rank, timeout, where)
        return Trainer.over(session, lambda: found, shards_of(source, trainers, where), where)
    shards = _told(lambda: shards_of(source, trainers, where), address, rank, timeout)
    store = meet(address, rank, timeout)

    def construct(driver: Driver | None) -> Trainer:
        return Trainer(
            lambda: found,
            shards,
            StoreControl(store, rank, world),
            transport_of(transport, store, rank, world, where, nccl_unique_id_b64),
            trainers=trainers,
            timeout=timeout,
            device=where,
            watch=None if driver is None else driver.watch,
        )

    if client is None:
        return construct(None)
    return DrivenTrainer(
        construct,
        worker_init_info(found, address, transport, timeout, worker_plan, nccl_unique_id_b64),
        Driver(client) if rank == 0 else None,
        StoreControl(store, rank, trainers, "m2ncompile/trainers"),
        timeout,
    )


def worker(
    plan: Plan | str | Path,
    target: Target,
    *,
    address: str,
    rank: int,
    transport: str = "torch",
    timeout: float = TIMEOUT,
    nccl_unique_id_b64: str | None = None,
) -> Worker:
    """Worker `rank`'s end of a run, counted from 0 among workers. As `trainer`.

    vLLM's workers don't call it: their backend `m2n_plan` does the same.
    """
    from m2ncompile.runtime.control import StoreControl
    from m2ncompile.runtime.rendezvous import meet
    from m2ncompile.runtime.worker import Worker

    found = _plan(plan)
    trainers = found.inputs.trainer.ranks
    world, place = trainers + found.inputs.engine.workers, trainers + rank
    _check_rank(rank, found.inputs.engine.workers, "worker")
    store = meet(address, place, timeout)
    return Worker(
        lambda: found,
        target,
        StoreControl(store, place, world),
        transport_of(transport, store, place, world, target.device, nccl_unique_id_b64),
        trainers=trainers,
        timeout=timeout,
    )
