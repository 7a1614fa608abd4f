"""The files of a remote store: each is read and written whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from m2ncompile.errors import Problem, StoreError
from m2ncompile.remote.address import Address
from m2ncompile.remote.bounded import SilentError, bounded
from m2ncompile.store import files
from m2ncompile.store.files import Tree
from m2ncompile.store.records import DamagedError, Kind, file_name

__all__ = ["Files", "FolderFiles", "FsspecFiles", "files_at", "make_root"]

#: Bytes asked for at once.
_CHUNK = 8 << 20


class Files(Protocol):
    """Raises whatever the protocol's library raises, and DamagedError for what is too large."""

    def read(
        self, kind: Kind, digest: str, limit: int, received: Callable[[int], None]
    ) -> bytes | None:
        """At most `limit` bytes, or None where there is no such file."""

    def write(self, kind: Kind, digest: str, data: bytes) -> None:
        """Puts the file in place; no reader ever sees a part of it."""

    def names(self, kind: Kind, shard: str | None) -> list[str]:
        """Names of files, of digests that start with `shard` or of all."""


def files_at(address: Address) -> Files:
    folder = address.folder
    return FsspecFiles(address) if folder is None else FolderFiles(folder)


def make_root(address: Address, seconds: float) -> None:
    """Makes the folder of a `file://` store that is to be written; others need none.

    Where that fails or takes longer, what is read or written there next says why.
    """
    if (folder := address.folder) is not None:
        with suppress(OSError, SilentError):
            bounded(lambda _: folder.mkdir(parents=True, exist_ok=True), seconds)


class FolderFiles:
    """In a folder. fsspec's own files by path are not in place at once, and it follows links.

    A folder that is not there is no empty store: a mount may be absent, or the URL misspelt. Only
    an object may be asked for in it, as a push does before it makes the folder; who wants the
    object for itself takes its absence for an error.
    """

    def __init__(self, root: Path) -> None:
        self._tree = Tree(root, "check the folder and its permissions")
        self._may_be_new = False

    def read(
        self, kind: Kind, digest: str, limit: int, received: Callable[[int], None]
    ) -> bytes | None:
        try:
            with self._tree.folder(kind, digest) as fd:
                return files.read(fd, file_name(digest), limit)
        except FileNotFoundError:
            self._may_be_new |= kind == "objects" and not self._tree.root.exists()
            if not self._may_be_new:
                self._check_root()
            return None

    def write(self, kind: Kind, digest: str, data: bytes) -> None:
        with self._tree.folder(kind, digest, write=True) as fd:
            files.write(fd, file_name(digest), data)

    def names(self, kind: Kind, shard: str | None) -> list[str]:
        found = [file.name for file in self._tree.files(kind, shard)]
        if not found:
            self._check_root()
        return found

    def _check_root(self) -> None:
        root = self._tree.root
        if not root.exists():
            fix = "check the URL, and that what it names is mounted; a push makes the folder"
            raise StoreError("", [Problem(str(root), "no such folder", fix)])


class FsspecFiles:
    """By fsspec, over a protocol that puts objects in place whole."""

    def __init__(self, address: Address) -> None:
        import fsspec

        self._address = address
        self._files, _ = fsspec.url_to_fs(address.url, use_listings_cache=False)

    def read(
        self, kind: Kind, digest: str, limit: int, received: Callable[[int], None]
    ) -> bytes | None:
        how: dict[str, Any] = {"cache_type": "none"}
        if self._address.read_only:
            # As one stream. Asked for the size first, fsspec's http takes any failure for absence.
            how = {"block_size": 0, "size": 1}
        try:
            data = bytearray()
            with self._files.open(self._address.where(kind, digest), "rb", **how) as file:
                while chunk := file.read(min(_CHUNK, limit + 1 - len(data))):
                    data += chunk
                    received(len(chunk))
        except FileNotFoundError:
            return None
        if len(data) > limit:
            raise DamagedError(f"it has more than {limit} bytes, which are not read")
        return bytes(data)

    def write(self, kind: Kind, digest: str, data: bytes) -> None:
        self._files.pipe_file(self._address.where(kind, digest), data)

    def names(self, kind: Kind, shard: str | None) -> list[str]:
        folder = "/".join(filter(None, (self._address.url, kind, shard)))
        try:
            return [path.rpartition("/")[2] for path in self._files.find(folder)]
        except FileNotFoundError:
            return []
