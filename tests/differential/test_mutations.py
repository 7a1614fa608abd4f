"""Single mutations of traced plans of real models: the reader or the validator refuses each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest

from m2ncompile.compile.assemble import assemble
from m2ncompile.compile.pipeline import build_plan
from m2ncompile.compile.reloading import reloading
from m2ncompile.compile.validate import validate
from m2ncompile.engine.postload import not_direct
from m2ncompile.engine.record_all import record_all
from m2ncompile.engine.recording import Recording
from m2ncompile.engine.vllm_meta import MetaEngine
from m2ncompile.errors import LayoutError, M2nCompileError, PlanError
from m2ncompile.families import families
from m2ncompile.inventory import TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Mesh
from m2ncompile.plan import Digests, Plan, PlanDestination, program_digest
from m2ncompile.plan_check import check, layouts_of, wire_digests
from m2ncompile.routes import Destination, Landing, Param, Reason, Wire
from m2ncompile.spec import EngineSpec, ModelSpec, RuleSpec, Spec, TrainerSpec
from m2ncompile.verify.reduce import reduced_config

pytestmark = pytest.mark.engine

replace = msgspec.structs.replace
REASON = Reason("no-transfer", "because")

#: Model, spec. Between them: kv heads copied to two ranks, experts on one rank each,
#: parts of fused tensors, uneven and strided shards, a converted dtype, derived
#: matrices, scales, a fallback.
FSDP4 = TrainerSpec(ranks=4, layout="fsdp")
CASES: dict[str, tuple[str, dict[str, Any], TrainerSpec]] = {
    "copied kv heads, experts": ("Qwen3-30B-A3B", dict(tp=8, ep=8), FSDP4),
    "fused tensors": (
        "phi-4",
        dict(tp=2),
        TrainerSpec(ranks=8, layout="hsdp", shard_ranks=4),
    ),
    "transposed": (
        "gpt2",
        dict(tp=2, dtype="float32"),
        TrainerSpec(
            ranks=4,
            layout="fsdp",
            rules=(RuleSpec(match="wte.weight", placements=(1, "replicate")),),
        ),
    ),
    "fused tensors, replicated": ("phi-4", dict(tp=2), TrainerSpec(ranks=2, layout="ddp")),
    "derived": ("DeepSeek-V2-Lite", dict(tp=2, dp=2, ep=4), TrainerSpec(ranks=2, layout="ddp")),
    "fallback": ("gpt-oss-20b", dict(tp=4), FSDP4),
}


class Case(msgspec.Struct):
    plan: Plan
    recordings: list[Recording]
    tensors: tuple[TensorInfo, ...]
    sources: tuple[Layout, ...]
    destinations: tuple[Destination, ...]

    def assembled(
        self,
        destinations: tuple[Destination, ...] | None = None,
        sources: tuple[Layout, ...] | None = None,
    ) -> Plan:
        """A plan of other records, with digests of its own."""
        return assemble(
            self.plan.inputs,
            self.tensors,
            sources or self.sources,
            destinations or self.destinations,
            self.plan.transfers if destinations is None else None,
            reloading(self.recordings, self.plan.inputs.trainer.ranks),
        )

    def refuses(self, plan: Plan) -> bool:
        try:
            check(plan)
            validate(plan, self.recordings)
        except PlanError:
            return True
        return False


def opened(plan: Plan, recordings: list[Recording]) -> Case:
    """The records that the plan was assembled from."""
    layouts = layouts_of(plan)

    def info(geometry: int) -> tuple[str, tuple[int, ...]]:
        entry = plan.geometries[geometry]
        return plan.dtypes[entry.dtype], entry.shape

    def landing(d: PlanDestination) -> Landing | None:
        if d.landing is None or d.offset is None:
            return None
        entry = plan.landings[d.landing]
        param = plan.params[entry.param]
        offsets = (d.offset,) if isinstance(d.offset, int) else d.offset
        whole = Param(param.name, *info(param.geometry), param.stride)
        return Landing(whole, offsets, entry.dims)

    return Case(
        plan,
        recordings,
        tuple(TensorInfo(t.name, *info(t.geometry)) for t in plan.tensors),
        tuple(layouts[t.source] for t in plan.tensors),
        tuple(
            Destination(
                d.tensor,
                Wire(
                    plan.wires[d.wire].base,
                    info(plan.wires[d.wire].geometry)[1],
                    layouts[plan.wires[d.wire].source],
                ),
                d.route,
                layouts[d.layout],
                landing(d),
                None if d.reason is None else plan.reasons[d.reason],
            )
            for d in plan.destinations
        ),
    )


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, engine, trainer = CASES[request.param]
    models = Path(__file__).parents[2] / "plans" / "models"
    folder = tmp_path_factory.mktemp(name)
    config = json.loads((models / name / "config.json").read_text())
    tp, ep, dp = (engine.get(key, 1) for key in ("tp", "ep", "dp"))
    small = reduced_config(config, tp, ep, dp, trainer.ranks)
    (folder / "config.json").write_text(json.dumps(small))
    spec = Spec(
        model=ModelSpec(path=str(folder), name=name),
        engine=EngineSpec(version="0.33.0", target="cuda-sm90", **engine),
        trainer=trainer,
    )
    plan = build_plan(spec)
    tensors = opened(plan, []).tensors
    recordings = record_all(
        MetaEngine(spec.engine, folder),
        tensors,
        lambda module: not_direct(module, spec.engine.target),
        lambda stage, done, total: None,
    )
    found = opened(plan, recordings)
    assert found.assembled().encoded == plan.encoded
    assert not found.refuses(plan)
    return found


# What one record can be changed to.


def other_meshes(mesh: Mesh) -> Iterator[Mesh]:
    a, b = mesh.dims
    for dims in {(b, a), (a * b, 1), (1, a * b), (a + 1, b), (a, b + 1), (1, 1), (2 * a, b)}:
        for start in {mesh.start, mesh.start + 1, max(0, mesh.start - 1), mesh.start + a * b}:
            yield Mesh(dims, start)


def other_layouts(layout: Layout) -> Iterator[Layout]:
    """One thing changed: the mesh or the placements."""
    for mesh in other_meshes(layout.mesh):
        yield replace(layout, mesh=mesh)
    for dim in range(3):
        for placements in ((REPLICATE, dim), (dim, REPLICATE)):
            yield replace(layout, placements=placements)
    yield replace(layout, placements=None)


def other_landings(landing: Landing, params: list[Param]) -> Iterator[Landing]:
    offsets, dims = landing.offsets, landing.dims
    size, stride = dims[-1]
    for step in (1, -1, size, -size, size // 2):
        yield replace(landing, offsets=(offsets[0] + step, *offsets[1:]))
        yield replace(landing, offsets=(*offsets[:-1], offsets[-1] + step))
    yield replace(landing, offsets=offsets[::-1])
    yield replace(landing, offsets=offsets[:1])
    for place, (size, stride) in enumerate(dims):
        for changed in (
            (size, stride + 1),
            (size, stride - 1),
            (size, 2 * stride),
            (size, 0),
            (size + 1, stride),
            (size - 1, stride),
        ):
            yield replace(landing, dims=(*dims[:place], changed, *dims[place + 1 :]))
    yield replace(landing, dims=dims[::-1])
    yield replace(landing, dims=(*dims, (1, 1)))
    sizes, strides = zip(*dims, strict=True)
    yield replace(landing, dims=tuple(zip(sizes, strides[::-1], strict=True)))
    for param in params:
        yield replace(landing, param=param)
    param = landing.param
    for dtype in ("float32", "bfloat16", "uint8"):
        yield replace(landing, param=replace(param, dtype=dtype))
    yield replace(landing, param=replace(param, name=param.name + "x"))
    yield replace(landing, param=replace(param, shape=param.shape[::-1]))
    yield replace(landing, param=replace(param, shape=(prod(param.shape),)))
    row_major = tuple(prod(param.shape[dim + 1 :]) for dim in range(len(param.shape)))
    yield replace(landing, param=replace(param, stride=row_major[::-1]))
    yield replace(landing, param=replace(param, stride=tuple(s + 1 for s in row_major)))


def other_wires(wire: Wire) -> Iterator[Wire]:
    for step in (1, -1, wire.shape[-1], -wire.shape[-1], prod(wire.shape)):
        yield replace(wire, base=wire.base + step)
    yield replace(wire, base=0)
    for source in other_layouts(wire.source):
        yield replace(wire, source=source)


def other_routes(d: Destination, case: Case) -> Iterator[Destination]:
    engine = case.plan.inputs.engine
    everywhere = Layout(
        Mesh((engine.dp * engine.pp, engine.tp), case.plan.inputs.trainer.ranks), None
    )
    tensor = case.tensors[d.tensor]
    whole = Wire(0, tensor.shape, case.sources[d.tensor])
    if d.landing is not None:
        yield replace(d, route="direct", reason=None)
        yield replace(d, route="reload", reason=d.reason or REASON)
        yield replace(d, route="fallback", reason=d.reason or REASON)
        yield replace(d, route="fallback", reason=d.reason or REASON, landing=None)
        yield replace(
            d, route="fallback", reason=REASON, landing=None, layout=everywhere, wire=whole
        )
        return
    size = prod(tensor.shape)
    for param in {p.name: p for p in params_of(case) if prod(p.shape) >= size}.values():
        landing = Landing(param, (0,), ((size, 1),))
        yield replace(d, route="direct", reason=None, landing=landing)
        yield replace(d, route="reload", landing=landing)


def params_of(case: Case) -> list[Param]:
    return list({d.landing.param: None for d in case.destinations if d.landing is not None})


def mutations(case: Case) -> Iterator[tuple[str, tuple[Destination, ...], tuple[Layout, ...]]]:
    """Records of which one differs; of destinations that are alike, one is tried."""
    destinations, sources = case.destinations, case.sources
    alike = families(
        range(len(destinations)),
        name=lambda i: case.tensors[destinations[i].tensor].name,
        same=lambda i: (destinations[i].route, destinations[i].wire.base != 0),
    )
    params = params_of(case)
    for _, members in alike:
        for index in members[:1]:
            d = destinations[index]
            name = case.tensors[d.tensor].name
            changed: list[tuple[str, Destination]] = []
            changed += [("route", other) for other in other_routes(d, case)]
            changed += [("layout", replace(d, layout=o)) for o in other_layouts(d.layout)]
            changed += [("wire", replace(d, wire=other)) for other in other_wires(d.wire)]
            if d.landing is not None:
                of_same_shape = [p for p in params if p.shape == d.landing.param.shape]
                changed += [
                    ("landing", replace(d, landing=other))
                    for other in other_landings(d.landing, of_same_shape[:3] + of_same_shape[-2:])
                ]
            for what, other in changed:
                if other != d:
                    yield (
                        f"{what} of {name}: {d} -> {other}",
                        (*destinations[:index], other, *destinations[index + 1 :]),
                        sources,
                    )
            yield f"without {d}", (*destinations[:index], *destinations[index + 1 :]), sources
            for source in other_layouts(sources[d.tensor]):
                if source != sources[d.tensor]:
                    lies = (*sources[: d.tensor], source, *sources[d.tensor + 1 :])
                    moved = tuple(
                        replace(o, wire=replace(o.wire, source=source))
                        if o.tensor == d.tensor
                        else o
                        for o in destinations
                    )
                    yield f"trainer of {name}: {source}", destinations, lies
                    yield f"trainer and wire of {name}: {source}", moved, lies


def test_every_mutated_record_is_refused(case: Case) -> None:
    tried, sound, survived = 0, 0, []
    for what, destinations, sources in mutations(case):
        tried += 1
        try:
            plan = case.assembled(destinations, sources)
        except (PlanError, LayoutError):
            continue  # a reader refuses it
        sound += 1
        if not case.refuses(plan):
            survived.append(what)
    assert not survived, "\n".join([str(len(survived)), *survived[:20]])
    assert tried > 1000 and sound > 200


# The same in the file: one entry of one table.


def sealed(plan: Plan) -> Plan:
    """With the digests of its content."""
    try:
        source, complete = wire_digests(plan)
    except (IndexError, M2nCompileError):
        return plan
    return replace(plan, digests=Digests(program_digest(plan), source, complete))


def table_mutations(plan: Plan) -> Iterator[tuple[str, int, Any]]:
    """(table, place, other entry)."""
    for place, mesh in enumerate(plan.meshes):
        yield from (("meshes", place, other) for other in other_meshes(mesh))
    for place, layout in enumerate(plan.layouts):
        for placements in (None, *((REPLICATE, dim) for dim in range(3)), (0, REPLICATE)):
            yield "layouts", place, replace(layout, placements=placements)
    for place, param in enumerate(plan.params[:20]):
        yield "params", place, replace(param, stride=(1, 1))
    indices: dict[str, dict[str, Any]] = {
        "layouts": {"mesh": plan.meshes},
        "params": {"geometry": plan.geometries},
        # Another shape of as many elements can say the same.
        "wires": {"source": plan.layouts},
        "landings": {"param": plan.params},
        "tensors": {"geometry": plan.geometries, "source": plan.layouts},
        "destinations": {
            "tensor": plan.tensors,
            "layout": plan.layouts,
            "landing": (*plan.landings, None),
        },
    }
    for table, fields in indices.items():
        for field, targets in fields.items():
            for place, entry in enumerate(getattr(plan, table)[:40]):
                now = getattr(entry, field) or 0
                for other in {-1, 0, now - 1, now + 1, len(targets) - 1, len(targets)}:
                    yield table, place, replace(entry, **{field: other})
    for place, wire in enumerate(plan.wires):
        yield from (("wires", place, replace(wire, base=wire.base + i)) for i in (1, -1, 64))
    for place, landing in enumerate(plan.landings[:40]):
        for step in (1, -1, 64):
            dims = tuple((size, stride + step) for size, stride in landing.dims)
            yield "landings", place, replace(landing, dims=dims)
    for place, transfer in enumerate(plan.transfers[:40]):
        members, others = transfer.destinations, plan.transfers[place - 1].destinations
        for changed in (members[:-1], (*members, members[0]), (*members, *others), others):
            yield "transfers", place, replace(transfer, destinations=changed)
    for place, d in enumerate(plan.destinations[:40]):
        for route in ("direct", "reload", "fallback"):
            yield "destinations", place, replace(d, route=route)
        if d.offset is not None:
            for step in (1, -1, 64):
                yield "destinations", place, replace(d, offset=d.offset_at(0) + step)


def test_every_mutated_entry_is_refused(case: Case) -> None:
    plan, tried, survived = case.plan, 0, []
    for table, place, other in table_mutations(plan):
        entries = getattr(plan, table)
        if other == entries[place]:
            continue
        tried += 1
        changed = (*entries[:place], other, *entries[place + 1 :])
        if not case.refuses(sealed(replace(plan, **{table: changed}))):
            survived.append(f"{table}[{place}]: {entries[place]} -> {other}")
    assert not survived, "\n".join([str(len(survived)), *survived[:20]])
    assert tried > 500
