"""The `vllm.general_plugins` entry point: vLLM loads it in every process of its own."""

from __future__ import annotations

__all__ = ["BACKEND", "register"]

#: The name in `--weight-transfer-config '{"backend": "m2n_plan"}'`.
BACKEND = "m2n_plan"


def register() -> None:
    """Names the backend in vLLM's factories; the engines are imported when one is made."""
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    if BACKEND not in WeightTransferEngineFactory._registry:  # plugins may be loaded twice
        WeightTransferEngineFactory.register_engine(
            BACKEND, "m2ncompile.runtime.vllm_worker", "PlanWeightTransferEngine"
        )
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(
            BACKEND, "m2ncompile.runtime.vllm_trainer", "PlanTrainerWeightTransferEngine"
        )
