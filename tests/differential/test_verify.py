"""Plans of real models run on real data, and wrong ones are told from right ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from m2ncompile.compile.pipeline import build_plan
from m2ncompile.engine.processing import load, own_tensors, process
from m2ncompile.engine.vllm_meta import MetaEngine
from m2ncompile.errors import PlanError, Problem
from m2ncompile.inventory import Inventory, TensorInfo, natural_key, read_inventory, write_manifest
from m2ncompile.layout import REPLICATE, Layout, Mesh
from m2ncompile.plan import Plan, PlanDestination, PlanTransfer
from m2ncompile.plan_check import layouts_of
from m2ncompile.plan_check import load as load_plan
from m2ncompile.spec import EngineSpec, ModelSpec, ResolverSpec, RuleSpec, Spec, TrainerSpec
from m2ncompile.verify import Verification, execute, verify
from m2ncompile.verify.reduce import reduced_config
from m2ncompile.verify.transfers import bits, deliver, land, random_tensors
from tests.plans import make_plan

pytestmark = pytest.mark.engine

replace = msgspec.structs.replace
FSDP4 = TrainerSpec(ranks=4, layout="fsdp")
#: What does not divide by four.
RULES = {
    "gpt2": (RuleSpec(match="wte.weight", placements=(1, "replicate")),),
    "Qwen3-Next-80B-A3B": (RuleSpec(match="*.shared_expert_gate.*", placements="replicated"),),
    "DeepSeek-V3": (RuleSpec(match="*_scale_inv", placements="replicated"),),
    "Kimi-K2-Instruct": (RuleSpec(match="*_scale_inv", placements="replicated"),),
    "Qwen3-30B-A3B-FP8": (RuleSpec(match="*_scale_inv", placements="replicated"),),
}


def spec_of(
    folder: Path, trainer: TrainerSpec = FSDP4, resolver: str = "traced", **engine: Any
) -> Spec:
    rules = trainer.rules or RULES.get(folder.name, ())
    if folder.name == "gpt2":
        engine["dtype"] = "float32"
    return Spec(
        model=ModelSpec(path=str(folder), name=folder.name),
        engine=EngineSpec(version="0.33.0", **{"target": "cuda-sm90", **engine}),
        trainer=replace(trainer, rules=rules),
        resolver=ResolverSpec(name=resolver),  # type: ignore[arg-type]
    )


MODELS = Path(__file__).parents[2] / "plans" / "models"
#: All models at tp 2, and those with experts with these spread over four ranks.
SWEEP = [
    (path.name, engine)
    for path in sorted(MODELS.iterdir())
    for engine in (dict(tp=2), dict(tp=4, ep=4))
    if "ep" not in engine or "expert" in (path / "config.json").read_text()
]


@pytest.fixture
def real(models: Path, tmp_path: Path) -> Callable[..., Path]:
    """A real model's folder, with few layers for the sake of time; its sizes are the real ones."""

    def real(name: str, **change: Any) -> Path:
        config = json.loads((models / name / "config.json").read_text()) | change
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return real


def assert_passed(found: Verification, workers: int) -> None:
    assert found.problems == ()
    assert found.unchecked == ()
    assert found.notes == ()
    loaded = [row for row in found.modules if row.routes]
    assert sum(row.tensors for row in loaded) == found.tensors
    assert all(row.elements > 0 and row.ranks == workers for row in loaded)


@pytest.mark.parametrize(
    ("model", "change", "engine", "trainer", "routes"),
    [
        ("Llama-3.1-8B", dict(num_hidden_layers=3), dict(tp=4), FSDP4, {"direct"}),
        (
            "Qwen3-30B-A3B",
            dict(num_hidden_layers=3),
            dict(tp=2, dp=2, ep=4),
            FSDP4,
            {"direct"},
        ),
        ("gpt2", dict(n_layer=3), dict(tp=2), FSDP4, {"direct", "reload"}),
        (
            "DeepSeek-V2-Lite",
            dict(num_hidden_layers=3),
            dict(tp=2, ep=2),
            TrainerSpec(ranks=4, layout="hsdp", shard_ranks=2),
            {"direct", "reload"},
        ),
        ("phi-4", dict(num_hidden_layers=3), dict(tp=2), FSDP4, {"direct"}),
        ("Qwen3-Next-80B-A3B", dict(num_hidden_layers=4), dict(tp=2), FSDP4, {"direct", "reload"}),
        ("Qwen3-30B-A3B-FP8", dict(num_hidden_layers=2), dict(tp=2), FSDP4, {"direct", "reload"}),
    ],
)
def test_passes(
    real, model: str, change: dict[str, Any], engine: dict[str, Any], trainer, routes: set[str]
) -> None:
    folder = real(model, **change)
    plan = build_plan(spec_of(folder, trainer, **engine))
    found = verify(plan, folder)
    assert_passed(found, plan.inputs.engine.workers)
    assert {route for row in found.modules for route in row.routes} == routes


