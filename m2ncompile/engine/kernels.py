"""Kernel choice while vLLM builds a model for planning.

vLLM chooses kernels from the machine it runs on, while a layer is built. So a
model may not build on a machine without the right CPU or GPU, and could come
out otherwise from one machine to the next. A plan needs the load format alone:
the parameters that `create_weights` makes. `planning_kernels` therefore answers
each choice itself, from the target and never from this machine, and refuses
those whose effect on parameters it does not know.

Facts of vLLM 0.33.0 that this rests on (paths under `vllm/model_executor/layers`):

* `quantization/fp8.py` and `quantization/compressed_tensors/schemes/
  compressed_tensors_w8a8_fp8.py`: a linear layer registers its parameters before
  it asks for a kernel, and the kernel changes none of them. compressed-tensors
  takes another scheme below compute capability 8.9.
* `fused_moe/routed_experts.py`: a MoE layer asks its method for a backend, lets
  it round the layer's sizes up, then creates weights. The rounding is all that
  the backend decides:
    - unquantized (`fused_moe/oracle/unquantized.py`): on CUDA only FlashInfer
      TRT-LLM rounds; it needs capability 10.x and FlashInfer
      (`fused_moe/experts/trtllm_bf16_moe.py`).
    - FP8 (`quantization/fp8.py`, `compressed_tensors_moe_w8a8_fp8.py`): none
      rounds. Scale blocks are refined to fit the shard by shape alone, unless a
      `moe_backend` is named: then by what that backend can do on the device
      (`resolve_fp8_moe_weight_block_shape` in `fused_moe/oracle/fp8.py`).
    - MXFP4 of gpt-oss (`fused_moe/oracle/mxfp4.py`): every backend rounds, each
      its own way. The first that runs with unquantized activations in the standard
      format: on 9.0 OpenAI's Triton kernels, which are inside vLLM's wheel
      and need 9.0 (`fused_moe/experts/gpt_oss_triton_kernels_moe.py`); on 8.x and
      12.x Marlin; on 10.x FlashInfer TRT-LLM, or Triton without FlashInfer.
* `activation.py`: three activations without parameters keep a compiled operator
  when they are built, which an installation without vLLM's CPU extension lacks.
* `platforms/cpu.py` under `vllm/`, and `utils.py`: on a CPU with AMX tiles, MLA and
  small matrices are processed by operators of that extension.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from m2ncompile.errors import EngineError, Problem, Problems
from m2ncompile.spec import TARGETS

__all__ = ["PlanningKernel", "plain_cpu", "planning_kernels"]

_KNOWN_VLLM = ("0.33.0", "0.32.0")
_KERNELS = "vllm.model_executor.kernels.linear"
_MOE = "vllm.model_executor.layers.fused_moe"
_QUANT = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_QUANT}.compressed_tensors"

_Function = Callable[..., object]


@contextmanager
def planning_kernels(target: str) -> Iterator[None]:
    """Models built inside the block have the parameters they would have on `target`.

    `target` is one of `m2ncompile.spec.TARGETS`. Every module's copy of vLLM's
    selection functions is replaced for the block, process-wide, and put back
    after it, however it ends. Kernels are stand-ins that refuse to run.

    Raises EngineError at once where vLLM is not the known release, not on its
    CPU platform, or its functions are not the known ones (or replaced already);
    and from inside the block, while building, where the load format on `target`
    can't be told.
    """
    import torch

    answers, refusals = _stand_ins(target)
    lacking = [name for name in _KEPT_OPERATORS if not hasattr(torch.ops._C, name)]
    try:
        for name in lacking:
            setattr(torch.ops._C, name, PlanningKernel(f"operator {name}", {}))
        for module, name, original in _copies(map(inspect.unwrap, refusals.values())):
            setattr(module, name, answers.get((module.__name__, name), refusals[original.__name__]))
        with plain_cpu():
            yield
    finally:
        # Searched anew: a module that was imported inside the block copied a stand-in.
        for module, name, stand_in in _copies([*answers.values(), *refusals.values()]):
            setattr(module, name, inspect.unwrap(stand_in))
        for name in lacking:
            delattr(torch.ops._C, name)


@contextmanager
def plain_cpu() -> Iterator[None]:
    """Inside the block this CPU has no AMX tiles, for all who ask torch in this process.

    So weights are processed alike on every machine.
    """
    import torch

    answer = torch.cpu._is_amx_tile_supported
    torch.cpu._is_amx_tile_supported = lambda: False
    try:
        yield
    finally:
        torch.cpu._is_amx_tile_supported = answer


class PlanningKernel:
    """Stands where vLLM keeps a kernel. Knows what was asked; refuses all else."""

    def __init__(self, what: str, asked: Mapping[str, object]) -> None:
        self.what = what
        self.asked = dict(asked)

    def input_quant_key(self) -> None:
        """No pre-quantized input; compressed-tensors asks while a layer is built."""

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_use(self.what, name)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse_use(self.what, "a call")


class _PlanningExperts(type):
    """The same for MoE, where vLLM keeps a class: no attributes, no instances."""

    what: str
    asked: dict[str, object]

    def __getattr__(cls, name: str) -> NoReturn:
        _refuse_use(cls.what, name)

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        _refuse_use(cls.what, "a call")


def _refuse_use(what: str, use: str) -> NoReturn:
    if use.startswith("__"):
        raise AttributeError(use)  # Python's own protocols probe for these
    raise EngineError(
        "a model built for planning has no kernels, so its weights can't be processed or run",
        [Problem(what, f"vLLM asked the stand-in for {use}")],
    )


# --- what is answered: one function a (selection function, calling module) ---


def _fp8_linear(target: str, asked: dict[str, Any]) -> object:
    return PlanningKernel(f"FP8 linear kernel on {target}", asked)


def _compressed_fp8_linear(target: str, asked: dict[str, Any]) -> object:
    if target in ("cuda-sm80", "cuda-sm86"):
        _undecided(
            "compressed-tensors FP8 linear layer",
            target,
            "vLLM loads it as W8A16 below compute capability 8.9 and as W8A8 here",
            "plan for cuda-sm89 or later",
        )
    return _fp8_linear(target, asked)


def _unquantized_moe(target: str, asked: dict[str, Any]) -> object:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    config, backends = asked["moe_config"], unquantized.UnquantizedMoeBackend
    # These two name quantized kernels; vLLM passes over them here.
    if config.moe_backend not in ("auto", "humming", "marlin"):
        candidates = [unquantized.map_unquantized_backend(config.moe_backend)]
    elif target == "cpu":
        candidates = [backends.CPU]
    elif _major(target) == 10:
        candidates = [backends.FLASHINFER_TRTLLM, backends.TRITON]
    else:
        candidates = [backends.TRITON]
    round_up = unquantized.unquantized_round_up_hidden_size_and_intermediate_size
    return _agreed("unquantized MoE", target, asked, config, candidates, round_up)


def _fp8_moe(target: str, asked: dict[str, Any]) -> object:
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    config = asked["config"]
    if config.tp_shard_with_padding:
        _undecided(
            "FP8 MoE",
            target,
            f'moe_backend "{config.moe_backend}" is named and a shard of '
            f"{config.intermediate_size} / {config.tp_size} = "
            f"{config.intermediate_size // config.tp_size} is no multiple of the scale block; "
            "whether it is padded or the scales are refined depends on the device",
            'leave moe_backend at "auto", or use a tp that leaves whole blocks on each rank',
        )
    backend = Fp8MoeBackend.CPU if target == "cpu" else Fp8MoeBackend.TRITON
    return backend, _experts("FP8 MoE", target, asked)


def _gpt_oss_moe(target: str, asked: dict[str, Any]) -> object:
    from vllm import envs
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4

    config, backends = asked["config"], mxfp4.Mxfp4MoeBackend
    quantized = mxfp4._resolve_activation_key(asked.get("activation_key"))
    unusual = {
        f"activations quantized as {quantized}": quantized is not None,
        "batched activations": config.moe_parallel_config.use_batched_activation_format,
        "LoRA": config.is_lora_enabled,
        "batch invariance": envs.VLLM_BATCH_INVARIANT,
        f"activation {config.activation}": config.activation != MoEActivation.SWIGLUOAI,
    }
    if any(unusual.values()):
        with_what = ", ".join(what for what, present in unusual.items() if present)
        _undecided(
            "MXFP4 MoE",
            target,
            f"which kernel runs with {with_what} is not known, and each pads differently",
            "plan without it",
        )
    if config.moe_backend != "auto":
        candidates = mxfp4._get_requested_backends(config.moe_backend, None)
    elif target == "cpu":
        candidates = [backends.CPU]
    elif _major(target) == 9:
        candidates = [backends.TRITON]
    elif _major(target) == 10:
        candidates = [backends.FLASHINFER_TRTLLM_MXFP4_BF16, backends.TRITON]
    else:
        candidates = [backends.MARLIN]
    round_up = mxfp4.mxfp4_round_up_hidden_size_and_intermediate_size
    return _agreed("MXFP4 MoE", target, asked, config, candidates, round_up)


def _major(target: str) -> int:
    """Major compute capability: 9 for `cuda-sm90`."""
    return int(target.removeprefix("cuda-sm")) // 10


def _agreed(
    what: str,
    target: str,
    asked: dict[str, Any],
    config: Any,
    candidates: list[Any],
    round_up: Callable[[Any, int, int], tuple[int, int]],
) -> tuple[Enum, type]:
    """The first candidate, provided that all of them round to the same sizes."""
    hidden, intermediate = config.hidden_dim, config.intermediate_size_per_partition
    sizes = {backend: round_up(backend, hidden, intermediate) for backend in candidates}
    if len(set(sizes.values())) > 1:
        forms = ", ".join(f"{b.name} {h} x {i}" for b, (h, i) in sizes.items())
        _undecided(
            what,
            target,
            f"a shard's hidden x intermediate {hidden} x {intermediate} is padded as the kernel "
            f"needs ({forms}), and which one runs depends on what is installed there",
            "use a tp, or expert parallelism, at which these agree",
        )
    return candidates[0], _experts(what, target, asked)


def _experts(what: str, target: str, asked: dict[str, Any]) -> type:
    return _PlanningExperts("PlanningExperts", (), {"what": f"{what} on {target}", "asked": asked})


def _undecided(what: str, target: str, message: str, fix: str) -> NoReturn:
    raise EngineError(
        f"the load format of this model on {target} can't be told", [Problem(what, message, fix)]
    )


# --- vLLM's selection functions and how they are replaced ---


class _Choice(NamedTuple):
    """A selection function that is answered, in the modules that are known to call it."""

    module: str
    name: str
    parameters: tuple[str, ...]
    callers: Mapping[str, Callable[[str, dict[str, Any]], object]]


_ANSWERED = (
    _Choice(
        _KERNELS,
        "init_fp8_linear_kernel",
        (
            "activation_quant_key",
            "weight_quant_key",
            "input_dtype",
            "out_dtype",
            "weight_shape",
            "force_kernel",
            "module_name",
        ),
        {
            f"{_QUANT}.fp8": _fp8_linear,
            f"{_COMPRESSED}.schemes.compressed_tensors_w8a8_fp8": _compressed_fp8_linear,
        },
    ),
    _Choice(
        f"{_MOE}.oracle.unquantized",
        "select_unquantized_moe_backend",
        ("moe_config",),
        {f"{_MOE}.unquantized_fused_moe_method": _unquantized_moe},
    ),
    _Choice(
        f"{_MOE}.oracle.fp8",
        "select_fp8_moe_backend",
        ("config", "weight_key", "activation_key", "allow_vllm_cutlass"),
        {
            f"{_QUANT}.fp8": _fp8_moe,
            f"{_COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8": _fp8_moe,
        },
    ),
    _Choice(
        f"{_MOE}.oracle.mxfp4",
        "select_mxfp4_moe_backend",
        ("config", "activation_key"),
        {f"{_QUANT}.mxfp4": _gpt_oss_moe},
    ),
)

#: The other choices that a model under construction can ask for, and the ones
#: above when any other module asks.
_REFUSED = (
    (_KERNELS, "choose_mp_linear_kernel"),
    (_KERNELS, "init_int8_linear_kernel"),
    (_KERNELS, "init_mxfp4_linear_kernel"),
    (_KERNELS, "init_mxfp6_linear_kernel"),
    (_KERNELS, "init_mxfp8_linear_kernel"),
    (_KERNELS, "init_nvfp4_linear_kernel"),
    (_KERNELS, "init_wfp8_a16_linear_kernel"),
    (f"{_MOE}.oracle.int8", "select_int8_moe_backend"),
    (f"{_MOE}.oracle.int_wna16", "select_wna16_moe_backend"),
    (f"{_MOE}.oracle.mxfp4", "select_deepseek_v4_mxfp4_moe_backend"),
    (f"{_MOE}.oracle.mxfp8", "select_mxfp8_moe_backend"),
    (f"{_MOE}.oracle.nvfp4", "select_nvfp4_moe_backend"),
    (f"{_MOE}.oracle.w4a8", "select_w4a8_moe_backend"),
    (f"{_MOE}.oracle.w4a8_int8", "select_w4a8_int8_moe_backend"),
    *((choice.module, choice.name) for choice in _ANSWERED),
)


#: Of `torch.ops._C`, kept by NewGELU, FastGELU and QuickGELU.
_KEPT_OPERATORS = ("gelu_new", "gelu_fast", "gelu_quick")


def _stand_ins(target: str) -> tuple[dict[tuple[str, str], _Function], dict[str, _Function]]:
    """Stand-ins by (calling module, name), and for all other callers by name.

    Each wraps the function it stands for, which `inspect.unwrap` returns.
    """
    if target not in TARGETS:
        raise EngineError(f'unknown target "{target}"; known: {", ".join(TARGETS)}')
    import vllm
    from vllm.platforms import current_platform

    if vllm.__version__.split("+")[0] not in _KNOWN_VLLM:
        raise EngineError(
            f"kernel choice is known for vLLM {', '.join(_KNOWN_VLLM)}; "
            f"{vllm.__version__} is installed"
        )
    if not current_platform.is_cpu():
        raise EngineError(
            f"vLLM runs on {current_platform.device_name} here; planning needs its CPU platform. "
            "Set VLLM_TARGET_DEVICE=cpu before vLLM is imported"
        )
    problems = Problems()
    refusals: dict[str, _Function] = {}
    for module, name in _REFUSED:
        function = getattr(importlib.import_module(module), name, None)
        if inspect.isfunction(function) and inspect.unwrap(function) is function:
            refusals[name] = _refusing(function, target)
        else:
            problems.add(f"{module}.{name}", f"expected vLLM's own function, got {function!r}")
    answers: dict[tuple[str, str], _Function] = {}
    for choice in _ANSWERED:
        where = f"{choice.module}.{choice.name}"
        if choice.name not in refusals:
            continue
        original = inspect.unwrap(refusals[choice.name])
        parameters = tuple(inspect.signature(original).parameters)
        if parameters != choice.parameters:
            problems.add(
                where,
                f"expected parameters {', '.join(choice.parameters)}; got {', '.join(parameters)}",
            )
        for caller, answer in choice.callers.items():
            answers[caller, choice.name] = _answering(original, answer, target)
            found = getattr(importlib.import_module(caller), choice.name, None)
            if found is not original:
                problems.add(f"{caller}.{choice.name}", f"expected {where}, got {found!r}")
    problems.raise_if_any(
        EngineError,
        f"kernel choice is not that of vLLM {' or '.join(_KNOWN_VLLM)}, or is replaced already",
    )
    return answers, refusals


def _answering(
    original: _Function, answer: Callable[[str, dict[str, Any]], object], target: str
) -> _Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def stand_in(*args: object, **kwargs: object) -> object:
        return answer(target, signature.bind(*args, **kwargs).arguments)

    return stand_in


def _refusing(original: _Function, target: str) -> _Function:
    @functools.wraps(original)
    def stand_in(*args: object, **kwargs: object) -> NoReturn:
        _undecided(
            f"{original.__module__}.{original.__name__}",
            target,
            "vLLM chooses this kernel from the device it runs on, and what parameters each "
            "choice gives is not known here",
            "what can be planned: unquantized models, FP8 checkpoints, compressed-tensors FP8 "
            "(W8A8) and MXFP4 gpt-oss",
        )

    return stand_in


def _copies(functions: Iterable[_Function]) -> list[tuple[ModuleType, str, Any]]:
    """Every attribute of vLLM's imported modules (and its plugins') that is one of `functions`."""
    wanted = {id(function) for function in functions}
    return [
        (module, name, value)
        for path, module in list(sys.modules.items())
        if path.startswith("vllm")
        for name, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in wanted
    ]
