"""Plans tied to live processes: what fits, and every difference in one error."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from math import prod
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from m2ncompile.compile.assemble import assemble
from m2ncompile.dtypes import nbytes
from m2ncompile.errors import BindError
from m2ncompile.inventory import TensorInfo
from m2ncompile.inventory.records import Missing
from m2ncompile.layout import REPLICATE, Layout, Mesh
from m2ncompile.plan import Plan
from m2ncompile.routes import Destination, Landing, Param, Route, Wire
from m2ncompile.runtime.bind_trainer import TrainerBinding, bind_trainer
from m2ncompile.runtime.bind_worker import WorkerBinding, bind_worker
from m2ncompile.runtime.shards import Held, ModuleShards, shards_of
from m2ncompile.runtime.shards import held_as_planned as held_of
from m2ncompile.runtime.target import Form
from tests.plans import make_inputs, make_plan
from tests.runs import REASON, DictTarget, params_of, varied_plan

EMBED, DOWN, NORM, DOWN_1 = (
    "model.embed.weight",
    "model.layers.0.down.weight",
    "model.layers.0.norm.weight",
    "model.layers.1.down.weight",
)
ROWS = Layout(Mesh((2, 1), 0), (0, REPLICATE))
WHOLE = Layout(Mesh((2, 1), 0), None)


# --- trainer


def refused(plan: Plan, held: list[Held], rank: int = 0) -> str:
    with pytest.raises(BindError) as caught:
        bind_trainer(plan, held, rank)
    return str(caught.value)


def changed(**changes: object) -> list[Held]:
    """What `make_plan` assumes, but for its second tensor."""
    held = held_of(make_plan())
    held[1] = msgspec.structs.replace(held[1], **changes)
    return held


def test_a_trainer_that_holds_what_the_plan_assumes() -> None:
    plan = make_plan()
    binding = bind_trainer(plan, held_of(plan), 1)
    assert [part.tensor for send in binding.sends if send for part in send.parts] == [0, 1, 2, 3]
    assert binding.shapes == ((4, 4), (2, 8), (2,), (2, 8))
    assert not binding.whole and not binding.packed_numel


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (changed(name="other.weight"), f"{DOWN}: the trainer has no such tensor"),
        (changed(name=f"module.{DOWN}"), f"did it rename module.{DOWN}?"),
        (changed(dtype="float32"), f"{DOWN}: the trainer has float32, the plan expects bfloat16"),
        (
            changed(shape=(8, 8)),
            f"{DOWN}: the trainer has shape [8, 8], the plan expects [4, 8]",
        ),
        (changed(layout=WHOLE), f"{DOWN}: the trainer holds it as "),
        (changed(layout=Layout(Mesh((2, 1), 0), (1, REPLICATE))), "the plan expects "),
        (changed(layout="placements (Partial(sum))"), "holds it as placements (Partial(sum))"),
        (
            changed(flaw="its shard has strides [1, 2], which are not row-major"),
            f"{DOWN}: its shard has strides [1, 2], which are not row-major",
        ),
        ([*held_of(make_plan()), held_of(make_plan())[1]], f"{DOWN}: the trainer has it 2 times"),
        (
            [*held_of(make_plan()), Held("lora.a", "float32", (2, 2), ROWS)],
            "lora.a: the trainer has it, the plan does not",
        ),
    ],
)
def test_what_differs_on_the_trainer(held: list[Held], words: str) -> None:
    text = refused(make_plan(), held)
    assert text.startswith("the trainer does not hold what the plan assumes\n")
    assert words in text


def test_one_error_lists_every_difference_of_the_trainer() -> None:
    embed, down, norm, _ = held_of(make_plan())
    held = [
        msgspec.structs.replace(embed, dtype="float32", shape=(16, 4)),
        msgspec.structs.replace(down, layout=WHOLE),
        norm,
        norm,
        Held("extra", "float32", (1,), ROWS),
    ]
    with pytest.raises(BindError) as caught:
        bind_trainer(make_plan(), held, 0)
    named = sorted(problem.where for problem in caught.value.problems)
    assert named == [*("extra", EMBED, EMBED, DOWN, NORM, DOWN_1)]


def test_a_layout_may_be_spelled_otherwise() -> None:
    """The same shards on every rank are the same layout."""
    held = changed(layout=Layout(Mesh((1, 2), 0), (REPLICATE, 0)))
    assert bind_trainer(make_plan(), held, 0).sends[1] is not None


def test_excluded_and_missing_names_may_be_there() -> None:
    inputs = make_inputs()
    model = msgspec.structs.replace(
        inputs.model,
        exclude=("lora.*",),
        missing=(Missing("mtp", "mtp.*.weight", 1, 8, "no layer"),),
    )
    plan = make_plan(inputs=msgspec.structs.replace(inputs, model=model))
    extra = [Held(name, "float32", (2,), ROWS) for name in ("lora.a", "mtp.0.weight")]
    binding = bind_trainer(plan, [extra[0], *held_of(plan), extra[1]], 0)
    # Those that are not sent are given out too: the first leg waits for two.
    assert binding.needed == (2, 3, 4, 5)
    text = refused(plan, [*held_of(plan), *extra, Held("mtp.0.bias", "float32", (2,), ROWS)])
    assert "mtp.0.bias" in text and "lora" not in text and "mtp.0.weight" not in text


def uneven_plan() -> Plan:
    """One tensor that two trainers don't split evenly, which the plan takes whole."""
    wire = Wire(0, (5, 2), WHOLE)
    layout = Layout(Mesh((2, 1), 2), None)
    destination = Destination(0, wire, "fallback", layout, None, REASON)
    return assemble(make_inputs(), [TensorInfo("odd", "float32", (5, 2))], [WHOLE], [destination])