def test_fallback_goes_through_the_models_own_loaders(real) -> None:
    """gpt-oss at tp 4: packed rows that no transfer places; four dims travel as three."""
    folder = real("gpt-oss-20b")
    found = verify(build_plan(spec_of(folder, tp=4)), folder)
    assert found.problems == () and found.unchecked == ()
    (experts,) = (row for row in found.modules if row.kind == "GptOssRoutedExperts")
    assert experts.routes == ("reload", "fallback")


def test_vllms_own_resolution(real) -> None:
    folder = real("Llama-3.1-8B", num_hidden_layers=3)
    found = verify(build_plan(spec_of(folder, resolver="vllm", tp=2)), folder)
    assert found.problems == ()
    routes = {row.name.split(".")[-1]: row.routes for row in found.modules}
    assert routes["o_proj"] == ("direct",)
    assert routes["qkv_proj"] == ("fallback",)


def test_says_what_ran_after_loading_and_why_not(real) -> None:
    folder = real("Qwen3-30B-A3B", num_hidden_layers=2)
    found = verify(build_plan(spec_of(folder, tp=2)), folder)
    by_kind = {row.kind: row for row in found.modules}
    assert by_kind["RMSNorm"].processed is None
    assert by_kind["QKVParallelLinear"].processed is True
    assert by_kind["RoutedExperts"].processed is False
    assert "no kernels" in by_kind["RoutedExperts"].why


@pytest.mark.slow
@pytest.mark.parametrize(("model", "engine"), SWEEP)
def test_every_real_model_in_full(models: Path, model: str, engine: dict[str, int]) -> None:
    plan = build_plan(spec_of(models / model, **engine))
    found = verify(plan, models / model)
    assert found.problems == () and found.unchecked == () and found.notes == ()


# Wrong plans.


@pytest.fixture
def small(models: Path, tmp_path: Path) -> Callable[..., tuple[Plan, MetaEngine]]:
    """A plan of a real model's reduced form, and its engine."""

    def small(name: str, trainer: TrainerSpec = FSDP4, **engine: Any) -> tuple[Plan, MetaEngine]:
        config = json.loads((models / name / "config.json").read_text())
        tp, ep, dp = (engine.get(key, 1) for key in ("tp", "ep", "dp"))
        folder = tmp_path / name
        folder.mkdir()
        reduced = reduced_config(config, tp, ep, dp, trainer.ranks)
        (folder / "config.json").write_text(json.dumps(reduced))
        spec = spec_of(folder, trainer, **engine)
        return build_plan(spec), MetaEngine(spec.engine, folder)

    return small


def changed(plan: Plan, index: int, **fields: Any) -> Plan:
    """With another destination `index`."""
    other = replace(plan.destinations[index], **fields)
    destinations = plan.destinations
    return replace(plan, destinations=(*destinations[:index], other, *destinations[index + 1 :]))


def added(plan: Plan, table: str, entry: Any) -> tuple[Plan, int]:
    """With one more entry in a table, and its place."""
    entries = (*getattr(plan, table), entry)
    return replace(plan, **{table: entries}), len(entries) - 1


def destination_of(plan: Plan, ending: str) -> tuple[int, PlanDestination]:
    return next(
        (i, d)
        for i, d in enumerate(plan.destinations)
        if plan.tensors[d.tensor].name.endswith(ending)
    )


def caught(plan: Plan, engine: MetaEngine, tensor: str) -> list[Problem]:
    problems = execute(plan, engine).problems
    found = [p for p in problems if any(name.endswith(tensor) for name in p.where.split(", "))]
    assert found, problems
    return found


