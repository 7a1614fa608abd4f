"""The stored form of quantized weights."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.errors import InventoryError
from m2ncompile.inventory import TensorInfo
from m2ncompile.inventory.stored import Quantization, read_quantization, stored_form

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def fp8(*skip: str, block: tuple[int, int] = (128, 128)) -> Quantization:
    return Quantization("fp8", "float8_e4m3fn", skip, block=block, scale_dtype="float32")


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(InventoryError) as caught:
        read_quantization(config, "config.json")
    return str(caught.value)


sizes = st.integers(1, 40)


@given(shape=st.tuples(sizes, sizes), block=st.tuples(sizes, sizes))
def test_one_fp8_scale_for_each_block(shape: tuple[int, int], block: tuple[int, int]) -> None:
    weight = TensorInfo("a.weight", "float8_e4m3fn", shape)
    stored = stored_form([weight], fp8(block=block), "bfloat16", "config.json")
    blocks = {(r // block[0], c // block[1]) for r in range(shape[0]) for c in range(shape[1])}
    scales = (max(r for r, _ in blocks) + 1, max(c for _, c in blocks) + 1)
    assert stored == [weight, TensorInfo("a.weight_scale_inv", "float32", scales)]


def test_unpacked_tensors_have_no_scale() -> None:
    plain = [TensorInfo("norm.weight", "bfloat16", (4,)), TensorInfo("r", "float32", (4, 4))]
    assert stored_form(plain, fp8(), "bfloat16", "config.json") == plain
    assert stored_form(plain, None, "bfloat16", "config.json") == plain


@pytest.mark.parametrize(
    ("entry", "tensor", "skipped"),
    [
        ("lm_head", "lm_head.weight", True),
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate.weight", True),
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj.weight", False),
        ("model.layers.1.mlp.gate", "model.layers.11.mlp.gate.weight", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj.weight", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj.weight", False),
        ("mlp.gate", "model.layers.1.mlp.gate.weight", True),
        ("gate", "model.layers.1.mlp.gate.weight", True),
        ("ate", "model.layers.1.mlp.gate.weight", False),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.q_proj.weight", True),
        ("model.layers.*.self_attn", "model.layers.7.mlp.self_attn.weight", False),
        ("a.b", "model.axb.weight", False),
    ],
)
def test_skipped_modules_are_whole_parts_of_a_name(entry: str, tensor: str, skipped: bool) -> None:
    packed = TensorInfo(tensor, "float8_e4m3fn", (8, 8))
    stored = stored_form([packed], fp8("other", entry), "float16", "config.json")
    if skipped:
        assert stored == [TensorInfo(tensor, "float16", (8, 8))]
    else:
        assert stored[0] == packed
        assert len(stored) == 2


def test_no_quantization() -> None:
    assert read_quantization({"model_type": "llama"}, "config.json") is None
    config = {"model_type": "llama", "quantization_config": None}
    assert read_quantization(config, "config.json") is None


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [("deepseek_v3", "float32"), ("kimi_k2", "float32"), ("qwen3_moe", "bfloat16")],
)
def test_fp8_scale_dtype_by_model_type(model_type: str, dtype: str) -> None:
    found = read_quantization({"model_type": model_type, "quantization_config": FP8}, "c")
    assert found == Quantization("fp8", "float8_e4m3fn", (), block=(128, 128), scale_dtype=dtype)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"quant_method": "awq"}, "quant_method: expected fp8 or mxfp4; got 'awq'"),
        ({}, "quant_method: expected fp8 or mxfp4; got None"),
        ("fp8", "quantization_config: expected an object; got 'fp8'"),
        ({"quant_method": "fp8"}, "weight_block_size: expected the rows and columns"),
        ({**FP8, "weight_block_size": [128]}, "got [128]"),
        ({**FP8, "weight_block_size": [0, 128]}, "got [0, 128]"),
        ({**FP8, "fmt": "e5m2"}, "fmt: expected \"e4m3\"; got 'e5m2'"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme: expected"),
        ({**FP8, "modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert"),
        ({**FP8, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert: expected module"),
        ({"quant_method": "mxfp4"}, "mxfp4 is known for gpt_oss, not for 'qwen3_moe'"),
    ],
)
def test_unknown_forms_are_refused(entry: Any, expected: str) -> None:
    text = refusal({"model_type": "qwen3_moe", "quantization_config": entry})
    assert expected in text


def test_a_refusal_says_what_to_do() -> None:
    text = refusal({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}})
    assert "give the checkpoint's folder (safetensors) or a manifest" in text


def test_unknown_scale_dtype_is_refused() -> None:
    text = refusal({"model_type": "llama", "quantization_config": FP8})
    assert "the dtype of the scales is known for deepseek_v3, kimi_k2, qwen3_moe" in text


@pytest.mark.parametrize("key", ["compression_config", "text_config"])
def test_quantization_in_another_place_is_refused(key: str) -> None:
    inner = {"quant_method": "fp8"} if key == "compression_config" else {"quantization_config": FP8}
    assert key in refusal({"model_type": "qwen3_moe", key: inner})


def test_mxfp4_groups_must_divide() -> None:
    packed = TensorInfo("e.down_proj", "uint8", (2, 33, 8))
    quantization = Quantization("mxfp4", "uint8", ())
    with pytest.raises(InventoryError, match="33 inputs are no multiple of the 32"):
        stored_form([packed], quantization, "bfloat16", "config.json")
