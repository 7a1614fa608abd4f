"""Trainer layouts: presets, and rules in order."""

from __future__ import annotations

import pytest

from m2ncompile.errors import SpecError
from m2ncompile.inventory import TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Mesh
from m2ncompile.source import source_layouts
from m2ncompile.spec import RuleSpec, TrainerSpec

TENSORS = tuple(
    TensorInfo(name, "bfloat16", (8, 4))
    for name in ("model.a.weight", "model.b.weight", "model.experts.0.w", "model.experts.1.w")
)


@pytest.mark.parametrize(
    ("trainer", "layout"),
    [
        (TrainerSpec(ranks=4, layout="ddp"), Layout(Mesh((4, 1), 0), None)),
        (TrainerSpec(ranks=4, layout="fsdp"), Layout(Mesh((4, 1), 0), (0, REPLICATE))),
        (
            TrainerSpec(ranks=8, layout="hsdp", shard_ranks=4),
            Layout(Mesh((2, 4), 0), (REPLICATE, 0)),
        ),
    ],
)
def test_presets(trainer: TrainerSpec, layout: Layout) -> None:
    assert source_layouts(trainer, TENSORS) == (layout,) * 4


def test_first_matching_rule_decides() -> None:
    trainer = TrainerSpec(
        ranks=4,
        layout="fsdp",
        rules=(
            RuleSpec(match="*.experts.0.*", placements="replicated"),
            RuleSpec(match="*.experts.*", mesh=(2, 2), placements=("replicate", 1)),
        ),
    )
    preset = Layout(Mesh((4, 1), 0), (0, REPLICATE))
    assert source_layouts(trainer, TENSORS) == (
        preset,
        preset,
        Layout(Mesh((4, 1), 0), None),
        Layout(Mesh((2, 2), 0), (REPLICATE, 1)),
    )


def test_what_does_not_divide_can_be_replicated() -> None:
    tensors = (*TENSORS[:1], TensorInfo("gate", "bfloat16", (1, 4)), TensorInfo("s", "float32", ()))
    trainer = TrainerSpec(
        ranks=4,
        layout="fsdp",
        uneven="replicate",
        rules=(RuleSpec(match="s", placements=(0, "replicate")),),
    )
    preset = Layout(Mesh((4, 1), 0), (0, REPLICATE))
    assert source_layouts(trainer, tensors) == (preset, Layout(Mesh((4, 1), 0), None), preset)
    kept = TrainerSpec(ranks=4, layout="fsdp")
    assert source_layouts(kept, tensors) == (preset,) * 3


def test_rules_that_decide_nothing_are_listed() -> None:
    trainer = TrainerSpec(
        ranks=4,
        layout="fsdp",
        rules=(
            RuleSpec(match="*.experts.*", placements="replicated"),
            RuleSpec(match="*.experts.1.*", placements=(1, "replicate")),
            RuleSpec(match="*.Experts.*", placements=(1, "replicate")),
        ),
    )
    with pytest.raises(SpecError) as caught:
        source_layouts(trainer, TENSORS)
    assert [(p.where, p.message.split("; ")[0]) for p in caught.value.problems] == [
        (
            "trainer.rules[1]",
            'match = "*.experts.1.*" matches only tensors that earlier rules already decide',
        ),
        ("trainer.rules[2]", 'match = "*.Experts.*" matches none of the 4 tensors'),
    ]
