"""The plan store: objects by content, and apart from them what the inputs led to.

```
root/objects/ab/<digest>.json    a plan, named by the digest of its content
root/actions/cd/<digest>.json    the key of a build's inputs -> the plan's digest
```

Nothing is locked. A file appears whole, by rename, and is never written again,
so a reader sees all of it or none. What is read is checked, what is damaged is
removed, and a removed object only costs a rebuild.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from m2ncompile.errors import PlanError, Problem, StoreError

__all__ = [
    "GRACE_SECONDS",
    "MAX_OBJECT_BYTES",
    "ActionKey",
    "Change",
    "Entry",
    "GcResult",
    "Miss",
    "Store",
    "VerifyResult",
    "default_root",
]

#: Larger objects are neither written nor read.
MAX_OBJECT_BYTES = 1 << 30
_MAX_ACTION_BYTES = 1 << 20
#: `Store.gc` spares what was put or hit this recently: someone is about to record or read it.
GRACE_SECONDS = 60.0
#: Age at which a temporary file's writer is taken for dead.
_LEFTOVER_SECONDS = 3600.0

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"[0-9a-f]{64}\.json")
_SHARD = re.compile(r"[0-9a-f]{2}")
_LEFTOVER = re.compile(r"[0-9a-f]{64}\.json\.[0-9a-f]{16}\.(tmp|aside)")
_FIX_ROOT = "choose another folder with M2NCOMPILE_CACHE"

#: To open a folder. `O_NOFOLLOW` refuses a link in its place.
_FOLDER = os.O_RDONLY | os.O_DIRECTORY

_Kind = Literal["objects", "actions"]
_KINDS: tuple[_Kind, ...] = ("objects", "actions")
_T = TypeVar("_T")


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


class ActionKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The inputs of a build: (name, value) pairs, sorted by name, each name once.

    Raises ValueError when they are not; `ActionKey.of` sorts.
    """

    components: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.components]
        if names != sorted(set(names)):
            raise ValueError(f"expected names sorted and each once, got {names}")

    @classmethod
    def of(cls, components: Mapping[str, str]) -> ActionKey:
        return cls(tuple(sorted(components.items())))

    @property
    def digest(self) -> str:
        """SHA-256 of the pairs as compact JSON."""
        return sha256(msgspec.json.encode(self.components)).hexdigest()


class Entry(msgspec.Struct, frozen=True):
    """One object: its digest, bytes, last use (unix seconds) and the inputs that led to it."""

    digest: str
    nbytes: int
    last_used: float
    actions: tuple[ActionKey, ...] = ()


class Change(msgspec.Struct, frozen=True):
    """A component that differs; None where one side lacks it."""

    name: str
    before: str | None
    now: str | None


class Miss(msgspec.Struct, frozen=True):
    """Why a key missed: what changed against the most similar key on record.

    No changes: these very inputs were built, and the plan was removed or damaged.
    """

    nearest: ActionKey
    changes: tuple[Change, ...]


class GcResult(msgspec.Struct, frozen=True):
    """What `Store.gc` removed, or would remove.

    `removed` is in order of removal; `kept_bytes` counts the objects left;
    `spared` the objects kept only because they were used within `GRACE_SECONDS`.
    """

    removed: tuple[Entry, ...]
    kept_bytes: int
    spared: int
    actions: int
    leftovers: int

    @property
    def freed_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.removed)


class VerifyResult(msgspec.Struct, frozen=True):
    """How many objects and actions there are, all the damage, and how much of it was removed.

    `repaired` is less than the damage where the system refused.
    """

    objects: int
    actions: int
    damage: tuple[Problem, ...]
    repaired: int


class _Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: ActionKey
    plan: str


class _File(msgspec.Struct, frozen=True):
    name: str
    status: os.stat_result

    @property
    def digest(self) -> str:
        return self.name.removesuffix(".json")

    def entry(self, keys: Mapping[str, list[ActionKey]]) -> Entry:
        actions = sorted(keys.get(self.digest, ()), key=lambda key: key.components)
        return Entry(self.digest, self.status.st_size, self.status.st_mtime, tuple(actions))

    @property
    def regular(self) -> bool:
        return stat.S_ISREG(self.status.st_mode)