def test_a_right_plan_has_no_problems(small) -> None:
    plan, engine = small("Llama-3.2-1B", tp=2)
    assert execute(plan, engine).problems == ()


def test_a_shifted_landing(small) -> None:
    plan, engine = small("Llama-3.2-1B", tp=2)
    index, d = destination_of(plan, "layers.1.self_attn.k_proj.weight")
    plan = changed(plan, index, offset=d.offset_at(0) + 64)
    found = caught(plan, engine, "layers.1.self_attn.qkv_proj.weight")
    # Row 256 is the first of k's. What was written beyond them is overwritten with v.
    assert len(found) == 2
    assert all(p.message.endswith("the first at [256, 0], where nothing lands") for p in found)


def test_a_landing_in_another_layer(small) -> None:
    plan, engine = small("Llama-3.2-1B", tp=2)
    index, _ = destination_of(plan, "layers.0.mlp.down_proj.weight")
    _, other = destination_of(plan, "layers.1.mlp.down_proj.weight")
    found = execute(changed(plan, index, landing=other.landing), engine).problems
    # Layer 0 keeps the weights of the step before; in layer 1 the later transfer wins.
    assert {(p.where, p.message.split()[2]) for p in found} == {
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight")
    }
    assert {p.message.split(":")[0] for p in found} == {"worker 0", "worker 1"}


def test_swapped_placements(small) -> None:
    """Columns where rows belong: as many elements, so that a reader finds nothing wrong."""
    plan, engine = small("Llama-3.2-1B", tp=2)
    index, d = destination_of(plan, "layers.0.mlp.gate_proj.weight")
    layout = plan.layouts[d.layout]
    assert layout.placements == (REPLICATE, 0)
    plan, place = added(plan, "layouts", replace(layout, placements=(REPLICATE, 1)))
    caught(changed(plan, index, layout=place), engine, "layers.0.mlp.gate_proj.weight")


def test_ranks_in_another_order(small) -> None:
    """Two copies of halves, where there were quarters of their own."""
    plan, engine = small("gemma-3-1b-it", tp=4)
    index, d = destination_of(plan, "layers.0.self_attn.q_proj.weight")
    layout = layouts_of(plan)[d.layout]
    assert layout == Layout(Mesh((1, 4), 4), (REPLICATE, 0))
    plan, mesh = added(plan, "meshes", Mesh((2, 2), 4))
    plan, place = added(plan, "layouts", replace(plan.layouts[d.layout], mesh=mesh))
    index, _ = destination_of(plan, "layers.0.self_attn.q_proj.weight")
    found = execute(changed(plan, index, layout=place), engine).problems
    assert any("q_proj" in p.where for p in found)


def test_a_shifted_wire(small) -> None:
    """Half of gate instead of up: whoever sends it, the trainer ranks named do not hold it."""
    plan, engine = small("phi-4", tp=2)
    index, d = destination_of(plan, "layers.0.mlp.gate_up_proj.weight")
    wire = plan.wires[d.wire]
    assert wire.base == 0
    plan, place = added(plan, "wires", replace(wire, base=wire.base + 768))
    found = caught(changed(plan, index, wire=place), engine, "layers.0.mlp.gate_up_proj.weight")
    assert any("is to send elements that it does not hold" in p.message for p in found)


def test_a_shifted_wire_of_a_replicated_tensor(small) -> None:
    plan, engine = small("phi-4", TrainerSpec(ranks=2, layout="ddp"), tp=2)
    index, d = destination_of(plan, "layers.0.self_attn.qkv_proj.weight")
    wire = plan.wires[d.wire]
    plan, place = added(plan, "wires", replace(wire, base=wire.base + 768))
    found = caught(changed(plan, index, wire=place), engine, "layers.0.self_attn.qkv_proj.weight")
    assert all("is not as load_weights makes it" in p.message for p in found)


def test_a_tensor_that_is_left_out(small) -> None:
    plan, engine = small("Llama-3.2-1B", tp=2)
    index, _ = destination_of(plan, "model.norm.weight")
    left = (tuple(d for d in t.destinations if d != index) for t in plan.transfers)
    plan = replace(plan, transfers=tuple(map(PlanTransfer, left)))
    (first, second) = execute(plan, engine).problems
    assert first.where == second.where == "model.norm.weight"
    assert "elements differ, the first at [0], where nothing lands" in first.message


