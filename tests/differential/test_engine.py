"""The front-end: real classes for any rank, and clear refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from m2ncompile.engine.inspect_params import worker_facts
from m2ncompile.engine.vllm_meta import MetaEngine
from m2ncompile.errors import EngineError
from m2ncompile.inventory import read_inventory
from m2ncompile.spec import EngineSpec

pytestmark = pytest.mark.engine


def engine_spec(**sizes: Any) -> EngineSpec:
    return EngineSpec(version="0.33.0", target="cuda-sm90", **sizes)


@pytest.fixture
def small(models: Path, tmp_path: Path):
    """A real model's config with few layers, in a folder of its own."""

    def small(name: str, **change: Any) -> Path:
        config = json.loads((models / name / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        return tmp_path

    return small


def shapes(engine: MetaEngine, rank: int) -> dict[str, tuple[int, ...]]:
    return {param.name: param.shape for param in worker_facts(engine, rank).params}


def test_ranks_of_tp(small) -> None:
    engine = MetaEngine(engine_spec(tp=8), small("Qwen3-30B-A3B", num_hidden_layers=1))
    first, last = shapes(engine, 0), shapes(engine, 7)
    assert first == last
    assert first["model.layers.0.self_attn.qkv_proj.weight"] == ((4 + 1 + 1) * 128, 2048)
    assert first["model.layers.0.mlp.experts.routed_experts.w13_weight"] == (128, 2 * 96, 2048)


def test_ranks_of_ep_and_dp(small) -> None:
    """Experts spread over dp * tp, attention over tp."""
    folder = small("Qwen3-30B-A3B", num_hidden_layers=1)
    engine = MetaEngine(engine_spec(tp=2, dp=2, ep=4), folder)
    for rank in range(4):
        found = shapes(engine, rank)
        assert found["model.layers.0.self_attn.qkv_proj.weight"] == ((16 + 2 + 2) * 128, 2048)
        assert found["model.layers.0.mlp.experts.routed_experts.w13_weight"] == (32, 2 * 768, 2048)


def test_dp_without_ep_shards_experts_over_both(small) -> None:
    folder = small("Qwen3-30B-A3B", num_hidden_layers=1)
    found = shapes(MetaEngine(engine_spec(tp=2, dp=2), folder), 3)
    assert found["model.layers.0.mlp.experts.routed_experts.w13_weight"] == (128, 2 * 192, 2048)


def test_pipeline_stages_hold_their_layers(small) -> None:
    engine = MetaEngine(engine_spec(tp=1, pp=2), small("Qwen3-0.6B", num_hidden_layers=4))
    first, second = shapes(engine, 0), shapes(engine, 1)
    layers = [{name.split(".")[2] for name in s if ".layers." in name} for s in (first, second)]
    assert layers == [{"0", "1"}, {"2", "3"}]


def test_nothing_is_allocated(small) -> None:
    engine = MetaEngine(engine_spec(), small("Llama-3.1-70B"))
    with engine.worker(0) as model:
        assert {p.device.type for p in model.parameters()} == {"meta"}
        assert sum(p.numel() for p in model.parameters()) > 70e9


def test_transformers_classes_are_put_back(small) -> None:
    """OLMo-2 runs on classes of transformers, which vLLM changes in place."""
    folder = small("OLMo-2-1124-7B", num_hidden_layers=1)
    for _ in range(2):
        found = worker_facts(MetaEngine(engine_spec(tp=2), folder), 0)
        assert found.params
        assert read_inventory(folder).tensors


def test_groups_are_put_back_and_can_not_communicate(small) -> None:
    import torch
    import vllm.distributed.parallel_state as state

    engine = MetaEngine(engine_spec(tp=2), small("Qwen3-0.6B", num_hidden_layers=1))
    before = state._TP
    with engine.worker(1):
        assert state.get_tensor_model_parallel_rank() == 1
        with pytest.raises(Exception):  # noqa: B017 - any refusal will do
            state.get_tp_group().all_reduce(torch.ones(2))
    assert state._TP is before


def test_variables_of_the_engine_change_no_model(small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even those that were set after vLLM was imported, which it reads when it needs them."""
    folder = small("DeepSeek-V2-Lite", num_hidden_layers=2)
    plain = shapes(MetaEngine(engine_spec(tp=2), folder), 0)
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in plain
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder / "cache"))
    engine = MetaEngine(engine_spec(tp=2), folder)
    assert engine.model_config.use_mla
    assert shapes(engine, 0) == plain
    assert {"VLLM_MLA_DISABLE", "VLLM_PP_LAYER_PARTITION"}.isdisjoint(os.environ)
    assert os.environ["VLLM_CACHE_ROOT"] == str(folder / "cache")
    assert os.environ["VLLM_TARGET_DEVICE"] == "cpu"


def test_activation_ops_are_stood_in_for_and_refuse(small) -> None:
    import torch

    engine = MetaEngine(engine_spec(), small("gpt2", n_layer=1))
    before = hasattr(torch.ops._C, "gelu_new")
    with engine.worker(0) as model:
        (activation,) = (m for m in model.modules() if type(m).__name__ == "NewGELU")
    assert hasattr(torch.ops._C, "gelu_new") == before
    if not before:
        with pytest.raises(EngineError, match="no kernels"):
            activation.op(None, None)


def refusal(spec: EngineSpec, folder: Path) -> str:
    with pytest.raises(EngineError) as caught:
        engine = MetaEngine(spec, folder)
        for rank in range(spec.workers):
            worker_facts(engine, rank)
    return str(caught.value)


def test_unsupported_version(small) -> None:
    spec = EngineSpec(version="0.31.0", target="cuda-sm90")
    assert "knows 0.33.0, 0.32.0" in refusal(spec, small("Qwen3-0.6B"))


def test_other_version_installed(small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2ncompile.engine.vllm_meta.installed_version", lambda: "0.34.1")
    text = refusal(engine_spec(), small("Qwen3-0.6B"))
    assert "0.34.1 is installed" in text
    assert "pip install 'vllm==0.33.0'" in text


def test_not_installed(small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2ncompile.engine.vllm_meta.installed_version", lambda: None)
    assert "pip install 'm2ncompile[vllm]'" in refusal(engine_spec(), small("Qwen3-0.6B"))


def test_unknown_architecture(small) -> None:
    text = refusal(
        engine_spec(), small("Qwen3-0.6B", architectures=["NoSuchForCausalLM"], model_type="nope")
    )
    assert "vLLM 0.33.0 refuses the model" in text
    assert "nope" in text


@pytest.mark.parametrize("tp", [3, 32])
def test_tp_that_does_not_divide(small, tp: int) -> None:
    text = refusal(engine_spec(tp=tp), small("Qwen3-0.6B", num_hidden_layers=1))
    assert "16" in text
    assert str(tp) in text
    assert "divisible" in text


def test_unknown_quantization(small) -> None:
    assert "fp9" in refusal(engine_spec(quantization="fp9"), small("Qwen3-0.6B"))
