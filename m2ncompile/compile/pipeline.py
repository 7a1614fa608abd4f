"""Spec to plan: the stages in order."""

from __future__ import annotations

import re
from fnmatch import translate
from pathlib import Path

from m2ncompile import __version__
from m2ncompile.collector import collector_paused
from m2ncompile.compile.assemble import assemble
from m2ncompile.compile.coalesce import coalesce
from m2ncompile.compile.reloading import reloading
from m2ncompile.compile.resolve_traced import (
    check_accepted,
    check_reloaded,
    pieces_by_tensor,
    resolve_traced,
)
from m2ncompile.compile.resolve_vllm import agreed_destinations, forbids_direct, resolve
from m2ncompile.compile.rows import by_rows
from m2ncompile.compile.split import split
from m2ncompile.compile.validate import validate
from m2ncompile.engine.facts import ModelFacts
from m2ncompile.engine.inspect_params import worker_facts
from m2ncompile.engine.postload import not_direct
from m2ncompile.engine.vllm_meta import MetaEngine
from m2ncompile.errors import Problems, SpecError
from m2ncompile.inventory import Inventory, TensorInfo, config_digest, read_inventory
from m2ncompile.layout import Layout, Mesh
from m2ncompile.plan import Inputs, ModelInput, Plan
from m2ncompile.progress import Progress
from m2ncompile.quiet import captured_output
from m2ncompile.routes import Destination
from m2ncompile.source import source_layouts
from m2ncompile.spec import Spec

__all__ = ["build_plan"]


def build_plan(spec: Spec, progress: Progress = lambda stage, done, total: None) -> Plan:
    """Compile `spec` (from `load_spec`).

    Raises an M2nCompileError of the stage that finds something wrong.
    """
    with collector_paused():
        return _build_plan(spec, progress)


def _build_plan(spec: Spec, progress: Progress) -> Plan:
    assert spec.model.name is not None, "specs come from load_spec"
    model = Path(spec.model.path)
    progress("inventory", 0, 1)
    with captured_output():  # torch warns on import
        inventory = read_inventory(Path(spec.model.manifest) if spec.model.manifest else model)
    tensors = _sent(inventory, spec.model.exclude)
    progress("inventory", 1, 1)
    sources = source_layouts(spec.trainer, tensors)
    progress("engine", 0, 1)
    engine = MetaEngine(spec.engine, model)
    progress("engine", 1, 1)
    inputs = Inputs(
        compiler=__version__,
        model=ModelInput(
            name=spec.model.name,
            architecture=engine.architecture,
            config=config_digest(model),
            inventory=inventory.digest,
            origin=inventory.origin,
            exclude=spec.model.exclude,
            missing=inventory.missing,
        ),
        engine=spec.engine,
        trainer=spec.trainer,
        resolver=spec.resolver,
        limits=spec.limits,
    )
    # Axis 0 replicates, axis 1 shards, as vLLM's workers have it.
    mesh = Mesh((spec.engine.dp * spec.engine.pp, spec.engine.tp), spec.trainer.ranks)
    if spec.resolver.name == "vllm":
        destinations = _as_vllm(spec, engine, tensors, sources, mesh, progress)
        return assemble(inputs, tensors, sources, destinations)  # a stock peer stacks nothing
    from m2ncompile.engine.record_all import record_all  # imports torch: after the checks above

    target, moe_backend = spec.engine.target, spec.engine.moe_backend
    recordings = record_all(
        engine, tensors, lambda module: not_direct(module, target, moe_backend), progress
    )
    placed = pieces_by_tensor(recordings, mesh.start)
    check_accepted(tensors, recordings, placed, engine.quantization is not None)
    destinations = resolve_traced(tensors, sources, recordings, placed, mesh, spec.limits.max_dims)
    check_reloaded(destinations, recordings, placed, mesh.start)
    groups = coalesce(tensors, destinations, spec.limits)
    transfers = by_rows(destinations, split(tensors, destinations, groups, spec.limits))
    plan = assemble(
        inputs, tensors, sources, destinations, transfers, reloading(recordings, mesh.start)
    )
    validate(plan, recordings)
    return plan


def _sent(inventory: Inventory, exclude: tuple[str, ...]) -> tuple[TensorInfo, ...]:
    """The inventory without what the spec excludes."""
    problems = Problems()
    tensors = inventory.tensors
    for index, glob in enumerate(exclude):
        matches = re.compile(translate(glob)).match
        kept = tuple(tensor for tensor in tensors if not matches(tensor.name))
        if len(kept) == len(tensors):
            problems.add(f"model.exclude[{index}]", f'"{glob}" matches no tensor that is left')
        tensors = kept
    problems.raise_if_any(SpecError, "the excluded tensors do not fit the model")
    if not tensors:
        raise SpecError("there is no tensor to send: the model has none, or all are excluded")
    return tensors


def _as_vllm(
    spec: Spec,
    engine: MetaEngine,
    tensors: tuple[TensorInfo, ...],
    sources: tuple[Layout, ...],
    mesh: Mesh,
    progress: Progress,
) -> tuple[Destination, ...]:
    forbidden = forbids_direct(engine.quantization, spec.engine.pp)
    if forbidden is not None:
        return resolve(tensors, sources, None, mesh, forbidden)

    def facts_of(rank: int) -> ModelFacts:
        facts = worker_facts(engine, rank)
        progress("workers", rank + 1, spec.engine.workers)
        return facts

    return agreed_destinations(tensors, sources, range(spec.engine.workers), facts_of, mesh)
