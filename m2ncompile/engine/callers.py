"""Who called what, and in what words it failed: frames and errors of a model's loaders."""

from __future__ import annotations

import re
import sys
from functools import partial
from types import FrameType
from typing import Any

__all__ = ["caller", "data_operation", "frames_of", "qualname", "raised_by", "words_of"]

#: Torch's words when an operation wants the data that meta tensors don't have.
_NO_DATA = re.compile(r"\bmeta (tensor|device)|unallocated storage", re.IGNORECASE)


def data_operation(error: Exception) -> str | None:
    """What failed for want of data, None if something else did."""
    if not isinstance(error, (NotImplementedError, RuntimeError, TypeError)):
        return None
    text = str(error)
    if not _NO_DATA.search(text):
        return None
    named = re.search(r"\b(item|numpy|tolist)\b", text)
    return named[0] if named else "reading the data"


def words_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:300] + '...'}"


def frames_of(error: Exception) -> list[FrameType]:
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return [frame for frame in frames if not _is_ours(frame)]


def raised_by(error: Exception) -> str:
    frames = frames_of(error)
    return frames[-1].f_code.co_qualname if frames else ""


def caller() -> str:
    """The function below torch and the recorder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return frame.f_code.co_qualname if frame is not None else ""


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("m2ncompile.engine.") or name.split(".")[0] == "torch"


def qualname(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))
