"""Trainers send what transformers' modules call it: stacked experts, its own prefixes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import m2ncompile
from m2ncompile.compile.pipeline import build_plan
from m2ncompile.engine.vllm_meta import MetaEngine
from m2ncompile.errors import EngineError, M2nCompileError
from m2ncompile.spec import EngineSpec, ModelSpec, Spec, TrainerSpec
from m2ncompile.verify import execute
from m2ncompile.verify.reduce import reduced_config

pytestmark = pytest.mark.engine


def captured(models: Path, name: str, folder: Path) -> Spec:
    """A spec of the model at reduced dims, with the tensors that a live module has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = reduced_config(json.loads((models / name / "config.json").read_text()), 2, 1, 1, 2)
    config.pop("auto_map", None)
    config.pop("quantization_config", None)  # a trainer has the weights unpacked
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        loaded = AutoConfig.from_pretrained(folder)
        module = AutoModelForCausalLM.from_config(loaded, dtype=torch.bfloat16)
    (folder / "manifest.json").write_bytes(m2ncompile.capture(module))
    return Spec(
        model=ModelSpec(path=str(folder), name=name, manifest=str(folder / "manifest.json")),
        engine=EngineSpec(version="0.33.0", target="cuda-sm90", tp=2),
        trainer=TrainerSpec(ranks=2, layout="fsdp", uneven="replicate"),
    )


@pytest.mark.parametrize(
    ("name", "stacked"),
    [
        ("GLM-4.5-Air", "model.layers.1.mlp.experts.gate_up_proj"),
        ("Qwen3-30B-A3B", "model.layers.0.mlp.experts.gate_up_proj"),
        ("Qwen3-Next-80B-A3B", "model.layers.0.mlp.experts.gate_up_proj"),
        ("gpt-oss-20b", "model.layers.0.mlp.experts.gate_up_proj"),
        ("gpt2", "transformer.h.0.attn.c_attn.weight"),
    ],
)
def test_module_names_that_the_engine_takes(
    name: str, stacked: str, models: Path, tmp_path: Path
) -> None:
    plan = build_plan(captured(models, name, tmp_path))
    routes = {plan.tensors[d.tensor].name: d.route for d in plan.destinations}
    assert stacked in routes
    assert "fallback" not in routes.values()
    engine = MetaEngine(plan.inputs.engine, tmp_path)
    assert execute(plan, engine).problems == ()


@pytest.mark.parametrize("name", ["Mixtral-8x7B-v0.1", "DeepSeek-V2-Lite"])
def test_module_names_that_it_does_not_take(name: str, models: Path, tmp_path: Path) -> None:
    """It would train one model and serve another: an error that names the tensors."""
    with pytest.raises(M2nCompileError) as caught:
        build_plan(captured(models, name, tmp_path))
    assert not isinstance(caught.value, EngineError)
    assert "mlp.experts.gate_up_proj: the model's loaders do not take it" in str(caught.value)
