"""Ahead-of-time compiler for weight transfer from trainers to inference workers."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`trainer`, `worker` and `capture`; they import torch when they are called."""
    if name in ("trainer", "worker"):
        from m2ncompile.runtime import api

        return getattr(api, name)
    if name == "capture":
        from m2ncompile.runtime.capture import capture

        return capture
    raise AttributeError(f"module 'm2ncompile' has no attribute {name!r}")
