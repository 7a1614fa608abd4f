"""Amounts for people."""

from __future__ import annotations

__all__ = ["size"]


def size(nbytes: int) -> str:
    """Bytes in decimal units, as link speeds are."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"
