"""Plan x plan: what is said, that all of it is said, and that it reads as few lines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.diff import (
    Difference,
    Group,
    check_comparable,
    compare,
    markdown,
    parse_gates,
    tripped,
)
from m2ncompile.diff.grouping import NameTree, pattern
from m2ncompile.diff.layouts import layout_text
from m2ncompile.diff.matching import match
from m2ncompile.diff.records import SECTIONS
from m2ncompile.diff.words import headline, notes
from m2ncompile.errors import PlanError
from m2ncompile.families import families
from m2ncompile.layout import REPLICATE, Layout, Mesh
from m2ncompile.plan import Inputs, Plan
from m2ncompile.plan_check import load
from m2ncompile.routes import Reason
from m2ncompile.staging import Reloading, staging_of
from tests.plans import make_inputs, make_plan

PLANS = Path(__file__).parents[1] / "plans"
Row = tuple[str, str, tuple[int, ...], int | None]
ROWS: tuple[Row, ...] = (
    ("model.embed.weight", "bfloat16", (8, 4), None),
    ("model.layers.0.down.weight", "bfloat16", (4, 8), 1),
    ("model.layers.0.norm.weight", "float32", (4,), None),
    ("model.layers.1.down.weight", "bfloat16", (4, 8), 1),
    ("model.layers.1.norm.weight", "float32", (4,), None),
)


def rows(*changes: tuple[str, dict[str, Any]]) -> list[Row]:
    """ROWS with fields (name, dtype, shape, dim) of one row changed."""
    fields = "name", "dtype", "shape", "dim"
    found = []
    for row in ROWS:
        record = dict(zip(fields, row, strict=True))
        for name, change in changes:
            record |= change if row[0] == name else {}
        found.append(tuple(record.values()))
    return found  # type: ignore[return-value]


def lines(groups: Sequence[Group]) -> list[tuple[str, int, str | None, str | None]]:
    return [(g.name, g.tensors, g.before, g.after) for g in groups]


def changed_sections(difference: Difference) -> set[str]:
    return {name for name in SECTIONS if getattr(difference, name)}


def with_inputs(plan: Plan, **changes: Any) -> Plan:
    """The plan, said to be made from other inputs; what runs stays."""
    inputs = msgspec.structs.replace(plan.inputs, **changes)
    kept = {name: getattr(plan, name) for name in plan.__struct_fields__}
    return Plan(**kept | {"inputs": inputs})


def test_engine_upgrade_that_changes_nothing_says_so_first() -> None:
    before = make_plan()
    engine = msgspec.structs.replace(before.inputs.engine, version="0.34.0")
    found = compare(before, with_inputs(before, engine=engine))
    assert found.same_program and not found.empty
    assert headline(found) == "same program: 1 input changed, and nothing that runs"
    assert [(c.path, c.before, c.after) for c in found.inputs] == [
        ("engine.version", "0.33.0", "0.34.0")
    ]
    assert changed_sections(found) == set()
    assert not found.stacks and not found.reordered
    assert markdown(found).splitlines()[0].startswith("**Same program: 1 input changed")


def test_routes_change_with_their_reasons() -> None:
    found = compare(make_plan(ROWS), make_plan(rows(("model.embed.weight", {"dim": 0}))))
    assert lines(found.routes) == [("model.embed.weight", 1, "fallback (no-parameter)", "direct")]
    assert lines(found.destinations) == [("model.embed.weight", 1, "whole on all 2", "dim 0 / 2")]
    assert [reason.code for reason in found.reasons] == ["no-parameter"]
    assert found.new_fallback == ()
    assert found.amount("fallback-bytes").before - found.amount("fallback-bytes").after == 64
    assert found.amount("wire-bytes").before == found.amount("wire-bytes").after + 32
    back = compare(make_plan(rows(("model.embed.weight", {"dim": 0}))), make_plan(ROWS))
    assert lines(back.new_fallback) == [
        ("model.embed.weight", 1, "direct", "fallback (no-parameter)")
    ]


def test_another_reason_is_told_though_the_program_is_the_same() -> None:
    found = compare(make_plan(ROWS), make_plan(ROWS, reason=Reason("no-parameter", "other words")))
    assert found.same_program
    assert "reasons for routes differ" in headline(found)
    assert {g.after for g in found.routes} == {"fallback (other words)"}
    found = compare(make_plan(ROWS), make_plan(ROWS, reason=Reason("loader", "unknown loader")))
    assert {g.after for g in found.routes} == {"fallback (loader)"}
    assert {reason.code for reason in found.reasons} == {"no-parameter", "loader"}


def test_tensors_added_removed_reshaped_retyped() -> None:
    other = [
        *rows(("model.embed.weight", {"shape": (16, 4)})),
        *(
            (f"model.layers.{i}.{name}.weight", "bfloat16", (4, 8), 1)
            for i in (2, 3)
            for name in ("down", "up")
        ),
    ]
    other[2] = ("model.layers.0.norm.weight", "bfloat16", (4,), None)
    before, after = make_plan(ROWS), make_plan(other)
    found = compare(before, after)
    assert lines(found.added) == [("model.layers.{2..3}.*", 4, None, "added")]
    assert lines(found.reshaped) == [("model.embed.weight", 1, "8x4", "16x4")]
    assert lines(found.retyped) == [("model.layers.0.norm.weight", 1, "float32", "bfloat16")]
    assert found.removed == ()
    assert lines(compare(after, before).removed) == [("model.layers.{2..3}.*", 4, "removed", None)]


def test_renamed_by_geometry_and_position() -> None:
    other = [(name.replace("model.", "model.text."), *rest) for name, *rest in ROWS]
    other.append(("model.text.layers.2.down.weight", "bfloat16", (4, 8), 1))
    found = compare(make_plan(ROWS), make_plan(other))  # type: ignore[arg-type]
    assert lines(found.added) == [("model.text.layers.2.down.weight", 1, None, "added")]
    assert found.removed == ()
    assert sum(group.tensors for group in found.renamed) == len(ROWS)
    assert {(g.before, g.after) for g in found.renamed} == {
        ("model.embed.weight", "model.text.embed.weight"),
        ("model.layers.{0..1}.*", "model.text.layers.{0..1}.*"),
    }


def test_renamed_pairs_layer_with_layer() -> None:
    before = [f"layers.{i}.a" for i in range(4)]
    after = [f"layers.{i}.b" for i in (1, 2, 3)]
    found = match(before, after, [0] * 4, [0] * 3)
    assert [(before[i], after[j]) for i, j in found.renamed] == [
        (f"layers.{i}.a", f"layers.{i}.b") for i in (1, 2, 3)
    ]
    assert found.removed == [0]


def test_a_fallback_elsewhere_excuses_none() -> None:
    """Of one geometry, which alone makes them one renamed tensor."""
    gone = [*ROWS, ("model.layers.0.rotary.scale", "bfloat16", (8,), None)]
    come = [*ROWS, ("visual.patch.bias", "bfloat16", (8,), None)]
    found = compare(make_plan(gone), make_plan(come))
    assert lines(found.renamed) == [
        ("visual.patch.bias", 1, "model.layers.0.rotary.scale", "visual.patch.bias")
    ]
    assert lines(found.new_fallback) == [("visual.patch.bias", 1, None, "fallback (no-parameter)")]
    renamed = [(name.replace(".rotary.", ".rope."), *rest) for name, *rest in gone]
    assert compare(make_plan(gone), make_plan(renamed)).new_fallback == ()


def test_nothing_is_guessed_where_counts_disagree() -> None:
    found = match(["x.a"], ["x.b", "x.c"], [0], [0, 0])
    assert (found.renamed, found.removed, found.added) == ([], [0], [0, 1])
    found = match(["x.a"], ["x.b"], [0], [1])
    assert found.renamed == []


def test_trainer_ranks_change_the_source_alone() -> None:
    """Workers' ranks start later then, and hold what they held."""
    found = compare(make_plan(ROWS), make_plan(ROWS, inputs=make_inputs(trainers=4)))
    assert not found.same_program
    assert [c.path for c in found.inputs] == ["trainer.ranks"]
    assert lines(found.sources) == [("*", len(ROWS), "dim 0 / 2", "dim 0 / 4")]
    assert changed_sections(found) == {"sources"}


