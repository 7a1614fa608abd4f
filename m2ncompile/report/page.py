"""Report -> one HTML page: styles, scripts and data inside, and nothing fetched."""

from __future__ import annotations

import base64
import re
import zlib
from hashlib import sha256
from html import escape
from importlib.resources import files

import msgspec

from m2ncompile.report.records import Report

__all__ = ["page"]

#: Concatenated in this order into one module.
_SCRIPTS = (
    "basics.js",
    "columns.js",
    "matrix.js",
    "overview.js",
    "changes.js",
    "search.js",
    "shards.js",
    "tensor.js",
    "page.js",
)
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def page(report: Report) -> str:
    """The page; the same report gives the same text (with one zlib).

    All that a plan says is in the title, escaped, and in the data, as base64.
    """
    style = _read("page.css")
    script = "".join(_read("script", name) for name in _SCRIPTS)
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    packed = zlib.compress(msgspec.json.encode(report), 9)
    parts = {
        "policy": f"{policy}; base-uri 'none'; form-action 'none'",
        "title": escape(f"{report.model}, plan {report.digest[:12]}"),
        "style": style,
        "script": script,
        "data": base64.b64encode(packed).decode(),
    }
    # In one pass: what is put in is not searched again.
    return _PLACE.sub(lambda place: parts[place[1]], _read("page.html"))


def _read(*path: str) -> str:
    return files(__package__).joinpath(*path).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"
