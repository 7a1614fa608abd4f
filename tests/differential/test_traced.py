"""Traced plans of real models: routes, layouts, and what the loaders do not take."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from m2ncompile.compile.pipeline import build_plan
from m2ncompile.errors import InventoryError
from m2ncompile.inventory import Inventory, TensorInfo, read_inventory, write_manifest
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of
from m2ncompile.spec import load_spec

pytestmark = pytest.mark.engine

Change = Callable[[dict[str, TensorInfo]], None]


@pytest.fixture
def build(models: Path, tmp_path: Path):
    """Builds a real model's plan with few layers, from its own or a changed list of tensors."""

    def build(
        name: str,
        engine: str,
        *,
        layout: str = 'ranks = 4\nlayout = "fsdp"',
        model: str = "",
        change: Change | None = None,
        **config: Any,
    ) -> Plan:
        folder = tmp_path / name
        folder.mkdir()
        found = json.loads((models / name / "config.json").read_text()) | config
        found = {key: value for key, value in found.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(found))
        if change is not None:
            tensors = {t.name: t for t in read_inventory(folder).tensors}
            change(tensors)
            manifest = Inventory("manifest", tuple(tensors[n] for n in sorted(tensors)))
            (tmp_path / "manifest.json").write_bytes(write_manifest(manifest))
            model += '\nmanifest = "manifest.json"'
        spec = tmp_path / "spec.toml"
        spec.write_text(
            f'[model]\npath = "{name}"\n{model}\n'
            f'[engine]\nversion = "0.33.0"\ntarget = "cuda-sm90"\n{engine}\n'
            f"[trainer]\n{layout}\n"
        )
        return build_plan(load_spec(spec))

    return build


def routes(plan: Plan) -> dict[str, set[str]]:
    """Last parts of names -> route, with the reason's code where there is one."""
    found = defaultdict(set)
    for d in plan.destinations:
        code = "" if d.reason is None else f" ({plan.reasons[d.reason].code})"
        leaf = ".".join(plan.tensors[d.tensor].name.split(".")[-2:])
        found[leaf].add(d.route + code)
    return dict(found)


def wires(plan: Plan, ending: str) -> list[tuple[Any, ...]]:
    """(base, shape, source, destination) of each destination of tensors that end so."""
    layouts = layouts_of(plan)
    return [
        (
            plan.wires[d.wire].base,
            plan.geometries[plan.wires[d.wire].geometry].shape,
            layouts[plan.wires[d.wire].source],
            layouts[d.layout],
        )
        for d in plan.destinations
        if plan.tensors[d.tensor].name.endswith(ending)
    ]


def test_a_dense_decoder_is_direct_throughout(build) -> None:
    plan = build("Llama-3.1-8B", "tp = 4", num_hidden_layers=2)
    assert set().union(*routes(plan).values()) == {"direct"}
    assert len(plan.destinations) == len(plan.tensors)
    carried = [d for transfer in plan.transfers for d in transfer.destinations]
    assert len(plan.transfers) < len(carried) == len(plan.destinations)


def test_kv_heads_are_replicated_by_groups(build) -> None:
    plan = build("Qwen3-30B-A3B", "tp = 8", num_hidden_layers=1)
    ((_, shape, _, destination),) = wires(plan, "k_proj.weight")
    assert shape == (4 * 128, 2048)
    assert destination.mesh.dims == (4, 2)
    assert destination.placements == (0, -1)


@pytest.mark.parametrize(
    ("backend", "route"),
    [("auto", "direct"), ("triton", "direct"), ("flashinfer_cutlass", "reload (post-load)")],
)
def test_experts_go_to_their_ranks_as_their_kernel_lets_them(
    build, backend: str, route: str
) -> None:
    engine = f'tp = 4\nep = 4\nmoe_backend = "{backend}"'
    plan = build("Qwen3-30B-A3B", engine, num_hidden_layers=1, num_experts=8)
    assert routes(plan)["up_proj.weight"] == {route}
    assert [w[3].mesh.start for w in wires(plan, "up_proj.weight")] == [4, 4, 5, 5, 6, 6, 7, 7]
    assert {w[3].mesh.size for w in wires(plan, "up_proj.weight")} == {1}