def test_worker_layouts_and_places() -> None:
    found = compare(make_plan(ROWS), make_plan(ROWS, inputs=make_inputs(tp=4)))
    assert {(g.name, g.before, g.after) for g in found.destinations} == {
        ("model.embed.weight", "whole on all 2", "whole on all 4"),
        ("model.layers.{0..1}.norm.weight", "whole on all 2", "whole on all 4"),
        ("model.layers.{0..1}.down.weight", "dim 1 / 2", "dim 1 / 4"),
    }
    assert lines(found.landings) == [
        ("model.layers.{0..1}.down.weight", 2, None, "another form of it, dims")
    ]
    before, after = found.wire_bytes_per_worker
    assert (len(before), len(after)) == (2, 4)


def test_change_in_eighteen_thousand_tensors_is_three_lines() -> None:
    plan = load(PLANS / "qwen3-30b-a3b-fsdp8-ep4.plan.json")
    spread = make_experts(plan, lambda expert: 1 + expert % 3)
    found = compare(plan, spread)
    assert sum(group.tensors for group in found.destinations) > 6000
    assert len(found.destinations) <= 3
    renamed = rename(plan, lambda name: name.replace(".experts.", ".routed."))
    found = compare(plan, renamed)
    assert lines(found.renamed) == [
        (
            "model.layers.{0..47}.mlp.routed.*",
            18432,
            "model.layers.{0..47}.mlp.experts.{0..127}.*",
            "model.layers.{0..47}.mlp.routed.*",
        )
    ]
    assert changed_sections(found) == {"renamed"}


