"""Untyped data (from TOML or JSON) to msgspec structs, reporting every violation.

msgspec's own decoder stops at the first error; a person mending a file wants
them all. So structs are walked here field by field and msgspec converts leaves.
"""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from m2ncompile.errors import Problems, nearest

__all__ = ["convert_all"]

T = TypeVar("T", bound=msgspec.Struct)


def convert_all(data: Any, struct: type[T], where: str, problems: Problems) -> T | None:
    """`data` as a `struct`, or None after adding to `problems` all that is wrong.

    `where` (a file name) precedes the key path in each problem.
    """
    before = len(problems)
    value = _convert_struct(data, struct, where, "", problems)
    return value if len(problems) == before else None


def _convert(data: Any, kind: Any, where: str, path: str, problems: Problems) -> Any:
    if get_origin(kind) in (Union, UnionType):
        options = [o for o in get_args(kind) if o is not type(None)]
        if len(options) == 1:
            kind = options[0]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _convert_struct(data, kind, where, path, problems)
    item = get_args(kind)[0] if get_origin(kind) is tuple else None
    if isinstance(item, type) and issubclass(item, msgspec.Struct) and isinstance(data, list):
        return tuple(
            _convert_struct(value, item, where, f"{path}[{index}]", problems)
            for index, value in enumerate(data)
        )
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        if not isinstance(data, str) or data not in choices:
            close = nearest(str(data), choices)
            problems.add(
                f"{where}: {path}",
                f"expected one of {_quoted(choices)}; got {_shown(data)}",
                f'did you mean "{close}"?' if close else None,
            )
            return None
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        message = str(error).split(" - at ")[0]
        problems.add(f"{where}: {path}", f"{message}; value: {_shown(data)}")
        return None


def _convert_struct(
    data: Any, struct: type[msgspec.Struct], where: str, path: str, problems: Problems
) -> Any:
    if not isinstance(data, dict):
        problems.add(f"{where}: {path or '(top level)'}", f"expected a table; got {_shown(data)}")
        return None
    before = len(problems)
    prefix = f"{path}." if path else ""
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    for key in data:
        if key not in fields:
            close = nearest(key, fields)
            problems.add(
                f"{where}: {prefix}{key}",
                f"unknown key; valid here: {', '.join(fields)}",
                f"did you mean `{prefix}{close}`?" if close else None,
            )
    values: dict[str, Any] = {}
    for key, field in fields.items():
        if key in data:
            values[field.name] = _convert(data[key], field.type, where, prefix + key, problems)
        elif field.required:
            problems.add(f"{where}: {prefix}{key}", "required key is missing")
    if len(problems) > before:
        return None
    try:
        return struct(**values)
    except ValueError as error:  # the struct's own __post_init__ refuses
        problems.add(f"{where}: {path or '(top level)'}", str(error))
        return None


def _quoted(choices: list[str]) -> str:
    return ", ".join(f'"{choice}"' for choice in choices)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
