"""What a rank does while a transfer runs that may never return."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from m2ncompile.errors import RunError
from m2ncompile.runtime import session
from m2ncompile.runtime.deadline import Aside, Deadline
from m2ncompile.runtime.session import bounded

#: Stands for a transport over a GPU, whose calls run inside of something.
GPU: Any = SimpleNamespace(detached=nullcontext)
CPU: Any = SimpleNamespace(detached=lambda: None)


@pytest.mark.parametrize("transport", [GPU, CPU])
def test_what_never_returns_is_given_up(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_SLACK", 0.0)
    held = threading.Event()
    result, error = bounded(Aside(), transport, held.wait, Deadline(0.2))
    held.set()
    assert result is None
    assert error == "the transfer did not end within 0.2 s, and goes on: restart the process"


@pytest.mark.parametrize("transport", [GPU, CPU])
def test_what_returns_or_fails_is_told(transport: Any) -> None:
    def fail() -> object:
        raise RunError("rank 2 left")

    assert bounded(Aside(), transport, lambda: 7, Deadline(30)) == (7, None)
    assert bounded(Aside(), transport, fail, Deadline(30)) == (None, "rank 2 left")
    assert bounded(Aside(), transport, lambda: 1 // 0, Deadline(30))[1] == (
        "ZeroDivisionError: integer division or modulo by zero"
    )
