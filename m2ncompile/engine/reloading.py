"""What vLLM's layer-wise reload of a module waits for.

A module is made anew, loaded and processed once as many elements have come as it has;
attention layers only at the end. Read in vLLM 0.33.0 and 0.32.0:
`model_executor/model_loader/reload`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["awaited", "deferred"]


def awaited(name: str, tensor: torch.Tensor) -> bool:
    """Whether the reload of its module waits for a parameter or buffer in load format."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

    return name.rpartition(".")[2] not in SKIP_LOAD_TENSORS and tensor.numel() > 0


def deferred(module: nn.Module) -> bool:
    """Whether a module is processed only when all others are done."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    found: bool = is_deferred_attention_layer(module)
    return found