def test_experts_stacked_as_transformers_stacks_them(build) -> None:
    """Module names of transformers 5: one tensor with gate and up of all experts."""

    def stack(tensors: dict[str, TensorInfo]) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            del tensors[name]
        prefix = "model.layers.0.mlp.experts."
        for leaf, shape in (("gate_up_proj", (8, 1536, 2048)), ("down_proj", (8, 2048, 768))):
            tensors[prefix + leaf] = TensorInfo(prefix + leaf, "bfloat16", shape)

    plan = build("Qwen3-30B-A3B", "tp = 2", num_hidden_layers=1, num_experts=8, change=stack)
    ((base, shape, _, destination),) = wires(plan, "gate_up_proj")
    assert (base, shape) == (0, (16, 768 * 2048))
    assert destination.placements == (-1, 1)
    assert routes(plan)["experts.down_proj"] == {"direct"}


def test_stacked_experts_over_expert_ranks(build) -> None:
    def stack(tensors: dict[str, TensorInfo]) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            del tensors[name]
        prefix = "model.layers.0.mlp.experts."
        for leaf, shape in (("gate_up_proj", (8, 1536, 2048)), ("down_proj", (8, 2048, 768))):
            tensors[prefix + leaf] = TensorInfo(prefix + leaf, "bfloat16", shape)

    plan = build(
        "Qwen3-30B-A3B", "tp = 4\nep = 4", num_hidden_layers=1, num_experts=8, change=stack
    )
    ((base, shape, _, destination),) = wires(plan, "gate_up_proj")
    assert (base, shape) == (0, (8, 1536, 2048))
    assert destination.placements == (-1, 0)


def test_fused_checkpoint_tensors_are_taken_apart(build) -> None:
    """phi-4's qkv and gate_up, whose shards lie across those of four trainers."""
    plan = build("phi-4", "tp = 2", num_hidden_layers=1)
    assert set().union(*routes(plan).values()) == {"direct"}
    halves = wires(plan, "gate_up_proj.weight")
    assert [w[2].mesh.start for w in halves] == [0, 2]
    parts = wires(plan, "qkv_proj.weight")
    assert sum(
        shape[0] if len(shape) == 1 else shape[0] * shape[1] for _, shape, _, _ in parts
    ) == (7680 * 5120)


def test_transposed_weights_are_placed_by_copy(build) -> None:
    plan = build(
        "gpt2",
        'tp = 2\ndtype = "float32"',
        layout='ranks = 4\nlayout = "fsdp"\n[[trainer.rules]]\nmatch = "wte.weight"\n'
        'placements = [1, "replicate"]',
        n_layer=1,
    )
    assert routes(plan)["c_attn.weight"] == {"reload (strided)"}
    # 50257 rows over two workers: each rank's rows by themselves.
    assert [shape for _, shape, _, _ in wires(plan, "wte.weight")] == [(25152, 768), (25105, 768)]


def test_mla_is_reloaded_where_matrices_are_derived_from_it(build) -> None:
    plan = build("DeepSeek-V2-Lite", "tp = 2", num_hidden_layers=2)
    found = routes(plan)
    assert found["kv_b_proj.weight"] == {"reload (post-load)"}
    assert found["o_proj.weight"] == {"direct"}


def test_quantized_layers_are_reloaded(build) -> None:
    plan = build(
        "Qwen3-30B-A3B-FP8",
        "tp = 2",
        layout='ranks = 1\nlayout = "ddp"',
        num_hidden_layers=1,
        num_experts=8,
    )
    found = routes(plan)
    assert found["q_proj.weight"] == found["up_proj.weight"] == {"reload (post-load)"}
    assert found["q_proj.weight_scale_inv"] == {"reload (dtype)"}  # bfloat16 to float32
    assert found["input_layernorm.weight"] == {"direct"}


