"""Layout rules against vLLM's own functions: the same is accepted, the same is counted."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from vllm.distributed.weight_transfer import m2n_common as vllm_m2n

from m2ncompile.dtypes import ITEMSIZE, TRANSFERABLE
from m2ncompile.errors import LayoutError
from m2ncompile.layout import (
    MESH_AXES,
    REPLICATE,
    REPLICATED,
    Layout,
    Limits,
    Mesh,
    check_transfers,
    local_shape,
    overlaps,
    transfer_problems,
)

pytestmark = pytest.mark.engine

thorough = settings(max_examples=500)

#: Ints, those around the bounds above all, and what may pose as one.
scalars = st.sampled_from([-2, -1, 0, 1, 2, True, False, None, 1.0, "1"]) | st.integers(0, 99)
positive = st.integers(1, 99)
pairs = st.one_of(
    st.tuples(positive, positive),
    st.tuples(st.just(REPLICATE), scalars),
    st.tuples(scalars, st.just(REPLICATE)),
    st.lists(scalars, max_size=4).map(tuple),
)


def accepted(call: Callable[..., object], *args: object) -> bool:
    try:
        call(*args)
    except (ValueError, TypeError, LayoutError):
        return False
    return True


def theirs(layout: Layout) -> tuple[vllm_m2n.M2NMesh, tuple[int, int]]:
    mesh = vllm_m2n.M2NMesh(layout.mesh.dims, layout.mesh.start)
    resolved: tuple[vllm_m2n.M2NMesh, tuple[int, int]]
    resolved = vllm_m2n.resolve_layout(mesh, layout.placements)
    return resolved


def test_constants() -> None:
    assert MESH_AXES == vllm_m2n.MESH_NDIMS
    assert REPLICATE == vllm_m2n.REPLICATE
    assert REPLICATED is vllm_m2n.REPLICATED
    assert Limits() == Limits(
        max_dims=vllm_m2n.MAX_TENSOR_DIMS,
        max_sources=vllm_m2n.MAX_SOURCE_SHARDS,
        max_destinations=vllm_m2n.MAX_DEST_SHARDS,
    )
    assert {getattr(torch, name) for name in TRANSFERABLE} == vllm_m2n.SUPPORTED_DTYPES


@thorough
@given(dims=pairs, start=scalars)
def test_meshes(dims: tuple[int, int], start: int) -> None:
    ours = accepted(Mesh, dims, start)
    event(f"accepted: {ours}")
    assert ours == accepted(vllm_m2n.M2NMesh, dims, start)
    if ours:
        assert Mesh(dims, start).size == vllm_m2n.M2NMesh(dims, start).size


@thorough
@given(placements=pairs)
def test_placements(placements: tuple[int, int]) -> None:
    ours = accepted(Layout, Mesh((2, 2)), placements)
    event(f"accepted: {ours}")
    assert ours == accepted(vllm_m2n.check_placements, placements)


@st.composite
def layouts(draw: st.DrawFn, shards: st.SearchStrategy[int]) -> Layout:
    dims = [draw(shards), draw(st.integers(1, 3))]
    axis = draw(st.integers(0, 1))
    start = draw(st.integers(0, 3))
    if axis:
        dims.reverse()
    if draw(st.integers(0, 4)) == 0:
        return Layout(Mesh((dims[0], dims[1]), start), REPLICATED)
    dim = draw(st.integers(0, 2))
    return Layout(Mesh((dims[0], dims[1]), start), (REPLICATE, dim) if axis else (dim, REPLICATE))


any_layout = layouts(st.integers(1, 12))


@thorough
@given(layout=any_layout, shape=st.lists(st.sampled_from([0, 1, 6, 8, 12]), max_size=4))
def test_resolving_and_local_shapes(layout: Layout, shape: list[int]) -> None:
    mesh, placements = theirs(layout)
    resolved = layout.resolved()
    assert (resolved.mesh.dims, resolved.mesh.start) == (mesh.dims, mesh.start_rank)
    assert resolved.placements == placements

    ours = accepted(local_shape, resolved, shape)
    event(f"accepted: {ours}")
    assert ours == accepted(vllm_m2n.validate_layout, mesh, placements, shape, "layout")
    if ours:
        assert local_shape(resolved, shape) == vllm_m2n.validate_layout(
            mesh, placements, shape, "layout"
        )


#: Counts on both sides of 16 and 64.
many = st.one_of(
    st.integers(1, 140),
    st.sampled_from([15, 16, 17, 18, 30, 32, 34, 48, 51, 63, 64, 65, 66, 96, 128, 130, 192]),
)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[str, tuple[int, ...], Layout, Layout]:
    """A transfer over disjoint ranks that mostly fits; each rule is broken at times."""
    source = draw(layouts(many))
    destination = draw(layouts(many))
    destination = Layout(
        Mesh(destination.mesh.dims, source.mesh.ranks.stop + destination.mesh.start),
        destination.placements,
    )
    units = [1] * draw(st.sampled_from([3, 3, 3, 2, 1, 0, 4]))
    for layout in (source, destination):
        if layout.split and layout.split[0] < len(units):
            dim, shards = layout.split
            units[dim] = lcm(units[dim], shards)
    shape = [unit * draw(st.integers(1, 2)) for unit in units]
    if shape and draw(st.integers(0, 9)) == 0:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(-2, 7))
    dtype = "bfloat16" if draw(st.integers(0, 9)) else draw(st.sampled_from(sorted(ITEMSIZE)))
    return dtype, tuple(shape), source, destination


def vllm_checks(dtype: str, shape: tuple[int, ...], source: Layout, destination: Layout) -> None:
    """All that vLLM's two sides check of one transfer before the first reshard."""
    record = vllm_m2n.M2NWireParam("w", dtype, shape, source.mesh.dims, source.placements)
    mesh = vllm_m2n.M2NMesh(source.mesh.dims, source.mesh.start)
    layout = vllm_m2n.M2NLayout(mesh, record.src_placements)
    vllm_m2n.validate_transfer_plan(
        [vllm_m2n.M2NParamMeta(record.name, getattr(torch, dtype), record.shape, layout)],
        vllm_m2n.M2NMesh(destination.mesh.dims, destination.mesh.start),
        [destination.placements],
    )


