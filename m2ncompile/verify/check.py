"""`m2ncompile verify`: a plan's reduced form is compiled, compared with it, and executed."""

from __future__ import annotations

import glob
import json
import re
from fnmatch import translate
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from m2ncompile.compile.pipeline import build_plan
from m2ncompile.compile.validate_routes import trainer_problems
from m2ncompile.engine.vllm_meta import MetaEngine
from m2ncompile.errors import LayoutError, PlanError, Problem
from m2ncompile.inventory import TensorInfo, config_digest, read_inventory
from m2ncompile.layout import local_shape
from m2ncompile.plan import Plan
from m2ncompile.progress import Progress
from m2ncompile.source import source_layouts
from m2ncompile.spec import ModelSpec, RuleSpec, Spec, TrainerSpec
from m2ncompile.verify.alike import Unchecked, compare_treatments
from m2ncompile.verify.reduce import reduced_config
from m2ncompile.verify.workers import ModuleRow, execute

__all__ = ["Reduced", "Verification", "reduce_plan", "verify"]


class Reduced(msgspec.Struct, frozen=True):
    """`sizes` are the config's that were changed: from, to; `notes` what else was."""

    plan: Plan
    sizes: dict[str, tuple[int, int]]
    notes: tuple[str, ...]


class Verification(msgspec.Struct, frozen=True):
    """`reduced` are the config's sizes that were changed: from, to; `notes` what else was.

    `tensors` counts those of the reduced model. The plan passed if there are no problems.
    """

    reduced: dict[str, tuple[int, int]]
    notes: tuple[str, ...]
    tensors: int
    modules: tuple[ModuleRow, ...]
    unchecked: tuple[Unchecked, ...]
    problems: tuple[Problem, ...]


def verify(
    plan: Plan, model: Path, progress: Progress = lambda stage, done, total: None
) -> Verification:
    """Checks `plan`, which was made from the model in the folder `model`.

    Raises PlanError when it was not, and the error of its stage when the reduced
    model can't be compiled.
    """
    with TemporaryDirectory() as scratch:
        small = reduce_plan(plan, model, Path(scratch))
        execution = execute(small.plan, MetaEngine(plan.inputs.engine, Path(scratch)), progress)
    unchecked, problems = compare_treatments(plan, small.plan)
    problems += trainer_problems(plan)
    if sum(entry.tensors for entry in unchecked) == len(plan.tensors):
        problems.append(Problem("the plan", "nothing was checked: no tensor is in both plans"))
    return Verification(
        reduced=small.sizes,
        notes=small.notes,
        tensors=len(small.plan.tensors),
        modules=execution.modules,
        unchecked=tuple(unchecked),
        problems=(*problems, *execution.problems),
    )


def reduce_plan(plan: Plan, model: Path, folder: Path) -> Reduced:
    """The plan of the same model at reduced dims, whose config is written to `folder`.

    Raises as `verify`.
    """
    if (digest := config_digest(model)) != plan.inputs.model.config:
        raise PlanError(
            f"{model}: the plan was made from another model. Its config has digest\n"
            f"  {plan.inputs.model.config}, this one\n  {digest}"
        )
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    engine = plan.inputs.engine
    small = reduced_config(config, engine.tp, engine.ep, engine.dp, plan.inputs.trainer.ranks)
    (folder / "config.json").write_text(json.dumps(small), encoding="utf-8")
    spec, notes = _reduced_spec(plan, folder)
    return Reduced(
        plan=build_plan(spec),
        sizes={
            key: (config[key], size)
            for key, size in small.items()
            if isinstance(size, int) and size != config[key] and not key.endswith("_token_id")
        },
        notes=tuple(notes),
    )


def _reduced_spec(plan: Plan, folder: Path) -> tuple[Spec, list[str]]:
    """The plan's spec for the model in `folder`, without what does not apply there."""
    inputs, notes = plan.inputs, []
    tensors = read_inventory(folder).tensors
    exclude = []
    for pattern in inputs.model.exclude:
        kept = tuple(t for t in tensors if not re.match(translate(pattern), t.name))
        if len(kept) < len(tensors):
            exclude.append(pattern)
        else:
            notes.append(f'nothing to exclude by "{pattern}" in the reduced model')
        tensors = kept
    rules, undecided = [], [tensor.name for tensor in tensors]
    for rule in inputs.trainer.rules:
        rest = [name for name in undecided if not re.match(translate(rule.match), name)]
        if len(rest) < len(undecided):
            rules.append(rule)
        else:
            notes.append(f'no tensor of the reduced model is left to trainer rule "{rule.match}"')
        undecided = rest
    trainer = msgspec.structs.replace(inputs.trainer, rules=tuple(rules))
    whole = []
    for name in _uneven(trainer, tensors):
        whole.append(RuleSpec(match=glob.escape(name), placements="replicated"))
        notes.append(f"every trainer rank holds {name} whole, for it does not divide when reduced")
    limits = inputs.limits
    if any(transfer.part is not None for transfer in plan.transfers):
        # So that what is largest goes in parts here too.
        largest = max(prod(plan.geometries[tensor.geometry].shape) for tensor in plan.tensors)
        small = max(prod(tensor.shape) for tensor in tensors)
        stage = max(1, limits.stage_bytes * small // largest)
        limits = msgspec.structs.replace(limits, stage_bytes=stage)
    spec = Spec(
        model=ModelSpec(path=str(folder), name=inputs.model.name, exclude=tuple(exclude)),
        engine=inputs.engine,
        trainer=msgspec.structs.replace(trainer, rules=(*whole, *rules)),
        resolver=inputs.resolver,
        limits=limits,
    )
    return spec, notes


def _uneven(trainer: TrainerSpec, tensors: tuple[TensorInfo, ...]) -> list[str]:
    """The tensors that do not divide as the trainer is to hold them."""
    names = []
    for tensor, layout in zip(tensors, source_layouts(trainer, tensors), strict=True):
        try:
            local_shape(layout, tensor.shape)
        except LayoutError:
            names.append(tensor.name)
    return names
