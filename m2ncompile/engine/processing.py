"""What vLLM does to a module's weights once they are loaded, module by module, on the CPU.

The order is that of vLLM 0.33.0's `process_weights_after_loading`: quantization
methods, attention layers, then the model itself. A step that can't run here does
not keep the others from running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from m2ncompile.errors import M2nCompileError

if TYPE_CHECKING:
    import torch

__all__ = ["disable", "load", "own_tensors", "process"]


def load(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The model's own `load_weights`, as vLLM's weight transfer calls it.

    Loaders may write to what they are given (gpt-oss does), so they get copies.
    """
    import torch
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    with torch.no_grad(), disable_mtp_completeness_check():
        loaders: Any = model
        loaders.load_weights((name, tensor.clone()) for name, tensor in tensors)


def process(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, str | None]:
    """Processes the weights of every module by path: None where it ran, else why it could not.

    Modules that vLLM does nothing to are left out. `dtype` is the model's.
    """
    import torch

    outcomes: dict[str, str | None] = {}
    with torch.no_grad():
        for path, step in _steps(model, dtype):
            try:
                step()
            except Exception as error:  # kernels raise whatever this machine lacks
                outcomes[path] = _words(error)
            else:
                outcomes.setdefault(path, None)
    return outcomes


def disable(model: torch.nn.Module, paths: Iterable[str]) -> None:
    """Weights of the modules at `paths` are processed no more, not in vLLM's reload either."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for path in paths:
        module: Any = model.get_submodule(path)
        method = getattr(module, "quant_method", None)
        for owner in (method if isinstance(method, QuantizeMethodBase) else None, module):
            if owner is not None and hasattr(owner, "process_weights_after_loading"):
                owner.process_weights_after_loading = lambda *_: None


def _steps(
    model: torch.nn.Module, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            yield path, partial(method.process_weights_after_loading, module)
    for path, module in model.named_modules():
        if is_deferred_attention_layer(module):
            attention: Any = module
            yield path, partial(attention.process_weights_after_loading, dtype)
    whole: Any = model
    if hasattr(model, "process_weights_after_loading"):
        yield "", whole.process_weights_after_loading


def _words(error: Exception) -> str:
    if isinstance(error, M2nCompileError):
        return error.title
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = f" in {traceback.tb_frame.f_code.co_qualname}" if traceback is not None else ""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{where}" + (f": {lines[0][:200]}" if lines else "")


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters, buffers and plain tensor attributes of a module without its children's."""
    import torch

    found: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=False))
    found.update(module.named_buffers(recurse=False))
    found.update(
        (name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)
    )
    return found
