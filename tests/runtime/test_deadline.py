"""Calls that can be left behind."""

from __future__ import annotations

import threading

import pytest

from m2ncompile.runtime.deadline import Aside, within

LONG = 60.0


def test_calls_share_a_thread_that_is_not_the_callers() -> None:
    aside = Aside()
    first, second = (aside.run(threading.current_thread, LONG) for _ in range(2))
    assert first is second
    assert first is not threading.current_thread()
    assert first.daemon  # whatever it is in, the process can end


def test_what_a_call_raises_is_raised_and_the_next_call_goes_on() -> None:
    def fail() -> None:
        raise KeyError("x")

    aside = Aside()
    with pytest.raises(KeyError, match="x"):
        aside.run(fail, LONG)
    assert aside.run(lambda: 1, LONG) == 1


def test_a_call_that_does_not_end_is_left_behind() -> None:
    aside, gate = Aside(), threading.Event()
    stuck: list[threading.Thread] = []

    def wait() -> str:
        stuck.append(threading.current_thread())
        gate.wait(LONG)
        return "stale"

    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        aside.run(wait, 0.1)
    assert aside.run(lambda: "fresh", LONG) == "fresh"  # and not what the first one says
    gate.set()
    stuck[0].join(LONG)
    assert not stuck[0].is_alive()
    assert aside.run(lambda: "fresh", LONG) == "fresh"


def test_a_call_that_is_begun_goes_on_beside() -> None:
    aside, gate = Aside(), threading.Event()
    call = aside.begin(lambda: gate.wait(LONG) and threading.current_thread())
    with pytest.raises(TimeoutError):
        call.result(0.1)
    assert aside.run(lambda: "meanwhile", LONG) == "meanwhile"
    gate.set()
    first = call.result(LONG)
    assert call.result(0) is first is not threading.current_thread()
    assert aside.run(threading.current_thread, LONG) is first  # it is free again


def test_two_threads_call_at_once() -> None:
    aside, both = Aside(), threading.Barrier(2, timeout=LONG)
    other = threading.Thread(target=lambda: aside.run(both.wait, LONG))
    other.start()
    aside.run(both.wait, LONG)
    other.join(LONG)
    assert aside.run(lambda: 1, LONG) == 1


def test_the_thread_ends_with_what_it_is_for() -> None:
    aside = Aside()
    thread = aside.run(threading.current_thread, LONG)
    del aside
    thread.join(LONG)
    assert not thread.is_alive()
    gone = within(threading.current_thread, LONG)
    gone.join(LONG)
    assert not gone.is_alive()
