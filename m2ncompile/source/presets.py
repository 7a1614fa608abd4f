"""Presets and per-tensor rules."""

from __future__ import annotations

import re
from fnmatch import translate

from m2ncompile.errors import Problems, SpecError
from m2ncompile.inventory.records import TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Mesh, Placements
from m2ncompile.spec import RuleSpec, TrainerSpec, rule_placements

__all__ = ["source_layouts"]


def source_layouts(trainer: TrainerSpec, tensors: tuple[TensorInfo, ...]) -> tuple[Layout, ...]:
    """One layout per tensor, over trainer ranks `[0, ranks)`.

    The first matching rule decides, then the preset, and `trainer.uneven` where
    that does not split a tensor evenly. Meshes and placements are
    spelled as vLLM's trainer spells them (a 1-D mesh gets a second axis of size
    1), since its source digest covers the spelling.

    Raises SpecError for rules that decide nothing.
    """
    preset = _preset(trainer)
    rules = [(re.compile(translate(r.match)).match, _rule_layout(r, preset)) for r in trainer.rules]
    used = [False] * len(rules)
    layouts = []
    for tensor in tensors:
        layout = preset
        if trainer.uneven == "replicate" and not _divides(preset, tensor.shape):
            layout = Layout(preset.mesh, None)
        for index, (matches, ruled) in enumerate(rules):
            if matches(tensor.name):
                layout, used[index] = ruled, True
                break
        layouts.append(layout)

    problems = Problems()
    for index, (matches, _) in enumerate(rules):
        if not used[index]:
            shadowed = any(matches(tensor.name) for tensor in tensors)
            problems.add(
                f"trainer.rules[{index}]",
                f'match = "{trainer.rules[index].match}" '
                + (
                    "matches only tensors that earlier rules already decide"
                    if shadowed
                    else f"matches none of the {len(tensors)} tensors"
                ),
                "move it up or drop it"
                if shadowed
                else f"names look like {tensors[0].name if tensors else '(no tensors)'}",
            )
    problems.raise_if_any(SpecError, "the trainer's rules do not fit the model")
    return tuple(layouts)


def _preset(trainer: TrainerSpec) -> Layout:
    whole: tuple[int, int] = (trainer.ranks, 1)
    match trainer.layout:
        case "ddp":
            return Layout(Mesh(whole, 0), None)
        case "fsdp":
            return Layout(Mesh(whole, 0), (0, REPLICATE))
        case "hsdp":
            assert trainer.shard_ranks is not None
            groups = trainer.ranks // trainer.shard_ranks
            return Layout(Mesh((groups, trainer.shard_ranks), 0), (REPLICATE, 0))


def _divides(layout: Layout, shape: tuple[int, ...]) -> bool:
    if layout.split is None:
        return True
    dim, shards = layout.split
    return dim < len(shape) and shape[dim] % shards == 0


def _rule_layout(rule: RuleSpec, preset: Layout) -> Layout:
    mesh = Mesh(rule.mesh, 0) if rule.mesh else preset.mesh
    placements: Placements | None = rule_placements(rule)
    return Layout(mesh, placements)
