"""Reduced configs: small, and alike in all that a layout depends on."""

from __future__ import annotations

import copy
import json
from math import gcd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.verify import reduce
from m2ncompile.verify.reduce import reduced_config

MODELS = sorted(path.name for path in (Path(__file__).parents[1] / "plans" / "models").iterdir())
#: (tp, ep, dp, trainer ranks)
LAYOUTS = [
    (1, 1, 1, 1),
    (2, 1, 1, 4),
    (4, 4, 1, 8),
    (8, 1, 1, 8),
    (2, 4, 2, 6),
    (5, 1, 1, 5),
    (16, 1, 1, 64),
]
WIDTHS = ("hidden_size", "n_embd")
SIZES = (
    *WIDTHS,
    *("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("kv_lora_rank", "q_lora_rank", "linear_key_head_dim", "linear_value_head_dim"),
    *("n_routed_experts", "num_experts", "num_local_experts", "vocab_size", "n_positions"),
    *("num_attention_heads", "num_key_value_heads", "n_head"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)


def config_of(models: Path, name: str) -> dict[str, Any]:
    return json.loads((models / name / "config.json").read_text())


@given(st.integers(1, 3000), st.integers(1, 600), st.integers(1, 600))
def test_a_size_divides_as_before(size: int, cut: int, least: int) -> None:
    small = reduce._shrunk(size, cut, least)
    assert gcd(small, cut) == gcd(size, cut)
    assert min(size, least) <= small <= size
    smaller = range(min(size, least), small)
    assert all(gcd(other, cut) != gcd(size, cut) for other in smaller)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_real_models(models: Path, model: str, layout: tuple[int, int, int, int]) -> None:
    config = config_of(models, model)
    before = copy.deepcopy(config)
    tp, _, dp, trainers = layout
    small = reduced_config(config, *layout)
    assert config == before
    assert small.keys() == config.keys()
    assert small["model_type"] == config["model_type"]
    assert small.get("quantization_config") == config.get("quantization_config")

    for key in SIZES:
        if isinstance(size := config.get(key), int):
            assert small[key] <= size, key
            for count in (tp, tp * dp, trainers):
                assert gcd(small[key], count) == gcd(size, count), (key, count)
    block = 128 if config.get("quantization_config", {}).get("quant_method") == "fp8" else 1
    for key in (*WIDTHS, "intermediate_size", "moe_intermediate_size", "kv_lora_rank"):
        if block > 1 and key in config:
            assert gcd(small[key], block * trainers) == gcd(config[key], block * trainers)
    key = next(k for k in WIDTHS if k in config)
    assert small[key] == config[key] or (small[key] < config[key])

    # vLLM pads vocabularies to 64 rows, and gives each rank as many.
    assert gcd(small["vocab_size"], 64 * tp) == gcd(config["vocab_size"], 64 * tp)
    padded = -(-small["vocab_size"] // 64) * 64
    assert small["vocab_size"] > padded // tp * (tp - 1)

    heads, groups = "num_attention_heads", "num_key_value_heads"
    if groups in config:
        assert small[heads] * config[groups] == config[heads] * small[groups]
        if config[groups] < tp:  # copied
            assert small[groups] == config[groups]
        else:
            assert small[groups] >= tp
            assert (small[groups] > tp) == (config[groups] > tp)
    if "head_dim" in config:
        apart = config["hidden_size"] != config[heads] * config["head_dim"]
        assert apart == (small["hidden_size"] != small[heads] * small["head_dim"])
    elif heads in config and "kv_lora_rank" not in config:
        assert small["hidden_size"] % small[heads] == 0
    inner = config.get("moe_intermediate_size", config.get("intermediate_size", 0))
    if inner != config.get("hidden_size") and inner >= 2 * 256 * tp:
        key = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
        assert small[key] != small["hidden_size"]

    for experts in ("n_routed_experts", "num_experts", "num_local_experts"):
        if experts in config:
            assert small[experts] >= min(config[experts], 2 * tp * dp)
            assert small["num_experts_per_tok"] <= small[experts] // (small.get("n_group") or 1)
            assert small[experts] % (small.get("n_group") or 1) == 0
            assert (small.get("n_group") or 1) == min(config.get("n_group") or 1, 2)
            assert (small.get("topk_group") or 1) <= (small.get("n_group") or 1)


def test_small_enough(models: Path) -> None:
    """No tensor of more than some millions of elements, few layers."""
    for model in MODELS:
        small = reduced_config(config_of(models, model), 4, 1, 1, 8)
        width = small.get("hidden_size") or small["n_embd"]
        assert width <= 2048
        assert small["vocab_size"] * width <= 2**20
        assert small.get("moe_intermediate_size", 0) * width <= 2**21
        assert small.get("num_hidden_layers", small.get("n_layer")) <= 6
        assert max(small.get(e, 0) for e in ("n_routed_experts", "num_experts")) <= 16
        assert small.get("max_position_embeddings", 0) <= 4096


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("Llama-3.1-8B", 2),
        ("DeepSeek-V2-Lite", 2),  # one dense, one with experts
        ("DeepSeek-V3", 2),  # three dense ones become one
        ("Qwen3-Next-80B-A3B", 4),  # every fourth has full attention
        ("gemma-3-1b-it", 6),  # every sixth
        ("gpt-oss-20b", 2),  # sliding and full by turns
    ],
)
def test_a_layer_of_every_kind_stays(models: Path, model: str, layers: int) -> None:
    small = reduced_config(config_of(models, model), 2, 1, 1, 4)
    assert small["num_hidden_layers"] == layers
    if model == "DeepSeek-V3":
        assert small["first_k_dense_replace"] == 1
    if model == "gpt-oss-20b":
        assert small["layer_types"] == ["sliding_attention", "full_attention"]


def test_layers_that_differ_by_lists_and_by_numbers(models: Path) -> None:
    config = config_of(models, "Qwen3-30B-A3B")
    assert reduced_config(config | {"decoder_sparse_step": 3}, 2, 1, 1, 4)["num_hidden_layers"] == 3
    assert reduced_config(config | {"mlp_only_layers": [4]}, 2, 1, 1, 4)["num_hidden_layers"] == 5
    kinds = ["a"] * 7 + ["b"] * 41
    small = reduced_config(config | {"layer_types": kinds}, 2, 1, 1, 4)
    assert (small["num_hidden_layers"], small["layer_types"]) == (8, ["a"] * 7 + ["b"])
    skip = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.3.mlp"]}
    small = reduced_config(config | {"quantization_config": skip}, 2, 1, 1, 4)
    assert small["num_hidden_layers"] == 4


def test_rotary_tables_shrink_in_proportion(models: Path) -> None:
    config = config_of(models, "Phi-3.5-mini-instruct")
    small = reduced_config(config, 2, 1, 1, 4)
    before, after = (
        c["max_position_embeddings"] / c["original_max_position_embeddings"]
        for c in (config, small)
    )
    assert before == after
    head = small["hidden_size"] // small["num_attention_heads"]
    for key in ("long_factor", "short_factor"):
        assert len(small["rope_scaling"][key]) == head // 2
        assert len(config["rope_scaling"][key]) == 48


def test_ids_lie_in_the_vocabulary(models: Path) -> None:
    small = reduced_config(config_of(models, "phi-4"), 2, 1, 1, 4)
    assert small["pad_token_id"] < small["vocab_size"]


def test_what_is_no_size_or_not_known_stays(models: Path) -> None:
    config = config_of(models, "Llama-3.1-8B") | {"some_new_size": 4096, "tie_word_embeddings": 1}
    small = reduced_config(config, 2, 1, 1, 4)
    assert small["some_new_size"] == 4096
    assert small["rms_norm_eps"] == config["rms_norm_eps"]
    assert small["rope_scaling"]["factor"] == config["rope_scaling"]["factor"]


def test_a_small_model_stays_as_it_is() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 64,
        "num_hidden_layers": 1,
    }
    assert reduced_config(config, 1, 1, 1, 1) == config
