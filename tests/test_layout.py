from __future__ import annotations

from itertools import product
from math import lcm, prod

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2ncompile.errors import LayoutError
from m2ncompile.layout import (
    REPLICATE,
    REPLICATED,
    Box,
    Layout,
    Limits,
    Mesh,
    check_transfers,
    local_shape,
    overlaps,
    shard_box,
    transfer_problems,
)

NCCL = Limits()


def sharded(dim: int, shards: int, *, copies: int = 1, start: int = 0) -> Layout:
    return Layout(Mesh((copies, shards), start), (REPLICATE, dim))


def whole(ranks: int, *, start: int = 0) -> Layout:
    return Layout(Mesh((1, ranks), start), REPLICATED)


def messages(
    source: Layout,
    destination: Layout,
    *,
    shape: tuple[int, ...] = (64, 64),
    dtype: str = "bfloat16",
    limits: Limits = NCCL,
) -> list[str]:
    return [p.message for p in transfer_problems("w", dtype, shape, source, destination, limits)]


@st.composite
def layouts(draw: st.DrawFn, rank: int, *, start: int = 0) -> Layout:
    """Small layouts of a tensor of `rank` dims, sharded over either axis, or replicated."""
    a, b = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    if draw(st.integers(0, 3)) == 0:
        return Layout(Mesh((a, b), start), REPLICATED)
    dim = draw(st.integers(0, rank - 1))
    if draw(st.booleans()):
        return Layout(Mesh((a, b), start), (dim, REPLICATE))
    return Layout(Mesh((b, a), start), (REPLICATE, dim))


@st.composite
def fitting(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Layout]:
    """A shape that both of two layouts divide."""
    rank = draw(st.integers(1, 3))
    source = draw(layouts(rank))
    destination = draw(layouts(rank, start=draw(st.integers(36, 40))))
    units = [1] * rank
    for layout in (source, destination):
        if layout.split:
            dim, shards = layout.split
            units[dim] = lcm(units[dim], shards)
    return tuple(unit * draw(st.integers(1, 3)) for unit in units), source, destination


def boxes(layout: Layout, shape: tuple[int, ...]) -> list[Box]:
    found = [shard_box(layout, shape, rank) for rank in layout.mesh.ranks]
    assert None not in found
    return [box for box in found if box is not None]


def meet(a: Box, b: Box) -> bool:
    return all(max(p[0], q[0]) < min(p[1], q[1]) for p, q in zip(a, b, strict=True))


class TestMesh:
    def test_ranks_are_an_interval(self) -> None:
        mesh = Mesh((2, 3), 4)
        assert mesh.size == 6
        assert list(mesh.ranks) == [4, 5, 6, 7, 8, 9]

    @pytest.mark.parametrize(
        ("dims", "start", "message"),
        [
            ((2,), 0, "a mesh has 2 dims, got 1"),
            ((2, 2, 2), 0, "a mesh has 2 dims, got 3"),
            ((0, 2), 0, "mesh dim 0 must be an int of at least 1, got 0"),
            ((2, -1), 0, "mesh dim 1 must be an int of at least 1, got -1"),
            ((2, True), 0, "mesh dim 1 must be an int of at least 1, got True"),
            ((2.0, 1), 0, "mesh dim 0 must be an int of at least 1, got 2.0"),
            ((2, 1), -1, "a mesh starts at rank 0 or above, got -1"),
            ((2, 1), True, "a mesh starts at rank 0 or above, got True"),
            ((0, 0), -1, "mesh dim 0.*mesh dim 1.*starts at rank 0"),
        ],
    )
    def test_refuses(self, dims: tuple[int, int], start: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Mesh(dims, start)

    def test_travels_as_an_array(self) -> None:
        layout = Layout(Mesh((2, 4), 8), (REPLICATE, 0))
        encoded = msgspec.json.encode(layout)
        assert encoded == b"[[[2,4],8],[-1,0]]"
        assert msgspec.json.decode(encoded, type=Layout) == layout

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[[[[2, 0]], null]]", r"mesh dim 1 must be .* at `\$\[0\]\[0\]`"),
            ("[[[[2, 1]], [0, 0]]]", r"shard both mesh axes.* at `\$\[0\]`"),
            ("[[[[true, 1]], null]]", "Expected `int`, got `bool`"),
        ],
    )
    def test_decoding_validates_and_says_where(self, text: str, message: str) -> None:
        with pytest.raises(msgspec.ValidationError, match=message):
            msgspec.json.decode(text, type=list[Layout])


