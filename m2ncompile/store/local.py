"""The store in a folder, shared by any number of processes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from m2ncompile.errors import Problem, StoreError
from m2ncompile.store import files
from m2ncompile.store.files import File, Tree
from m2ncompile.store.records import (
    KINDS,
    MAX_ACTION_BYTES,
    MAX_OBJECT_BYTES,
    Action,
    ActionKey,
    Change,
    DamagedError,
    Entry,
    GcResult,
    Kind,
    Miss,
    VerifyResult,
    check_object,
    checked,
    checked_prefix,
    decode_action,
    encode_action,
    file_name,
    the_one,
)

__all__ = ["GRACE_SECONDS", "Store", "default_root"]

#: `Store.gc` spares what was put or hit this recently: someone is about to record or read it.
GRACE_SECONDS = 60.0
#: Age at which a temporary file's writer is taken for dead.
_LEFTOVER_SECONDS = 3600.0

_LEFTOVER = re.compile(r"[0-9a-f]{64}\.json\.[0-9a-f]{16}\.(tmp|aside)")
_FIX_ROOT = "choose another folder with M2NCOMPILE_CACHE"


def default_root() -> Path:
    """`$M2NCOMPILE_CACHE`, else `$XDG_CACHE_HOME/m2ncompile`, else `~/.cache/m2ncompile`.

    A relative `XDG_CACHE_HOME` is ignored, as its specification asks.
    Raises StoreError when there is no home folder to fall back on.
    """
    try:
        if own := os.environ.get("M2NCOMPILE_CACHE"):
            return Path(own).expanduser()
        xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "m2ncompile"
    except RuntimeError as error:
        problem = Problem("M2NCOMPILE_CACHE", str(error), "set it to an absolute path")
        raise StoreError("there is no folder for the cache", [problem]) from error


class Store:
    """Plans under `root`, shared by any number of processes.

    `digest_of` takes an object's bytes and returns the digest it is named by,
    64 hex digits, or raises PlanError when the bytes are damaged.

    Symbolic links below `root` are never followed, `root` itself may be one.
    Everything raises StoreError when the system refuses, naming the path and
    the reason.
    """

    def __init__(self, root: Path, digest_of: Callable[[bytes], str]) -> None:
        self.root = root
        self._tree = Tree(root, _FIX_ROOT)
        self._digest_of = digest_of

    def path(self, digest: str) -> Path:
        """Where the object is or would be."""
        return self._tree.path("objects", checked(digest))

    def put(self, data: bytes) -> str:
        """Keeps the object and returns its digest; a damaged copy is replaced.

        Raises PlanError when `data` itself is damaged.
        """
        if len(data) > MAX_OBJECT_BYTES:
            message = f"expected at most {MAX_OBJECT_BYTES} bytes, got {len(data)}"
            raise StoreError("the plan is too large to keep", [Problem(str(self.root), message)])
        digest = checked(self._digest_of(data))
        name = file_name(digest)
        with self._tree.folder("objects", digest, write=True) as fd:
            with suppress(OSError, DamagedError):
                self._sound(fd, name, digest)
                files.touch(fd, name)
                return digest
            files.write(fd, name, data)
        return digest

    def get(self, digest: str) -> bytes:
        """The object's bytes, checked; raises StoreError when absent or damaged.

        A damaged object is removed, so that the next build makes it anew.
        """
        path, name = self.path(digest), file_name(digest)
        try:
            with self._tree.folder("objects", digest) as fd:
                data = files.held(fd, name, lambda held: self._sound(fd, held, digest))
                with suppress(OSError):  # a store that we may only read
                    files.touch(fd, name)
                return data
        except FileNotFoundError:
            problem = Problem(str(path), "no such object", "build it")
            raise StoreError("the plan is not in the store", [problem]) from None
        except DamagedError as damage:
            fate = "it was removed" if self._discard(digest) else "it could not be removed"
            problem = Problem(str(path), f"{damage}; {fate}", "build it again")
            raise StoreError("the plan in the store is damaged", [problem]) from None

    def has(self, digest: str) -> bool:
        """Whether the object is there; its bytes are not read."""
        name = file_name(checked(digest))
        with suppress(FileNotFoundError), self._tree.folder("objects", digest) as fd:
            files.held(fd, name, lambda held: files.status(fd, held))
            return True
        return False

    def record(self, key: ActionKey, digest: str) -> None:
        """Remembers that `key` leads to `digest`, which must have been put before."""
        if not self.has(digest):
            problem = Problem(str(self.path(digest)), "no such object", "put it first")
            raise StoreError("the plan is not in the store", [problem])
        with self._tree.folder("actions", key.digest, write=True) as fd:
            files.write(fd, file_name(key.digest), encode_action(key, digest))

    def lookup(self, key: ActionKey) -> str | None:
        """The digest of the plan that `key` leads to, its object checked; None on a miss.

        An action or object that is absent or damaged is a miss: building again heals it.
        """
        try:
            with self._tree.folder("actions", key.digest) as fd:
                digest = _read_action(fd, file_name(key.digest), key.digest).plan
        except (FileNotFoundError, DamagedError):
            return None
        try:
            with self._tree.folder("objects", digest) as fd:
                self._sound(fd, file_name(digest), digest)
                try:
                    files.touch(fd, file_name(digest))
                except FileNotFoundError:
                    return None
                except OSError:
                    pass  # a store that we may only read
                return digest
        except FileNotFoundError:
            return None
        except DamagedError:
            self._discard(digest)
            return None

    def explain(self, key: ActionKey) -> Miss | None:
        """What `key` changes against the most similar key on record, the latest among equals.

        None when nothing is recorded.
        """
        wanted = dict(key.components)
        recorded = [(file.status.st_mtime_ns, a.key) for file, a in self._actions() if a]
        if not recorded:
            return None
        _, nearest = max(
            recorded,
            key=lambda one: (len(set(one[1].components) & wanted.items()), one[0], one[1].digest),
        )
        known = dict(nearest.components)
        changes = (
            Change(name, known.get(name), wanted.get(name))
            for name in sorted(known.keys() | wanted.keys())
        )
        return Miss(nearest, tuple(change for change in changes if change.before != change.now))

    def resolve(self, prefix: str) -> str:
        """The one digest that starts with `prefix`, at least 6 hex digits."""
        text = checked_prefix(prefix)
        found = [f.digest for f in self._tree.files("objects", text[:2]) if f.name.startswith(text)]
        return the_one(text, found, str(self.root))

    def entries(self) -> list[Entry]:
        """Every object, the last used first."""
        keys = _keys(self._actions())
        entries = [_entry(file, keys) for file in self._tree.files("objects") if file.regular]
        return sorted(entries, key=lambda entry: (-entry.last_used, entry.digest))

    def gc(
        self,
        *,
        keep_bytes: int | None,
        keep_seconds: float | None,
        now: float,
        dry_run: bool = False,
    ) -> GcResult:
        """Removes objects, the least recently used first, then what they leave behind.

        An object goes when it was not used for more than `keep_seconds`, or
        while all objects together hold more than `keep_bytes`; None sets no
        limit. `now` is in unix seconds. Also removed: actions whose object is
        gone or that can't be read, and files that a dead writer left.

        Safe beside other processes:

        * put and lookup leave the object under its own name with a new mtime.
          If they do before it is listed here, `GRACE_SECONDS` protects it; if
          after, `_remove` sees the change and puts it back. So there is time
          to record it or to read it.
        * get also looks where `_remove` holds a file that it may put back.
        * record comes after put, so a new action has its object; one that is
          written just before its removal is looked at again and put back.
        * What is read is checked, so the worst that a kill or a clock that is
          off can lead to is a rebuild.
        """
        actions = self._actions()
        keys = _keys(actions)
        found = [file for file in self._tree.files("objects") if file.regular]
        found.sort(key=lambda file: (file.status.st_mtime_ns, file.digest))
        total = sum(file.status.st_size for file in found)
        removed: list[Entry] = []
        spared = 0
        for file in found:
            age = now - file.status.st_mtime
            expired = keep_seconds is not None and age > keep_seconds
            if not expired and (keep_bytes is None or total <= keep_bytes):
                break  # the rest is younger still
            if age < GRACE_SECONDS:
                spared += 1
            elif dry_run or self._remove_unused(file):
                removed.append(_entry(file, keys))
                total -= file.status.st_size
            elif not self.has(file.digest):  # another gc was first
                total -= file.status.st_size
        gone = {entry.digest for entry in removed}
        dead = [
            file.digest
            for file, action in actions
            if action is None or action.plan in gone or not self.has(action.plan)
        ]
        dropped = sum(dry_run or self._remove_damaged("actions", digest) for digest in dead)
        return GcResult(tuple(removed), total, spared, dropped, self._sweep(now, dry_run))

    def verify(self, *, repair: bool = False) -> VerifyResult:
        """Reads every object and action; `repair` removes what is damaged.

        An action is damaged when it can't be read or its object is gone.
        """
        counts: dict[Kind, int] = {"objects": 0, "actions": 0}
        damage: list[Problem] = []
        repaired = 0
        for kind in counts:
            for file in self._tree.files(kind):
                path = self._tree.path(kind, file.digest)
                try:
                    with self._tree.folder(kind, file.digest) as fd:
                        self._check(kind, fd, file.name, file.digest)
                except FileNotFoundError:
                    continue  # removed since it was listed
                except DamagedError as error:
                    damage.append(Problem(str(path), str(error), "build it again"))
                    if repair:
                        with suppress(StoreError):
                            repaired += self._remove_damaged(kind, file.digest)
                except StoreError as error:
                    damage.extend(error.problems)
                counts[kind] += 1
        return VerifyResult(counts["objects"], counts["actions"], tuple(damage), repaired)

    def _sound(self, fd: int, name: str, digest: str) -> bytes:
        data = files.read(fd, name, MAX_OBJECT_BYTES)
        check_object(data, digest, self._digest_of)
        return data

    def _check(self, kind: Kind, fd: int, name: str, digest: str) -> None:
        if kind == "objects":
            self._sound(fd, name, digest)
            return
        plan = _read_action(fd, name, digest).plan
        if not self.has(plan):
            raise DamagedError(f"its object {plan} is gone")

    def _remove_damaged(self, kind: Kind, digest: str) -> bool:
        def sound(fd: int, name: str) -> bool:
            try:
                self._check(kind, fd, name, digest)
            except DamagedError:
                return False
            return True

        with self._tree.folder(kind, digest, write=True) as fd:
            return files.remove(fd, file_name(digest), keep=sound)

    def _discard(self, digest: str) -> bool:
        """Removes a damaged object; whether the damage is gone, by whomsoever."""
        try:
            self._remove_damaged("objects", digest)
        except StoreError:  # a store that we may only read
            return False
        return True

    def _remove_unused(self, file: File) -> bool:
        def used(fd: int, name: str) -> bool:
            return files.status(fd, name).st_mtime_ns != file.status.st_mtime_ns

        with self._tree.folder("objects", file.digest, write=True) as fd:
            return files.remove(fd, file.name, keep=used)

    def _actions(self) -> list[tuple[File, Action | None]]:
        """Every action, None for one that is damaged."""
        found: list[tuple[File, Action | None]] = []
        for file in self._tree.files("actions"):
            with suppress(FileNotFoundError), self._tree.folder("actions", file.digest) as fd:
                try:
                    found.append((file, _read_action(fd, file.name, file.digest)))
                except DamagedError:
                    found.append((file, None))
        return found

    def _sweep(self, now: float, dry_run: bool) -> int:
        """Removes what a killed writer or `_remove` left; returns how many."""
        swept = 0
        for kind in KINDS:
            for shard in self._tree.shards(kind):
                for file in self._tree.scan(kind, shard):
                    old = now - file.status.st_mtime > _LEFTOVER_SECONDS
                    if not (old and _LEFTOVER.fullmatch(file.name)):
                        continue
                    swept += 1
                    if not dry_run:
                        with (
                            self._tree.folder(kind, shard, write=True) as fd,
                            suppress(FileNotFoundError),
                        ):
                            os.unlink(file.name, dir_fd=fd)
        return swept


def _keys(actions: Iterable[tuple[File, Action | None]]) -> dict[str, list[ActionKey]]:
    """Plan digest -> the keys that lead to it."""
    keys: dict[str, list[ActionKey]] = {}
    for _, action in actions:
        if action is not None:
            keys.setdefault(action.plan, []).append(action.key)
    return keys


def _entry(file: File, keys: Mapping[str, list[ActionKey]]) -> Entry:
    actions = sorted(keys.get(file.digest, ()), key=lambda key: key.components)
    return Entry(file.digest, file.status.st_size, file.status.st_mtime, tuple(actions))


def _read_action(fd: int, name: str, digest: str) -> Action:
    return decode_action(files.read(fd, name, MAX_ACTION_BYTES), digest)
