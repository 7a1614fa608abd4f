"""The backend `m2n_plan` in vLLM's trainer factory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from m2ncompile.runtime import api
from m2ncompile.runtime.driven import DrivenTrainer

__all__ = ["PlanTrainerInitInfo", "PlanTrainerWeightTransferEngine"]


@dataclass(kw_only=True)
class PlanTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """`plan` is a file, a digest or a URL; the workers get it with their init info.

    Unless `worker_plan` says where they find it themselves. The ranks meet at
    `master_address:master_port`, which rank 0 opens. `timeout` is in seconds.
    """

    backend: ClassVar[str] = "m2n_plan"

    plan: str
    master_address: str
    master_port: int
    worker_plan: str | None = None
    transport: str = "torch"
    device: str = "cpu"
    timeout: float = api.TIMEOUT
    nccl_unique_id_b64: str | None = field(default=None, repr=False)


class PlanTrainerWeightTransferEngine(TrainerWeightTransferEngine[PlanTrainerInitInfo]):  # type: ignore[misc]
    """One trainer rank's end; `send_weights` is a whole update."""

    init_info_cls = PlanTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, rank: int, trainer: DrivenTrainer) -> None:
        super().__init__(client=client, source=source, is_sender=rank == 0)
        self.rank = rank  # vLLM 0.32 does not take it
        self.trainer = trainer

    @classmethod
    def trainer_init(
        cls, init_info: PlanTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        if source is None:
            raise ValueError("m2n_plan needs a WeightSource (or a module) to send from")
        trainer = api.trainer(
            init_info.plan,
            source,
            address=f"{init_info.master_address}:{init_info.master_port}",
            rank=init_info.rank,
            client=client,
            device=init_info.device,
            transport=init_info.transport,
            timeout=init_info.timeout,
            worker_plan=init_info.worker_plan,
            nccl_unique_id_b64=init_info.nccl_unique_id_b64,
        )
        assert isinstance(trainer, DrivenTrainer)  # there is a client
        return cls(client=client, source=source, rank=init_info.rank, trainer=trainer)

    def send_weights(self) -> None:
        self.trainer.send()

    def shutdown(self) -> None:
        self.trainer.close()
