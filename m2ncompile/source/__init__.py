"""Source layouts: where each tensor's pieces lie on the trainer's ranks."""

from m2ncompile.source.presets import source_layouts

__all__ = ["source_layouts"]