def test_what_fsdp_splits_unevenly_is_gathered() -> None:
    held = Held("odd", "float32", (5, 2), ROWS, gathers=True)
    binding = bind_trainer(uneven_plan(), [held], 0)
    assert binding.whole == {"odd"}
    assert binding.shapes == ((5, 2),)
    # A flaw of the shard does not matter where the shard is not sent.
    flawed = msgspec.structs.replace(held, flaw="its shard has strides [1, 3]")
    assert bind_trainer(uneven_plan(), [flawed], 0).whole == {"odd"}


def test_what_can_not_be_gathered_is_refused() -> None:
    text = refused(uneven_plan(), [Held("odd", "float32", (5, 2), ROWS)])
    assert "odd: the trainer holds it as " in text
    # Nor what the plan wants in other shards.
    assert "the trainer holds it as " in refused(make_plan(), changed(layout=WHOLE, gathers=True))


@pytest.mark.parametrize("seed", range(8))
def test_tensors_are_taken_from_the_source_before_they_are_needed(seed: int) -> None:
    plan = varied_plan(seed)
    held = held_of(plan)
    random.Random(seed).shuffle(held)
    bindings = [bind_trainer(plan, held, rank) for rank in range(2)]
    position = {one.name: count for count, one in enumerate(held, 1)}
    for binding in bindings:
        last: dict[int, int] = {}
        for leg, transfer in enumerate(plan.transfers):
            for tensor in {plan.destinations[index].tensor for index in transfer.destinations}:
                assert binding.needed[leg] >= position[plan.tensors[tensor].name]
                last[tensor] = leg
        assert list(binding.needed) == sorted(binding.needed)
        # What no later leg needs is let go, once.
        dropped = [(tensor, leg) for leg, gone in enumerate(binding.dropped) for tensor in gone]
        assert sorted(dropped) == sorted(last.items())
    # A source may run collectives: no rank takes more than another before a leg.
    assert bindings[0].needed == bindings[1].needed


def test_what_a_rank_does_not_hold_is_refused_by_name() -> None:
    """A plan whose wire lies on the trainer as its tensor does not."""
    plan = columns_of_rows()
    for rank in range(2):
        with pytest.raises(BindError) as caught:
            bind_trainer(plan, held_of(plan), rank)
        assert f"w: trainer {rank}: it does not hold all of what it is to send" in str(caught.value)


def columns_of_rows() -> Plan:
    seen = (4, 4, 1)
    wire = Wire(0, seen, Layout(Mesh((2, 1), 0), (1, REPLICATE)))
    layout = Layout(Mesh((2, 1), 2), None)
    landing = Landing(Param("w", "float32", (4, 4)), (0,), ((16, 1),))
    destination = Destination(0, wire, "direct", layout, landing, None)
    return assemble(make_inputs(), [TensorInfo("w", "float32", (4, 4))], [ROWS], [destination])


