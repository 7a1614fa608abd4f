"""What is kept, as records and bytes: the same in every store, local or remote."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Literal

import msgspec

from m2ncompile.errors import PlanError, Problem, StoreError

__all__ = [
    "DIGEST",
    "KINDS",
    "MAX_ACTION_BYTES",
    "MAX_OBJECT_BYTES",
    "Action",
    "ActionKey",
    "Change",
    "DamagedError",
    "Entry",
    "GcResult",
    "Kind",
    "Miss",
    "VerifyResult",
    "check_object",
    "checked",
    "checked_prefix",
    "decode_action",
    "encode_action",
    "file_name",
    "the_one",
]

#: Larger objects are neither written nor read.
MAX_OBJECT_BYTES = 1 << 30
MAX_ACTION_BYTES = 1 << 20

DIGEST = re.compile(r"[0-9a-f]{64}")

Kind = Literal["objects", "actions"]
KINDS: tuple[Kind, ...] = ("objects", "actions")


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


class Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: ActionKey
    plan: str


class DamagedError(Exception):
    """A file is there and is not what its name says."""


def checked(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        problem = Problem(repr(digest), "expected 64 hex digits, lower case")
        raise StoreError("not a digest", [problem])
    return digest


def checked_prefix(prefix: str) -> str:
    text = prefix.lower()
    if not re.fullmatch(r"[0-9a-f]{6,64}", text):
        problem = Problem(repr(prefix), "expected 6 to 64 hex digits of a plan's digest")
        raise StoreError("not a digest", [problem])
    return text


def the_one(prefix: str, found: Sequence[str], where: str) -> str:
    """The only digest of those that start with `prefix`."""
    if len(found) == 1:
        return found[0]
    if not found:
        raise StoreError("no such plan", [Problem(prefix, f"no object in {where}")])
    raise StoreError(
        f"{len(found)} plans have digests that start so",
        [Problem(prefix, f"may be {digest}", "give more digits") for digest in found],
    )


def file_name(digest: str) -> str:
    return f"{digest}.json"


def check_object(data: bytes, digest: str, digest_of: Callable[[bytes], str]) -> None:
    """Raises DamagedError when the bytes are not those of the object of this name."""
    try:
        actual = digest_of(data)
    except PlanError as error:
        raise DamagedError(" ".join(str(error).split())) from None
    if actual != digest:
        raise DamagedError(f"its bytes are those of {actual}")


def encode_action(key: ActionKey, digest: str) -> bytes:
    return msgspec.json.encode(Action(key, digest)) + b"\n"


def decode_action(data: bytes, digest: str) -> Action:
    """The action whose key has this digest; raises DamagedError when the bytes are not it."""
    try:
        action = msgspec.json.decode(data, type=Action)
    except msgspec.MsgspecError as error:
        raise DamagedError(f"not an action: {error}") from None
    # The file's name vouches for the key. What vouches for the plan is that an object has its name.
    if not DIGEST.fullmatch(action.plan):
        raise DamagedError(f"expected the 64 hex digits of a plan, got {action.plan!r}")
    if action.key.digest != digest:
        raise DamagedError(f"its key is that of {action.key.digest}")
    return action
