"""Experts of vLLM's workers: where they lie, and which kernel reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from m2ncompile.compile.pipeline import build_plan
from m2ncompile.engine.vllm_meta import MetaEngine
from m2ncompile.errors import BindError
from m2ncompile.plan import Plan
from m2ncompile.runtime.vllm_experts import check_experts
from m2ncompile.runtime.vllm_target import VllmTarget
from m2ncompile.spec import EngineSpec, ModelSpec, Spec, TrainerSpec
from m2ncompile.verify.reduce import reduced_config

pytestmark = pytest.mark.engine

MODELS = Path(__file__).parents[2] / "plans" / "models"


def grouped(folder: Path) -> Path:
    """A model whose experts vLLM can place round robin: they are in groups."""
    real = json.loads((MODELS / "DeepSeek-V3-bf16" / "config.json").read_text())
    config = reduced_config(real, 2, 2, 1, 1) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def expert_worker(folder: Path, engine: EngineSpec) -> tuple[Plan, torch.nn.Module]:
    trainer = TrainerSpec(ranks=2, layout="fsdp", uneven="replicate")
    model = ModelSpec(path=str(folder), name="m")
    with MetaEngine(engine, folder).worker(0) as module:
        return build_plan(Spec(model=model, engine=engine, trainer=trainer)), module


def check(plan: Plan, module: torch.nn.Module, rehearsed: bool = False) -> None:
    VllmTarget(module, None, torch.device("cpu"), "0.33.0", rehearsed).check(plan)


@pytest.mark.parametrize(
    ("ep", "changed", "says"),
    [
        (2, {}, None),
        (1, {}, None),
        (2, {"expert_placement_strategy": "round_robin"}, r"\(round_robin\), the plan expects"),
        (2, {"enable_eplb": True}, "start vLLM without --enable-eplb"),
    ],
)
def test_workers_have_the_experts_that_the_plan_puts_there(
    ep: int, changed: dict[str, Any], says: str | None, tmp_path: Path
) -> None:
    spec = EngineSpec(version="0.33.0", target="cuda-sm90", tp=2, ep=ep)
    meta = MetaEngine(spec, grouped(tmp_path))
    parallel = meta._config.parallel_config
    for name, value in changed.items():
        if name != "enable_eplb":
            setattr(parallel, name, value)
    for worker in range(2):
        with meta.worker(worker) as module:
            maps = [m for m in module.modules() if "_expert_map" in m._buffers]
            assert maps
        if "enable_eplb" in changed:
            parallel.enable_eplb = True
        if says is None:
            check_experts(spec, worker, module, parallel)
            # Where another worker's are expected, it is told.
            if ep > 1:
                with pytest.raises(BindError, match="was the plan built for another parallel"):
                    check_experts(spec, 1 - worker, module, parallel)
            continue
        with pytest.raises(BindError, match=says):
            check_experts(spec, worker, module, parallel)
        parallel.enable_eplb = False


@pytest.mark.parametrize("backend", ["auto", "triton", "flashinfer_cutlass"])
@pytest.mark.parametrize("running", ["TRITON", "BATCHED_TRITON", "FLASHINFER_CUTLASS", "CPU"])
def test_experts_are_written_only_under_a_kernel_that_reads_them_as_loaded(
    backend: str, running: str, tmp_path: Path
) -> None:
    spec = EngineSpec(version="0.33.0", target="cuda-sm90", tp=2, moe_backend=backend)
    plan, module = expert_worker(grouped(tmp_path), spec)
    paths = {n for n, m in module.named_modules() if isinstance(m, RoutedExperts)}
    assert paths
    for path in paths:
        method: Any = module.get_submodule(path).quant_method
        method.unquantized_backend = UnquantizedMoeBackend[running]
    if backend == "flashinfer_cutlass" or "TRITON" in running:
        check(plan, module)
        return
    with pytest.raises(BindError) as raised:
        check(plan, module)
    assert {problem.where for problem in raised.value.problems} == paths
    # A plan can be built for what vLLM's flag can name.
    assert ("or build it with" in str(raised.value)) == (running == "FLASHINFER_CUTLASS")
    check(plan, module, rehearsed=True)  # on a machine without that kernel


@pytest.mark.parametrize("running", [None, "triton"])
def test_experts_of_a_kernel_without_a_name_are_not_written(running: Any, tmp_path: Path) -> None:
    spec = EngineSpec(version="0.33.0", target="cuda-sm90", tp=2)
    plan, module = expert_worker(grouped(tmp_path), spec)
    (path, *_) = (n for n, m in module.named_modules() if "_expert_map" in m._buffers)
    method: Any = module.get_submodule(path).quant_method
    method.unquantized_backend = running
    with pytest.raises(BindError, match=f"{path}: .* with a kernel that it does not name"):
        check(plan, module)


def test_experts_of_an_unknown_class_are_not_written(tmp_path: Path) -> None:
    spec = EngineSpec(version="0.33.0", target="cuda-sm90", tp=2)
    plan, module = expert_worker(grouped(tmp_path), spec)
    (path, *_) = (n for n, m in module.named_modules() if "_expert_map" in m._buffers)
    experts = module.get_submodule(path)
    experts.__class__ = type("Other", (type(experts),), {})
    with pytest.raises(BindError, match=f"{path}: the worker runs its experts with Other"):
        check(plan, module)
