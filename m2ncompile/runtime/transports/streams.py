"""CUDA's current device and stream, from one thread to another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

__all__ = ["as_here"]


def as_here(device: torch.device) -> AbstractContextManager[None]:
    """For another thread: inside of it `device` and what is its stream here are current."""
    return _current(device, torch.cuda.current_stream(device))


@contextmanager
def _current(device: torch.device, stream: Any) -> Iterator[None]:
    # Without this the stream's end sets GPU 0, which takes half a gigabyte there.
    torch.cuda.set_device(device)
    with torch.cuda.stream(stream):
        yield
