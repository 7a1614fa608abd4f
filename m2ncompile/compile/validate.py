"""Translation validation: does the finished plan do what the loaders were seen to do?

The compiler is not trusted. From the plan alone it is worked out again, rank by
rank and at the real dims, which element of which tensor every element of every
live parameter receives, and compared with the recording. On the trainer's side
each rank must hold whatever the plan has it send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import gcd, prod

from m2ncompile.compile.resolve_traced import piece_of_copy
from m2ncompile.compile.strided import Dim, Piece, canonical, merged
from m2ncompile.compile.validate_routes import route_problems, trainer_problems
from m2ncompile.engine.recording import Recording
from m2ncompile.errors import PlanError, Problems
from m2ncompile.layout import Layout, shard_box
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of

__all__ = ["overlapping", "same_map", "validate"]

#: Runs beyond which two maps that differ in form are taken to differ.
_MAX_RUNS = 1 << 20


def validate(plan: Plan, recordings: Sequence[Recording]) -> None:
    """Raises PlanError listing every tensor that the plan would not place as its loader does.

    `recordings` has one per worker, in rank order, over the plan's tensors.
    """
    problems = Problems()
    _check_senders(plan, problems)
    problems.extend(trainer_problems(plan))
    problems.extend(route_problems(plan, recordings))
    layouts = layouts_of(plan)
    fallen = {d.tensor for d in plan.destinations if d.route == "fallback"}
    first = plan.inputs.trainer.ranks
    planned = _planned_pieces(plan, layouts)
    for recording in recordings:
        names = [param.name for param in recording.params]
        seen: defaultdict[tuple[int, str], list[Piece]] = defaultdict(list)
        filled: defaultdict[str, list[tuple[int, Piece]]] = defaultdict(list)
        for copy in recording.copies:
            name = names[copy.param]
            piece = piece_of_copy(copy)
            # A landing counts from the parameter's own start.
            start = recording.params[copy.param].view.offset
            piece = piece._replace(target=piece.target - start)
            filled[name].append((copy.tensor, piece))
            if copy.tensor not in fallen:
                seen[copy.tensor, name].append(piece)
        mine = planned[first + recording.rank]
        for key in sorted(seen.keys() | mine.keys()):
            tensor, name = key
            if not same_map(seen.get(key, ()), mine.get(key, ())):
                problems.add(
                    plan.tensors[tensor].name,
                    f"worker {recording.rank}: the loader fills {name} with "
                    f"{_text(merged(seen.get(key, ())))}, the plan with "
                    f"{_text(merged(mine.get(key, ())))}",
                )
        for name, pieces in filled.items():
            for a, b in overlapping(pieces):
                problems.add(
                    plan.tensors[b].name,
                    f"worker {recording.rank}: it fills elements of {name} that "
                    f"{plan.tensors[a].name} fills too, so the order of loading matters",
                )
    problems.raise_if_any(PlanError, "the plan does not do what the model's loaders do")


def _planned_pieces(
    plan: Plan, layouts: Sequence[Layout]
) -> dict[int, dict[tuple[int, str], list[Piece]]]:
    """Per communicator rank: (tensor, live parameter) -> what the plan puts there."""
    workers = range(
        plan.inputs.trainer.ranks, plan.inputs.trainer.ranks + plan.inputs.engine.workers
    )
    planned: dict[int, dict[tuple[int, str], list[Piece]]] = {rank: {} for rank in workers}
    # What a rank reads of a wire depends on few things: worked out once for each.
    boxes: dict[tuple[int, int, int], tuple[int, tuple[tuple[int, int], ...]]] = {}
    for d in plan.destinations:
        if d.landing is None:
            continue
        wire, landing, layout = plan.wires[d.wire], plan.landings[d.landing], layouts[d.layout]
        name = plan.params[landing.param].name
        for place, rank in enumerate(layout.mesh.ranks):
            key = (d.wire, d.layout, rank)
            if key not in boxes:
                boxes[key] = _strided(plan.geometries[wire.geometry].shape, layout, rank)
            offset, dims = boxes[key]
            joint = canonical(_aligned(dims, landing.dims))
            piece = Piece(wire.base + offset, d.offset_at(place), joint)
            planned[rank].setdefault((d.tensor, name), []).append(piece)
    return planned


def _strided(
    shape: Sequence[int], layout: Layout, rank: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """What `rank` holds of a row-major tensor: its first element, then (size, stride) dims."""
    box = shard_box(layout, shape, rank)
    assert box is not None
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = sum(a * stride for (a, _), stride in zip(box, strides, strict=True))
    return offset, tuple((b - a, stride) for (a, b), stride in zip(box, strides, strict=True))


def _aligned(buffer: Sequence[tuple[int, int]], target: Sequence[tuple[int, int]]) -> Iterator[Dim]:
    """Two (size, stride) descriptions of one sequence of elements, as joint dims.

    Raises PlanError when they describe different numbers of elements, or step
    at places that no common dims have.
    """
    left, right = list(buffer), list(target)
    while left and right:
        (a, source), (b, step) = left.pop(), right.pop()
        size = min(a, b)
        if max(a, b) % size:
            raise PlanError(f"a landing's dims {list(target)} do not fit a shard's {list(buffer)}")
        yield Dim(size, source, step)
        if a > size:
            left.append((a // size, source * size))
        if b > size:
            right.append((b // size, step * size))
    if prod(size for size, _ in left + right) != 1:
        raise PlanError(f"a landing's dims {list(target)} do not fit a shard's {list(buffer)}")


def _check_senders(plan: Plan, problems: Problems) -> None:
    """Every trainer rank holds what its wires have it send."""
    layouts = layouts_of(plan)
    kinds: dict[tuple[int, int, int], str] = {}
    for d in plan.destinations:
        tensor = plan.tensors[d.tensor]
        kinds.setdefault((tensor.geometry, tensor.source, d.wire), tensor.name)
    for (geometry, held, wire_index), name in kinds.items():
        wire = plan.wires[wire_index]
        shape, source = plan.geometries[geometry].shape, layouts[held]
        for rank in layouts[wire.source].mesh.ranks:
            offset, dims = _strided(
                plan.geometries[wire.geometry].shape, layouts[wire.source], rank
            )
            if not _holds(shape, source, rank, wire.base + offset, dims):
                problems.add(
                    name,
                    f"trainer rank {rank} would send elements that it does not hold",
                )


def _holds(
    shape: Sequence[int],
    layout: Layout,
    rank: int,
    offset: int,
    dims: Sequence[tuple[int, int]],
) -> bool:
    """Whether `rank` holds all elements of a strided box of the tensor."""
    box = shard_box(layout, shape, rank)
    if box is None:
        return False
    if layout.split is None:
        return True
    dim, shards = layout.split
    if shards == 1:
        return True
    # Along the sharded dim a rank holds an interval of every period.
    stride = prod(shape[dim + 1 :])
    period = shape[dim] * stride
    start, stop = box[dim][0] * stride, box[dim][1] * stride
    reach = sum((size - 1) * step for size, step in dims if step % period)
    return start <= offset % period and offset % period + reach < stop


def same_map(a: Sequence[Piece], b: Sequence[Piece]) -> bool:
    """Whether two sets of pieces copy the same elements to the same places.

    False where their forms differ and are too fine to compare run by run.
    """
    left, right = set(merged(a)), set(merged(b))
    if left == right:
        return True
    # The form of joined pieces is not unique (three fused rows, cut otherwise);
    # their maximal contiguous runs are.
    return (runs := _runs(left - right)) is not None and runs == _runs(right - left)


def _runs(pieces: set[Piece]) -> list[tuple[int, int, int]] | None:
    """Maximal (source, target, length) runs that step by one on both sides; None for too many."""
    found: list[tuple[int, int, int]] = []
    for piece in pieces:
        dims = list(piece.dims)
        length = 1
        if dims and (dims[-1].source, dims[-1].target) == (1, 1):
            length = dims.pop().size
        if len(found) + prod(dim.size for dim in dims) > _MAX_RUNS:
            return None
        starts = [(piece.source, piece.target)]
        for size, source, target in dims:
            starts = [(s + i * source, t + i * target) for s, t in starts for i in range(size)]
        found += [(source, target, length) for source, target in starts]
    joined: list[tuple[int, int, int]] = []
    for source, target, length in sorted(found):
        if joined:
            before, place, size = joined[-1]
            if (before + size, place + size) == (source, target):
                joined[-1] = before, place, size + length
                continue
        joined.append((source, target, length))
    return joined


def overlapping(pieces: Sequence[tuple[int, Piece]]) -> list[tuple[int, int]]:
    """Pairs of tensors whose pieces share target elements. Pieces come with their tensor."""
    ordered = sorted(pieces, key=lambda item: item[1].target)
    found = []
    open_until: list[tuple[int, int, Piece]] = []
    for tensor, piece in ordered:
        end = piece.target + sum((dim.size - 1) * dim.target for dim in piece.dims)
        open_until = [entry for entry in open_until if entry[0] >= piece.target]
        for _, other, before in open_until:
            if _share(before, piece):
                found.append((other, tensor))
        open_until.append((end, tensor, piece))
    return found


def _share(a: Piece, b: Piece) -> bool:
    """Whether two pieces whose target intervals meet share an element; True where unsure."""
    if a.dense and b.dense:
        return True
    # Runs of elements that both step over whole count as one element each.
    strides = [dim.target for dim in (*a.dims, *b.dims) if dim.target != 1]
    run = gcd(_run(a), _run(b), a.target, b.target, *strides)
    # Interleaved rows or columns: all steps are multiples of what sets the two apart.
    step = gcd(*(stride // run for stride in strides))
    if max(_run(a), _run(b)) > run:
        step = 1
    return step <= 1 or (a.target - b.target) // run % step == 0


def _run(piece: Piece) -> int:
    """Elements of the target's steps of one, 1 where it has none."""
    return prod(dim.size for dim in piece.dims if dim.target == 1)


def _text(pieces: Sequence[Piece]) -> str:
    if not pieces:
        return "nothing"
    shown = ", ".join(
        f"{p.numel} elements from {p.source} at {p.target}"
        + (f" by {[tuple(d) for d in p.dims]}" if len(p.dims) != 1 else "")
        for p in pieces[:2]
    )
    return shown + (f" and {len(pieces) - 2} more" if len(pieces) > 2 else "")
