"""A worker's module inside vLLM: its layer-wise reload, driven with shards.

vLLM reloads a module in three steps: `initialize_layerwise_reload` puts aside
the tensors that kernels read and restores empty ones in load format; every
loader call is kept until the module has all of its elements; then it is
materialized, loaded, processed, and copied into the tensors that were put
aside, so that their addresses stay (CUDA graphs hold them). Here a parameter's
loader is, for the time of a sync, one that takes a whole parameter in load
format. Read in vLLM 0.33.0 and 0.32.0: `model_executor/model_loader/reload`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from m2ncompile.engine.reloading import awaited, deferred
from m2ncompile.errors import BindError
from m2ncompile.plan import Plan
from m2ncompile.runtime.bind_worker import form_of
from m2ncompile.runtime.target import Form
from m2ncompile.runtime.vllm_experts import check_kernels

__all__ = ["VllmTarget"]


class VllmTarget:
    """`model` is loaded and processed, `model_config` vLLM's for it.

    `rehearsed` is one that does not run on the platform that its plan is for.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: Any,
        device: torch.device,
        version: str,
        rehearsed: bool = False,
    ) -> None:
        self.version, self.device = version, device
        self.platform = None if rehearsed else _platform(device)
        self._model, self._config = model, model_config
        self._modules: nn.Module | None = None
        #: Attention layers that get nothing in this sync.
        self._deferred: list[nn.Module] = []
        #: Parameters in load format, and the loaders that they had.
        self._replaced: list[tuple[torch.Tensor, Any]] = []
        #: By name, the module that has the parameter, and what it calls it.
        self._owners: dict[str, tuple[nn.Module | None, str]] = {}

    def check(self, plan: Plan) -> None:
        if self.platform is not None:
            _check_offloading()
            check_kernels(plan, self._model)

    def held(self, name: str) -> torch.Tensor | None:
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = self._owner(name)
        module, leaf = owner
        return None if module is None else getattr(module, leaf, None)

    def live(self) -> Mapping[str, torch.Tensor]:
        return {
            **dict(self._model.named_buffers(remove_duplicate=False)),
            **dict(self._model.named_parameters(remove_duplicate=False)),
        }

    def load_form(self, name: str) -> Form | None:
        tensor = self._restored(name)
        return None if tensor is None else form_of(tensor)

    def _restored(self, name: str) -> torch.Tensor | None:
        """The tensor in load format, as vLLM recorded it; the live one where it keeps that."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        module, leaf = self._owner(name)
        if module is None:
            return None
        params, buffers = get_layerwise_info(module).restore_metadata
        recorded = params.get(leaf, buffers.get(leaf))
        return getattr(module, leaf, None) if recorded is None else recorded

    def _owner(self, name: str) -> tuple[nn.Module | None, str]:
        path, _, leaf = name.rpartition(".")
        try:
            return self._model.get_submodule(path), leaf
        except AttributeError:
            return None, leaf

    def kept(self, name: str, loaded: Collection[str]) -> bool:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

        path = name.rpartition(".")[0]
        module, _ = self._owner(name)
        assert module is not None
        if deferred(module):
            return True
        params, buffers = get_layerwise_info(module).restore_metadata
        # A reload takes away what processing made, but for these.
        stay = SKIP_TENSORS & {*module._parameters, *module._buffers}
        names = (f"{path}.{leaf}".lstrip(".") for leaf in {*params, *buffers, *stay})
        return any(
            one not in loaded and awaited(one, tensor)
            for one in names
            if (tensor := self._restored(one)) is not None
        )

    def begin(self, reloaded: Collection[str], everything: bool) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

        if everything:
            self._modules = self._model
        else:
            owners = {id(m): m for m in (self._owner(name)[0] for name in reloaded) if m}
            self._modules = nn.ModuleList(owners.values())
            # What attention derives (absorbed matrices, scales) follows from any weights. A reload
            # of such a layer would put its tensors aside and back, and derive anew.
            among = {*self._modules.modules()}
            self._deferred = [m for m in self._model.modules() if deferred(m) and m not in among]
        if self.device.type == "cpu":
            # vLLM pads and packs experts for its CPU kernel only while there is none yet.
            for module in self._modules.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        initialize_layerwise_reload(self._modules)
        for name in reloaded:
            module, leaf = self._owner(name)
            if leaf in SKIP_LOAD_TENSORS:
                continue
            param = getattr(module, leaf)
            self._replaced.append((param, _unwrapped(param.weight_loader)))
            param.weight_loader = _take_whole
            param.weight_loader = make_online_process_loader(module, leaf)

    def load(self, name: str, value: torch.Tensor) -> None:
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

        module, leaf = self._owner(name)
        param = getattr(module, leaf)
        if leaf in SKIP_LOAD_TENSORS:
            param.data.copy_(value)
        else:
            param.weight_loader(param, value)

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        with _incomplete_mtp():
            loaders: Any = self._model
            loaders.load_weights(tensors)

    def finish(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        assert self._modules is not None
        with _quiet_about_direct():
            finalize_layerwise_reload(self._modules, self._config)
        for module in self._deferred:
            attention: Any = module
            attention.process_weights_after_loading(self._config.dtype)
        self._modules, self._deferred = None, []
        for param, loader in self._replaced:
            param.weight_loader = loader
        self._replaced.clear()

    def abandon(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        if self._modules is None:
            return
        for module in self._modules.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                # As if nothing had come: its tensors are put back as they are.
                info.load_numel = 0
                info.loaded_weights = []
        self.finish()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _check_offloading() -> None:
    """Raises BindError where vLLM has its weights on the host, and those on the GPU are copies."""
    try:
        from vllm.model_executor.offloader import PrefetchOffloader, get_offloader
    except ImportError:  # a vLLM without it
        return
    if isinstance(get_offloader(), PrefetchOffloader):
        raise BindError(
            "vLLM keeps weights on the host and copies them over those on the GPU as it serves; "
            "what a sync writes there would be lost. Start it without --offload-group-size"
        )


def _platform(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device.type)
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda-sm{major}{minor}"


def _unwrapped(loader: Any) -> Any:
    """A loader as it was before vLLM wrapped it for the reload."""
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
    return loader


def _take_whole(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """A loader whose weight is the parameter.

    It is copied, though it lies as the parameter does: what processing keeps of it (an expert's
    bias in a kernel's configuration) must not be staging memory, which is used again.
    """
    param.data.copy_(loaded_weight)


@contextmanager
def _incomplete_mtp() -> Iterator[None]:
    """vLLM's weight transfer does not ask for multi-token-prediction layers to be complete."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import (
            disable_mtp_completeness_check,
        )
    except ImportError:  # before 0.33
        yield
        return
    with disable_mtp_completeness_check():
        yield


@contextmanager
def _quiet_about_direct() -> Iterator[None]:
    """vLLM warns of modules without loader calls; those were written directly."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")

    def keep(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