def rename(plan: Plan, change: Any) -> Plan:
    kept = {name: getattr(plan, name) for name in plan.__struct_fields__}
    tensors = tuple(msgspec.structs.replace(t, name=change(t.name)) for t in plan.tensors)
    digests = msgspec.structs.replace(plan.digests, program="0" * 64)
    return Plan(**kept | {"tensors": tensors, "digests": digests})


def make_experts(plan: Plan, worker: Any) -> Plan:
    """The plan with experts on other workers; only `compare` reads it."""
    single = {}
    first = plan.inputs.trainer.ranks
    for index, layout in enumerate(plan.layouts):
        mesh = plan.meshes[layout.mesh]
        if mesh.size == 1 and mesh.start >= first:
            single[mesh.start - first] = index
    destinations = []
    for d in plan.destinations:
        name = plan.tensors[d.tensor].name.split(".")
        if "experts" in name:
            layout = single[worker(int(name[name.index("experts") + 1]))]
            d = msgspec.structs.replace(d, layout=layout)
        destinations.append(d)
    kept = {name: getattr(plan, name) for name in plan.__struct_fields__}
    one_each = tuple(type(plan.transfers[0])((i,)) for i in range(len(destinations)))
    return Plan(**kept | {"destinations": tuple(destinations), "transfers": one_each})


def test_stacks_and_order() -> None:
    plan = load(PLANS / "llama-3.1-8b-fsdp8-tp4.plan.json")
    kept = {name: getattr(plan, name) for name in plan.__struct_fields__}
    turned = Plan(**kept | {"transfers": plan.transfers[::-1]})
    found = compare(plan, turned)
    assert found.reordered and not found.stacks
    assert changed_sections(found) == set()
    single = type(plan.transfers[0])
    apart = Plan(
        **kept | {"transfers": tuple(single((d,)) for t in plan.transfers for d in t.destinations)}
    )
    apart = msgspec.structs.replace(apart, staging=staging_of(apart, Reloading()))
    found = compare(plan, apart)
    assert not found.reordered
    assert {(s.size, s.after) for s in found.stacks} == {(1, 291), (8, 0), (32, 0), (65, 0)}
    assert sum(s.size * s.before for s in found.stacks) == 291
    staging = found.amount("staging-bytes")
    # The pool, and on trainers what is packed.
    assert (staging.before, staging.after) == (659_554_304, 525_336_576)