@thorough
@given(transfer=transfers())
def test_transfers(transfer: tuple[str, tuple[int, ...], Layout, Layout]) -> None:
    problems = transfer_problems("w", *transfer, Limits())
    event(f"problems: {len(problems)}")
    assert (not problems) == accepted(vllm_checks, *transfer)
    assert (not problems) == accepted(check_transfers, [("w", *transfer)], Limits())


@thorough
@given(transfer=transfers())
def test_overlaps(transfer: tuple[str, tuple[int, ...], Layout, Layout]) -> None:
    """vLLM refuses exactly when a count exceeds its constant, so moving that finds its count."""
    _, shape, source, destination = transfer
    assume(shape and min(shape) >= 0)
    assume(accepted(local_shape, source, shape) and accepted(local_shape, destination, shape))
    counted = overlaps(shape, source, destination)
    with pytest.MonkeyPatch.context() as patch:
        for count, constant, other in (
            (counted[0], "MAX_SOURCE_SHARDS", "MAX_DEST_SHARDS"),
            (counted[1], "MAX_DEST_SHARDS", "MAX_SOURCE_SHARDS"),
        ):
            patch.setattr(vllm_m2n, other, 10**9)
            for bound, fits in ((count, True), (count - 1, False)):
                patch.setattr(vllm_m2n, constant, bound)
                assert fits == accepted(
                    vllm_m2n.check_plan_limits, theirs(source), theirs(destination), "w", shape
                )
