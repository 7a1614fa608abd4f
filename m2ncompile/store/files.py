"""The files of a store in a folder: reached without following links, written whole."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from m2ncompile.errors import Problem, StoreError
from m2ncompile.store.records import DIGEST, DamagedError, Kind, file_name

__all__ = ["File", "Tree", "held", "read", "remove", "status", "touch", "write"]

_FILE = re.compile(r"[0-9a-f]{64}\.json")
_SHARD = re.compile(r"[0-9a-f]{2}")

#: To open a folder. `O_NOFOLLOW` refuses a link in its place.
_FOLDER = os.O_RDONLY | os.O_DIRECTORY

_T = TypeVar("_T")


class File(msgspec.Struct, frozen=True):
    """What lies in a shard, whatever it is."""

    name: str
    status: os.stat_result

    @property
    def digest(self) -> str:
        return self.name.removesuffix(".json")

    @property
    def regular(self) -> bool:
        return stat.S_ISREG(self.status.st_mode)


class Tree:
    """`root/objects` and `root/actions`, each with a folder per first two digits.

    `fix` says what to do where the system refuses.
    """

    def __init__(self, root: Path, fix: str) -> None:
        self.root = root
        self._fix = fix

    def path(self, kind: Kind, digest: str) -> Path:
        return self.root / kind / digest[:2] / file_name(digest)

    @contextmanager
    def folder(
        self, kind: Kind, digest: str | None = None, *, write: bool = False
    ) -> Iterator[int]:
        """A descriptor of `root/kind`, or of the shard of `digest` (or its first two digits).

        Opened one level at a time without following links, and files are then
        reached by their bare names in it: a link below the root leads nowhere,
        even one that is put there meanwhile.

        What the system refuses in the block raises StoreError, but for a file
        that is absent where it was to be read.
        """
        parts = (kind,) if digest is None else (kind, digest[:2])
        fd = -1
        try:
            if write:
                self.root.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.root, _FOLDER)
            for part in parts:
                if write:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=fd)
                parent, fd = fd, os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
                os.close(parent)
            yield fd
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not write:
                raise
            folder = self.root.joinpath(*parts)
            file = folder / file_name(digest) if digest and DIGEST.fullmatch(digest) else folder
            problem = _blame(self.root, folder, self._fix) or Problem(
                str(file), error.strerror or str(error), self._fix
            )
            title = f"can't {'write' if write else 'read'} the store"
            raise StoreError(title, [problem]) from error
        finally:
            if fd >= 0:
                os.close(fd)

    def scan(self, kind: Kind, shard: str) -> list[File]:
        files: list[File] = []
        with suppress(FileNotFoundError), self.folder(kind, shard) as fd:
            for name in sorted(os.listdir(fd)):
                with suppress(FileNotFoundError):  # removed meanwhile
                    files.append(File(name, status(fd, name)))
        return files

    def shards(self, kind: Kind) -> list[str]:
        with suppress(FileNotFoundError), self.folder(kind) as fd:
            return sorted(filter(_SHARD.fullmatch, os.listdir(fd)))
        return []

    def files(self, kind: Kind, shard: str | None = None) -> list[File]:
        return [
            file
            for one in ([shard] if shard else self.shards(kind))
            for file in self.scan(kind, one)
            if _FILE.fullmatch(file.name) and file.name.startswith(one)
        ]


def _blame(root: Path, folder: Path, fix: str) -> Problem | None:
    """The first thing on the way to `folder` that is no folder."""
    for part in [*reversed(folder.parents), folder]:
        if part != root and part.is_relative_to(root) and os.path.islink(part):
            return Problem(str(part), "is a symbolic link, which the store does not follow")
        if os.path.lexists(part) and not os.path.isdir(part):
            return Problem(str(part), "expected a folder, found a file", fix)
    return None


def status(fd: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=fd, follow_symlinks=False)


def read(fd: int, name: str, limit: int) -> bytes:
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedError("it is a symbolic link, which the store does not follow") from None
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError("it is not a regular file")
        if status.st_size > limit:
            raise DamagedError(f"it has {status.st_size} bytes, at most {limit} are read")
        with open(file, "rb", closefd=False) as stream:
            return stream.read(status.st_size)
    finally:
        os.close(file)


def write(fd: int, name: str, data: bytes) -> None:
    """Puts the file in place whole, also after a crash of the machine."""
    temporary = f"{name}.{secrets.token_hex(8)}.tmp"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=fd)
    try:
        with open(file, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(file)
        os.replace(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=fd)
        raise
    with suppress(OSError):  # not every file system syncs folders; at worst a crash loses the name
        os.fsync(fd)


def touch(fd: int, name: str) -> None:
    """Marks a use; FileNotFoundError when the file lost its name before the mark was set."""
    os.utime(name, dir_fd=fd, follow_symlinks=False)
    status(fd, name)


def remove(fd: int, name: str, *, keep: Callable[[int, str], bool]) -> bool:
    """Removes the file unless `keep(fd, its name)`; False when kept or already gone.

    Between a look at a file and its removal another process may put a new one
    in its place or mark a use. So it is renamed first, and looked at when no
    other process can reach it by its name.
    """
    aside = f"{name}.{secrets.token_hex(8)}.aside"
    try:
        os.rename(name, aside, src_dir_fd=fd, dst_dir_fd=fd)
    except FileNotFoundError:
        return False
    try:
        if not keep(fd, aside):
            os.unlink(aside, dir_fd=fd)
            return True
    except BaseException:  # such as a folder under this name
        with suppress(OSError):
            os.rename(aside, name, src_dir_fd=fd, dst_dir_fd=fd)
        raise
    os.rename(aside, name, src_dir_fd=fd, dst_dir_fd=fd)
    return False


def held(fd: int, name: str, look: Callable[[str], _T]) -> _T:
    """`look(name)`, also while `_remove` holds the file aside; FileNotFoundError when gone."""
    with suppress(FileNotFoundError):
        return look(name)
    for other in os.listdir(fd):
        if other.startswith(f"{name}.") and other.endswith(".aside"):
            with suppress(FileNotFoundError, DamagedError):
                return look(other)
    return look(name)  # put back meanwhile