def test_different_models_are_refused_and_other_configs_are_not() -> None:
    plan = make_plan()
    model = plan.inputs.model

    def other(**changes: Any) -> Plan:
        return with_inputs(plan, model=msgspec.structs.replace(model, **changes))

    check_comparable(plan, other(inventory="2" * 64, config="3" * 64))
    check_comparable(plan, other(name="another", config="3" * 64))
    for changes in ({"name": "another"}, {"architecture": "GPT2LMHeadModel"}):
        with pytest.raises(PlanError, match="different models") as caught:
            check_comparable(plan, other(inventory="2" * 64, **changes))
        assert len(caught.value.problems) == 2


# Algebra.

SHAPES = st.sampled_from([(8,), (8, 4), (4, 8), (16, 8)])
NAMES = st.builds(
    "{}.{}.{}.{}".format,
    st.sampled_from(["model.layers", "m"]),
    st.integers(0, 3),
    st.sampled_from(["a", "b", "c.d"]),
    st.sampled_from(["weight", "bias"]),
)
TENSORS = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from(["bfloat16", "float32"]),
        SHAPES,
        st.sampled_from([None, 0]),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda row: row[0],
)
INPUTS = st.builds(make_inputs, trainers=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4]))
PLAN = st.builds(make_plan, TENSORS, INPUTS)


@given(PLAN)
def test_a_plan_does_not_differ_from_itself(plan: Plan) -> None:
    found = compare(plan, plan)
    assert found.empty and found.same_program
    assert not found.inputs and changed_sections(found) == set() and not notes(found)
    assert all(amount.before == amount.after for amount in found.amounts)
    assert not tripped(found, parse_gates("fallback-bytes,program,new-fallback,format,inputs"))


@given(PLAN, PLAN)
def test_the_other_way_round_is_the_mirror(a: Plan, b: Plan) -> None:
    there, back = compare(a, b), compare(b, a)
    assert there.same_program == back.same_program == (a.digests.program == b.digests.program)
    assert [(c.path, c.before, c.after) for c in there.inputs] == [
        (c.path, c.after, c.before) for c in back.inputs
    ]
    assert [(x.name, x.before, x.after) for x in there.amounts] == [
        (x.name, x.after, x.before) for x in back.amounts
    ]
    assert [(s.size, s.before, s.after) for s in there.stacks] == [
        (s.size, s.after, s.before) for s in back.stacks
    ]
    assert there.reordered == back.reordered
    assert there.wire_bytes_per_worker == back.wire_bytes_per_worker[::-1]

    def total(groups: Sequence[Group]) -> int:
        return sum(group.tensors for group in groups)

    mirrored = {"added": "removed", "removed": "added"}
    for name in SECTIONS:
        other = mirrored.get(name, name)
        assert total(getattr(there, name)) == total(getattr(back, other)), name
        if not there.renamed:
            assert {(g.name, g.tensors) for g in getattr(there, name)} == {
                (g.name, g.tensors) for g in getattr(back, other)
            }


@given(PLAN, PLAN)
def test_every_tensor_is_accounted_for(a: Plan, b: Plan) -> None:
    found = compare(a, b)
    counts = {name: sum(g.tensors for g in getattr(found, name)) for name in SECTIONS}
    assert len(a.tensors) - counts["removed"] == len(b.tensors) - counts["added"]
    ours, theirs = ({t.name for t in plan.tensors} for plan in (a, b))
    assert counts["removed"] + counts["renamed"] == len(ours - theirs)
    forms = [
        {
            t.name: (p.dtypes[p.geometries[t.geometry].dtype], p.geometries[t.geometry].shape)
            for t in p.tensors
        }
        for p in (a, b)
    ]
    common = ours & theirs
    assert counts["retyped"] == sum(forms[0][n][0] != forms[1][n][0] for n in common)
    assert counts["reshaped"] == sum(forms[0][n][1] != forms[1][n][1] for n in common)


@given(PLAN, PLAN)
def test_no_change_of_the_program_is_silent(a: Plan, b: Plan) -> None:
    found = compare(a, b)
    if not found.same_program:
        assert found.inputs or changed_sections(found) or notes(found)


