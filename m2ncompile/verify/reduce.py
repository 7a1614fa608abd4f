"""A model's config at reduced dims: the same architecture, small enough to run with real data.

A plan depends on which sizes divide which, and on which is the larger, not on the
sizes themselves. So every size becomes the smallest that has the same common
divisors with all that it may be divided by: ranks of both sides, quantization
blocks, padding. What divides still does, what does not still does not, kv heads
that are copied to several ranks are still copied. Of each kind of layer at least
one stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd, lcm
from typing import Any

__all__ = ["reduced_config"]

#: The padding that vLLM gives to vocabularies, and the largest of its MoE kernels.
_VOCABULARY, _HIDDEN, _INTERMEDIATE = 64, 256, 128

#: Heads, and the groups of them that share keys and values.
_HEADS = (
    ("num_attention_heads", "num_key_value_heads"),
    ("n_head", "n_head"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)
_HEAD_DIMS = (
    "head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_RANKS = ("kv_lora_rank", "q_lora_rank")
_WIDTHS = ("hidden_size", "n_embd")
_INNER = (
    "intermediate_size",
    "moe_intermediate_size",
    "n_inner",
    "shared_expert_intermediate_size",
)
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_CHOSEN = ("experts_per_token", "num_experts_per_tok")
_LAYERS = ("n_layer", "num_hidden_layers")
#: Layer `i` differs by `i` modulo one of these.
_PERIODS = (
    "decoder_sparse_step",
    "full_attention_interval",
    "moe_layer_freq",
    "sliding_window_pattern",
)


def reduced_config(
    config: Mapping[str, Any], tp: int, ep: int, dp: int, trainer_ranks: int
) -> dict[str, Any]:
    """The config of a small model that is sharded as the one of `config` is.

    `config` is a `config.json` of a language model; keys that are not sizes, or not
    known, stay. All sizes that a trainer's or an engine's layout may cut by a
    divisor of its ranks divide as before.
    """
    ranks = lcm(trainer_ranks, tp * dp, ep)
    blocks = lcm(*_blocks(config.get("quantization_config") or {}))
    #: What quantized sizes are cut by: each rank may get scales of whole blocks.
    cut = ranks * blocks if blocks > 1 else ranks
    small = dict(config)
    width = small_width = 0

    def shrink(keys: tuple[str, ...], unit: int, least: int) -> None:
        for key in keys:
            if isinstance(size := config.get(key), int):
                small[key] = _shrunk(size, unit, least)
                # A matrix that is not square stays so.
                if size != width and small[key] == small_width:
                    small[key] = _shrunk(size, unit, small[key] + 1)

    shrink(_HEAD_DIMS, lcm(32, cut), 32)
    _shrink_heads(config, small, tp, ranks)
    width, small_width = _shrink_width(config, small, cut)
    shrink(("vocab_size",), lcm(_VOCABULARY * tp, ranks), _VOCABULARY * tp)
    shrink(_INNER, lcm(_INTERMEDIATE * tp, cut), _INTERMEDIATE * tp)
    shrink(_RANKS, lcm(128, cut), 128)
    shrink(("n_ctx", "n_positions"), lcm(64, ranks), 64)
    _shrink_experts(config, small, ranks, tp * dp)
    _shrink_layers(small)
    _shrink_positions(config, small)
    for key, value in config.items():
        if key.endswith("_token_id") and isinstance(value, int):
            # Embeddings refuse a padding row outside of the vocabulary.
            small[key] = min(value, small["vocab_size"] - 1)
    return small


def _shrunk(size: int, cut: int, least: int) -> int:
    """The smallest of at least `least` that has the same common divisors with `cut`."""
    step = gcd(size, cut)
    small = -(-min(size, least) // step) * step
    while gcd(small, cut) != step:
        small += step
    return small


def _blocks(quantization: Mapping[str, Any]) -> Iterator[int]:
    """Elements that share a scale, by all that a quantization config says of them."""
    for key, value in quantization.items():
        if isinstance(value, dict):
            yield from _blocks(value)
        elif key in ("block_structure", "group_size", "weight_block_size"):
            sizes = value if isinstance(value, list) else [value]
            yield from (size for size in sizes if isinstance(size, int) and size > 0)


def _shrink_heads(config: Mapping[str, Any], small: dict[str, Any], tp: int, ranks: int) -> None:
    for many, few in _HEADS:
        if many in config:
            groups = config.get(few) or config[many]
            ratio = config[many] // groups
            fewer = _fewer_groups(groups, ratio, tp, ranks)
            small.update({few: fewer, many: fewer * ratio} if few in config else {many: fewer})


def _fewer_groups(groups: int, ratio: int, tp: int, ranks: int) -> int:
    """Key heads, for `ratio` times as many others.

    Several on each rank stay so; fewer than ranks are copied to several, so their
    number stays, as does the ratio, which says where one tensor of all of them is cut.
    """
    fewer = min(groups, 2 * tp)
    while (gcd(fewer, ranks), gcd(fewer * ratio, ranks)) != (
        gcd(groups, ranks),
        gcd(groups * ratio, ranks),
    ):
        fewer += 1
    return fewer


def _shrink_width(config: Mapping[str, Any], small: dict[str, Any], cut: int) -> tuple[int, int]:
    """The model's width, before and after."""
    key = next(key for key in _WIDTHS if key in config)
    many = next(many for many, _ in _HEADS if many in config)
    width: int = config[key]
    cut_up = width == config[many] * (config.get("head_dim") or width // config[many])
    if cut_up and "kv_lora_rank" not in config:
        # The heads are the width cut up, and stay so.
        head = _shrunk(width // config[many], lcm(32, cut), 32)
        small[key] = small[many] * head
    else:
        unit = lcm(_HIDDEN, cut)
        small[key] = _shrunk(width, unit, _HIDDEN)
        if small[key] == small[many] * (small.get("head_dim") or 0):
            small[key] = _shrunk(width, unit, small[key] + 1)
    return width, small[key]


def _shrink_experts(
    config: Mapping[str, Any], small: dict[str, Any], ranks: int, spread: int
) -> None:
    groups = config.get("n_group") or 1
    if groups > 1:
        small["n_group"], small["topk_group"] = 2, 1
        groups = 2
    for key in _EXPERTS:
        if isinstance(count := config.get(key), int):
            # Two on each rank, and two in each group to choose from.
            small[key] = _shrunk(count, lcm(ranks, groups), max(2 * spread, 2 * groups, 4))
    for key in _CHOSEN:
        if isinstance(count := config.get(key), int):
            small[key] = min(count, 2)


def _shrink_layers(small: dict[str, Any]) -> None:
    for key in _LAYERS:
        if key not in small:
            continue
        layers = small[key]
        if small.get("first_k_dense_replace"):
            small["first_k_dense_replace"] = 1
        kinds = [_layer_kind(small, layers, layer) for layer in range(layers)]
        count = min(2, layers)
        while set(kinds[:count]) != set(kinds):
            count += 1
        for name, value in small.items():
            if isinstance(value, list) and len(value) == layers:
                small[name] = value[:count]
        small[key] = count


def _layer_kind(config: Mapping[str, Any], layers: int, layer: int) -> tuple[object, ...]:
    """Equal for layers that are built alike."""
    skipped = (config.get("quantization_config") or {}).get("modules_to_not_convert") or ()
    return (
        layer < (config.get("first_k_dense_replace") or 0),
        layer in (config.get("mlp_only_layers") or ()),
        tuple(layer % step for step in map(config.get, _PERIODS) if isinstance(step, int)),
        tuple(str(v[layer]) for v in config.values() if isinstance(v, list) and len(v) == layers),
        frozenset(
            name.replace(f".{layer}.", ".") for name in skipped if f".{layer}." in f"{name}."
        ),
    )


def _shrink_positions(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Rotary tables in proportion, and their factors, of which there is one for two elements."""
    lengths = ("max_position_embeddings", "original_max_position_embeddings")
    scaling = dict(config.get("rope_scaling") or {})
    found = [part[key] for part in (config, scaling) for key in lengths if key in part]
    divisor = max(1, min(found, default=1) // 64)
    for part in (small, scaling):
        part.update({key: part[key] // divisor for key in lengths if key in part})
    for key in ("long_factor", "short_factor"):
        if key in scaling:
            head = config["hidden_size"] // config["num_attention_heads"]
            fewer = small["hidden_size"] // small["num_attention_heads"]
            count = len(scaling[key]) * fewer // head
            scaling[key] = scaling[key][:count]
    if scaling:
        small["rope_scaling"] = scaling
