"""What a rank does while a transfer runs that may never return."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from m2ncompile.errors import RunError
from m2ncompile.runtime import session
from m2ncompile.runtime.control import StoreControl
from m2ncompile.runtime.deadline import Aside, Deadline
from m2ncompile.runtime.session import Session, bounded

#: What nothing here may take.
LONG = 60.0

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


def test_what_waits_in_vain_is_woken_once_another_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stands for a connection that does not break when the other side does."""
    monkeypatch.setattr(session, "_LOOK", 0.05)
    closed, looks = threading.Event(), iter([None, None, "worker 1 failed"])
    transport: Any = SimpleNamespace(detached=lambda: None, close=closed.set)
    found = bounded(
        Aside(), transport, lambda: closed.wait(LONG), Deadline(LONG), lambda: next(looks)
    )
    assert found == (None, "worker 1 failed")


def test_what_can_not_be_woken_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LOOK", 0.05)
    transport: Any = SimpleNamespace(detached=lambda: None, close=lambda: None)
    held = threading.Event()
    found = bounded(
        Aside(), transport, lambda: held.wait(LONG), Deadline(LONG), lambda: "worker 1 failed"
    )
    held.set()
    assert found == (None, "worker 1 failed; its transfer goes on: restart the process")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_ranks_hear_at_once_of_one_that_failed(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_LOOK", 0.05)
    monkeypatch.setattr(session, "GRACE", 1.0)
    store = HashStore()

    def rank(number: int) -> str:
        closed = threading.Event()
        transport: Any = SimpleNamespace(detached=lambda: None, close=closed.set)
        one = Session(StoreControl(store, number, 3), transport, 2, LONG)
        one._program = "established"

        def run(*_: object) -> None:
            if number == failing:
                raise RunError("out of memory")
            assert closed.wait(LONG)

        with pytest.raises(RunError) as raised:
            one.sync("1", run)
        return str(raised.value)

    with ThreadPoolExecutor(3) as pool:
        texts = {one.result() for one in [pool.submit(rank, number) for number in range(3)]}
    (text,) = texts
    assert f"{('trainer 0', 'trainer 1', 'worker 0')[failing]}: out of memory" in text