def test_an_expert_on_another_rank(small) -> None:
    plan, engine = small("Qwen3-30B-A3B", tp=4, ep=4)
    index, _ = destination_of(plan, "layers.0.mlp.experts.0.up_proj.weight")
    other, _ = destination_of(plan, "layers.0.mlp.experts.2.up_proj.weight")
    plan = changed(plan, index, layout=plan.destinations[other].layout)
    found = execute(plan, engine).problems
    assert {p.message.split(":")[0] for p in found} == {"worker 0"}, found


def test_a_landing_that_no_module_has(small) -> None:
    plan, engine = small("Llama-3.2-1B", tp=2)
    _, d = destination_of(plan, "model.norm.weight")
    param = plan.landings[d.landing].param
    params = list(plan.params)
    params[param] = replace(params[param], name="model.nrom.weight")
    found = caught(replace(plan, params=tuple(params)), engine, "model.norm.weight")
    assert "the module has no model.nrom.weight" in found[0].message


def test_a_landing_outside_of_its_parameter(small) -> None:
    plan, engine = small("Llama-3.2-1B", tp=2)
    index, _ = destination_of(plan, "model.norm.weight")
    found = caught(changed(plan, index, offset=1), engine, "model.norm.weight")
    assert "can't be written to model.norm.weight" in found[0].message


# The parts.


def test_every_step_has_other_weights() -> None:
    plan = make_plan()
    before, after = random_tensors(plan, 0), random_tensors(plan, 1)
    for tensor, one, other in zip(plan.tensors, before, after, strict=True):
        geometry = plan.geometries[tensor.geometry]
        assert str(one.dtype) == f"torch.{plan.dtypes[geometry.dtype]}"
        assert one.shape == geometry.shape
        assert (one != other).sum() > 0.9 * one.numel()
        assert torch.equal(bits(one), bits(random_tensors(plan, 0)[plan.tensors.index(tensor)]))
    assert not torch.equal(bits(before[1]), bits(before[3]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "uint8", "int64", "float32"])
def test_shards_arrive_as_sliced(dtype: str) -> None:
    plan = make_plan([("a", dtype, (8, 6), 1), ("b", dtype, (8, 6), 0), ("c", dtype, (8, 6), None)])
    tensors = random_tensors(plan, 3)
    problems: list[Problem] = []
    arrivals = deliver(plan, tensors, problems)
    assert problems == [] and arrivals.keys() == {2, 3}
    for worker in (0, 1):
        a, b, c = (arrival.buffer for arrival in arrivals[2 + worker])
        assert torch.equal(bits(a), bits(tensors[0][:, 3 * worker : 3 * worker + 3]))
        assert torch.equal(bits(b), bits(tensors[1][4 * worker : 4 * worker + 4]))
        assert torch.equal(bits(c), bits(tensors[2]))


def test_trainers_send_only_what_they_hold() -> None:
    """Rank 0 of a two-way split is to send all of it."""
    plan = make_plan([("a", "bfloat16", (8, 6), None)])
    plan, mesh = added(plan, "meshes", Mesh((1, 1), 0))
    plan, layout = added(plan, "layouts", replace(plan.layouts[0], mesh=mesh, placements=None))
    plan = replace(plan, wires=(replace(plan.wires[0], source=layout),))
    problems: list[Problem] = []
    arrivals = deliver(plan, random_tensors(plan, 0), problems)
    assert [str(p) for p in problems] == [
        "a: trainer rank 0 is to send elements that it does not hold",
        "a: worker 0: no trainer sends it all of its shard",
        "a: worker 1: no trainer sends it all of its shard",
    ]
    assert arrivals == {2: [], 3: []}


def test_a_shard_that_is_sent_in_part() -> None:
    """Rank 0 holds everything and is to send one half; rank 1 has nothing to send."""
    plan = make_plan([("a", "bfloat16", (8, 6), None)])
    plan, mesh = added(plan, "meshes", Mesh((1, 1), 0))
    plan, layout = added(plan, "layouts", replace(plan.layouts[0], mesh=mesh, placements=None))
    plan = replace(plan, tensors=(replace(plan.tensors[0], source=layout),))
    problems: list[Problem] = []
    arrivals = deliver(plan, random_tensors(plan, 0), problems)
    assert [p.message for p in problems] == [
        "trainer rank 1 is to send elements that it does not hold",
        "worker 0: no trainer sends it all of its shard",
        "worker 1: no trainer sends it all of its shard",
    ]
    assert arrivals == {2: [], 3: []}


