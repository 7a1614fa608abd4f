"""What several commands share: options, opening a plan, output."""

from __future__ import annotations

import os
import secrets
import signal
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from m2ncompile.build import Trouble, open_store
from m2ncompile.errors import SpecError, StoreError
from m2ncompile.store import Store, default_root
from m2ncompile.units import size

if TYPE_CHECKING:
    from rich.console import Console

    from m2ncompile.remote import Remote


__all__ = [
    "CacheOption",
    "JsonOption",
    "PlanArgument",
    "RemoteOption",
    "cache_trouble",
    "console",
    "holds_plan",
    "naming",
    "print_json",
    "refusal",
    "remote_at",
    "size",
    "spec_files",
    "store_at",
    "write_file",
]

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document with a versioned schema.")
]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        help="The store's folder (default: $M2NCOMPILE_CACHE, else a folder in the user's cache).",
    ),
]
RemoteOption = Annotated[
    str | None,
    typer.Option(
        "--remote",
        metavar="URL",
        envvar="M2NCOMPILE_REMOTE",
        help="A store shared by machines: file:///FOLDER, s3://, gs://, or http(s)://, read-only.",
    ),
]
PlanArgument = Annotated[
    str,
    typer.Argument(
        metavar="PLAN", help="A plan file, a URL, or the start of a digest in the store."
    ),
]


def store_at(root: Path | None) -> Store:
    return open_store(root or default_root())


def remote_at(url: str | None) -> Remote | None:
    if not url:
        return None
    from m2ncompile.remote import open_remote

    # A server that goes away while it is sent to is to be told of, not to end the process.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return open_remote(url)


def cache_trouble(required: bool) -> Trouble:
    """Warns of what a store, local or remote, could not do; where stores are required, raises."""

    def tell(what: str, why: StoreError) -> None:
        if required:
            raise why
        print(f"warning: {what}: {why}", file=sys.stderr)

    return tell


def spec_files(given: Iterable[Path]) -> list[Path]:
    """Files as they are, folders as the specs in them."""
    found: list[Path] = []
    for path in given:
        if not os.path.isdir(path):
            found.append(path)
            continue
        try:
            inside = sorted(file for file in path.iterdir() if file.name.endswith(".toml"))
        except OSError as error:
            raise SpecError(f"{path}: can't read the folder: {error.strerror}") from None
        if not inside:
            raise SpecError(f"{path}: the folder holds no spec (*.toml)")
        found += inside
    return found


def refusal(error: OSError) -> str:
    """What the system refused, with the file where it names one."""
    why = error.strerror or str(error)
    return why if error.filename is None else f"{os.fsdecode(error.filename)}: {why}"


@contextmanager
def naming(spec: Path) -> Iterator[None]:
    """What the system refuses becomes a SpecError that names the spec it was for."""
    try:
        yield
    except OSError as error:
        raise SpecError(f"{spec}: {refusal(error)}") from None


def holds_plan(path: Path) -> bool:
    """Whether a file's start is that of a plan, be it a damaged one. Raises OSError."""
    with path.open("rb") as file:
        return b'"m2ncompile-plan"' in file.read(4096)


def write_file(path: Path, data: bytes, what: str) -> None:
    """A reader never sees half a file; links are followed, and stay. Raises StoreError."""
    scratch: Path | None = None
    try:
        if _is_special(path):
            path.write_bytes(data)
            return
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{secrets.token_hex(8)}")
        scratch.write_bytes(data)
        os.replace(scratch, target)
    except OSError as error:
        if scratch is not None:
            with suppress(OSError):
                scratch.unlink()
        raise StoreError(f"{path}: can't write {what}: {error.strerror}") from None


def _is_special(path: Path) -> bool:
    """A device or a pipe, which must not be replaced with a file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def print_json(schema: str, content: dict[str, Any]) -> None:
    """One document on stdout; `schema` changes when keys change their meaning."""
    document = {"schema": schema, **content}
    try:
        data = msgspec.json.encode(document)
    except UnicodeEncodeError:  # a path that is no text
        data = msgspec.json.encode(_as_text(msgspec.to_builtins(document)))
    sys.stdout.flush()
    # JSON is UTF-8, whatever the locale's encoding is.
    sys.stdout.buffer.write(msgspec.json.format(data, indent=2) + b"\n")


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_text(key): _as_text(one) for key, one in value.items()}
    return [_as_text(one) for one in value] if isinstance(value, list | tuple) else value


def console() -> Console:
    from rich.console import Console

    return Console(
        # Tables must not wrap at 80 columns when a pipe has no width of its own.
        width=None if sys.stdout.isatty() else 160,
        highlight=False,
        soft_wrap=True,
        # Names from specs and plans are printed, and may look like either.
        markup=False,
        emoji=False,
    )
