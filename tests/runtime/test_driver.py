"""Calls to an engine, one after the other."""

from __future__ import annotations

import threading
from typing import Any

from m2ncompile.runtime.driver import Driver

LONG = 60.0


def fail(words: str) -> None:
    raise ValueError(words)


def test_calls_share_a_thread_and_are_told_apart() -> None:
    client: Any = None  # its calls are given
    driver, threads = Driver(client), list[threading.Thread]()
    for _ in range(2):
        driver.start("good", lambda: threads.append(threading.current_thread()))
        assert driver.join(LONG) is None
    driver.start("bad", lambda: fail("no room"))
    assert driver.join(LONG) == driver.watch() == "bad: ValueError: no room"
    driver.start("good", lambda: threads.append(threading.current_thread()))
    assert driver.join(LONG) is driver.watch() is None
    assert len({*threads}) == 1 and threads[0] is not threading.current_thread()


def test_a_call_that_was_given_up_is_not_told_of_the_next() -> None:
    client: Any = None
    driver, gate = Driver(client), threading.Event()
    stuck: list[threading.Thread] = []

    def late() -> None:
        stuck.append(threading.current_thread())
        gate.wait(LONG)
        fail("late")

    driver.start("first", late)
    assert driver.join(0.1) == "first did not return within 0.1 s"
    driver.start("second", lambda: None)
    assert driver.join(LONG) is None
    gate.set()
    stuck[0].join(LONG)
    assert driver.watch() is driver.join(LONG) is None
