"""`m2ncompile explain`."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from m2ncompile.cli.common import (
    CacheOption,
    JsonOption,
    PlanArgument,
    RemoteOption,
    print_json,
    size,
)
from m2ncompile.cli.text import placement_text
from m2ncompile.dtypes import nbytes
from m2ncompile.errors import PlanError, nearest
from m2ncompile.opening import open_plan
from m2ncompile.pieces import pieces
from m2ncompile.plan_check import layouts_of

if TYPE_CHECKING:
    from m2ncompile.plan import Plan, PlanPart

__all__ = ["explain_command"]


def explain_command(
    plan: PlanArgument,
    tensor: Annotated[str, typer.Argument(metavar="TENSOR", help="The tensor's checkpoint name.")],
    cache: CacheOption = None,
    remote: RemoteOption = None,
    json: JsonOption = False,
) -> None:
    """Say where each piece of a tensor comes from and goes to, and why by this route."""
    document = _document(open_plan(plan, cache, remote), tensor)
    if json:
        print_json("m2ncompile.explain/1", document)
    else:
        _print(document)


def _document(plan: Plan, name: str) -> dict[str, Any]:
    names = [tensor.name for tensor in plan.tensors]
    if name not in names:
        close = nearest(name, names)
        raise PlanError(
            f'the plan has no tensor "{name}"' + (f'; did you mean "{close}"?' if close else "")
        )
    index = names.index(name)
    layouts = layouts_of(plan)
    tensor = plan.tensors[index]
    geometry = plan.geometries[tensor.geometry]
    source = layouts[tensor.source]
    dtype = plan.dtypes[geometry.dtype]
    carried: defaultdict[int, list[tuple[int, PlanPart | None]]] = defaultdict(list)
    for i, transfer in enumerate(plan.transfers):
        for d in transfer.destinations:
            carried[d].append((i, transfer.part))
    destinations = []
    for number, destination in enumerate(plan.destinations):
        if destination.tensor != index:
            continue
        layout = layouts[destination.layout]
        wire = plan.wires[destination.wire]
        shape = plan.geometries[wire.geometry].shape
        landing = None if destination.landing is None else plan.landings[destination.landing]
        reason = None if destination.reason is None else plan.reasons[destination.reason]
        destinations.append(
            {
                "route": destination.route,
                "reason": None if reason is None else msgspec.to_builtins(reason),
                "parameter": None if landing is None else plan.params[landing.param].name,
                "offset": destination.offset,
                "range": [wire.base, wire.base + prod(shape)],
                "shape": shape,
                "source": placement_text(layouts[wire.source]),
                "layout": placement_text(layout),
                "collective": carried[number][0][0],
                "parts": [
                    {
                        "collective": i,
                        "dim": part.dim,
                        "range": [part.start, part.start + part.size],
                    }
                    for i, part in carried[number]
                    if part is not None
                ],
                "collectives": len(plan.transfers),
                "pieces": [
                    msgspec.to_builtins(piece)
                    for piece in pieces(shape, layouts[wire.source], layout)
                ],
            }
        )
    return {
        "tensor": name,
        "dtype": dtype,
        "shape": geometry.shape,
        "nbytes": nbytes(dtype, geometry.shape),
        "source": placement_text(source),
        "trainer_ranks": plan.inputs.trainer.ranks,
        "destinations": destinations,
    }


def _collectives(destination: dict[str, Any]) -> str:
    first = destination["collective"] + 1
    if not (parts := destination["parts"]):
        return f"collective {first}"
    last = parts[-1]["collective"] + 1
    return f"in {len(parts)} parts of dim {parts[0]['dim']}, collectives {first} to {last}"


def _offsets(offset: int | tuple[int, ...]) -> str:
    return str(offset) if isinstance(offset, int) else ", ".join(map(str, offset))


def _print(document: dict[str, Any]) -> None:
    first = document["trainer_ranks"]
    print(
        f"{document['tensor']}\n"
        f"  {document['dtype']} {list(document['shape'])}, {size(document['nbytes'])}\n"
        f"  on the trainer: {document['source']}"
    )
    for destination in document["destinations"]:
        start, stop = destination["range"]
        if (start, destination["shape"]) != (0, document["shape"]):
            print(
                f"  its elements [{start}, {stop}) as {list(destination['shape'])}, "
                f"on the trainer: {destination['source']}"
            )
        print(
            f"  on the workers: {destination['layout']}\n"
            f"  route {destination['route']}, {_collectives(destination)} of "
            f"{destination['collectives']}"
        )
        if destination["parameter"]:
            print(
                f"  into parameter {destination['parameter']}, "
                f"from its element {_offsets(destination['offset'])} on"
            )
        if destination["reason"]:
            print(
                f"  not direct: {destination['reason']['text']} [{destination['reason']['code']}]"
            )
        for piece in destination["pieces"]:
            where = ", ".join(f"{a}:{b}" for a, b in piece["box"])
            trainers = " or ".join(f"trainer {rank}" for rank in piece["trainers"])
            print(f"    worker {piece['worker'] - first}: [{where}] from {trainers}")
