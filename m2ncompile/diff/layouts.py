"""Layouts in words, by themselves and one against another."""

from __future__ import annotations

from m2ncompile.layout import REPLICATE, Layout, Mesh

__all__ = ["layout_text", "pair_text", "relative"]


def relative(layout: Layout, first: int) -> Layout:
    """The layout with its side's first rank counted as 0.

    Where every rank holds the whole, its mesh's form means nothing and is dropped.
    """
    mesh = layout.mesh
    dims = mesh.dims if layout.placements is not None else (mesh.size, 1)
    # A table has both sides' layouts: those of the other side are not asked for.
    return Layout(Mesh(dims, max(mesh.start - first, 0)), layout.placements)


def layout_text(layout: Layout, ranks: int, side: str) -> str:
    """`dim 0 / 4`, `dim 0 / 2 x2` (each piece on two neighbours), `whole on 1 of 4 workers`."""
    size = layout.mesh.size
    if layout.split is None or layout.placements is None:
        text = "whole"
        everywhere = f" on all {ranks}" if ranks > 1 else ""
    else:
        dim, shards = layout.split
        copies = size // shards
        text, everywhere = f"dim {dim} / {shards}", ""
        if copies > 1:
            neighbours = layout.placements[1] == REPLICATE
            text = f"{text} x{copies}" if neighbours else f"{copies} times {text}"
    return text + (everywhere if size == ranks else f" on {size} of {ranks} {side}s")


def pair_text(before: str, after: str, differs: str) -> tuple[str, str]:
    """Both texts; where they are equal, the second says what `differs`."""
    return before, after if before != after else f"{after}, {differs}"
