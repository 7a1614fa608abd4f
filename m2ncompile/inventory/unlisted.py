"""What published checkpoints store and the transformers module has no place for.

Counts are exact, derived from the module's own shapes: an MTP layer is one more
decoder layer, built along with the others and split off here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from m2ncompile.inventory.records import Missing, TensorInfo

__all__ = [
    "MTP_LIMIT",
    "Group",
    "buffers",
    "mtp_layers",
    "split_mtp",
    "tied",
    "uncounted",
    "with_mtp_layers",
]

#: Model types whose checkpoints have multi-token-prediction layers -> how many
#: where the config does not say.
MTP_DEFAULT = {"deepseek_v3": 1, "glm4_moe": 1, "kimi_k2": 0, "qwen3_next": 1}
MTP_LIMIT = 64

_MTP_REASON = (
    "multi-token prediction: transformers has no module for it; only speculative decoding uses it"
)


class Group(msgspec.Struct, frozen=True):
    """Tensors that an inventory names without listing; `names` is a glob."""

    kind: Literal["mtp", "buffer", "tied"]
    names: str
    reason: str
    tensors: tuple[TensorInfo, ...]

    def record(self) -> Missing:
        nbytes = sum(t.nbytes for t in self.tensors)
        return Missing(self.kind, self.names, len(self.tensors), nbytes, self.reason)


def mtp_layers(raw: dict[str, Any]) -> Any:
    """How many MTP layers the config says, unchecked, or its model type implies."""
    if raw["model_type"] not in MTP_DEFAULT:
        return 0
    count = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers"))
    return MTP_DEFAULT[raw["model_type"]] if count is None else count


def with_mtp_layers(model_type: str, config: Any, mtp: int) -> dict[str, Any]:
    """Config entries that make the MTP layers the module's last decoder layers."""
    entries: dict[str, Any] = {"num_hidden_layers": config.num_hidden_layers + mtp}
    if model_type == "qwen3_next":
        entries["layer_types"] = [*config.layer_types, *["full_attention"] * mtp]
    return entries


def split_mtp(
    model_type: str, tensors: Iterable[TensorInfo], layers: int
) -> tuple[list[TensorInfo], list[Group]]:
    """The tensors without decoder layers from `layers` on, and those under their hub names."""
    listed: list[TensorInfo] = []
    split: dict[int, list[TensorInfo]] = {}
    for tensor in tensors:
        match = re.match(r"model\.layers\.(\d+)\.(.+)", tensor.name)
        if match is None or (layer := int(match[1])) < layers or model_type not in MTP_DEFAULT:
            listed.append(tensor)
        else:
            split.setdefault(layer, []).append(msgspec.structs.replace(tensor, name=match[2]))
    if not split:
        return listed, []
    embedding = _named(listed, "model.embed_tokens.weight")
    if model_type == "qwen3_next":
        return listed, [_qwen_mtp([split[layer] for layer in sorted(split)], embedding)]
    return listed, [_deepseek_mtp(layer, split[layer], embedding) for layer in sorted(split)]


def _deepseek_mtp(layer: int, inner: list[TensorInfo], embedding: TensorInfo) -> Group:
    """A decoder layer with its own embedding and head (DeepSeek-V3's README_WEIGHTS.md)."""
    vocabulary, hidden = embedding.shape
    extra = {
        "embed_tokens": (vocabulary, hidden),
        "enorm": (hidden,),
        "hnorm": (hidden,),
        "eh_proj": (hidden, 2 * hidden),
        "shared_head.norm": (hidden,),
        "shared_head.head": (vocabulary, hidden),
    }
    return _mtp_group(f"model.layers.{layer}.", inner, extra, embedding.dtype)


def _qwen_mtp(inner: list[list[TensorInfo]], embedding: TensorInfo) -> Group:
    """Decoder layers that share the model's embedding and head."""
    hidden = embedding.shape[1]
    extra = {
        "fc": (hidden, 2 * hidden),
        "norm": (hidden,),
        "pre_fc_norm_embedding": (hidden,),
        "pre_fc_norm_hidden": (hidden,),
    }
    layers = [
        TensorInfo(f"layers.{index}.{t.name}", t.dtype, t.shape)
        for index, layer in enumerate(inner)
        for t in layer
    ]
    return _mtp_group("mtp.", layers, extra, embedding.dtype)


def _mtp_group(
    prefix: str, inner: list[TensorInfo], extra: dict[str, tuple[int, ...]], dtype: str
) -> Group:
    """`extra` (module -> shape of its weight) is stored in the model's own dtype."""
    tensors = [
        *(TensorInfo(prefix + t.name, t.dtype, t.shape) for t in inner),
        *(TensorInfo(f"{prefix}{n}.weight", dtype, shape) for n, shape in extra.items()),
    ]
    return Group("mtp", f"{prefix}*", _MTP_REASON, tuple(tensors))


def buffers(model_type: str, heads: int, tensors: Sequence[TensorInfo]) -> list[Group]:
    """Buffers that the published checkpoints of `model_type` hold beside the parameters."""
    shape: tuple[int, ...]
    if model_type == "kimi_k2":
        table = _named(tensors, "model.embed_tokens.weight")
        anchor, leaf = "self_attn.o_proj.weight", "self_attn.rotary_emb.inv_freq"
        names, what = f"model.layers.*.{leaf}", "rotary frequencies"
        shape = (table.shape[1] // heads // 2,)
    elif model_type == "gpt2":
        table = _named(tensors, "wpe.weight")
        anchor, leaf = "attn.c_attn.weight", "attn.bias"
        names, what = f"h.*.{leaf}", "causal masks"
        shape = (1, 1, table.shape[0], table.shape[0])
    else:
        return []
    stored = tuple(
        TensorInfo(t.name.removesuffix(anchor) + leaf, table.dtype, shape)
        for t in tensors
        if t.name.endswith(f".{anchor}")
    )
    return [Group("buffer", names, f"{what}: stored as buffers, computed when loaded", stored)]


def tied(pairs: Iterable[tuple[TensorInfo, str]]) -> list[Group]:
    """Second names of listed tensors: (tensor, listed name)."""
    return [
        Group("tied", t.name, f"the same tensor as {name}; some checkpoints store it twice", (t,))
        for t, name in pairs
    ]


def uncounted(model_type: str, ignored: Iterable[str]) -> list[Group]:
    """What the model's class skips on loading, where nothing is known of its tensors."""
    if model_type in MTP_DEFAULT or model_type == "gpt2":
        return []
    reason = "transformers skips these when loading; how many there are, the config does not say"
    return [
        Group(
            "mtp" if re.search(r"mtp|^model\\\.layers\\\.\d+(\\\.)?\.\*$", pattern) else "buffer",
            _glob(pattern),
            reason,
            (),
        )
        for pattern in ignored
    ]


def _glob(pattern: str) -> str:
    """A glob that matches what the regular expression finds in a name, or more."""
    start = "" if pattern.startswith("^") else "*"
    body = re.sub(r"\(\^\|\\\.\)|\\d\+|\.\*", "*", pattern.lstrip("^")).replace("\\", "")
    return re.sub(r"\*+", "*", f"{start}{body}*")


def _named(tensors: Iterable[TensorInfo], name: str) -> TensorInfo:
    return next(tensor for tensor in tensors if tensor.name == name)