# --- a trainer's module


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks of which this process is the first; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


def module_of(**parameters: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    return module


def dtensor(mesh: DeviceMesh, *placements: Placement) -> DTensor:
    local = [8, 8]
    for size, placement in zip(mesh.mesh.shape, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            local[placement.dim] //= size
    return DTensor.from_local(
        torch.zeros(local),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size((8, 8)),
        stride=(8, 1),
    )


@pytest.mark.parametrize(
    ("placements", "layout"),
    [
        ((Shard(0), Shard(0)), Layout(Mesh((4, 1), 0), (0, REPLICATE))),
        ((Replicate(), Shard(0)), Layout(Mesh((2, 2), 0), (REPLICATE, 0))),
        ((Shard(1), Replicate()), Layout(Mesh((2, 2), 0), (1, REPLICATE))),
        ((Replicate(), Replicate()), Layout(Mesh((4, 1), 0), None)),
    ],
)
def test_layouts_of_dtensors(
    mesh: DeviceMesh, placements: tuple[Placement, ...], layout: Layout
) -> None:
    (held,) = ModuleShards(module_of(w=dtensor(mesh, *placements)), 4).describe()
    assert held == Held("w", "float32", (8, 8), layout, gathers=True)


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(1)),
        (Partial(), Shard(0)),
        # FSDP over tensor parallel on one dim: shards are not in rank order.
        (_StridedShard(0, split_factor=2), Shard(0)),
    ],
)
def test_layouts_that_no_plan_has(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    (held,) = ModuleShards(module_of(w=dtensor(mesh, *placements)), 4).describe()
    assert held.layout == f"placements {placements}"


def test_a_mesh_over_some_of_the_ranks_is_no_layout(mesh: DeviceMesh) -> None:
    other = DeviceMesh("cpu", [1, 0, 3, 2])
    (held,) = ModuleShards(module_of(w=dtensor(other, Shard(0))), 4).describe()
    assert held.layout == "a device mesh over ranks [1, 0, 3, 2], not all 4 in order"
    (held,) = ModuleShards(module_of(w=dtensor(mesh, Shard(0), Shard(0))), 8).describe()
    assert held.layout == "a device mesh over ranks [0, 1, 2, 3], not all 8 in order"


def test_a_plain_module_is_whole_on_every_rank_and_ties_count_once() -> None:
    module = torch.nn.Module()
    module.embed, module.head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4)
    module.head.weight = module.embed.weight
    module.register_buffer("mask", torch.zeros(1), persistent=False)
    module.register_buffer("scale", torch.ones(1))
    shards = ModuleShards(module, 2)
    held = shards.describe()
    assert [(one.name, one.layout) for one in held] == [
        ("scale", WHOLE),
        ("embed.weight", WHOLE),
        ("head.bias", WHOLE),
    ]
    given = dict(shards.items(frozenset()))
    assert list(given) == ["scale", "embed.weight", "head.bias"]
    assert given["embed.weight"].data_ptr() == module.embed.weight.data_ptr()
    assert not given["embed.weight"].requires_grad


def test_shards_that_can_not_be_sent_as_they_are() -> None:
    module = module_of(w=torch.zeros(4, 2).T, other=torch.zeros(2, device="meta"))
    w, other = ModuleShards(module, 2, torch.device("cpu")).describe()
    assert w.flaw == "its shard has strides [1, 2], which are not row-major"
    assert other.flaw == "its shard is on meta, the transport sends from cpu"


def test_what_is_no_source() -> None:
    with pytest.raises(TypeError, match=r"a trainer sends a torch module, or a source with .*dict"):
        shards_of({}, 2)
    shards = ModuleShards(torch.nn.Module(), 2)
    assert shards_of(shards, 2) is shards
    # vLLM before 0.33 has no owners: all ranks give out whole tensors.
    meta = SimpleNamespace(name="w", dtype=torch.bfloat16, shape=(4, 2))
    source = SimpleNamespace(metadata=[meta], iter_local=lambda: iter([("w", torch.zeros(4, 2))]))
    (held,) = shards_of(source, 2).describe()
    assert held == Held("w", "bfloat16", (4, 2), WHOLE)


