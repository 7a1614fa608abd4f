"""The control plane, over stores of torch's and of vLLM's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
from torch.distributed import HashStore, PrefixStore

from m2ncompile.runtime import control
from m2ncompile.runtime.control import Answers, StoreControl
from m2ncompile.runtime.deadline import Deadline
from tests.runs import failures, together

WORLD = 4
LONG = 60.0


@pytest.fixture(autouse=True)
def _short_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_MARGIN", 0.5)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def planes(store: HashStore) -> list[StoreControl]:
    return [StoreControl(store, rank, WORLD) for rank in range(WORLD)]


def speak(plane: StoreControl, words: str, seconds: float = LONG) -> Callable[[], Answers]:
    return lambda: plane.exchange(words.encode(), Deadline(seconds))


def test_all_learn_what_all_said_round_after_round(planes: list[StoreControl]) -> None:
    for turn in range(5):
        said = tuple(f"{plane.rank} in {turn}".encode() for plane in planes)
        answers = together([speak(plane, f"{plane.rank} in {turn}") for plane in planes])
        assert answers == [Answers(said)] * WORLD


def test_one_rank_alone_learns_what_it_said(store: HashStore) -> None:
    assert speak(StoreControl(store, 0, 1), "me")() == Answers((b"me",))


@pytest.mark.parametrize("missing", [1, 3])
def test_who_does_not_speak_is_none_to_all(planes: list[StoreControl], missing: int) -> None:
    calls = [speak(plane, "here", 0.3) for plane in planes if plane.rank != missing]
    answers = together(calls)
    assert len(set(answers)) == 1
    assert answers[0].by_rank.index(None) == missing
    assert answers[0].by_rank.count(b"here") == WORLD - 1
    # Who comes too late learns what the others made of it.
    assert speak(planes[missing], "late")() == answers[0]


def test_without_rank_0_all_others_raise_the_same(planes: list[StoreControl]) -> None:
    texts = failures([speak(plane, "here", 0.25) for plane in planes[1:]])
    assert set(texts) == {
        "rank 0, which hosts the control plane, did not answer in time, or is gone"
    }


def test_an_answer_that_is_none_is_an_error(planes: list[StoreControl], store: HashStore) -> None:
    PrefixStore("m2ncompile", store).set("0/all", "no msgpack")
    assert "did not answer" in failures([speak(planes[1], "here")])[0]


def test_who_leaves_says_so_in_the_round_that_the_others_come_to(
    planes: list[StoreControl],
) -> None:
    together([speak(plane, "one") for plane in planes])
    planes[2].leave("interrupted", b"gone")
    others = [plane for plane in planes if plane.rank != 2]
    for answers in together([speak(plane, "two") for plane in others]):
        assert answers == Answers((b"two", b"two", b"gone", b"two"))


def test_who_leaves_before_it_spoke_says_so_in_that_round(planes: list[StoreControl]) -> None:
    """As when an interrupt comes just as it begins to speak."""

    class Interrupted:
        """A store that is not written to yet."""

        def set(self, key: str, value: bytes) -> None:
            raise KeyboardInterrupt

    together([speak(plane, "one") for plane in planes])
    real, planes[2]._store = planes[2]._store, Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        speak(planes[2], "two")()
    planes[2]._store = real
    planes[2].leave("interrupted", b"gone")
    others = [plane for plane in planes if plane.rank != 2]
    for answers in together([speak(plane, "two") for plane in others]):
        assert answers == Answers((b"two", b"two", b"gone", b"two"))


def test_rank_0_leaves_those_who_wait_for_it(planes: list[StoreControl]) -> None:
    together([speak(plane, "one") for plane in planes])
    waiting = [speak(plane, "two") for plane in planes[1:]]
    left = Answers((None,) * WORLD, "interrupted")

    def leave() -> Answers:
        time.sleep(0.1)
        planes[0].leave("interrupted", b"gone")
        return left

    assert together([leave, *waiting]) == [left] * WORLD


def test_rank_0_leaves_in_the_middle_of_a_round(
    planes: list[StoreControl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an interrupt does while it collects."""

    def interrupted(*_: object) -> Answers:
        raise KeyboardInterrupt

    monkeypatch.setattr(planes[0], "_collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        speak(planes[0], "one")()
    planes[0].leave("interrupted", b"gone")
    for answers in together([speak(plane, "one") for plane in planes[1:]]):
        assert answers == Answers((None,) * WORLD, "interrupted")
    planes[0].settle()
    assert not planes[0]._unread


def test_rank_0_leaves_nothing_behind_a_round_that_ended(planes: list[StoreControl]) -> None:
    """What all have heard stays; they hear of it in the next round."""
    first = together([speak(plane, "one") for plane in planes])
    planes[0].leave("interrupted", b"gone")
    assert first == [Answers((b"one",) * WORLD)] * WORLD
    for answers in together([speak(plane, "two") for plane in planes[1:]]):
        assert answers.vain == "interrupted"


def test_rank_0_stops_waiting_when_it_is_in_vain(planes: list[StoreControl]) -> None:
    failing = Deadline(0.5)

    def watch() -> str | None:
        return "worker 1's request failed" if failing.passed else None

    def first() -> Answers:
        return planes[0].exchange(b"here", Deadline(LONG), watch)

    others = [speak(plane, "here") for plane in planes[1:3]]
    answers = together([first, *others])
    assert set(answers) == {Answers((b"here",) * 3 + (None,), "worker 1's request failed")}


def test_nobody_is_watched_when_all_speak(planes: list[StoreControl]) -> None:
    def first() -> Answers:
        return planes[0].exchange(b"here", Deadline(LONG), lambda: "in vain")

    for plane in planes[1:]:
        plane._say(0, b"here")
    assert first() == Answers((b"here",) * WORLD)


def test_a_watch_counts_on_rank_0_alone(planes: list[StoreControl]) -> None:
    calls = [speak(plane, "here") for plane in planes if plane.rank != 1]
    watched = [lambda: planes[1].exchange(b"here", Deadline(LONG), lambda: "in vain")]
    assert set(together([*calls, *watched])) == {Answers((b"here",) * WORLD)}


def test_keys_of_old_rounds_are_deleted(planes: list[StoreControl], store: HashStore) -> None:
    kept = set()
    for turn in range(8):
        together([speak(plane, "here") for plane in planes])
        if turn > 2:
            kept.add(store.num_keys())
    # What each said last, and read last; of two rounds what all said.
    assert max(kept) <= 2 * (WORLD - 1) + 2


def test_two_runs_of_other_names_share_a_store(store: HashStore) -> None:
    runs = [[StoreControl(store, r, 2, name) for r in range(2)] for name in ("one", "two")]
    calls = [speak(plane, f"run {n}") for n, run in enumerate(runs) for plane in run]
    one, two = Answers((b"run 0",) * 2), Answers((b"run 1",) * 2)
    assert together(calls) == [one, one, two, two]


def test_rank_0_settles_when_all_have_read(planes: list[StoreControl]) -> None:
    """Its process, and with it the store, may end then and not before."""
    gate, settled = threading.Event(), threading.Event()
    slow = planes[3]

    class Slow:
        """A store whose reader takes its time."""

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def get(self, key: str) -> bytes:
            gate.wait(LONG)
            return real.get(key)  # type: ignore[no-any-return]

    real = slow._store
    slow._store = Slow()  # type: ignore[assignment]

    def first() -> Answers:
        answers = speak(planes[0], "here")()
        threading.Timer(0.3, gate.set).start()
        planes[0].settle()
        assert gate.is_set()
        settled.set()
        return answers

    together([first, *(speak(plane, "here") for plane in planes[1:])])
    assert settled.is_set()


def test_rank_0_does_not_settle_for_ever(
    planes: list[StoreControl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_SETTLE", 0.1)
    for plane in planes[1:]:
        plane._say(0, b"here")  # and dies
    speak(planes[0], "here")()
    planes[0].settle()
    assert not planes[0]._unread
    planes[1].settle()  # has nothing to wait for


def test_rank_0_does_not_settle_for_who_said_nothing_or_left(
    planes: list[StoreControl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_SETTLE", 2 * LONG)
    planes[2].leave("interrupted", b"gone")
    together([speak(plane, "here", 0.3) for plane in planes[:2]])
    planes[0].settle()


def test_a_closed_plane_holds_no_store(planes: list[StoreControl]) -> None:
    planes[0].close()
    planes[0].close()
    with pytest.raises(AttributeError):
        planes[0]._store  # noqa: B018


def test_answers_survive_the_wire() -> None:
    answers = Answers((b"\x00\xff", None, b""), "why")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(answers), type=Answers) == answers


@pytest.mark.engine
def test_over_the_group_that_vllm_makes() -> None:
    from vllm.distributed.utils import StatelessProcessGroup

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def rank(number: int) -> list[Answers]:
        group = StatelessProcessGroup.create("127.0.0.1", port, number, 3, store_timeout=60)
        plane = StoreControl.over(group)
        assert (plane.rank, plane.world) == (number, 3)
        found = [speak(plane, f"{number} {turn}")() for turn in range(4)]
        group.barrier()  # its own messages and these do not meet
        if number == 2:
            plane.leave("enough", b"gone")
        else:
            found.append(speak(plane, "last")())
        plane.settle()
        return found

    first, second, third = together([lambda n=n: rank(n) for n in range(3)])
    assert first == second
    assert (
        first[:4]
        == third
        == [Answers(tuple(f"{n} {turn}".encode() for n in range(3))) for turn in range(4)]
    )
    assert first[4] == Answers((b"last", b"last", b"gone"))