@given(PLAN, PLAN)
def test_records_and_markdown_of_any_two_plans(a: Plan, b: Plan) -> None:
    found = compare(a, b)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Difference) == found
    text = markdown(found)
    first = text.splitlines()[0]
    assert ("ame program" in first) == found.same_program
    assert len(text) < 65_536


@given(st.lists(NAMES, unique=True, min_size=1, max_size=30), st.data())
def test_groups_are_a_partition_and_say_no_more_than_they_hold(
    names: list[str], data: st.DataObject
) -> None:
    keys = {
        index: key
        for index in range(len(names))
        if (key := data.draw(st.sampled_from([None, "x", "y"]))) is not None
    }
    groups = NameTree(names).groups(keys)
    leaves = [leaf for _, members in groups for leaf in members]
    assert sorted(leaves) == sorted(keys)
    for title, members in groups:
        assert len({keys[leaf] for leaf in members}) == 1
        if title.endswith("*") and "{" not in title:
            prefix = title[:-1]
            assert {i for i, name in enumerate(names) if name.startswith(prefix)} == set(members)
        elif "{" not in title:
            assert [names[leaf] for leaf in members] == [title]
    # Never more lines than the families of those that changed alike.
    assert len(groups) <= len(families(keys, name=lambda i: names[i], same=lambda i: keys[i]))


def test_a_name_of_very_many_parts() -> None:
    names = [".".join("a" * 5000), "a.b"]
    assert NameTree(names).groups({0: 1}) == [(names[0], [0])]


def test_pattern() -> None:
    assert pattern(["a.0.x", "a.1.x"]) == "a.{0..1}.x"
    assert pattern(["a.0.x", "a.1.y"]) == "a.{0..1}.*"
    assert pattern(["a.x", "b.y"]) == "*"


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(Mesh((1, 4), 0), (REPLICATE, 0)), "dim 0 / 4"),
        (Layout(Mesh((2, 2), 0), (0, REPLICATE)), "dim 0 / 2 x2"),
        (Layout(Mesh((2, 2), 0), (REPLICATE, 1)), "2 times dim 1 / 2"),
        (Layout(Mesh((1, 1), 3), (REPLICATE, 0)), "dim 0 / 1 on 1 of 4 workers"),
        (Layout(Mesh((2, 1), 2), None), "whole on 2 of 4 workers"),
        (Layout(Mesh((4, 1), 0), None), "whole on all 4"),
    ],
)
def test_layout_in_words(layout: Layout, text: str) -> None:
    assert layout_text(layout, 4, "worker") == text


# Gates.


def grown(before: int, after: int) -> Difference:
    """A difference whose every amount goes from `before` to `after`."""
    found = compare(make_plan(), make_plan())
    amounts = tuple(msgspec.structs.replace(a, before=before, after=after) for a in found.amounts)
    return msgspec.structs.replace(found, amounts=amounts)


@pytest.mark.parametrize(
    ("gate", "before", "after", "holds"),
    [
        ("wire-bytes", 100, 100, True),
        ("wire-bytes", 100, 99, True),
        ("wire-bytes", 100, 101, False),
        ("wire-bytes+1%", 100, 101, True),
        ("wire-bytes+1%", 100, 102, False),
        ("wire-bytes+0.5%", 1000, 1005, True),
        ("wire-bytes+0.5%", 1000, 1006, False),
        ("fallback-bytes+50%", 0, 1, False),
        ("fallback-bytes+1K", 0, 1000, True),
        ("fallback-bytes+1K", 0, 1001, False),
        ("staging-bytes+1.5M", 0, 1_500_000, True),
        ("staging-bytes+1.5M", 0, 1_500_001, False),
        ("reload-bytes+1G", 5, 10**9 + 5, True),
        ("collectives+2", 5, 7, True),
        ("collectives+2", 5, 8, False),
        ("tensors", 5, 6, False),
    ],
)
def test_amount_gates(gate: str, before: int, after: int, holds: bool) -> None:
    trips = tripped(grown(before, after), parse_gates(gate))
    assert (not trips) == holds
    if trips:
        assert trips[0].gate == gate
        assert f"from {before:,} to {after:,}" in trips[0].message


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**6))
def test_a_percentage_is_exact(before: int, after: int, millionths: int) -> None:
    gate = f"model-bytes+{millionths // 10000}.{millionths % 10000:04}%"
    allowed = before * (1 + Fraction(millionths, 10**6))
    assert bool(tripped(grown(before, after), parse_gates(gate))) == (after > allowed)


