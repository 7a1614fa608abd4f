"""Which destinations travel together, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.compile.coalesce import coalesce
from m2ncompile.inventory.records import TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Limits, Mesh
from m2ncompile.routes import Destination, Landing, Param, Route, Wire
from m2ncompile.stacking import stacked
from tests.runs import experts_plan

SOURCE = Layout(Mesh((2, 1), 0), (0, REPLICATE))
SPLIT = Layout(Mesh((1, 2), 2), (REPLICATE, 0))


@dataclass
class Case:
    """A list of destinations, one tensor each, built up by name."""

    tensors: list[TensorInfo]
    destinations: list[Destination]

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        layout: Layout = SPLIT,
        route: Route = "reload",
        source: Layout = SOURCE,
    ) -> None:
        landing = Landing(Param(name, "bfloat16", shape), (0,), ((1, 1),))
        self.destinations.append(
            Destination(len(self.tensors), Wire(0, shape, source), route, layout, landing, None)
        )
        self.tensors.append(TensorInfo(name, "bfloat16", shape))

    def groups(self, **limits: int) -> list[list[str]]:
        found = coalesce(self.tensors, self.destinations, Limits(**limits))
        return [[self.tensors[i].name for i in group] for group in found]


def test_a_layer_is_stacked_by_geometry() -> None:
    case = Case([], [])
    for layer in (0, 1):
        for name in ("q", "k", "v"):
            case.add(f"layers.{layer}.{name}.weight", (8, 4) if name == "q" else (4, 4))
    assert case.groups() == [
        ["layers.0.q.weight"],
        ["layers.0.k.weight", "layers.0.v.weight"],
        ["layers.1.q.weight"],
        ["layers.1.k.weight", "layers.1.v.weight"],
    ]


def test_direct_ones_are_stacked_across_layers_after_the_last() -> None:
    case = Case([], [])
    for layer in range(3):
        case.add(f"layers.{layer}.norm.weight", (8,), route="direct")
        case.add(f"layers.{layer}.mlp.weight", (8, 8))
    assert case.groups() == [
        ["layers.0.mlp.weight"],
        ["layers.1.mlp.weight"],
        [f"layers.{layer}.norm.weight" for layer in range(3)],
        ["layers.2.mlp.weight"],
    ]


def test_stacks_across_layers_take_a_quarter_of_what_may_be_staged() -> None:
    """Of 64 bytes a rank: a trainer may hold tensors until their stack is complete."""
    case = Case([], [])
    for layer in range(8):
        case.add(f"layers.{layer}.a", (8, 8), route="direct")
        for name in "bcde":
            case.add(f"layers.{layer}.{name}", (8, 8))
    sizes = [len(group) for group in case.groups(stage_bytes=4 * 64)]
    assert sizes.count(1) == 8 and sizes.count(4) == 8


def test_what_a_layer_has_much_of_is_stacked_within_it() -> None:
    """Directly or not: four matrices are more than half of the quarter that goes across layers."""
    case = Case([], [])
    for layer in range(3):
        for expert in range(4):
            case.add(f"layers.{layer}.experts.{expert}", (8, 8), route="direct")
    by_layer = [[f"layers.{layer}.experts.{expert}" for expert in range(4)] for layer in range(3)]
    assert case.groups(stage_bytes=4 * 2 * 4 * 64 - 1) == by_layer
    assert [len(group) for group in case.groups(stage_bytes=4 * 2 * 4 * 64)] == [6, 6]


def test_stacks_are_cut_evenly() -> None:
    case = Case([], [])
    for number in range(10):
        case.add(f"layers.0.{number}", (8, 8))
    assert [len(group) for group in case.groups(stage_bytes=4 * 64)] == [3, 3, 4]
    assert [len(group) for group in case.groups(stage_bytes=9 * 64)] == [5, 5]


def test_what_differs_stays_apart() -> None:
    case = Case([], [])
    case.add("layers.0.a", (8, 8))
    case.add("layers.0.b", (8, 8), layout=Layout(Mesh((1, 2), 2), (REPLICATE, 1)))
    case.add("layers.0.c", (8, 8), source=Layout(Mesh((2, 1), 0), None))
    case.add("layers.0.d", (8, 8), route="fallback")
    case.add("layers.0.e", (8, 16))
    assert [len(group) for group in case.groups()] == [1] * 5


def test_large_ones_and_those_of_all_dims_go_alone() -> None:
    case = Case([], [])
    for name in "ab":
        case.add(f"layers.0.{name}", (1024, 1024))
        case.add(f"layers.0.{name}.stacked", (2, 8, 8))
    assert [len(g) for g in case.groups(stack_bytes=1 << 21)] == [1, 1, 1, 1]
    assert [len(g) for g in case.groups(stack_bytes=(1 << 21) + 1)] == [2, 1, 1]


def test_experts_are_spread_over_their_ranks() -> None:
    case = Case([], [])
    for expert in range(8):
        for name in ("gate", "up"):
            layout = Layout(Mesh((1, 1), 2 + expert // 2), None)
            case.add(f"layers.0.experts.{expert}.{name}", (4, 4), layout=layout)
    ((*names,),) = case.groups()
    assert names == [
        f"layers.0.experts.{expert}.{name}" for expert in range(8) for name in ("gate", "up")
    ]


def test_a_stack_is_in_the_order_in_which_it_lies_in_its_parameter() -> None:
    """However the checkpoint lists it: 10 comes before 2 there."""
    plan = experts_plan(12)
    names = [
        [plan.tensors[plan.destinations[d].tensor].name for d in t.destinations]
        for t in plan.transfers
    ]
    assert [[name.removeprefix("layers.0.experts.") for name in group] for group in names] == [
        [f"{expert}.down" for expert in range(12)],
        [f"{expert}.{name}" for expert in range(12) for name in ("gate", "up")],
    ]


def test_uneven_experts_are_stacked_rank_by_rank() -> None:
    case = Case([], [])
    for expert, rank in enumerate((2, 2, 3)):
        case.add(f"layers.0.experts.{expert}", (4, 4), layout=Layout(Mesh((1, 1), rank), None))
    assert [len(group) for group in case.groups()] == [2, 1]


@given(
    ranks=st.lists(st.integers(2, 5), min_size=1, max_size=24),
    stage=st.sampled_from([1, 32, 64, 200, 1 << 20]),
)
def test_every_group_is_a_stack_within_its_budget(ranks: list[int], stage: int) -> None:
    """Whatever the experts' ranks: each is carried once, by a stack that one transfer can say."""
    case = Case([], [])
    for expert, rank in enumerate(ranks):
        case.add(f"layers.0.experts.{expert}", (4, 4), layout=Layout(Mesh((1, 1), rank), None))
    groups = coalesce(case.tensors, case.destinations, Limits(stage_bytes=stage))
    assert sorted(i for group in groups for i in group) == list(range(len(ranks)))
    for group in groups:
        layouts = [case.destinations[i].layout for i in group]
        stack = stacked((4, 4), SOURCE, layouts)
        share = len(group) // stack.destination.mesh.size * 32
        # One tensor a rank is the least that a transfer can carry.
        assert share <= max(stage, 32)
