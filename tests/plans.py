"""Plans made by hand for tests, through the real assembling pass and without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from m2ncompile.compile.assemble import assemble
from m2ncompile.inventory import TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Limits, Mesh, local_shape
from m2ncompile.plan import Inputs, ModelInput, Plan
from m2ncompile.routes import Destination, Landing, Param, Reason, Wire
from m2ncompile.spec import EngineSpec, ResolverSpec, TrainerSpec

REASON = Reason("no-parameter", "no live parameter has this name")


def make_inputs(trainers: int = 2, tp: int = 2, dp: int = 1, name: str = "model") -> Inputs:
    return Inputs(
        compiler="0.1.0",
        model=ModelInput(
            name=name,
            architecture="LlamaForCausalLM",
            config="0" * 64,
            inventory="1" * 64,
            origin="config",
            exclude=(),
            missing=(),
        ),
        engine=EngineSpec(version="0.33.0", target="cuda-sm90", tp=tp, dp=dp),
        trainer=TrainerSpec(ranks=trainers, layout="fsdp"),
        resolver=ResolverSpec(),
        limits=Limits(),
    )


def make_plan(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int | None]] = (
        ("model.embed.weight", "bfloat16", (8, 4), None),
        ("model.layers.0.down.weight", "bfloat16", (4, 8), 1),
        ("model.layers.0.norm.weight", "float32", (4,), None),
        ("model.layers.1.down.weight", "bfloat16", (4, 8), 1),
    ),
    inputs: Inputs | None = None,
    reason: Reason = REASON,
) -> Plan:
    """Tensors are (name, dtype, shape, dim that a direct write shards or None to fall back)."""
    inputs = inputs or make_inputs()
    trainers, engine = inputs.trainer.ranks, inputs.engine
    mesh = Mesh((engine.dp * engine.pp, engine.tp), trainers)
    source = Layout(Mesh((trainers, 1), 0), (0, REPLICATE))

    def destination(index: int) -> Destination:
        name, dtype, shape, dim = tensors[index]
        wire = Wire(0, shape, source)
        if dim is None:
            return Destination(index, wire, "fallback", Layout(mesh, None), None, reason)
        layout = Layout(mesh, (REPLICATE, dim))
        local = local_shape(layout, shape)
        landing = Landing(Param(name, dtype, local), (0,), ((prod(local), 1),))
        return Destination(index, wire, "direct", layout, landing, None)

    return assemble(
        inputs,
        [TensorInfo(name, dtype, shape) for name, dtype, shape, _ in tensors],
        [source] * len(tensors),
        [destination(index) for index in range(len(tensors))],
    )
