"""Untyped data (from TOML or JSON) to msgspec structs, reporting every violation.

msgspec's own decoder stops at the first error; a person mending a file wants
them all. So structs are walked here field by field and msgspec converts leaves.

A struct whose fields depend on each other has `violations`: given those of its values that are
good by themselves, by name, it yields the key and what is wrong with it; in a list of structs a
bad one is None. A leaf whose type does not say enough has a description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from m2ncompile.errors import Problems, nearest

__all__ = ["Violations", "convert_all"]

T = TypeVar("T", bound=msgspec.Struct)
#: (key, what is wrong with it).
Violations = Iterator[tuple[str, str]]


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
    items = _items(kind, data)
    if items and isinstance(items[0], type) and issubclass(items[0], msgspec.Struct):
        return _convert_items(data, items, where, path, problems)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if not any(type(data) is type(choice) and data == choice for choice in choices):
            close = nearest(data, choices) if isinstance(data, str) else None
            one_of = "one of " if len(choices) > 1 else ""
            problems.add(
                f"{where}: {path}",
                f"expected {one_of}{_quoted(choices)}; got {_shown(data)}",
                f'did you mean "{close}"?' if close else None,
            )
            return None
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        known = len(problems)
        if items:
            _convert_items(data, items, where, path, problems)
        if len(problems) == known:
            message = _description(kind) or str(error).split(" - at ")[0]
            problems.add(f"{where}: {path}", f"{message}; value: {_shown(data)}")
        return None


def _items(kind: Any, data: Any) -> tuple[Any, ...]:
    """The type of each item of `data`; none where it isn't a list or has not as many as it must."""
    origin, args = get_origin(kind), get_args(kind)
    if origin not in (list, tuple) or not isinstance(data, list):
        return ()
    if origin is list or args[1:] == (...,):
        return args[:1] * len(data)
    return args if len(args) == len(data) else ()


def _convert_items(
    data: list[Any], items: tuple[Any, ...], where: str, path: str, problems: Problems
) -> tuple[Any, ...]:
    return tuple(
        _convert(value, item, where, f"{path}[{index}]", problems)
        for index, (value, item) in enumerate(zip(data, items, strict=True))
    )


def _description(kind: Any) -> str | None:
    if get_origin(kind) is not Annotated:
        return None
    found = (meta.description for meta in get_args(kind)[1:] if isinstance(meta, msgspec.Meta))
    return next((text for text in found if text), None)


def _convert_struct(
    data: Any, struct: type[msgspec.Struct], where: str, path: str, problems: Problems
) -> Any:
    if not isinstance(data, dict):
        problems.add(
            f"{where}: {path or '(top level)'}", f"expected a table or object; got {_shown(data)}"
        )
        return None
    before = len(problems)
    prefix = f"{path}." if path else ""
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    for key in data:
        if key not in fields:
            close = nearest(key, fields)
            problems.add(
                f"{where}: {prefix}{key if key.isprintable() else ascii(key)}",
                f"unknown key; valid here: {', '.join(fields)}",
                f"did you mean `{prefix}{close}`?" if close else None,
            )
    values: dict[str, Any] = {}
    for key, field in fields.items():
        if key in data:
            known = len(problems)
            value = _convert(data[key], field.type, where, prefix + key, problems)
            if value is not None or len(problems) == known:
                values[field.name] = value
        elif field.required:
            problems.add(f"{where}: {prefix}{key}", "required key is missing")
        else:
            values[field.name] = field.default
    violations: Callable[[Mapping[str, Any]], Violations] | None
    if violations := getattr(struct, "violations", None):
        for key, message in violations(values):
            problems.add(f"{where}: {prefix}{key}", message)
    return struct(**values) if len(problems) == before else None


def _quoted(choices: tuple[Any, ...]) -> str:
    return ", ".join(
        f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices
    )


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, too deep
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
