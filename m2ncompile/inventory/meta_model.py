"""transformers' module of a config, built on the meta device and read as records.

The only importer of torch and transformers in this package, and only when called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from m2ncompile.errors import InventoryError, Problem
from m2ncompile.inventory import unlisted
from m2ncompile.inventory.checks import shown
from m2ncompile.inventory.records import TensorInfo
from m2ncompile.inventory.stored import Quantization
from m2ncompile.quiet import captured_output

__all__ = ["INSTEAD", "MODEL_ALIASES", "Built", "build"]

#: `model_type` that transformers lacks -> the type whose tensors are the same.
MODEL_ALIASES = {"kimi_k2": "deepseek_v3"}

#: Published from the base model, so without the base model's prefix in the names.
BASE_MODEL_TYPES = frozenset({"gpt2"})

#: Config entries that no tensor depends on and that make transformers fetch code
#: or kernels; and the quantization, which is applied to the records instead.
DROPPED = frozenset(
    {
        "_attn_implementation",
        "_experts_implementation",
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "quantization_config",
    }
)

#: Beyond any real model: a damaged config, which would build for hours.
LIMITS = {
    "num_hidden_layers": 2**12,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "n_routed_experts": 2**16,
}

INSTEAD = "give the checkpoint's folder (safetensors) or a manifest instead"


class Built(msgspec.Struct, frozen=True):
    """The module's tensors under hub names, MTP layers last among the layers.

    A tensor that the quantization packs carries its element type, all others
    theirs; `dtype` is the model's own. `tied` pairs a tensor left out with the
    name of the one that it is. `ignored` are patterns of names that the class
    skips on loading.
    """

    tensors: list[TensorInfo]
    tied: list[tuple[TensorInfo, str]]
    layers: int
    heads: int
    dtype: str
    ignored: tuple[str, ...]


def build(raw: dict[str, Any], mtp: int, quantization: Quantization | None, where: str) -> Built:
    """Builds the causal LM of config `raw` with `mtp` layers more; raises `InventoryError`."""
    try:
        with captured_output():
            return _build(raw, mtp, quantization, where)
    except InventoryError:
        raise
    except ImportError as error:
        title, fix = "a bare config needs transformers and torch", "pip install 'm2ncompile[vllm]'"
        problem = Problem(where, _one_line(error), f"{fix}, or {INSTEAD}")
    except Exception as error:  # transformers raises whatever a wrong value trips
        title = "transformers can't build the model of this config"
        problem = Problem(where, f"{type(error).__name__}: {_one_line(error)}", INSTEAD)
    raise InventoryError(title, [problem])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def _build(raw: dict[str, Any], mtp: int, quantization: Quantization | None, where: str) -> Built:
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = MODEL_ALIASES.get(raw["model_type"], raw["model_type"])
    if model_type not in CONFIG_MAPPING:
        message = f"transformers {transformers.__version__} has no {shown(model_type)}"
        raise _refused(f"{where}: model_type", message)
    fields = {key: value for key, value in raw.items() if key not in DROPPED}
    fields["model_type"] = model_type
    if quantization is not None and quantization.plain is not None:
        fields.setdefault("dtype", fields.get("torch_dtype") or quantization.plain)
    config_class = CONFIG_MAPPING[model_type]
    config = config_class.from_dict(dict(fields))
    text = config.get_text_config()
    for key, limit in LIMITS.items():
        if not 0 <= (count := getattr(text, key, 0) or 0) <= limit:
            raise _refused(f"{where}: {key}", f"expected at most {limit}; got {shown(count)}")
    if mtp:
        fields |= unlisted.with_mtp_layers(model_type, config, mtp)
        config = config_class.from_dict(dict(fields))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    declared = fields.get("architectures")
    if isinstance(declared, list) and declared and type(model).__name__ not in declared:
        message = f"a bare config is read as {type(model).__name__}; this is {shown(declared)}"
        raise _refused(f"{where}: architectures", message)

    state, tied = _state(model)
    for name in _kept_in_fp32(model, state):
        state[name] = torch.empty_like(state[name], dtype=torch.float32)
    for name in _packed(model, quantization):
        assert quantization is not None
        state[name] = torch.empty_like(state[name], dtype=getattr(torch, quantization.dtype))
    prefix = f"{model.base_model_prefix}." if model_type in BASE_MODEL_TYPES else ""

    def info(name: str, tensor: Any) -> TensorInfo:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorInfo(name.removeprefix(prefix), dtype, tuple(tensor.shape))

    return Built(
        tensors=[info(*item) for item in revert_weight_conversion(model, state).items()],
        tied=[(info(name, tensor), source.removeprefix(prefix)) for name, tensor, source in tied],
        layers=getattr(text, "num_hidden_layers", 0),
        heads=getattr(text, "num_attention_heads", 0),
        dtype=str(model.dtype).removeprefix("torch."),
        ignored=tuple(sorted(model._keys_to_ignore_on_load_unexpected or ())),
    )


def _refused(where: str, message: str) -> InventoryError:
    return InventoryError(
        "the config can't be read as a causal language model", [Problem(where, message, INSTEAD)]
    )


def _state(model: Any) -> tuple[dict[str, Any], list[tuple[str, Any, str]]]:
    """The state dict with every parameter once, and the other names of tied ones."""
    state: dict[str, Any] = {}
    tied: list[tuple[str, Any, str]] = []
    first: dict[int, str] = {}
    entries = model.state_dict(keep_vars=True).items()
    for name, tensor in sorted(entries, key=lambda entry: entry[0] in model.all_tied_weights_keys):
        source = first.setdefault(id(tensor), name)
        if source == name:
            state[name] = tensor.detach()
        else:
            tied.append((name, tensor, source))
    return state, tied


def _kept_in_fp32(model: Any, state: dict[str, Any]) -> list[str]:
    """Names that the class keeps in float32 whatever the model's dtype."""
    patterns = [p.replace("*", ".*") for p in model._keep_in_fp32_modules_strict or ()]
    return [name for name in state if any(re.search(p, name) for p in patterns)]


def _packed(model: Any, quantization: Quantization | None) -> Iterator[str]:
    """Names of the weights that `quantization` packs, before its exceptions.

    Chosen as transformers' quantizers do: stacked experts, and with FP8 every
    `nn.Linear` but the head.
    """
    import torch

    if quantization is None:
        return
    head = model.get_output_embeddings()
    linear = torch.nn.Linear if quantization.method == "fp8" else None
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    yield f"{name}.{leaf}"
        elif type(module) is linear and module is not head:
            yield f"{name}.weight"
