"""What must hold of any tensor entry, wherever it was read."""

from __future__ import annotations

import re
from reprlib import Repr

from m2ncompile.dtypes import ITEMSIZE
from m2ncompile.errors import Problems, nearest
from m2ncompile.inventory.records import TensorInfo

__all__ = ["check_tensor", "shown"]

#: Characters of a tensor's name; real ones stay under 100.
NAME_LIMIT = 1024
#: Elements of one tensor; keeps every byte count below 2**63.
ELEMENT_LIMIT = 2**59

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_repr = Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 120


def shown(value: object) -> str:
    """`value` as an error shows it: on one line, in ASCII, cut where long or deep."""
    if type(value) is str and len(value) < _repr.maxstring:
        return ascii(value)
    return _repr.repr(value).encode("ascii", "backslashreplace").decode()


def check_tensor(tensor: TensorInfo, where: str, problems: Problems) -> None:
    """Adds what is wrong with the tensor's name, dtype and shape."""
    if (reason := _name_problem(tensor.name)) is not None:
        problems.add(where, reason)
    if tensor.dtype not in ITEMSIZE:
        close = nearest(tensor.dtype, ITEMSIZE)
        problems.add(
            where,
            f"unknown dtype {shown(tensor.dtype)}; known: {', '.join(ITEMSIZE)}",
            f'did you mean "{close}"?' if close else None,
        )
    shape, elements = list(tensor.shape), 1
    for size in shape:
        if size <= 0:
            message = f"shape {shown(shape)} has the size {shown(size)}: nothing to transfer"
            problems.add(where, message, "remove the tensor")
            return
        elements *= size
        if elements > ELEMENT_LIMIT:
            problems.add(where, f"shape {shown(shape)} has more than 2**59 elements")
            return


def _name_problem(name: str) -> str | None:
    if not name:
        return "the tensor's name is empty"
    if len(name) > NAME_LIMIT:
        return f"the tensor's name has {len(name)} characters, more than {NAME_LIMIT}"
    if match := _CONTROL.search(name):
        return f"the tensor's name holds the control character U+{ord(match[0]):04X}"
    if _SURROGATE.search(name):
        return "the tensor's name holds a lone surrogate, which UTF-8 can't encode"
    return None
