"""How quantized checkpoints store their tensors: which are packed, and their scales.

transformers builds the unquantized module. The weights to be packed arrive here
marked by the element type they are stored in and leave with their scales beside
them, in the forms of the published DeepSeek-V3, Kimi-K2 and Qwen3-MoE (block
FP8) and gpt-oss (MXFP4) checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Literal

import msgspec

from m2ncompile.errors import InventoryError, Problem, Problems
from m2ncompile.inventory.checks import shown
from m2ncompile.inventory.records import TensorInfo

__all__ = ["Quantization", "read_quantization", "stored_form"]

#: Element type of `weight_scale_inv` in the published checkpoints, by model type.
FP8_SCALE_DTYPE = {"deepseek_v3": "float32", "kimi_k2": "float32", "qwen3_moe": "bfloat16"}

#: Input elements that share one MXFP4 scale, and the bytes that hold them.
MX_GROUP, MX_BYTES = 32, 16

_TITLE = "how this quantized checkpoint is stored is not known"
_FIX = "give the checkpoint's folder (safetensors) or a manifest: both say what is stored"


class Quantization(msgspec.Struct, frozen=True, dict=True):
    """A `quantization_config` whose stored form is known.

    `dtype` is the element type of packed weights, `plain` that of the others
    where the config names none. `block` is the rows and columns that share one
    FP8 scale, `skip` the modules that are not packed.
    """

    method: Literal["fp8", "mxfp4"]
    dtype: str
    skip: tuple[str, ...]
    plain: str | None = None
    block: tuple[int, int] = (1, 1)
    scale_dtype: str = "uint8"

    @cached_property
    def _skipped(self) -> re.Pattern[str]:
        modules = "|".join(re.escape(name).replace(r"\*", "[^.]*") for name in self.skip)
        return re.compile(rf"(?:^|\.)(?:{modules})\." if modules else r"(?!)")

    def skips(self, tensor: str) -> bool:
        """Whether `skip` names the tensor's module or one around it.

        An entry stands for whole parts of a dotted name, `*` for any one part:
        `mlp.gate` covers `layers.0.mlp.gate.weight`, not `layers.0.mlp.gate_proj.weight`.
        """
        return self._skipped.search(f"{tensor}.") is not None


def read_quantization(raw: dict[str, Any], where: str) -> Quantization | None:
    """The quantization of config `raw`, None where it has none.

    Raises `InventoryError` for one whose stored form is not known: to list its
    weights without their scales would be wrong.
    """
    elsewhere = [
        key
        for key, value in raw.items()
        if key != "quantization_config"
        and isinstance(value, dict)
        and (value.get("quant_method") or value.get("quantization_config"))
    ]
    if elsewhere:
        message = "expected a quantization in quantization_config alone"
        raise InventoryError(_TITLE, [Problem(f"{where}: {elsewhere[0]}", message, _FIX)])
    entry = raw.get("quantization_config")
    if entry is None:
        return None
    where = f"{where}: quantization_config"
    if not isinstance(entry, dict):
        raise InventoryError(_TITLE, [Problem(where, f"expected an object; got {shown(entry)}")])
    problems = Problems()
    skip = entry.get("modules_to_not_convert") or []
    if not isinstance(skip, list) or not all(isinstance(name, str) and name for name in skip):
        message = f"expected module names; got {shown(skip)}"
        problems.add(f"{where}.modules_to_not_convert", message)
        skip = []
    read = {"fp8": _read_fp8, "mxfp4": _read_mxfp4}.get(str(entry.get("quant_method")))
    if read is None:
        message = f"expected fp8 or mxfp4; got {shown(entry.get('quant_method'))}"
        problems.add(f"{where}.quant_method", message, _FIX)
    quantization = read and read(entry, raw["model_type"], tuple(skip), where, problems)
    problems.raise_if_any(InventoryError, _TITLE)
    return quantization


def _read_fp8(
    entry: dict[str, Any], model_type: str, skip: tuple[str, ...], where: str, problems: Problems
) -> Quantization:
    match entry.get("weight_block_size"):
        case [int(rows), int(cols)] if rows > 0 and cols > 0:
            block = rows, cols
        case other:
            block = 1, 1
            message = f"expected the rows and columns of a block; got {shown(other)}"
            problems.add(f"{where}.weight_block_size", message, _FIX)
    for key, known in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if (value := entry.get(key, known)) != known:
            problems.add(f"{where}.{key}", f'expected "{known}"; got {shown(value)}', _FIX)
    if entry.get("modules_to_convert"):
        problems.add(f"{where}.modules_to_convert", "expected none", _FIX)
    if model_type not in FP8_SCALE_DTYPE:
        message = (
            f"the dtype of the scales is known for {', '.join(FP8_SCALE_DTYPE)}, not for"
            f" {shown(model_type)}"
        )
        problems.add(where, message, _FIX)
    scale_dtype = FP8_SCALE_DTYPE.get(model_type, "")
    return Quantization("fp8", "float8_e4m3fn", skip, block=block, scale_dtype=scale_dtype)


def _read_mxfp4(
    entry: dict[str, Any], model_type: str, skip: tuple[str, ...], where: str, problems: Problems
) -> Quantization:
    if model_type != "gpt_oss":
        message = f"mxfp4 is known for gpt_oss, not for {shown(model_type)}"
        problems.add(f"{where}.quant_method", message, _FIX)
    return Quantization("mxfp4", "uint8", skip, plain="bfloat16")


def stored_form(
    tensors: Iterable[TensorInfo], quantization: Quantization | None, plain: str, where: str
) -> list[TensorInfo]:
    """`tensors` as the files hold them: scales beside each packed weight.

    Packed are the tensors of element type `quantization.dtype`, except skipped
    ones, which become of type `plain`.
    """
    if quantization is None:
        return list(tensors)
    pack = _fp8_blocks if quantization.method == "fp8" else _mxfp4
    problems = Problems()
    out: list[TensorInfo] = []
    for tensor in tensors:
        if tensor.dtype != quantization.dtype:
            out.append(tensor)
        elif quantization.skips(tensor.name):
            out.append(TensorInfo(tensor.name, plain, tensor.shape))
        else:
            out.extend(pack(tensor, quantization, where, problems))
    problems.raise_if_any(InventoryError, "the config contradicts its quantization")
    return out


def _fp8_blocks(
    tensor: TensorInfo, quantization: Quantization, where: str, problems: Problems
) -> Iterator[TensorInfo]:
    """[R, C] and scales [ceil(R / r), ceil(C / c)]: the last block of a dim may be ragged."""
    yield tensor
    scales = tuple(
        -(-size // block) for size, block in zip(tensor.shape, quantization.block, strict=True)
    )
    yield TensorInfo(f"{tensor.name}_scale_inv", quantization.scale_dtype, scales)


def _mxfp4(
    tensor: TensorInfo, quantization: Quantization, where: str, problems: Problems
) -> Iterator[TensorInfo]:
    """[E, in, out] becomes blocks [E, out, in / 32, 16] and scales [E, out, in / 32]."""
    experts, fan_in, fan_out = tensor.shape
    if fan_in % MX_GROUP:
        message = f"{fan_in} inputs are no multiple of the {MX_GROUP} that share one scale"
        problems.add(f"{where}: {tensor.name}", message)
    groups = fan_in // MX_GROUP
    yield TensorInfo(f"{tensor.name}_blocks", "uint8", (experts, fan_out, groups, MX_BYTES))
    yield TensorInfo(f"{tensor.name}_scales", "uint8", (experts, fan_out, groups))
