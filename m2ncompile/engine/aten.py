"""What the recorder knows of torch's operations: which rearrange, which write, which read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

__all__ = [
    "CAT",
    "COPY",
    "OVERWRITING",
    "REARRANGING",
    "STACK",
    "called",
    "on_meta",
    "passes",
    "takes_data_out",
    "tensors_in",
    "written_by",
    "zeroes",
]

COPY = torch.ops.aten.copy_.default
CAT = torch.ops.aten.cat.default
STACK = torch.ops.aten.stack.default
REARRANGING = {CAT, STACK, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
#: Views by their schema, which change values.
_COMPUTING_VIEWS = {torch.ops.aten._conj.default, torch.ops.aten._neg_view.default}


def _names(names: str) -> set[str]:
    return {f"aten::{name}" for name in names.split()}


#: Read a tensor's shape and dtype alone; `_unsafe_view` is a view that its schema does not show.
_NOT_READING = _names(
    "empty_like full_like ones_like rand_like randint_like randn_like zeros_like "
    "new_empty new_empty_strided new_full new_ones new_zeros _unsafe_view"
)
#: Do not read what they write to.
OVERWRITING = _names(
    "fill_ zero_ normal_ uniform_ random_ exponential_ bernoulli_ _foreach_zero_ _foreach_copy_"
)
#: Make or leave nothing but zeros; `fill_` where it is given zero.
_ZEROING = _names("zeros zeros_like new_zeros zero_ fill_")
#: In words of the functions that loaders call.
_CALLED = {"_to_copy": "to(dtype)", "_local_scalar_dense": "item"}


@cache
def passes(operation: Any) -> bool:
    """Whether what a result holds shows in its storage alone, or is no tensor's data."""
    schema = operation._schema
    return (
        schema.name in _NOT_READING
        or torch.Tag.inplace_view in operation.tags
        or (
            operation not in _COMPUTING_VIEWS
            and not written_by(operation)
            and all(result.alias_info is not None for result in schema.returns)
        )
    )


@cache
def written_by(operation: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operation writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def takes_data_out(operation: Any) -> bool:
    return any("Tensor" not in str(result.type) for result in operation._schema.returns)


def zeroes(operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether all that the operation makes, or writes to, is zero."""
    name = operation._schema.name
    return name in _ZEROING and (name != "aten::fill_" or (len(args) > 1 and args[1] == 0))


def called(operation: Any) -> str:
    name = str(operation._schema.name).removeprefix("aten::")
    return _CALLED.get(name, name)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A copy to another device stays here."""
    return kwargs if kwargs.get("device") is None else kwargs | {"device": torch.device("meta")}