@pytest.mark.engine
def test_sources_of_vllm() -> None:
    from vllm.distributed.weight_transfer.base import ParamMeta, Replicate, Shard

    four = {"owners": (0, 1, 2, 3)}
    metas = [
        ParamMeta("plain", torch.float32, (8, 8)),
        ParamMeta("whole", torch.float32, (8, 8), **four),
        ParamMeta("rows", torch.float32, (8, 8), **four, placements=(Shard(0),)),
        ParamMeta(
            "hsdp",
            torch.float32,
            (8, 8),
            **four,
            mesh_shape=(2, 2),
            placements=(Replicate(), Shard(1)),
        ),
        ParamMeta(
            "both",
            torch.float32,
            (8, 8),
            **four,
            mesh_shape=(2, 2),
            placements=(Shard(0), Shard(1)),
        ),
        ParamMeta("some", torch.float32, (8, 8), owners=(0, 1), placements=(Shard(0),)),
    ]
    source = SimpleNamespace(metadata=metas, iter_local=lambda: iter(()))
    layouts = {one.name: one.layout for one in shards_of(source, 4).describe()}
    whole = Layout(Mesh((4, 1), 0), None)
    assert layouts.pop("plain") == layouts.pop("whole") == whole
    assert layouts.pop("rows") == Layout(Mesh((4, 1), 0), (0, REPLICATE))
    assert layouts.pop("hsdp") == Layout(Mesh((2, 2), 0), (REPLICATE, 1))
    assert str(layouts.pop("both")).startswith("mesh [2, 2] with placements")
    assert layouts.pop("some") == "owners [0, 1], not all 4 ranks in order"


# --- worker


def target_of(plan: Plan, **changes: torch.Tensor | None) -> DictTarget:
    """Worker 0's, with other parameters, or without, by the last words of their modules."""
    params = params_of(plan, 0)
    for words, value in changes.items():
        name = f"{words.replace('__', '.')}.weight"
        if value is None:
            del params[name]
        else:
            params[name] = value
    return DictTarget(params)


class Kernels(DictTarget):
    """Stands for an engine that runs parameters in another form than it loads them in."""

    def __init__(self, plan: Plan, **live: torch.Tensor) -> None:
        super().__init__(params_of(plan, 0))
        self._live = live

    def live(self) -> dict[str, torch.Tensor]:
        found = {f"{words.replace('__', '.')}.weight": value for words, value in self._live.items()}
        return {name: found.get(name, value) for name, value in self.params.items()}


def bind_refused(plan: Plan, target: DictTarget) -> str:
    with pytest.raises(BindError) as caught:
        bind_worker(plan, target, plan.inputs.trainer.ranks)
    text = str(caught.value)
    assert text.startswith("the worker does not hold what the plan assumes\n")
    return text


def test_a_worker_that_holds_what_the_plan_assumes() -> None:
    plan = make_plan()
    binding = bind_worker(plan, target_of(plan), 2)
    routes = [one.route for one in binding.receives if one]
    assert routes == ["fallback", "direct", "fallback", "direct"]
    assert binding.falls_back and not binding.staged and binding.staging_nbytes == 0


BFLOAT = torch.bfloat16


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, f"{DOWN}: the worker has no such parameter"),
        (torch.zeros(4, 8, dtype=BFLOAT), "loads it as bfloat16 [4, 8] with strides [8, 1], the"),
        (torch.zeros(4, 4), f"{DOWN}: the worker loads it as float32 [4, 4]"),
        (torch.zeros(4, 4, dtype=BFLOAT).T, "loads it as bfloat16 [4, 4] with strides [1, 4]"),
        (torch.zeros(4, 4, dtype=BFLOAT, device="meta"), "on meta, the plan expects"),
    ],
)
def test_what_differs_on_the_worker(value: torch.Tensor | None, words: str) -> None:
    plan = make_plan()
    assert words in bind_refused(plan, target_of(plan, model__layers__0__down=value))


