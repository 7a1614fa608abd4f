"""Agreement: one text for all, which names who differs and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from torch.distributed import HashStore

from m2ncompile.errors import RunError
from m2ncompile.runtime import control
from m2ncompile.runtime.agree import Envelope, agree, rank_name
from m2ncompile.runtime.control import StoreControl
from m2ncompile.runtime.deadline import Deadline
from tests.runs import failures, together

TRAINERS, WORLD = 2, 4
TITLE = "the run can't start"


@pytest.fixture(autouse=True)
def _short_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_MARGIN", 0.5)


def rank(
    store: HashStore,
    number: int,
    digest: str = "abc",
    phase: str = "plan",
    *,
    world: int = WORLD,
    error: str | None = None,
    note: str = "",
    seconds: float = 60.0,
) -> Callable[[], list[str]]:
    plane = StoreControl(store, number, world)
    return lambda: agree(
        plane,
        phase,
        digest,
        Deadline(seconds),
        trainers=TRAINERS,
        title=TITLE,
        error=error,
        note=note,
    )


def same(calls: Sequence[Callable[[], object]]) -> str:
    texts = set(failures(calls))
    assert len(texts) == 1, texts
    return texts.pop()


def others(store: HashStore, *odd: int, seconds: float = 60.0) -> list[Callable[[], list[str]]]:
    return [rank(store, n, seconds=seconds) for n in range(WORLD) if n not in odd]


def test_ranks_that_agree_learn_each_others_notes() -> None:
    store = HashStore()
    notes = together([rank(store, n, note=f"note {n}") for n in range(WORLD)])
    assert notes == [[f"note {n}" for n in range(WORLD)]] * WORLD


@pytest.mark.parametrize("odd", range(WORLD))
def test_another_digest(odd: int) -> None:
    store = HashStore()
    text = same([*others(store, odd), rank(store, odd, "xyz")])
    name = rank_name(odd, TRAINERS)
    assert text == f"{TITLE}\n  {name}: its plan is xyz, most ranks have abc"


def test_every_rank_that_differs_is_named() -> None:
    store = HashStore()
    digests = ("abc", "abc", "x", "y")
    text = same([rank(store, n, digest) for n, digest in enumerate(digests)])
    assert text.splitlines()[1:] == [
        "  worker 0: its plan is x, most ranks have abc",
        "  worker 1: its plan is y, most ranks have abc",
    ]


def test_a_tie_is_told_alike_by_all() -> None:
    store = HashStore()
    text = same([rank(store, n, "abc" if n % 2 else "xyz") for n in range(WORLD)])
    assert "trainer 1: its plan is abc, most ranks have xyz" in text
    assert "worker 1: its plan is abc, most ranks have xyz" in text


@pytest.mark.parametrize("odd", range(WORLD))
def test_an_error(odd: int) -> None:
    store = HashStore()
    text = same([*others(store, odd), rank(store, odd, error="no such file")])
    assert text == f"{TITLE}\n  {rank_name(odd, TRAINERS)}: no such file"


def test_errors_and_digests_are_told_together() -> None:
    store = HashStore()
    text = same(
        [rank(store, 0), rank(store, 1, error="bad"), rank(store, 2, "xyz"), rank(store, 3)]
    )
    assert "trainer 1: bad" in text
    assert "worker 0: its plan is xyz, most ranks have abc" in text


@pytest.mark.parametrize("odd", range(WORLD))
def test_another_phase(odd: int) -> None:
    store = HashStore()
    text = same([*others(store, odd), rank(store, odd, phase="begin")])
    name = rank_name(odd, TRAINERS)
    assert text == f'{TITLE}\n  {name}: it is at "begin", most ranks are at "plan"'


def test_another_world() -> None:
    store = HashStore()
    text = same([*others(store, 2), rank(store, 2, world=5)])
    assert "worker 0: it counts 5 ranks in all, not 4" in text


def test_another_world_on_rank_0() -> None:
    store = HashStore()
    text = same([rank(store, 0, world=3), *others(store, 0)])
    assert "trainer 1: it counts 4 ranks in all, not 3" in text
    assert "worker 0: it counts 4 ranks in all, not 3" in text


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"phase":"plan","world":4,"digest":1}',
        b'{"phase":"plan","world":4,"digest":"abc","more":1}',
        b'{"phase":"plan","world":4,"digest":"abc"',
    ],
)
def test_what_is_no_envelope(said: bytes) -> None:
    store = HashStore()
    plane = StoreControl(store, 3, WORLD)

    def odd() -> list[str]:
        plane.exchange(said, Deadline(60.0))
        raise RunError("")

    *texts, _ = failures([*others(store, 3), odd])
    assert len(set(texts)) == 1
    assert "worker 1: its answer is no envelope" in texts[0]


def test_neither_digest_nor_error() -> None:
    store = HashStore()
    text = same([*others(store, 1), rank(store, 1, "")])
    assert "trainer 1: its answer has neither a digest nor an error" in text


@pytest.mark.parametrize("missing", [1, 3])
def test_a_rank_that_does_not_come(missing: int) -> None:
    text = same(others(HashStore(), missing, seconds=0.3))
    name = rank_name(missing, TRAINERS)
    assert text == f"{TITLE}\n  {name}: it did not answer within 0.3 s, or is gone"


def test_rank_0_does_not_come() -> None:
    text = same(others(HashStore(), 0, seconds=0.3))
    assert text.startswith("rank 0, which hosts the control plane, did not answer in time")


def test_a_rank_that_left_is_named_with_its_reason() -> None:
    store = HashStore()
    gone = msgspec.json.encode(Envelope("gone", WORLD, "", "it left: KeyboardInterrupt"))
    StoreControl(store, 3, WORLD).leave("it left", gone)
    assert same(others(store, 3)) == f"{TITLE}\n  worker 1: it left: KeyboardInterrupt"


def test_rank_0_left() -> None:
    store = HashStore()
    StoreControl(store, 0, WORLD).leave("it left: KeyboardInterrupt", b"")
    assert same(others(store, 0)) == f"{TITLE}\n  trainer 0: it left: KeyboardInterrupt"


def test_waiting_in_vain_is_rank_0s_and_names_nobody_else() -> None:
    """Who has not spoken by then is not at fault for it."""
    store = HashStore()
    plane = StoreControl(store, 0, WORLD)

    def first() -> list[str]:
        return agree(
            plane,
            "plan",
            "abc",
            Deadline(60.0),
            trainers=TRAINERS,
            title=TITLE,
            watch=lambda: "the engine answered 500",
        )

    text = same([first, *others(store, 0, 3)])
    assert text == f"{TITLE}\n  trainer 0: the engine answered 500"