def test_a_dtype_that_the_loader_converts_is_reloaded(build) -> None:
    """DeepSeek-V3's float32 router bias from a bfloat16 checkpoint."""

    def narrow(tensors: dict[str, TensorInfo]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensors[name] = msgspec.structs.replace(tensor, dtype="bfloat16")

    plan = build(
        "DeepSeek-V3-bf16", "tp = 2", num_hidden_layers=4, n_routed_experts=16, change=narrow
    )
    assert routes(plan)["gate.e_score_correction_bias"] == {"reload (dtype)"}


def test_tied_embeddings_are_sent_once(build) -> None:
    plan = build("Qwen3-0.6B", "tp = 2", num_hidden_layers=1)
    assert routes(plan)["embed_tokens.weight"] == {"direct"}
    assert [p.name for p in plan.params if p.name.startswith("lm_head")] == []


def test_pipeline_stages_get_their_layers(build) -> None:
    """A tied head makes the embedding live on the first and on the last stage."""
    plan = build("Qwen3-0.6B", "tp = 1\npp = 2", num_hidden_layers=4)
    starts = {
        t: {w[3].mesh.start for w in wires(plan, t)}
        for t in ("layers.1.mlp.up_proj.weight", "layers.2.mlp.up_proj.weight")
    }
    assert list(starts.values()) == [{4}, {5}]
    assert [w[3].mesh.ranks for w in wires(plan, "embed_tokens.weight")] == [range(4, 6)]


def test_data_parallel_replicas_take_the_same(build) -> None:
    plan = build("Qwen3-0.6B", "tp = 2\ndp = 2", num_hidden_layers=1)
    ((_, _, _, destination),) = wires(plan, "o_proj.weight")
    assert (destination.mesh.dims, destination.placements) == ((2, 2), (-1, 1))


def add(name: str, shape: tuple[int, ...]) -> Change:
    def change(tensors: dict[str, TensorInfo]) -> None:
        tensors[name] = TensorInfo(name, "bfloat16", shape)

    return change


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name) and None


@pytest.mark.parametrize(
    ("change", "where", "says"),
    [
        (
            add("model.layers.0.self_attn.qq_proj.weight", (16, 1024)),
            "model.layers.0.self_attn.qq_proj.weight",
            "nearest name that is taken is model.layers.0.self_attn.q_proj.weight",
        ),
        (
            drop("model.layers.0.mlp.down_proj.weight"),
            "model.layers.0.mlp.down_proj.weight",
            "no tensor fills this parameter",
        ),
        (
            add("model.layers.0.mlp.down_proj.weight", (1024, 3000)),
            "model.layers.0.mlp.down_proj.weight",
            "do not take it",
        ),
        (
            add("model.layers.7.mlp.down_proj.weight", (1024, 3072)),
            "model.layers.7.mlp.down_proj.weight",
            "do not take it",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    build, change: Change, where: str, says: str
) -> None:
    with pytest.raises(InventoryError) as caught:
        build("Qwen3-0.6B", "tp = 2", num_hidden_layers=1, change=change)
    found = [f"{p.message} {p.fix}" for p in caught.value.problems if p.where == where]
    assert any(says in text for text in found), found


def test_a_missing_expert_is_found(build) -> None:
    with pytest.raises(InventoryError) as caught:
        build(
            "Qwen3-30B-A3B",
            "tp = 2",
            num_hidden_layers=2,
            num_experts=4,
            change=drop("model.layers.1.mlp.experts.2.up_proj.weight"),
        )
    assert {p.where for p in caught.value.problems} == {
        "model.layers.1.mlp.experts.routed_experts.w13_weight"
    }


def test_a_bias_that_one_worker_adds(build) -> None:
    """gpt-oss: the other workers fill their copy with zeros."""
    plan = build(
        "gpt-oss-20b",
        "tp = 2",
        quantization_config=None,
        torch_dtype="bfloat16",
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    )
    assert {r for found in routes(plan).values() for r in found} <= {
        "direct",
        "reload (post-load)",
        "reload (strided)",
        "reload (unit)",
    }


def test_all_that_does_not_agree_is_listed(build) -> None:
    def change(tensors: dict[str, TensorInfo]) -> None:
        add("model.layers.0.extra.weight", (4,))(tensors)
        add("rotary.inv_freq", (64,))(tensors)
        drop("model.norm.weight")(tensors)

    with pytest.raises(InventoryError) as caught:
        build("Qwen3-0.6B", "tp = 2", num_hidden_layers=1, change=change)
    assert {p.where for p in caught.value.problems} == {
        "model.layers.0.extra.weight",
        "rotary.inv_freq",
        "model.norm.weight",
    }


def test_excluded_tensors_are_not_sent(build) -> None:
    plan = build(
        "Qwen3-0.6B",
        "tp = 2",
        model='exclude = ["rotary.*"]',
        num_hidden_layers=1,
        change=add("rotary.inv_freq", (64,)),
    )
    assert not [t for t in plan.tensors if t.name.startswith("rotary")]
