"""A remote store: what is read is checked, what is written is whole, and every call ends."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeVar

from m2ncompile.errors import Problem, StoreError
from m2ncompile.plan import digest_of
from m2ncompile.remote.address import Address, parse
from m2ncompile.remote.bounded import SilentError, bounded
from m2ncompile.remote.files import Files, files_at
from m2ncompile.store.records import (
    DIGEST,
    MAX_ACTION_BYTES,
    MAX_OBJECT_BYTES,
    ActionKey,
    DamagedError,
    Kind,
    check_object,
    checked_prefix,
    decode_action,
    encode_action,
    the_one,
)

__all__ = ["TIMEOUT", "Remote", "open_remote", "time_limit"]

#: How long one call may take, in seconds; what it moves adds to that (`bounded.RATE`).
TIMEOUT = 30.0

_T = TypeVar("_T")


def open_remote(url: str) -> Remote:
    """The remote store at `url`; no network is asked yet.

    Raises StoreError for a bad URL or time limit, and for a protocol whose package is not
    installed.
    """
    return Remote(parse(url), digest_of, time_limit())


def time_limit() -> float:
    """`$M2NCOMPILE_REMOTE_TIMEOUT`, by default `TIMEOUT`, in seconds. Raises StoreError."""
    text = os.environ.get("M2NCOMPILE_REMOTE_TIMEOUT") or str(TIMEOUT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86400:
        problem = Problem("M2NCOMPILE_REMOTE_TIMEOUT", f"expected seconds, 0 to 86400; got {text}")
        raise StoreError("can't use the remote store", [problem])
    return seconds


class Remote:
    """Plans at `address`, as in the local store.

    Every method raises StoreError when the remote can't be reached, refuses, or does not answer
    in time; `lost` is set from then on. Bytes that are not what their name says are refused with
    a StoreError and leave `lost` as it is. Nothing is ever removed.
    """

    def __init__(self, address: Address, digest_of: Callable[[bytes], str], seconds: float) -> None:
        self.address = address
        self.lost = False
        self._digest_of = digest_of
        self._seconds = seconds
        self._files: Files | None = None

    def lookup(self, key: ActionKey) -> str | None:
        """The digest that the remote claims `key` leads to; None where it claims nothing."""
        try:
            return self._action(key)
        except DamagedError as damage:
            message = f"expected the entry of key {key.digest}, got other bytes: {damage}"
            raise self._refused("actions", key.digest, message) from None

    def get(self, digest: str) -> bytes | None:
        """The object's bytes, which have this digest; None where it is not there."""
        try:
            return self._object(digest)
        except DamagedError as damage:
            message = f"expected the plan {digest}, got other bytes: {damage}"
            raise self._refused("objects", digest, message) from None

    def holds(self, digest: str) -> bool:
        """Whether the object is there and sound."""
        try:
            return self._object(digest) is not None
        except DamagedError:
            return False

    def leads(self, key: ActionKey, digest: str) -> bool:
        """Whether `key` leads to `digest`."""
        try:
            return self._action(key) == digest
        except DamagedError:
            return False

    def put(self, digest: str, data: bytes) -> None:
        """Writes the object, in place of any that is there."""
        self._write("objects", digest, data)

    def record(self, key: ActionKey, digest: str) -> None:
        """Writes that `key` leads to `digest`, which must have been put before."""
        self._write("actions", key.digest, encode_action(key, digest))

    def digests(self, prefix: str = "") -> list[str]:
        """The objects whose digests start with `prefix`, 2 or more hex digits or none."""
        if self.address.read_only:
            problem = Problem(
                self.address.url,
                "over http it can't be listed",
                "name a plan by all 64 digits of its digest, or by its spec",
            )
            raise StoreError("can't list the remote store", [problem])
        names = self._call(
            "list", self.address.url, lambda files, _: files.names("objects", prefix[:2])
        )
        found = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        return sorted(d for d in found if DIGEST.fullmatch(d) and d.startswith(prefix))

    def resolve(self, prefix: str) -> str:
        """The one digest that starts with `prefix`; all 64 digits are taken as they are."""
        text = checked_prefix(prefix)
        if len(text) == 64:
            return text
        return the_one(text, self.digests(text), self.address.url)

    def check_writable(self) -> None:
        """Raises StoreError where the protocol only reads."""
        if self.address.read_only:
            problem = Problem(
                self.address.url,
                "over http it is read-only",
                "push by the protocol that the server's files are written with, such as s3://",
            )
            raise StoreError("can't write the remote store", [problem])

    def _action(self, key: ActionKey) -> str | None:
        data = self._read("actions", key.digest, MAX_ACTION_BYTES)
        return None if data is None else decode_action(data, key.digest).plan

    def _object(self, digest: str) -> bytes | None:
        data = self._read("objects", digest, MAX_OBJECT_BYTES)
        if data is not None:
            check_object(data, digest, self._digest_of)
        return data

    def _read(self, kind: Kind, digest: str, limit: int) -> bytes | None:
        return self._call(
            "read",
            self.address.where(kind, digest),
            lambda files, received: files.read(kind, digest, limit, received),
        )

    def _write(self, kind: Kind, digest: str, data: bytes) -> None:
        self.check_writable()
        self._call(
            "write",
            self.address.where(kind, digest),
            lambda files, _: files.write(kind, digest, data),
            len(data),
        )

    def _call(
        self,
        verb: str,
        where: str,
        call: Callable[[Files, Callable[[int], None]], _T],
        nbytes: int = 0,
    ) -> _T:
        def run(received: Callable[[int], None]) -> _T:
            if self._files is None:
                self._files = files_at(self.address)
            return call(self._files, received)

        title = f"can't {verb} the remote store"
        try:
            return bounded(run, self._seconds, nbytes)
        except DamagedError:
            raise
        except StoreError as error:
            self.lost = True
            raise StoreError(title, error.problems) from None
        except SilentError as error:
            self.lost = True
            problem = Problem(where, str(error), "M2NCOMPILE_REMOTE_TIMEOUT sets the seconds")
            raise StoreError(title, [problem]) from None
        except Exception as error:  # every protocol raises its own
            self.lost = True
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
            problem = Problem(where, words, "check the URL, the network and the credentials")
            raise StoreError(title, [problem]) from None

    def _refused(self, kind: Kind, digest: str, message: str) -> StoreError:
        fix = "who may write there replaces it: m2ncompile cache push"
        return StoreError(
            "the remote store is damaged", [Problem(self.address.where(kind, digest), message, fix)]
        )