class _DamagedError(Exception):
    """A file is there and is not what its name says."""


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
        self._digest_of = digest_of

    def path(self, digest: str) -> Path:
        """Where the object is or would be."""
        return self._path("objects", _checked(digest))

    def put(self, data: bytes) -> str:
        """Keeps the object and returns its digest; a damaged copy is replaced.

        Raises PlanError when `data` itself is damaged.
        """
        if len(data) > MAX_OBJECT_BYTES:
            message = f"expected at most {MAX_OBJECT_BYTES} bytes, got {len(data)}"
            raise StoreError("the plan is too large to keep", [Problem(str(self.root), message)])
        digest = _checked(self._digest_of(data))
        name = _name(digest)
        with self._folder("objects", digest, write=True) as fd:
            with suppress(OSError, _DamagedError):
                self._sound(fd, name, digest)
                _touch(fd, name)
                return digest
            _write(fd, name, data)
        return digest

    def get(self, digest: str) -> bytes:
        """The object's bytes, checked; raises StoreError when absent or damaged.

        A damaged object is removed, so that the next build makes it anew.
        """
        path, name = self.path(digest), _name(digest)
        try:
            with self._folder("objects", digest) as fd:
                data = _held(fd, name, lambda held: self._sound(fd, held, digest))
                with suppress(OSError):  # a store that we may only read
                    _touch(fd, name)
                return data
        except FileNotFoundError:
            problem = Problem(str(path), "no such object", "build it")
            raise StoreError("the plan is not in the store", [problem]) from None
        except _DamagedError as damage:
            fate = "it was removed" if self._discard(digest) else "it could not be removed"
            problem = Problem(str(path), f"{damage}; {fate}", "build it again")
            raise StoreError("the plan in the store is damaged", [problem]) from None

    def has(self, digest: str) -> bool:
        """Whether the object is there; its bytes are not read."""
        name = _name(_checked(digest))
        with suppress(FileNotFoundError), self._folder("objects", digest) as fd:
            _held(fd, name, lambda held: _status(fd, held))
            return True
        return False

    def record(self, key: ActionKey, digest: str) -> None:
        """Remembers that `key` leads to `digest`, which must have been put before."""
        if not self.has(digest):
            problem = Problem(str(self.path(digest)), "no such object", "put it first")
            raise StoreError("the plan is not in the store", [problem])
        with self._folder("actions", key.digest, write=True) as fd:
            _write(fd, _name(key.digest), msgspec.json.encode(_Action(key, digest)) + b"\n")

    def lookup(self, key: ActionKey) -> str | None:
        """The digest of the plan that `key` leads to, its object checked; None on a miss.

        An action or object that is absent or damaged is a miss: building again heals it.
        """
        try:
            with self._folder("actions", key.digest) as fd:
                digest = _read_action(fd, _name(key.digest), key.digest).plan
        except (FileNotFoundError, _DamagedError):
            return None
        try:
            with self._folder("objects", digest) as fd:
                self._sound(fd, _name(digest), digest)
                try:
                    _touch(fd, _name(digest))
                except FileNotFoundError:
                    return None
                except OSError:
                    pass  # a store that we may only read
                return digest
        except FileNotFoundError:
            return None
        except _DamagedError:
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
        text = prefix.lower()
        if not re.fullmatch(r"[0-9a-f]{6,64}", text):
            problem = Problem(repr(prefix), "expected 6 to 64 hex digits of a plan's digest")
            raise StoreError("not a digest", [problem])
        found = [f.digest for f in self._files("objects", text[:2]) if f.name.startswith(text)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise StoreError("no such plan", [Problem(text, f"no object in {self.root}")])
        raise StoreError(
            f"{len(found)} plans have digests that start so",
            [Problem(text, f"may be {digest}", "give more digits") for digest in found],
        )

    def entries(self) -> list[Entry]:
        """Every object, the last used first."""
        keys = _keys(self._actions())
        entries = [file.entry(keys) for file in self._files("objects") if file.regular]
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
        files = [file for file in self._files("objects") if file.regular]
        files.sort(key=lambda file: (file.status.st_mtime_ns, file.digest))
        total = sum(file.status.st_size for file in files)
        removed: list[Entry] = []
        spared = 0
        for file in files:
            age = now - file.status.st_mtime
            expired = keep_seconds is not None and age > keep_seconds
            if not expired and (keep_bytes is None or total <= keep_bytes):
                break  # the rest is younger still
            if age < GRACE_SECONDS:
                spared += 1
            elif dry_run or self._remove_unused(file):
                removed.append(file.entry(keys))
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
        counts: dict[_Kind, int] = {"objects": 0, "actions": 0}
        damage: list[Problem] = []
        repaired = 0
        for kind in counts:
            for file in self._files(kind):
                path = self._path(kind, file.digest)
                try:
                    with self._folder(kind, file.digest) as fd:
                        self._check(kind, fd, file.name, file.digest)
                except FileNotFoundError:
                    continue  # removed since it was listed
                except _DamagedError as error:
                    damage.append(Problem(str(path), str(error), "build it again"))
                    if repair:
                        with suppress(StoreError):
                            repaired += self._remove_damaged(kind, file.digest)
                except StoreError as error:
                    damage.extend(error.problems)
                counts[kind] += 1
        return VerifyResult(counts["objects"], counts["actions"], tuple(damage), repaired)

    def _path(self, kind: _Kind, digest: str) -> Path:
        return self.root / kind / digest[:2] / _name(digest)

    @contextmanager
    def _folder(
        self, kind: _Kind, digest: str | None = None, *, write: bool = False
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
            file = folder / _name(digest) if digest and _DIGEST.fullmatch(digest) else folder
            problem = _blame(self.root, folder) or Problem(
                str(file), error.strerror or str(error), _FIX_ROOT
            )
            title = f"can't {'write' if write else 'read'} the store"
            raise StoreError(title, [problem]) from error
        finally:
            if fd >= 0:
                os.close(fd)

    def _sound(self, fd: int, name: str, digest: str) -> bytes:
        data = _read(fd, name, MAX_OBJECT_BYTES)
        try:
            actual = self._digest_of(data)
        except PlanError as error:
            raise _DamagedError(" ".join(str(error).split())) from None
        if actual != digest:
            raise _DamagedError(f"its bytes are those of {actual}")
        return data

    def _check(self, kind: _Kind, fd: int, name: str, digest: str) -> None:
        if kind == "objects":
            self._sound(fd, name, digest)
            return
        plan = _read_action(fd, name, digest).plan
        if not self.has(plan):
            raise _DamagedError(f"its object {plan} is gone")

    def _remove_damaged(self, kind: _Kind, digest: str) -> bool:
        def sound(fd: int, name: str) -> bool:
            try:
                self._check(kind, fd, name, digest)
            except _DamagedError:
                return False
            return True

        with self._folder(kind, digest, write=True) as fd:
            return _remove(fd, _name(digest), keep=sound)

    def _discard(self, digest: str) -> bool:
        """Removes a damaged object; whether the damage is gone, by whomsoever."""
        try:
            self._remove_damaged("objects", digest)
        except StoreError:  # a store that we may only read
            return False
        return True

    def _remove_unused(self, file: _File) -> bool:
        def used(fd: int, name: str) -> bool:
            return _status(fd, name).st_mtime_ns != file.status.st_mtime_ns

        with self._folder("objects", file.digest, write=True) as fd:
            return _remove(fd, file.name, keep=used)

    def _scan(self, kind: _Kind, shard: str) -> list[_File]:
        files: list[_File] = []
        with suppress(FileNotFoundError), self._folder(kind, shard) as fd:
            for name in sorted(os.listdir(fd)):
                with suppress(FileNotFoundError):  # removed meanwhile
                    files.append(_File(name, _status(fd, name)))
        return files

    def _shards(self, kind: _Kind) -> list[str]:
        with suppress(FileNotFoundError), self._folder(kind) as fd:
            return sorted(filter(_SHARD.fullmatch, os.listdir(fd)))
        return []

    def _files(self, kind: _Kind, shard: str | None = None) -> list[_File]:
        return [
            file
            for one in ([shard] if shard else self._shards(kind))
            for file in self._scan(kind, one)
            if _FILE.fullmatch(file.name) and file.name.startswith(one)
        ]

    def _actions(self) -> list[tuple[_File, _Action | None]]:
        """Every action, None for one that is damaged."""
        found: list[tuple[_File, _Action | None]] = []
        for file in self._files("actions"):
            with suppress(FileNotFoundError), self._folder("actions", file.digest) as fd:
                try:
                    found.append((file, _read_action(fd, file.name, file.digest)))
                except _DamagedError:
                    found.append((file, None))
        return found

    def _sweep(self, now: float, dry_run: bool) -> int:
        """Removes what a killed writer or `_remove` left; returns how many."""
        swept = 0
        for kind in _KINDS:
            for shard in self._shards(kind):
                for file in self._scan(kind, shard):
                    old = now - file.status.st_mtime > _LEFTOVER_SECONDS
                    if not (old and _LEFTOVER.fullmatch(file.name)):
                        continue
                    swept += 1
                    if not dry_run:
                        with (
                            self._folder(kind, shard, write=True) as fd,
                            suppress(FileNotFoundError),
                        ):
                            os.unlink(file.name, dir_fd=fd)
        return swept


def _checked(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        problem = Problem(repr(digest), "expected 64 hex digits, lower case")
        raise StoreError("not a digest", [problem])
    return digest


def _name(digest: str) -> str:
    return f"{digest}.json"


def _keys(actions: Iterable[tuple[_File, _Action | None]]) -> dict[str, list[ActionKey]]:
    """Plan digest -> the keys that lead to it."""
    keys: dict[str, list[ActionKey]] = {}
    for _, action in actions:
        if action is not None:
            keys.setdefault(action.plan, []).append(action.key)
    return keys


def _blame(root: Path, folder: Path) -> Problem | None:
    """The first thing on the way to `folder` that is no folder."""
    for part in [*reversed(folder.parents), folder]:
        if part != root and part.is_relative_to(root) and os.path.islink(part):
            return Problem(str(part), "is a symbolic link, which the store does not follow")
        if os.path.lexists(part) and not os.path.isdir(part):
            return Problem(str(part), "expected a folder, found a file", _FIX_ROOT)
    return None


def _status(fd: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=fd, follow_symlinks=False)


def _read(fd: int, name: str, limit: int) -> bytes:
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _DamagedError("it is a symbolic link, which the store does not follow") from None
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _DamagedError("it is not a regular file")
        if status.st_size > limit:
            raise _DamagedError(f"it has {status.st_size} bytes, at most {limit} are read")
        with open(file, "rb", closefd=False) as stream:
            return stream.read(status.st_size)
    finally:
        os.close(file)


def _read_action(fd: int, name: str, digest: str) -> _Action:
    data = _read(fd, name, _MAX_ACTION_BYTES)
    try:
        action = msgspec.json.decode(data, type=_Action)
    except msgspec.MsgspecError as error:
        raise _DamagedError(f"not an action: {error}") from None
    # The file's name vouches for the key. What vouches for the plan is that an object has its name.
    if not _DIGEST.fullmatch(action.plan):
        raise _DamagedError(f"expected the 64 hex digits of a plan, got {action.plan!r}")
    if action.key.digest != digest:
        raise _DamagedError(f"its key is that of {action.key.digest}")
    return action


def _write(fd: int, name: str, data: bytes) -> None:
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


def _touch(fd: int, name: str) -> None:
    """Marks a use; FileNotFoundError when the file lost its name before the mark was set."""
    os.utime(name, dir_fd=fd, follow_symlinks=False)
    _status(fd, name)


def _remove(fd: int, name: str, *, keep: Callable[[int, str], bool]) -> bool:
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


def _held(fd: int, name: str, look: Callable[[str], _T]) -> _T:
    """`look(name)`, also while `_remove` holds the file aside; FileNotFoundError when gone."""
    with suppress(FileNotFoundError):
        return look(name)
    for other in os.listdir(fd):
        if other.startswith(f"{name}.") and other.endswith(".aside"):
            with suppress(FileNotFoundError, _DamagedError):
                return look(other)
    return look(name)  # put back meanwhile
