"""Where a remote store is, and what its protocol can do. Nothing here asks a network."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from m2ncompile.errors import Problem, StoreError
from m2ncompile.store.records import Kind, file_name

__all__ = ["Address", "default_url", "parse"]

_TITLE = "can't use the remote store"
_KNOWN = "expected file:///FOLDER, s3://BUCKET/..., gs://BUCKET/... or http(s)://HOST/..."
#: Protocol -> the module that fsspec needs for it, and the extra that brings the module.
#: Others are refused: what fsspec writes by them may be seen half written.
_PROTOCOLS = {
    "file": ("fsspec", ""),
    "memory": ("fsspec", ""),
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "http": ("aiohttp", "http"),
    "https": ("aiohttp", "http"),
}


class Address(msgspec.Struct, frozen=True):
    """A URL that was checked, without a slash at its end."""

    url: str

    @property
    def folder(self) -> Path | None:
        """The folder of a `file://` URL."""
        return Path(self.url.removeprefix("file://") or "/") if self._is("file") else None

    @property
    def read_only(self) -> bool:
        """Over http nothing can be written or listed."""
        return self._is("http", "https")

    def where(self, kind: Kind, digest: str) -> str:
        return f"{self.url}/{kind}/{digest[:2]}/{file_name(digest)}"

    def _is(self, *protocols: str) -> bool:
        return self.url.partition("://")[0] in protocols


def default_url() -> str | None:
    """`$M2NCOMPILE_REMOTE`, or None when it is not set or empty."""
    return os.environ.get("M2NCOMPILE_REMOTE") or None


def parse(url: str) -> Address:
    """Raises StoreError for a URL that no remote store can have, and where a package is missing."""
    protocol, colon, rest = url.partition("://")
    if not colon or protocol not in _PROTOCOLS:
        raise StoreError(_TITLE, [Problem(url, _KNOWN)])
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreError(_TITLE, [Problem(url, str(error), _KNOWN)]) from None
    if "@" in rest.partition("/")[0]:
        hidden = f"{protocol}://{parts.netloc.rpartition('@')[2]}"
        fix = "set them as the protocol's own library reads them, such as by AWS_PROFILE"
        raise StoreError(_TITLE, [Problem(hidden, "a URL must not hold credentials", fix)])
    if protocol == "file" and not rest.startswith("/"):
        raise StoreError(_TITLE, [Problem(url, "expected an absolute path: file:///FOLDER")])
    if protocol not in ("file", "memory") and (not parts.netloc or parts.query or parts.fragment):
        message = "expected a bucket or host and a path, without ? and #"
        raise StoreError(_TITLE, [Problem(url, message)])
    module, extra = _PROTOCOLS[protocol]
    if importlib.util.find_spec(module) is None:
        message = f"{protocol}:// needs the package {module}, which is not installed"
        raise StoreError(_TITLE, [Problem(url, message, f"pip install 'm2ncompile[{extra}]'")])
    return Address(f"{protocol}://{rest.rstrip('/')}")
