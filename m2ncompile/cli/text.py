"""Layouts and targets in words."""

from __future__ import annotations

from m2ncompile.layout import REPLICATE, Layout
from m2ncompile.spec import EngineSpec

__all__ = ["placement_text", "target_text"]


def placement_text(layout: Layout) -> str:
    """`dim 0 / 4` (in four), `dim 0 / 2 x2` (each piece twice), `whole x4` (four copies)."""
    if layout.placements is None:
        return f"whole x{layout.mesh.size}"
    (shards,) = (
        size for size, code in zip(layout.mesh.dims, layout.placements, strict=True) if code >= 0
    )
    (dim,) = (code for code in layout.placements if code != REPLICATE)
    copies = layout.mesh.size // shards
    return f"dim {dim} / {shards}" + (f" x{copies}" if copies > 1 else "")


def target_text(engine: EngineSpec) -> str:
    sizes = [("tp", engine.tp), ("ep", engine.ep), ("pp", engine.pp), ("dp", engine.dp)]
    spread = ", ".join(f"{name} {size}" for name, size in sizes if size > 1 or name == "tp")
    return f"{engine.workers} of {engine.name} {engine.version} ({spread}) on {engine.target}"
