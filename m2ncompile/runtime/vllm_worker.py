"""The backend `m2n_plan` inside vLLM's workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from m2ncompile.errors import PlanError, RunError
from m2ncompile.opening import open_plan
from m2ncompile.plan import Plan
from m2ncompile.plan_check import loads
from m2ncompile.runtime.api import TIMEOUT, transport_of
from m2ncompile.runtime.control import StoreControl
from m2ncompile.runtime.driver import unpacked_plan
from m2ncompile.runtime.rendezvous import meet
from m2ncompile.runtime.vllm_target import VllmTarget
from m2ncompile.runtime.worker import Worker

__all__ = ["PlanInitInfo", "PlanUpdateInfo", "PlanWeightTransferEngine"]


logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class PlanInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the ranks meet, and the plan: `plan` (file, digest, URL) or `plan_data` (packed).

    `rank_offset` is the number of trainer ranks, `world_size` counts trainers and
    workers. `plan_digest`, where given, must be the plan's. `timeout` is in seconds.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    plan: str | None = None
    plan_data: str | None = field(default=None, repr=False)
    plan_digest: str | None = None
    transport: str = "torch"
    timeout: float = TIMEOUT
    nccl_unique_id_b64: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.plan is None) == (self.plan_data is None):
            raise ValueError("give either `plan` (a file, digest or URL) or `plan_data`")
        if not 0 < self.rank_offset < self.world_size:
            raise ValueError(
                f"rank_offset {self.rank_offset} must leave a worker in world_size "
                f"{self.world_size}"
            )

    def load(self) -> Plan:
        if self.plan_data is not None:
            plan = loads(unpacked_plan(self.plan_data), "the plan in init_info")
        else:
            assert self.plan is not None
            plan = open_plan(self.plan)
        if self.plan_digest is not None and plan.digest != self.plan_digest:
            raise PlanError(
                f"the trainer sends by plan {self.plan_digest[:16]}..., this worker found "
                f"{plan.digest[:16]}... at {self.plan or 'init_info'}"
            )
        return plan


@dataclass
class PlanUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The plan says what comes; there is nothing to add."""


class PlanWeightTransferEngine(WeightTransferEngine[PlanInitInfo, PlanUpdateInfo]):  # type: ignore[misc]
    """One worker's end. An update is one call of `update_weights`, between start and finish."""

    init_info_cls = PlanInitInfo
    update_info_cls = PlanUpdateInfo
    # The plan is of the target model.
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.worker: Worker | None = None
        self._started = self._received = False

    def init_transfer_engine(self, init_info: PlanInitInfo) -> None:
        with self._one_raises():
            if self.worker is not None and self.worker.unusable is None:
                raise _alike("a plan is bound already; call shutdown_weight_transfer_engine first")
            self.shutdown()
            parallel = self.parallel_config
            rank = init_info.rank_offset + (
                parallel.data_parallel_index * parallel.world_size + parallel.rank
            )
            address = f"{init_info.master_address}:{init_info.master_port}"
            store = meet(address, rank, init_info.timeout)
            version = vllm.__version__.split("+")[0]
            self.worker = Worker(
                init_info.load,
                VllmTarget(self.model, self.model_config, self.device, version),
                StoreControl(store, rank, init_info.world_size),
                transport_of(
                    init_info.transport,
                    store,
                    rank,
                    init_info.world_size,
                    self.device,
                    init_info.nccl_unique_id_b64,
                ),
                trainers=init_info.rank_offset,
                timeout=init_info.timeout,
            )

    def start_weight_update(self) -> None:
        with self._one_raises():
            worker = self._ready()
            if worker.unusable is not None:
                raise _alike(f"no update is possible: {worker.unusable}")
            self._started, self._received = True, False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # As the base class, without its device synchronization: `receive` ends with one, and
        # the base's fails where there is no accelerator.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PlanUpdateInfo) -> None:
        with self._one_raises():
            worker = self._ready()
            if not self._started:
                raise _alike("update_weights came without start_weight_update")
            if self._received:
                raise _alike(
                    f"update_weights came twice: version {worker.version} is complete; call "
                    "finish_weight_update"
                )
            worker.receive()
            self._received = True

    def finish_weight_update(self) -> None:
        with self._one_raises():
            worker = self._ready()
            started, self._started = self._started, False
            if worker.unusable is not None:
                return  # the update raised already; this ends vLLM's session
            if not started:
                raise _alike("finish_weight_update came without start_weight_update")
            if not self._received:
                raise _alike(
                    "finish_weight_update came before update_weights: the weights are still "
                    f"those of version {worker.version}"
                )

    @contextmanager
    def _one_raises(self) -> Iterator[None]:
        """What all workers fail with, only the last of vLLM's executor raises.

        It reads the workers' answers in order and stops at the first error (vLLM 0.32.0 and
        0.33.0, `multiproc_executor`): what the others then say would be taken for the
        answer to the next call.
        """
        try:
            yield
        except RunError as error:
            parallel = self.parallel_config
            if not error.agreed or parallel.rank == parallel.world_size - 1:
                raise
            logger.error("%s", error)

    def _ready(self) -> Worker:
        if self.worker is None:
            raise _alike("no plan is bound yet; call init_weight_transfer_engine first")
        return self.worker

    def shutdown(self) -> None:
        worker, self.worker = self.worker, None
        self._started = self._received = False
        if worker is not None:
            worker.close()


def _alike(message: str) -> RunError:
    """What every worker finds, since vLLM calls them all alike."""
    error = RunError(message)
    error.agreed = True
    return error
