"""The backend `m2n_plan` inside vLLM's workers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
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
from m2ncompile.runtime.session import GRACE
from m2ncompile.runtime.vllm_experts import check_experts
from m2ncompile.runtime.vllm_peers import Peers
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
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"timeout must be a number of seconds, got {self.timeout}")

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
    """One worker's end. An update is one call of `update_weights`, between start and finish.

    vLLM's worker keeps whether an update is open: it is once `start_weight_update` returned, and
    no more once `update_weights` raised or `finish_weight_update` returned. It refuses, on all
    workers, calls that do not fit that; so it should be the same on all, though one alone raises.
    """

    init_info_cls = PlanInitInfo
    update_info_cls = PlanUpdateInfo
    # The plan is of the target model.
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.worker: Worker | None = None
        self.peers = Peers(self.parallel_config)
        #: Why there is no worker any more, on all of them alike.
        self._ended: str | None = None
        self._started = self._received = False
        self._timeout = TIMEOUT

    def parse_init_info(self, init_dict: dict[str, Any]) -> PlanInitInfo | None:
        """None where it can't be read, which all workers find, and the last one raises."""
        try:
            info: PlanInitInfo = super().parse_init_info(init_dict)
        except ValueError as error:
            self._raise(error)
            return None
        return info

    def init_transfer_engine(self, init_info: PlanInitInfo | None) -> None:
        if init_info is None:
            return
        if self.worker is not None:
            first = "finish_weight_update, then " if self._started else ""
            self._refuse(
                f"a plan is bound already; call {first}shutdown_weight_transfer_engine first"
            )
            return
        self.shutdown()
        # A trainer that died in an update has not finished it.
        self._close_update()
        self._timeout = init_info.timeout
        self._all(lambda: self._connect(init_info))

    def _connect(self, init_info: PlanInitInfo) -> None:
        rank = init_info.rank_offset + self.peers.number
        address = f"{init_info.master_address}:{init_info.master_port}"
        store = meet(address, rank, init_info.timeout)
        version = vllm.__version__.split("+")[0]

        def load() -> Plan:
            plan = init_info.load()
            check_experts(plan.inputs.engine, self.peers.number, self.model, self.parallel_config)
            return plan

        self.worker = Worker(
            load,
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
        # Raises nothing: vLLM would hold the update for open on the other workers alone.
        self._started, self._received = True, False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # As the base class, without its device synchronization: `receive` ends with one, and
        # the base's fails where there is no accelerator.
        if self.worker is None:
            self._refuse(
                "no plan is bound yet; call init_weight_transfer_engine first"
                if self._ended is None
                else f"no update is possible: {self._ended}"
            )
        elif not self._started:
            self._refuse("update_weights came without start_weight_update")
        elif self._received:
            self._refuse(
                f"update_weights came twice: version {self.worker.version} is complete; call "
                "finish_weight_update"
            )
        else:
            self._all(lambda: self.receive_weights(self.parse_update_info(update_info)))
            self._received = self.worker is not None

    def receive_weights(self, update_info: PlanUpdateInfo) -> None:
        assert self.worker is not None
        self.worker.receive()

    def finish_weight_update(self) -> None:
        started, self._started = self._started, False
        # Where the update failed, that was raised; this ends it for vLLM.
        if self.worker is not None and started and not self._received:
            version = self.worker.version
            if self._close_update() or not self.peers.raises:
                self._refuse(
                    "finish_weight_update came before update_weights: the weights are still "
                    f"those of version {version}"
                )

    def _all(self, action: Callable[[], None]) -> None:
        """On all workers or none: else the run is over, and says why to every later call."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        # Each of its waits ends within the timeout and a little, once another worker gave up.
        failure = self.peers.told(failure, 2 * (self._timeout + GRACE))
        if failure is not None:
            ended = None if self.worker is None else self.worker.unusable
            self.shutdown()
            self._ended = ended or str(failure)
            self._raise(failure)

    def _refuse(self, message: str) -> None:
        """What every worker finds, since vLLM calls them all alike."""
        error = RunError(message)
        error.agreed = True
        self._raise(error)

    def _raise(self, error: Exception) -> None:
        if self.peers.raises:
            raise error
        logger.error("%s", error)

    def _close_update(self) -> bool:
        """For vLLM no update is open any more. False where its worker is not found.

        It is the one who calls: vLLM gives an engine no other way to it.
        """
        frame = sys._getframe()
        while frame is not None:
            caller = getattr(frame.f_locals.get("self"), "__dict__", {})
            if caller.get("weight_transfer_engine") is self:
                caller["_weight_update_active"] = False
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def shutdown(self) -> None:
        worker, self.worker, self._ended = self.worker, None, None
        self._started = self._received = False
        if worker is not None:
            try:
                worker.close()
            except Exception:  # one worker's own, and nothing depends on it
                logger.exception("the run was not closed well")
