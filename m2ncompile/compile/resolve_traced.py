"""The `traced` resolver: routes from what the model's own loaders were seen to do.

Per tensor, the workers' recorded copies are joined into pieces and put as
transfers (`spread.py`). What can't be put so goes whole to every worker
(`fallback`). What can is written where it belongs: straight away (`direct`)
where that is all there is to do, otherwise through the engine's layer-wise
reload (`reload`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod

from m2ncompile.compile.spread import Carried, InexpressibleError, carry
from m2ncompile.compile.strided import Piece, merged, piece_of
from m2ncompile.engine.recording import Copy, LiveParam, Recording
from m2ncompile.errors import EngineError, InventoryError, Problems, nearest
from m2ncompile.families import numberless
from m2ncompile.inventory.records import TensorInfo
from m2ncompile.layout import Layout, Mesh
from m2ncompile.routes import Destination, Landing, Param, Reason, Wire

__all__ = [
    "Pieces",
    "check_accepted",
    "check_reloaded",
    "piece_of_copy",
    "pieces_by_tensor",
    "resolve_traced",
]

#: A tensor's pieces: live parameter -> communicator rank -> pieces.
Pieces = dict[str, dict[int, tuple[Piece, ...]]]


def check_accepted(
    tensors: Sequence[TensorInfo],
    recordings: Sequence[Recording],
    placed: Mapping[int, Pieces],
    quantized: bool,
) -> None:
    """Every element of every tensor is read by some worker, every live parameter filled by some.

    What no loader takes would be trained and never served. A quantized model
    has scalar scales with defaults, which a checkpoint may leave out. Raises
    InventoryError listing tensors with the nearest names that are taken.
    """
    refused = {refusal.tensor for recording in recordings for refusal in recording.refusals}
    words = dict(found for recording in recordings for found in recording.unknown)
    taken = [tensors[i].name for i in sorted(refused | placed.keys())]
    problems = Problems()
    for index, tensor in enumerate(tensors):
        if index in words or not (index in refused or index in placed):
            close = nearest(tensor.name, taken) if len(problems) < 50 else None
            problems.add(
                tensor.name,
                f"the model's loaders do not take it as {list(tensor.shape)}"
                + (f": {words[index]}" if index in words else ": no worker reads it"),
                (f"the nearest name that is taken is {close}; " if close != tensor.name else "")
                + "if it is not to be sent, list it in model.exclude",
            )
        elif index not in refused and (unread := prod(tensor.shape) - _read(placed[index])) > 0:
            problems.add(
                tensor.name,
                f"the model's loaders leave {unread} of its {prod(tensor.shape)} elements unread",
                f"its shape {list(tensor.shape)} may be that of another model",
            )
    if not refused:  # where a refused tensor goes is not known
        _check_filled(recordings, quantized, problems)
    problems.raise_if_any(InventoryError, "the checkpoint and the model's loaders do not agree")


def _check_filled(recordings: Sequence[Recording], quantized: bool, problems: Problems) -> None:
    """Every parameter is filled on some worker, and as far as in the other layers.

    A worker may leave out what another has (a bias that one rank adds), and the
    end of a padded vocabulary; a layer may not leave out an expert.
    """
    shapes: dict[str, LiveParam] = {}
    filled: Counter[tuple[str, int]] = Counter()
    for recording in recordings:
        shapes |= {p.name: p for p in recording.params if p.parameter}
        for copy in recording.copies:
            filled[recording.params[copy.param].name, recording.rank] += prod(copy.source.shape)
    for name, param in shapes.items():
        most = max(filled[name, recording.rank] for recording in recordings)
        if not most and not (quantized and prod(param.view.shape) == 1):
            problems.add(
                name,
                f"no tensor fills this parameter of {param.owner}",
                "the checkpoint lacks a tensor, or names it otherwise",
            )
    for recording in recordings:
        alike: defaultdict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
        for param in recording.params:
            if param.parameter:
                alike[numberless(param.name), param.view.shape].append(param.name)
        for names in alike.values():
            most = max(filled[name, recording.rank] for name in names)
            for name in names:
                if 0 < filled[name, recording.rank] < most:
                    problems.add(
                        name,
                        f"on worker {recording.rank}, tensors fill {filled[name, recording.rank]} "
                        f"of its elements, in another layer {most}",
                        "the checkpoint lacks a tensor of this layer",
                    )


def _read(pieces: Pieces) -> int:
    """Elements that some worker reads; workers that read the same count once."""
    boxes = {
        (piece.source, tuple((dim.size, dim.source) for dim in piece.dims)): piece.numel
        for ranks in pieces.values()
        for found in ranks.values()
        for piece in found
    }
    return sum(boxes.values())


def check_reloaded(
    destinations: Sequence[Destination],
    recordings: Sequence[Recording],
    placed: Mapping[int, Pieces],
    first_worker: int,
) -> None:
    """What a reload can't give back must be zeros, which is what the run puts there.

    A module that is reloaded starts from nothing. A parameter that tensors fill on other
    workers alone (a bias that only the first of a row-parallel layer's workers adds) is then
    whatever its loader puts there. Raises EngineError where that is not seen to be zeros.
    """
    filled: defaultdict[str, set[int]] = defaultdict(set)
    for pieces in placed.values():
        for name, found in pieces.items():
            filled[name] |= found.keys()
    reloaded = {
        d.landing.param.name.rpartition(".")[0]
        for d in destinations
        if d.landing is not None and d.route == "reload"
    }
    arriving: defaultdict[int, set[str]] = defaultdict(set)
    for name, ranks in filled.items():
        for rank in ranks:
            arriving[rank].add(name.rpartition(".")[0])
    problems = Problems()
    for recording in recordings:
        rank = first_worker + recording.rank
        modules = reloaded & arriving[rank]
        for position, param in enumerate(recording.params):
            if (
                param.name in filled
                and rank not in filled[param.name]
                and param.name.rpartition(".")[0] in modules
                and position not in recording.zeroed
            ):
                problems.add(
                    param.name,
                    f"worker {recording.rank}'s loader leaves it as it was, on other workers "
                    "tensors fill it; its module is reloaded, which would lose it",
                )
    problems.raise_if_any(EngineError, "the model can't be reloaded as it was loaded")


def pieces_by_tensor(recordings: Sequence[Recording], first_worker: int) -> dict[int, Pieces]:
    """Tensor -> its pieces, joined, by communicator rank (worker 0 is `first_worker`)."""
    found: defaultdict[int, defaultdict[str, defaultdict[int, list[Piece]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for recording in recordings:
        rank = first_worker + recording.rank
        names = [param.name for param in recording.params]
        for copy in recording.copies:
            found[copy.tensor][names[copy.param]][rank].append(piece_of_copy(copy))
    return {
        tensor: {
            name: {
                rank: tuple(pieces) if len(pieces) == 1 else merged(pieces)
                for rank, pieces in ranks.items()
            }
            for name, ranks in params.items()
        }
        for tensor, params in found.items()
    }


def piece_of_copy(copy: Copy) -> Piece:
    """A recorded copy as a piece; its target is in the parameter's storage."""
    source, target = copy.source, copy.target
    return piece_of(source.offset, target.offset, source.shape, source.stride, target.stride)


def resolve_traced(
    tensors: Sequence[TensorInfo],
    sources: Sequence[Layout],
    recordings: Sequence[Recording],
    placed: Mapping[int, Pieces],
    mesh: Mesh,
    max_dims: int,
) -> tuple[Destination, ...]:
    """Destinations in the order of `tensors`; `mesh` is all workers, for fallback.

    Raises EngineError when workers disagree on what a parameter is.
    """
    params = _agreed_params(recordings)
    refusals = {
        refusal.tensor: Reason(
            "data",
            f"its loader {refusal.loader} needs the values ({refusal.op}), so only load_weights "
            "can place it",
        )
        for recording in recordings
        for refusal in recording.refusals
    }
    everywhere = Layout(mesh, None)
    decided: list[tuple[int, str | None, Carried | None, Reason | None]] = []
    for index, (tensor, source) in enumerate(zip(tensors, sources, strict=True)):
        try:
            if index in refusals:
                decided.append((index, None, None, refusals[index]))
                continue
            decided += [
                (index, name, carried, _local_work(params[name], tensor, carried))
                for name, ranks in placed[index].items()
                for carried in carry(tensor.shape, source, ranks, max_dims)
            ]
        except InexpressibleError as error:
            decided.append((index, None, None, Reason("no-transfer", str(error))))

    held_back = _unit_reasons(decided, placed, params, bool(refusals))
    destinations = []
    for index, name, found, reason in decided:
        source = sources[index]
        if found is None or name is None:
            assert reason is not None
            wire = Wire(0, _folded(tensors[index].shape, source, max_dims), source)
            destinations.append(Destination(index, wire, "fallback", everywhere, None, reason))
            continue
        reason = reason or held_back.get(name.rpartition(".")[0])
        live = params[name]
        destinations.append(
            Destination(
                index,
                Wire(found.base, found.shape, found.source),
                "direct" if reason is None else "reload",
                found.destination,
                _landing(live, found.pieces),
                reason,
            )
        )
    return tuple(destinations)


def _folded(shape: tuple[int, ...], source: Layout, max_dims: int) -> tuple[int, ...]:
    """A shape in at most `max_dims` dims, the last ones as one, where none of them is sharded."""
    last = max_dims - 1
    if len(shape) <= max_dims or (source.split is not None and source.split[0] >= last):
        return shape
    return (*shape[:last], prod(shape[last:]))


def _agreed_params(recordings: Sequence[Recording]) -> dict[str, LiveParam]:
    """Each live parameter by name; what one worker may not write directly, none may.

    Pipeline stages may differ in a parameter's other names (a tied head).
    """
    params: dict[str, LiveParam] = {}
    problems = Problems()
    for recording in recordings:
        for param in recording.params:
            known = params.setdefault(param.name, param)
            if (known.dtype, known.view) != (param.dtype, param.view):
                problems.add(
                    param.name,
                    f"worker {recording.rank} has {param.dtype} {list(param.view.shape)} "
                    f"in {param.owner}, an earlier one {known.dtype} {list(known.view.shape)} "
                    f"in {known.owner}",
                )
            elif known.not_direct is None:
                params[param.name] = param
    problems.raise_if_any(EngineError, "workers hold different parameters by the same name")
    return params


def _local_work(param: LiveParam, tensor: TensorInfo, carried: Carried) -> Reason | None:
    """Why writing the live parameter is not all there is to do; None when it is."""
    if param.dtype != tensor.dtype:
        return Reason("dtype", f"its loader converts {tensor.dtype} to {param.dtype} while copying")
    if not all(piece.dense for piece in carried.pieces):
        return Reason("strided", "its shard is no contiguous run of the live parameter's storage")
    if param.not_direct is not None:
        return Reason("post-load", param.not_direct)
    return None


def _unit_reasons(
    decided: Sequence[tuple[int, str | None, Carried | None, Reason | None]],
    placed: Mapping[int, Pieces],
    params: Mapping[str, LiveParam],
    any_refused: bool,
) -> dict[str, Reason]:
    """Modules in which nothing may be written directly, by path.

    The engine reloads a module as a unit: a parameter that goes through its
    loaders would take directly written siblings with it.
    """
    if any_refused:
        # Where a refused tensor goes is not known, so no module is safe.
        unknown = Reason(
            "unit", "another tensor's loader needs its values, so where that one goes is not known"
        )
        return {name.rpartition(".")[0]: unknown for name in params}
    held_back: dict[str, Reason] = {}
    for index, name, _, reason in decided:
        if reason is None:
            continue
        for touched in [name] if name is not None else placed.get(index, {}):
            module, _, leaf = touched.rpartition(".")
            held_back.setdefault(
                module,
                Reason(
                    "unit",
                    f"`{leaf}` of the same module is not written directly, and the engine "
                    "reloads a module as a unit",
                ),
            )
    return held_back


def _landing(live: LiveParam, pieces: Sequence[Piece]) -> Landing:
    offsets = tuple(piece.target - live.view.offset for piece in pieces)
    (dims,) = {tuple((dim.size, dim.target) for dim in piece.dims) for piece in pieces}
    shape, stride = live.view.shape, live.view.stride
    row_major = True
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        row_major &= size == 1 or step == expected
        expected *= size
    return Landing(
        Param(live.name, live.dtype, shape, None if row_major else stride),
        offsets[:1] if len(set(offsets)) == 1 else offsets,
        dims or ((1, 1),),
    )