def test_every_rank_has_its_own_offset() -> None:
    plan = make_plan([("a", "int32", (4, 3), 0)])
    plan = replace(plan, destinations=(replace(plan.destinations[0], offset=(1, 8)),))
    (tensor,) = random_tensors(plan, 0)
    arrivals = deliver(plan, [tensor], [])
    for worker, offset in ((0, 1), (1, 8)):
        memory = torch.zeros(20, dtype=torch.int32)
        param = memory[2:].view(3, 6)
        land(plan, arrivals[2 + worker][0], worker, param)
        expected = torch.zeros(20, dtype=torch.int32)
        expected[2 + offset : 8 + offset] = tensor.flatten()[6 * worker : 6 * worker + 6]
        assert torch.equal(memory, expected)


def test_what_mla_derives_is_among_what_is_compared(small) -> None:
    plan, engine = small("DeepSeek-V2-Lite", tp=2)
    names = [tensor.name for tensor in plan.tensors]
    with engine.worker(0, device="cpu") as model:
        load(model, zip(names, random_tensors(plan, 0), strict=True))
        outcomes = process(model, torch.bfloat16)
        (*_, attention) = (
            m for m in model.named_modules() if type(m[1]).__name__ == "MLAAttention"
        )
        assert outcomes[attention[0]] is None
        assert {"W_UK_T", "W_UV"} <= own_tensors(attention[1]).keys()


# The command's own checks.


def test_another_model_is_refused(models: Path, real) -> None:
    folder = real("Qwen3-0.6B", num_hidden_layers=2)
    plan = build_plan(spec_of(folder, tp=2))
    with pytest.raises(PlanError, match="made from another model"):
        verify(plan, models / "Qwen3-0.6B")


def test_a_plan_that_treats_tensors_otherwise_than_its_reduced_form(real) -> None:
    folder = real("Qwen3-30B-A3B", num_hidden_layers=2, num_experts=8)
    plan = build_plan(spec_of(folder, tp=2, moe_backend="flashinfer_cutlass"))
    index, d = destination_of(plan, "layers.1.mlp.experts.0.down_proj.weight")
    assert d.route == "reload"
    (direct,) = verify(changed(plan, index, route="direct", reason=None), folder).problems
    assert direct.where == "model.layers.1.mlp.experts.0.down_proj.weight"
    assert "only the plan moves it as direct" in direct.message

    index, d = destination_of(plan, "layers.1.self_attn.q_proj.weight")
    plan, place = added(plan, "layouts", replace(plan.layouts[d.layout], placements=(REPLICATE, 1)))
    (swapped,) = verify(changed(plan, index, layout=place), folder).problems
    assert "2 (dim 1)" in swapped.message


def test_a_plan_for_another_trainer(real) -> None:
    folder = real("Qwen3-0.6B", num_hidden_layers=2)
    plan = build_plan(spec_of(folder, tp=2))
    inputs = replace(plan.inputs, trainer=TrainerSpec(ranks=4, layout="ddp"))
    problems = verify(replace(plan, inputs=inputs), folder).problems
    assert any(p.message.startswith("the trainer holds it as") for p in problems)


def with_manifest(spec: Spec, path: Path, tensors: Iterable[TensorInfo], **model: Any) -> Spec:
    manifest = Inventory("manifest", tuple(sorted(tensors, key=lambda t: natural_key(t.name))))
    path.write_bytes(write_manifest(manifest))
    return replace(spec, model=replace(spec.model, manifest=str(path), **model))