def test_a_parameter_written_directly_must_be_run_as_it_is_loaded() -> None:
    plan, packed = make_plan(), torch.zeros(16, dtype=BFLOAT)
    text = bind_refused(plan, Kernels(plan, model__layers__0__down=packed))
    assert f"{DOWN}: it is written directly, but the worker runs it as bfloat16 [16]" in text


def test_a_reloaded_parameter_may_be_run_in_any_form() -> None:
    plan = layers_plan(1, "reload")
    binding = bind_worker(plan, Kernels(plan, layers__0__a=torch.zeros(1)), 2)
    assert binding.reloaded == ("layers.0.a.weight", "layers.0.b.weight")


def test_parameters_written_directly_must_not_share_memory() -> None:
    plan, memory = make_plan(), torch.zeros(4, 4, dtype=BFLOAT)
    target = target_of(plan, model__layers__0__down=memory, model__layers__1__down=memory)
    text = bind_refused(plan, target)
    assert f"{DOWN_1}: it shares its memory with {DOWN}" in text


def test_one_error_lists_every_difference_of_the_worker() -> None:
    plan = make_plan()
    target = target_of(plan, model__layers__0__down=None, model__layers__1__down=torch.zeros(1))
    text = bind_refused(plan, target)
    assert DOWN in text and DOWN_1 in text


def test_a_near_name_is_suggested() -> None:
    plan = make_plan()
    target = target_of(plan, model__layers__0__down=None)
    target.params["model.layers.0.down_proj.weight"] = torch.zeros(1)
    assert "it has model.layers.0.down_proj.weight" in bind_refused(plan, target)


def test_other_workers_parameters_are_not_asked_for() -> None:
    plan = bias_plan()
    target = DictTarget({"m.weight": torch.zeros(2, 4)})
    assert bind_worker(plan, target, 3).reloaded == ("m.weight",)


def test_a_module_is_not_written_directly_and_reloaded() -> None:
    """The engine reloads a module as a unit, and what was written would be lost."""
    plan = layers_plan(1, "reload", "direct")
    text = bind_refused(plan, DictTarget(params_of(plan, 0)))
    # Both parameters are in modules of their own there, but for this one.
    assert "layers.0.weight_b: it is written directly, but layers.0.weight_a goes by reload" in text


def layers_plan(layers: int, *routes: Route) -> Plan:
    """Layers with two tensors each: in modules of their own by one route, in one by two."""
    infos, destinations = [], []
    for layer in range(layers):
        for number, letter in enumerate("ab"):
            name = f"layers.{layer}." + (
                f"weight_{letter}" if len(routes) > 1 else f"{letter}.weight"
            )
            route = routes[number % len(routes)]
            wire = Wire(0, (64, 4), ROWS)
            layout = Layout(Mesh((1, 2), 2), (REPLICATE, 0))
            landing = Landing(Param(name, "float32", (32, 4)), (0,), ((128, 1),))
            infos.append(TensorInfo(name, "float32", (64, 4)))
            reason = None if route == "direct" else REASON
            index = len(infos) - 1
            destinations.append(Destination(index, wire, route, layout, landing, reason))
    return assemble(make_inputs(), infos, [ROWS] * len(infos), destinations)


def bias_plan() -> Plan:
    """A row-parallel layer: only the first worker's loaders fill the bias."""
    whole = Layout(Mesh((1, 1), 2), None)
    both = Layout(Mesh((1, 2), 2), (REPLICATE, 0))
    weight = Landing(Param("m.weight", "float32", (2, 4)), (0,), ((8, 1),))
    bias = Landing(Param("m.bias", "float32", (4,)), (0,), ((4, 1),))
    return assemble(
        make_inputs(),
        [TensorInfo("m.weight", "float32", (4, 4)), TensorInfo("m.bias", "float32", (4,))],
        [ROWS, ROWS],
        [
            Destination(0, Wire(0, (4, 4), ROWS), "reload", both, weight, REASON),
            Destination(1, Wire(0, (4,), ROWS), "reload", whole, bias, REASON),
        ],
    )


