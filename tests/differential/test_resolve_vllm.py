"""The `vllm` resolver against vLLM's own function, on vLLM's own modules, at real dims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from m2ncompile.compile.resolve_vllm import forbids_direct, resolve
from m2ncompile.engine.facts import ModelFacts
from m2ncompile.engine.inspect_params import param_facts
from m2ncompile.engine.vllm_meta import MetaEngine
from m2ncompile.inventory import Inventory, read_inventory
from m2ncompile.layout import Layout, Mesh
from m2ncompile.spec import EngineSpec

pytestmark = pytest.mark.engine

SOURCE = Layout(Mesh((4, 1), 0), None)

#: Model, then the layouts it divides by.
CASES = {
    "Llama-3.1-8B": ["tp1", "tp2", "tp4", "tp8"],
    "Qwen2.5-7B": ["tp1", "tp2", "tp4"],
    "Qwen3-30B-A3B": ["tp1", "tp2", "tp4", "tp8", "ep2", "ep4", "ep8"],
    "Mixtral-8x7B-v0.1": ["tp1", "tp2", "tp4", "tp8", "ep2"],
    "DeepSeek-V2-Lite": ["tp1", "tp2", "tp4", "tp8", "ep4"],
    "gemma-3-1b-it": ["tp1", "tp2", "tp4"],
    "gpt-oss-20b": ["tp1", "tp2", "tp4", "tp8"],
    "gpt-oss-20b unquantized": ["tp1", "tp2", "tp4", "tp8", "ep2"],
    "gpt2": ["tp1", "tp2", "tp4"],
    "phi-4": ["tp1", "tp2"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    models = Path(__file__).parents[2] / "plans" / "models"
    found = {name: models / name for name in CASES}
    config = json.loads((models / "gpt-oss-20b" / "config.json").read_text())
    del config["quantization_config"]
    plain = tmp_path_factory.mktemp("gpt-oss-20b")
    (plain / "config.json").write_text(json.dumps(config))
    return found | {"gpt-oss-20b unquantized": plain}


@pytest.fixture(scope="module")
def inventories(folders: dict[str, Path]) -> dict[str, Inventory]:
    return {name: read_inventory(folder) for name, folder in folders.items()}


@pytest.mark.parametrize(
    ("model", "layout"), [(model, layout) for model, layouts in CASES.items() for layout in layouts]
)
def test_equals_vllm(
    folders: dict[str, Path], inventories: dict[str, Inventory], model: str, layout: str
) -> None:
    import torch
    from vllm.distributed.weight_transfer.m2n_layout import resolve_parameter_destinations

    size = int(layout[2:])
    spec = EngineSpec(
        version="0.33.0", target="cuda-sm90", tp=size, ep=size if layout.startswith("ep") else 1
    )
    tensors = inventories[model].tensors
    engine = MetaEngine(spec, folders[model])
    mesh = Mesh((1, size), 4)
    forbidden = forbids_direct(engine.quantization, spec.pp)
    for rank in {0, size - 1}:
        with engine.worker(rank) as module:
            facts = ModelFacts(
                "vllm", "0.33.0", engine.architecture, None, rank, param_facts(module)
            )
            theirs = resolve_parameter_destinations(
                module,
                [t.name for t in tensors],
                [getattr(torch, t.dtype) for t in tensors],
                [t.shape for t in tensors],
                num_workers=size,
                shard_axis_size=size,
                allow_direct=forbidden is None,
            )
        ours = resolve(tensors, [SOURCE] * len(tensors), facts, mesh, forbidden)
        assert [
            (tensors[d.tensor].name, d.route == "direct", d.layout.placements) for d in ours
        ] == [(d.name, d.direct, d.placements) for d in theirs]
        assert all((d.reason is None) == (d.route == "direct") for d in ours)
    if forbidden is not None:
        assert not any(d.direct for d in theirs)


def test_some_are_direct(folders: dict[str, Path], inventories: dict[str, Inventory]) -> None:
    """Guards the comparison above: it would hold trivially if nothing ever resolved."""
    tensors = inventories["Llama-3.1-8B"].tensors
    engine = MetaEngine(
        EngineSpec(version="0.33.0", target="cuda-sm90", tp=2), folders["Llama-3.1-8B"]
    )
    with engine.worker(1) as module:
        facts = ModelFacts("vllm", "0.33.0", engine.architecture, None, 1, param_facts(module))
    found = resolve(tensors, [SOURCE] * len(tensors), facts, Mesh((1, 2), 4), None)
    direct = [d for d in found if d.route == "direct"]
    share = sum(tensors[d.tensor].nbytes for d in direct) / inventories["Llama-3.1-8B"].nbytes
    assert round(share, 3) == 0.301  # as vLLM logs it for this model