def test_rules_and_excludes_for_what_is_reduced_away(real, tmp_path: Path) -> None:
    folder = real("Qwen3-0.6B", num_hidden_layers=4)
    trainer = TrainerSpec(
        ranks=4,
        layout="fsdp",
        rules=(RuleSpec(match="model.layers.3.*", placements="replicated"),),
    )
    stored = TensorInfo("rotary.inv_freq", "bfloat16", (64,))
    spec = with_manifest(
        spec_of(folder, trainer, tp=2),
        tmp_path / "manifest.json",
        (*read_inventory(folder).tensors, stored),
        exclude=("rotary.*",),
    )
    found = verify(build_plan(spec), folder)
    assert found.problems == ()
    assert found.notes == (
        'nothing to exclude by "rotary.*" in the reduced model',
        'no tensor of the reduced model is left to trainer rule "model.layers.3.*"',
    )
    names = {row.name for row in found.unchecked}
    assert "model.layers.3.mlp.up_proj.weight" in names
    assert all(name.startswith("model.layers.3.") for name in names)
    assert {row.why for row in found.unchecked} == {
        "no tensor of this family lies on the reduced trainer as ranks [0, 4), whole"
    }


def test_tensors_that_the_config_does_not_tell_of(real, tmp_path: Path) -> None:
    """A checkpoint with experts stacked, which the loaders take as well."""
    folder = real("Qwen3-30B-A3B", num_hidden_layers=1, num_experts=8)
    tensors = {t.name: t for t in read_inventory(folder).tensors if ".experts." not in t.name}
    for leaf, shape in (("gate_up_proj", (8, 1536, 2048)), ("down_proj", (8, 2048, 768))):
        name = f"model.layers.0.mlp.experts.{leaf}"
        tensors[name] = TensorInfo(name, "bfloat16", shape)
    spec = with_manifest(spec_of(folder, tp=2), tmp_path / "manifest.json", tensors.values())
    found = verify(build_plan(spec), folder)
    assert found.problems == ()
    assert {(row.name.split(".")[-1], row.tensors) for row in found.unchecked} == {
        ("gate_up_proj", 1),
        ("down_proj", 1),
    }
    assert {row.why for row in found.unchecked} == {
        "the reduced model, listed from its config, has no tensor of this name"
    }


def test_a_plan_of_which_nothing_can_be_checked(real, tmp_path: Path) -> None:
    folder = real("Qwen3-0.6B", num_hidden_layers=1)
    spec = spec_of(folder, resolver="vllm", tp=2)
    other = [TensorInfo("other.weight", "bfloat16", (8, 8))]
    plan = build_plan(with_manifest(spec, tmp_path / "manifest.json", other))
    found = verify(plan, folder)
    assert [row.name for row in found.unchecked] == ["other.weight"]
    assert [p.message for p in found.problems] == [
        "nothing was checked: no tensor is in both plans"
    ]


def test_the_command(tmp_path: Path, models: Path) -> None:
    """Through vLLM's Transformers backend; exit codes and the document."""
    model = models / "OLMo-2-1124-7B"
    spec = tmp_path / "spec.toml"
    spec.write_text(
        f'[model]\npath = "{model}"\n[engine]\nversion = "0.33.0"\ntarget = "cuda-sm90"\ntp = 2\n'
        '[trainer]\nranks = 4\nlayout = "fsdp"\n'
    )

    def run(*args: object, code: int = 0) -> tuple[str, str]:
        command = [sys.executable, "-c", "from m2ncompile.cli import main; main()"]
        found = subprocess.run([*command, *map(str, args)], capture_output=True, text=True)
        assert found.returncode == code, found.stdout + found.stderr
        assert "Traceback" not in found.stderr
        return found.stdout, found.stderr

    path = tmp_path / "plan.json"
    run("build", spec, "--no-cache", "--output", path)
    text, _ = run("verify", path, "--model", model)
    assert "passed: 25 tensors to 2 workers" in text
    assert "hidden_size 4096 -> 128" in text

    plan = load_plan(path)
    inputs = replace(plan.inputs, trainer=TrainerSpec(ranks=4, layout="ddp"))
    path.write_bytes(replace(plan, inputs=inputs).encoded)
    stdout, stderr = run("verify", path, "--model", model, "--json", code=1)
    document = json.loads(stdout)
    assert document["schema"] == "m2ncompile.verify/1"
    assert document["passed"] is False
    assert {row["kind"] for row in document["modules"]} >= {"QKVParallelLinear", "ParallelLMHead"}
    assert document["problems"][0]["message"].startswith("the trainer holds it as")
    assert "error: OLMo-2-1124-7B: the plan does not do what the model's loaders do" in stderr