def test_what_loaders_fill_on_other_workers_alone_is_zeros_here() -> None:
    plan = bias_plan()
    params = {"m.weight": torch.zeros(2, 4), "m.bias": torch.ones(4)}
    first, second = (bind_worker(plan, DictTarget(params), rank) for rank in (2, 3))
    zeroed = [
        {one.name: one.zeroed for group in binding.staged.values() for one in group}
        for binding in (first, second)
    ]
    assert zeroed == [{"m.weight": False, "m.bias": False}, {"m.weight": False, "m.bias": True}]


def test_what_never_arrives_is_zeroed() -> None:
    wire, layout = Wire(0, (4, 4), ROWS), Layout(Mesh((2, 1), 2), None)
    landing = Landing(Param("w", "float32", (6, 4)), (0,), ((16, 1),))
    destination = Destination(0, wire, "reload", layout, landing, REASON)
    plan = assemble(make_inputs(), [TensorInfo("w", "float32", (4, 4))], [ROWS], [destination])
    ((one,),) = bind_worker(plan, DictTarget({"w": torch.zeros(6, 4)}), 2).staged.values()
    assert one.zeroed and one.form == Form("float32", (6, 4), (4, 1))


# --- staging memory


def lives(
    plan: Plan, binding: WorkerBinding, keeps: Collection[str]
) -> list[tuple[str, int, int, int, int]]:
    """(name, first byte, end, first leg, last leg) of everything staged, by its definition.

    What is not kept is done with when the leg after the module's last has begun.
    """
    done: dict[str, int] = {}
    for leg, group in binding.staged.items():
        for one in group:
            module = one.name.rpartition(".")[0]
            done[module] = max(done.get(module, 0), leg)
    return [
        (
            one.name,
            one.start,
            one.start + one.nbytes,
            one.first,
            len(plan.transfers) if one.name in keeps else done[one.name.rpartition(".")[0]] + 1,
        )
        for group in binding.staged.values()
        for one in group
    ]


@given(st.integers(0, 10_000), st.integers(1, 3), st.booleans())
def test_no_two_staged_parameters_are_in_one_place_at_once(
    seed: int, workers: int, keeping: bool
) -> None:
    plan = varied_plan(seed, workers=workers, tensors=15)
    for worker in range(workers):
        params = params_of(plan, worker)
        keeps = [*params][::3] if keeping else []
        binding = bind_worker(plan, DictTarget(params, keeps), 2 + worker)
        found = lives(plan, binding, keeps)
        for number, (name, a, b, first, last) in enumerate(found):
            assert first <= last and 0 <= a < b <= binding.staging_nbytes and a % 256 == 0
            form = DictTarget(params).load_form(name)
            assert form is not None and b - a >= nbytes(form.dtype, form.shape)
            for other, c, d, begins, ends in found[:number]:
                at_once = first <= ends and begins <= last
                assert not (at_once and a < d and c < b), (name, other)
        check_fills(binding)


def check_fills(binding: WorkerBinding) -> None:
    """Every part arrives while its parameter has its place, and the last one completes it."""
    staged = {one.name: (leg, one) for leg, group in binding.staged.items() for one in group}
    filled: dict[str, list[int]] = {}
    for leg, receive in enumerate(binding.receives):
        if receive is not None and receive.route == "reload":
            for part in receive.parts:
                assert part.into is not None
                filled.setdefault(part.into, []).append(leg)
    for name, legs in filled.items():
        complete, one = staged[name]
        assert (one.first, complete) == (legs[0], legs[-1])
        assert one.zeroed or prod(one.form.shape)


def test_layers_take_turns_in_staging_memory() -> None:
    for layers in (1, 2, 10):
        plan = layers_plan(layers, "reload")
        params = params_of(plan, 0)
        # Modules of one parameter each: one is settled while the next arrives.
        assert bind_worker(plan, DictTarget(params), 2).staging_nbytes == 2 * 32 * 4 * 4
        kept = bind_worker(plan, DictTarget(params, [*params]), 2)
        assert kept.staging_nbytes == 2 * layers * 32 * 4 * 4


def test_bindings_are_records() -> None:
    """They compare, and so can't hold live tensors."""
    plan = varied_plan(1)
    target = DictTarget(params_of(plan, 0))
    assert bind_worker(plan, target, 2) == bind_worker(plan, target, 2)
    one: TrainerBinding = bind_trainer(plan, held_of(plan), 0)
    assert one == bind_trainer(plan, held_of(plan), 0)