class TestLayout:
    @pytest.mark.parametrize(
        ("placements", "message"),
        [
            ((0,), "placements are 2 codes, one per mesh axis, got 1"),
            ((-1, 0, 0), "placements are 2 codes, one per mesh axis, got 3"),
            ((-2, 0), "placement 0 must be -1 .* got -2"),
            ((-1, True), "placement 1 must be -1 .* got True"),
            ((-1, "0"), "placement 1 must be -1 .* got '0'"),
            ((-1, -1), "two replicating axes: write null"),
            ((0, 1), r"placements \[0, 1\] shard both mesh axes"),
        ],
    )
    def test_refuses(self, placements: tuple[int, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Layout(Mesh((2, 2)), placements)

    def test_replicated_resolves_onto_a_mesh_of_one_column(self) -> None:
        resolved = Layout(Mesh((2, 3), 5), REPLICATED).resolved()
        assert resolved == Layout(Mesh((6, 1), 5), (REPLICATE, 0))

    def test_sharded_resolves_to_itself(self) -> None:
        layout = Layout(Mesh((2, 3), 5), (1, REPLICATE))
        assert layout.resolved() is layout

    @given(fitting())
    def test_resolving_changes_no_rank(self, case: tuple[tuple[int, ...], Layout, Layout]) -> None:
        shape, source, destination = case
        for layout in (source, destination):
            assert boxes(layout.resolved(), shape) == boxes(layout, shape)
        assert overlaps(shape, source.resolved(), destination.resolved()) == overlaps(
            shape, source, destination
        )


class TestLimits:
    def test_defaults_are_nccls(self) -> None:
        assert (NCCL.max_dims, NCCL.max_sources, NCCL.max_destinations) == (3, 16, 64)

    @pytest.mark.parametrize("name", ["max_dims", "max_sources", "max_destinations"])
    @pytest.mark.parametrize("value", [0, True, 1.5])
    def test_refuses(self, name: str, value: int) -> None:
        with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, got {value}"):
            Limits(**{name: value})


class TestShards:
    def test_ranks_are_row_major(self) -> None:
        by_column = Layout(Mesh((2, 2), 4), (REPLICATE, 0))
        by_row = Layout(Mesh((2, 2), 4), (0, REPLICATE))
        assert [shard_box(by_column, (8, 3), rank) for rank in range(4, 8)] == [
            ((0, 4), (0, 3)),
            ((4, 8), (0, 3)),
            ((0, 4), (0, 3)),
            ((4, 8), (0, 3)),
        ]
        assert [shard_box(by_row, (8, 3), rank) for rank in range(4, 8)] == [
            ((0, 4), (0, 3)),
            ((0, 4), (0, 3)),
            ((4, 8), (0, 3)),
            ((4, 8), (0, 3)),
        ]

    def test_ranks_outside_hold_nothing(self) -> None:
        layout = whole(2, start=4)
        assert shard_box(layout, (3,), 3) is None
        assert shard_box(layout, (3,), 4) == ((0, 3),)
        assert shard_box(layout, (3,), 5) == ((0, 3),)
        assert shard_box(layout, (3,), 6) is None

    def test_a_scalar_can_be_replicated(self) -> None:
        assert local_shape(whole(2), ()) == ()
        assert shard_box(whole(2), (), 1) == ()
        assert overlaps((), whole(2), whole(2, start=2)) == (1, 1)

    @given(fitting())
    def test_every_element_lies_on_as_many_ranks_as_there_are_copies(
        self, case: tuple[tuple[int, ...], Layout, Layout]
    ) -> None:
        shape, layout, _ = case
        held = boxes(layout, shape)
        copies = layout.mesh.size // (layout.split[1] if layout.split else 1)
        # Every distinct box is held `copies` times, and the distinct boxes tile the tensor.
        distinct = set(held)
        assert all(held.count(box) == copies for box in distinct)
        assert sum(prod(stop - start for start, stop in box) for box in distinct) == prod(shape)
        assert not any(meet(a, b) for a, b in product(distinct, distinct) if a != b)
        assert all(
            tuple(stop - start for start, stop in box) == local_shape(layout, shape)
            for box in distinct
        )

    def test_uneven_splits_show_the_arithmetic(self) -> None:
        with pytest.raises(
            LayoutError, match=r"shards dim 0 of \[10, 3\] over 4 ranks.*: 10 = 4 \* 2 \+ 2$"
        ):
            local_shape(sharded(0, 4), (10, 3))
        with pytest.raises(LayoutError, match=r"10 = 4 \* 2 \+ 2"):
            shard_box(sharded(0, 4), (10, 3), 0)
        with pytest.raises(LayoutError, match=r"10 = 4 \* 2 \+ 2"):
            overlaps((10, 3), sharded(0, 4), whole(1))
        with pytest.raises(LayoutError, match=r"10 = 4 \* 2 \+ 2"):
            overlaps((10, 3), whole(1), sharded(0, 4))

    def test_absent_dims(self) -> None:
        with pytest.raises(LayoutError, match=r"shards dim 2, but shape \[10, 3\] has 2 dims"):
            local_shape(sharded(2, 1), (10, 3))


class TestOverlaps:
    @given(fitting())
    def test_counts_the_boxes_that_meet(self, case: tuple[tuple[int, ...], Layout, Layout]) -> None:
        shape, source, destination = case
        sources, destinations = set(boxes(source, shape)), set(boxes(destination, shape))
        assert overlaps(shape, source, destination) == (
            max(sum(meet(s, d) for s in sources) for d in destinations),
            max(sum(meet(s, d) for d in destinations) for s in sources),
        )

    @pytest.mark.parametrize(
        ("source", "destination", "expected"),
        [
            (sharded(0, 3), sharded(0, 2), (2, 2)),
            (sharded(0, 4), sharded(0, 6), (2, 2)),
            (sharded(0, 6), sharded(0, 4), (2, 2)),
            (sharded(0, 3), sharded(0, 8), (2, 4)),
            (sharded(0, 32), sharded(0, 32), (1, 1)),
            (sharded(0, 4), sharded(1, 8), (4, 8)),
            (sharded(0, 4), whole(8), (4, 1)),
            (whole(4), sharded(1, 8), (1, 8)),
            (sharded(0, 4, copies=4), sharded(0, 2, copies=8), (2, 1)),
        ],
    )
    def test_examples(self, source: Layout, destination: Layout, expected: tuple[int, int]) -> None:
        assert overlaps((96, 96), source, destination) == expected

    def test_an_empty_tensor_has_none(self) -> None:
        assert overlaps((0, 8), sharded(0, 4), sharded(1, 8)) == (0, 0)
        assert overlaps((8, 0), sharded(0, 4), sharded(0, 8)) == (0, 0)


class TestTransfers:
    @pytest.mark.parametrize(
        ("source", "destination", "shape", "expected"),
        [
            # Across dims every source shard meets every destination shard.
            (sharded(0, 16), sharded(1, 64, start=16), (16, 64), []),
            (
                sharded(0, 17),
                sharded(1, 64, start=17),
                (17, 64),
                [
                    "17 source shards meet in one destination shard, over the limit of 16 "
                    "(source 17 along dim 0, destination 64 along dim 1)"
                ],
            ),
            (
                sharded(0, 16),
                sharded(1, 65, start=16),
                (16, 65),
                [
                    "one source shard feeds 65 destination shards, over the limit of 64 "
                    "(source 16 along dim 0, destination 65 along dim 1)"
                ],
            ),
            # Along one dim only those that share elements count.
            (sharded(0, 128), sharded(0, 128, start=128), (128,), []),
            (sharded(0, 32), sharded(0, 2, start=32), (32,), []),
            (
                sharded(0, 34),
                sharded(0, 2, start=34),
                (34,),
                [
                    "17 source shards meet in one destination shard, over the limit of 16 "
                    "(source 34 along dim 0, destination 2 along dim 0)"
                ],
            ),
            (sharded(0, 2), sharded(0, 128, start=2), (128,), []),
            (
                sharded(0, 2),
                sharded(0, 130, start=2),
                (130,),
                [
                    "one source shard feeds 65 destination shards, over the limit of 64 "
                    "(source 2 along dim 0, destination 130 along dim 0)"
                ],
            ),
            # A whole tensor is one shard, however many ranks hold it.
            (whole(100), whole(100, start=100), (8,), []),
            (
                sharded(0, 17),
                whole(100, start=17),
                (17,),
                [
                    "17 source shards meet in one destination shard, over the limit of 16 "
                    "(source 17 along dim 0, destination whole)"
                ],
            ),
        ],
    )
    def test_fan_in_and_fan_out(
        self, source: Layout, destination: Layout, shape: tuple[int, ...], expected: list[str]
    ) -> None:
        assert messages(source, destination, shape=shape) == expected

    def test_limits_can_be_narrower(self) -> None:
        narrow = Limits(max_dims=1, max_sources=2, max_destinations=3)
        assert messages(sharded(0, 2), sharded(0, 2, start=2), shape=(12,), limits=narrow) == []
        assert messages(sharded(0, 4), sharded(1, 4, start=4), limits=narrow) == [
            "shape [64, 64] has 2 dims, a transfer takes 1 to 1",
            "4 source shards meet in one destination shard, over the limit of 2 "
            "(source 4 along dim 0, destination 4 along dim 1)",
            "one source shard feeds 4 destination shards, over the limit of 3 "
            "(source 4 along dim 0, destination 4 along dim 1)",
        ]

    @pytest.mark.parametrize("dtype", ["bool", "int16", "complex64", "float8_e8m0fnu", ""])
    def test_dtypes(self, dtype: str) -> None:
        (problem,) = transfer_problems("w", dtype, (4,), whole(1), whole(1, start=1), NCCL)
        assert problem.message == f"dtype {dtype} can't be transferred"
        assert problem.fix is not None
        assert "bfloat16, float16" in problem.fix

    def test_shapes(self) -> None:
        pair = whole(1), whole(1, start=1)
        assert messages(*pair, shape=(2, 2, 2)) == []
        assert messages(*pair, shape=(2, 2, 2, 2)) == [
            "shape [2, 2, 2, 2] has 4 dims, a transfer takes 1 to 3"
        ]
        assert messages(*pair, shape=()) == ["shape [] has 0 dims, a transfer takes 1 to 3"]
        assert messages(*pair, shape=(4, 0)) == [
            "shape [4, 0] holds no elements, all sizes must be 1 or more"
        ]

    @pytest.mark.parametrize(
        ("source_start", "destination_start", "expected"),
        [
            (0, 4, []),
            (2, 0, []),
            (0, 3, ["source ranks [0, 4) and destination ranks [3, 5) share [3, 4)"]),
            (1, 0, ["source ranks [1, 5) and destination ranks [0, 2) share [1, 2)"]),
            (0, 1, ["source ranks [0, 4) and destination ranks [1, 3) share [1, 3)"]),
        ],
    )
    def test_sides_need_ranks_of_their_own(
        self, source_start: int, destination_start: int, expected: list[str]
    ) -> None:
        assert messages(whole(4, start=source_start), whole(2, start=destination_start)) == expected

    def test_one_error_lists_everything(self) -> None:
        good = ("good", "bfloat16", (8, 8), sharded(0, 4), sharded(1, 8, start=4))
        with pytest.raises(LayoutError) as caught:
            check_transfers(
                iter(
                    [
                        good,
                        ("a", "bool", (9, 8, 1, 1), sharded(0, 4), sharded(5, 8, start=2)),
                        ("b", "bfloat16", (32, 8), sharded(0, 32), sharded(1, 8, start=32)),
                        ("c", "bfloat16", (32, 8), sharded(0, 32), sharded(1, 8, start=32)),
                    ]
                ),
                NCCL,
            )
        assert caught.value.title == "3 of 4 tensors can't be moved as planned"
        assert [(p.where, p.message) for p in caught.value.problems] == [
            ("a", "dtype bool can't be transferred"),
            ("a", "shape [9, 8, 1, 1] has 4 dims, a transfer takes 1 to 3"),
            (
                "a",
                "source shards dim 0 of [9, 8, 1, 1] over 4 ranks, which is uneven: 9 = 4 * 2 + 1",
            ),
            ("a", "destination shards dim 5, but shape [9, 8, 1, 1] has 4 dims"),
            ("a", "source ranks [0, 4) and destination ranks [2, 10) share [2, 4)"),
            *(
                (
                    name,
                    "32 source shards meet in one destination shard, over the limit of 16 "
                    "(source 32 along dim 0, destination 8 along dim 1)",
                )
                for name in ("b", "c")
            ),
        ]
        assert all(problem.fix for problem in caught.value.problems)
        check_transfers([good], NCCL)

    @given(st.data())
    def test_a_plan_has_the_problems_of_its_tensors(self, data: st.DataObject) -> None:
        """Whatever is remembered of equal geometries, nothing is mixed up."""
        some_layouts = [whole(2), sharded(0, 2), sharded(1, 20), sharded(0, 2, start=2)]
        geometry = st.tuples(
            st.sampled_from(["bfloat16", "bool"]),
            st.sampled_from([(20,), (20, 40), (3, 20)]),
            st.sampled_from(some_layouts),
            st.sampled_from([sharded(1, 5, start=20), whole(3, start=20), sharded(0, 3)]),
        )
        plan = [(f"t{i}", *g) for i, g in enumerate(data.draw(st.lists(geometry, max_size=12)))]
        expected = [problem for t in plan for problem in transfer_problems(*t, NCCL)]
        if expected:
            with pytest.raises(LayoutError) as caught:
                check_transfers(plan, NCCL)
            assert list(caught.value.problems) == expected
        else:
            check_transfers(plan, NCCL)