def test_flag_gates() -> None:
    plain = make_plan(rows(("model.embed.weight", {"dim": 0})))
    falls = make_plan(ROWS)

    def trips(a: Plan, b: Plan) -> list[str]:
        gates = parse_gates("program, new-fallback,inputs,format")
        return [trip.gate for trip in tripped(compare(a, b), gates)]

    assert trips(plain, plain) == []
    assert trips(plain, falls) == ["program", "new-fallback"]
    assert trips(falls, plain) == ["program"]
    added = make_plan([*ROWS, ("z.weight", "bfloat16", (8,), None)])
    assert trips(falls, added) == ["program", "new-fallback"]
    assert trips(falls, with_inputs(falls, compiler="9.9.9")) == ["inputs"]
    later = Plan(
        **{name: getattr(falls, name) for name in falls.__struct_fields__}
        | {"format": msgspec.structs.replace(falls.format, minor=1)}
    )
    assert trips(falls, later) == ["format"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("falback-bytes", 'did you mean "fallback-bytes"?'),
        ("", "no such gate"),
        ("program,", "no such gate"),
        ("program+1", 'expected "program" by itself'),
        ("wire-bytes+", 'expected "wire-bytes"'),
        ("wire-bytes+1T", 'expected "wire-bytes"'),
        ("wire-bytes-1%", "no such gate"),
        ("wire-bytes+1e9", 'expected "wire-bytes"'),
        ("new-falback,tensers", 'did you mean "tensors"?'),
    ],
)
def test_bad_gates(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_gates(text)
    assert says in str(caught.value)


def test_names_of_tensors_are_only_text_in_markdown() -> None:
    nasty = "a|b`c\n# <img> @everyone [x](y)"
    text = markdown(
        compare(make_plan(ROWS), make_plan([*ROWS, (nasty, "bfloat16", (8,), None)])),
    )
    assert "\n# <img>" not in text
    row = next(line for line in text.splitlines() if "everyone" in line)
    assert row.count("|") - row.count("\\|") == 6
    assert row.count("`") == 2


def test_a_large_difference_fits_a_comment() -> None:
    many: list[Row] = [
        (f"{'part' * 30}{chr(97 + i % 26)}{i}x.weight", "bfloat16", (8,), 0) for i in range(3000)
    ]
    same: Row = ("same.weight", "bfloat16", (8,), 0)
    before = make_plan([same, *((n, "float32", (16,), None) for n, *_ in many)])
    text = markdown(compare(before, make_plan([same, *many])))
    assert len(text) < 65_536
    assert "... and 2988 more" in text


def test_comparing_imports_neither_torch_nor_engine() -> None:
    path = PLANS / "qwen3-0.6b-fsdp4-tp2.plan.json"
    script = (
        "import sys; from m2ncompile.cli import app; "
        f"app.app(['diff', {str(path)!r}, {str(path)!r}], standalone_mode=False); "
        "sys.exit(bool({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("same program: the plans are identical")


def test_inputs_by_key_path() -> None:
    from m2ncompile.diff import input_changes, input_paths
    from m2ncompile.spec import RuleSpec, TrainerSpec

    inputs: Inputs = make_inputs()
    rules = (RuleSpec(match="*.bias", placements="replicated"),)
    other = msgspec.structs.replace(
        inputs,
        trainer=TrainerSpec(ranks=2, layout="hsdp", shard_ranks=1, rules=rules),
        model=msgspec.structs.replace(inputs.model, exclude=("x.*",)),
    )
    found = input_changes(input_paths(inputs), input_paths(other))
    assert {c.path: (c.before, c.after) for c in found} == {
        "model.exclude": (None, ["x.*"]),
        "trainer.layout": ("fsdp", "hsdp"),
        "trainer.rules[0].match": (None, "*.bias"),
        "trainer.rules[0].placements": (None, "replicated"),
        "trainer.shard_ranks": (None, 1),
    }
    json.dumps([c.after for c in found])
