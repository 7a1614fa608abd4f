"""The store in one process: what it keeps, heals, explains, collects and refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from itertools import count
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from m2ncompile.errors import PlanError, Problem, StoreError
from m2ncompile.store import (
    GRACE_SECONDS,
    MAX_OBJECT_BYTES,
    ActionKey,
    Change,
    Store,
    default_root,
)

#: Later than any time that the file system gives, so that only dates set here matter.
NOW = float(int(time.time())) + 1e6


def digest_of(data: bytes) -> str:
    """Bytes that start with `bad` stand for a file whose own trailer does not fit."""
    if data.startswith(b"bad"):
        raise PlanError("the plan file is damaged", [Problem("line 1", "unexpected bytes")])
    return sha256(data).hexdigest()


def key_of(**components: str) -> ActionKey:
    return ActionKey.of(components)


def action_path(store: Store, key: ActionKey) -> Path:
    return store.root / "actions" / key.digest[:2] / f"{key.digest}.json"


def age(path: Path, seconds: float) -> None:
    os.utime(path, (NOW - seconds, NOW - seconds))


def files(store: Store) -> list[Path]:
    return sorted(path for path in store.root.rglob("*") if not path.is_dir())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", digest_of)


KEY = key_of(spec="s1", model="m1", engine_version="0.33.0", compiler="1")


# --- keeping


def test_what_was_put_is_got_under_its_digest(store: Store) -> None:
    digest = store.put(b"plan")
    assert digest == sha256(b"plan").hexdigest()
    assert store.get(digest) == b"plan"
    assert store.path(digest) == store.root / "objects" / digest[:2] / f"{digest}.json"
    assert store.path(digest).read_bytes() == b"plan"
    assert store.has(digest)
    assert not store.has("0" * 64)


def test_a_hit_needs_the_same_inputs(store: Store) -> None:
    assert store.lookup(KEY) is None
    digest = store.put(b"plan")
    store.record(KEY, digest)
    assert store.lookup(KEY) == digest
    assert store.lookup(key_of(**dict(KEY.components) | {"spec": "s2"})) is None


def test_a_key_may_lead_elsewhere_later_and_two_keys_to_one_plan(store: Store) -> None:
    first, second = store.put(b"one"), store.put(b"two")
    store.record(KEY, first)
    store.record(KEY, second)
    other = key_of(spec="s2")
    store.record(other, second)
    assert store.lookup(KEY) == store.lookup(other) == second


def test_putting_twice_writes_once(store: Store) -> None:
    path = store.path(store.put(b"plan"))
    inode = path.stat().st_ino
    age(path, 1000)
    store.put(b"plan")
    assert path.stat().st_ino == inode
    assert path.stat().st_mtime != NOW - 1000
    assert files(store) == [path]


def test_nothing_temporary_is_left(store: Store) -> None:
    store.record(KEY, store.put(b"plan"))
    assert [path.suffix for path in files(store)] == [".json", ".json"]


def test_files_have_the_permissions_that_the_umask_allows(store: Store) -> None:
    before = os.umask(0o027)
    try:
        path = store.path(store.put(b"plan"))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_record_refuses_a_plan_that_was_not_put(store: Store) -> None:
    with pytest.raises(StoreError, match="put it first"):
        store.record(KEY, "0" * 64)
    assert files(store) == []


def test_damaged_bytes_are_not_put(store: Store) -> None:
    with pytest.raises(PlanError):
        store.put(b"bad plan")
    assert files(store) == []


@pytest.mark.parametrize("digest", ["", "../../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_what_is_no_digest_never_becomes_a_path(store: Store, digest: str) -> None:
    for call in (store.path, store.get, store.has, lambda d: store.record(KEY, d)):
        with pytest.raises(StoreError, match="64 hex digits"):
            call(digest)
    with pytest.raises(StoreError, match="64 hex digits"):
        Store(store.root, lambda data: digest).put(b"plan")


# --- keys


def test_the_digest_of_a_key_is_fixed() -> None:
    key = ActionKey.of({"spec": "a", "model": 'quote " and \u00e9'})
    text = '[["model","quote \\" and \u00e9"],["spec","a"]]'
    assert key.digest == sha256(text.encode()).hexdigest()


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=4), st.randoms())
def test_the_order_in_which_components_are_given_does_not_matter(
    components: dict[str, str], random: object
) -> None:
    items = list(components.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert ActionKey.of(dict(items)).digest == ActionKey.of(components).digest


@given(
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
)
def test_keys_are_equal_only_when_every_component_is(a: dict[str, str], b: dict[str, str]) -> None:
    assert (ActionKey.of(a).digest == ActionKey.of(b).digest) == (a == b)


@pytest.mark.parametrize("names", [("b", "a"), ("a", "a")])
def test_a_key_with_names_out_of_order_or_twice_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="sorted and each once"):
        ActionKey(tuple((name, "") for name in names))


# --- explaining a miss


def test_a_miss_names_what_changed_against_the_nearest_key(store: Store) -> None:
    assert store.explain(KEY) is None
    digest = store.put(b"plan")
    near = key_of(spec="s1", model="m1", engine_version="0.32.0", resolver="traced")
    store.record(near, digest)
    store.record(key_of(spec="s9", model="m9", engine_version="0.33.0"), digest)
    miss = store.explain(KEY)
    assert miss is not None
    assert miss.nearest == near
    assert miss.changes == (
        Change("compiler", None, "1"),
        Change("engine_version", "0.32.0", "0.33.0"),
        Change("resolver", "traced", None),
    )


def test_among_equally_near_keys_the_latest_explains(store: Store) -> None:
    digest = store.put(b"plan")
    keys = [key_of(spec=spec, model="m1") for spec in ("a", "b", "c")]
    for key, seconds in zip(keys, (30, 10, 20), strict=True):
        store.record(key, digest)
        age(action_path(store, key), seconds)
    miss = store.explain(key_of(spec="d", model="m1"))
    assert miss is not None and miss.nearest == keys[1]


def test_a_miss_by_loss_of_the_plan_shows_no_change(store: Store) -> None:
    digest = store.put(b"plan")
    store.record(KEY, digest)
    store.path(digest).unlink()
    assert store.lookup(KEY) is None
    miss = store.explain(KEY)
    assert miss is not None and miss.nearest == KEY and miss.changes == ()


# --- prefixes and listing


def test_a_unique_prefix_resolves(store: Store) -> None:
    digest = store.put(b"plan")
    store.put(b"other")
    assert store.resolve(digest[:6]) == store.resolve(digest[:6].upper()) == digest
    assert store.resolve(digest) == digest


def test_an_ambiguous_prefix_lists_what_it_may_be(store: Store) -> None:
    names = {b"1": "abcdef" + "0" * 58, b"2": "abcdef" + "1" * 58, b"3": "abcdee" + "0" * 58}
    store = Store(store.root, names.__getitem__)
    for data in names:
        store.put(data)
    with pytest.raises(StoreError) as caught:
        store.resolve("abcdef")
    assert [p.message for p in caught.value.problems] == [
        f"may be {names[b'1']}",
        f"may be {names[b'2']}",
    ]
    assert store.resolve("abcdef1") == names[b"2"]


@pytest.mark.parametrize("prefix", ["", "abcde", "abcdeg", "../../", "a" * 65, "abcdef\n"])
def test_a_prefix_that_is_short_or_not_hex_is_refused(store: Store, prefix: str) -> None:
    with pytest.raises(StoreError, match="6 to 64 hex digits"):
        store.resolve(prefix)


def test_an_unknown_prefix_says_where_it_looked(store: Store) -> None:
    with pytest.raises(StoreError, match=str(store.root)):
        store.resolve("abcdef")


def test_entries_tell_bytes_last_use_and_inputs(store: Store) -> None:
    assert store.entries() == []
    old, new = store.put(b"old plan"), store.put(b"new")
    keys = [key_of(spec="b"), key_of(spec="a")]
    for key in keys:
        store.record(key, old)
    age(store.path(old), 200)
    age(store.path(new), 100)
    first, second = store.entries()
    assert (first.digest, first.nbytes, first.last_used, first.actions) == (new, 3, NOW - 100, ())
    assert (second.digest, second.nbytes, second.last_used) == (old, 8, NOW - 200)
    assert second.actions == (keys[1], keys[0])


def test_foreign_files_are_left_alone(store: Store) -> None:
    digest = store.put(b"plan")
    folder = store.path(digest).parent
    foreign = [
        folder / "README",
        folder / f"{digest}.json.bak",
        folder / f"{'0' * 64}.json",  # lies where it would never be looked for
        folder / f"{digest}.json.0123456789abcdef.old",
        store.root / "objects" / "CACHEDIR.TAG",
        store.root / "note.txt",
    ]
    for path in foreign:
        path.write_bytes(b"mine")
        age(path, 1e6)
    assert [entry.digest for entry in store.entries()] == [digest]
    assert store.verify(repair=True).damage == ()
    age(store.path(digest), 1e6)
    store.gc(keep_bytes=0, keep_seconds=0, now=NOW)
    assert files(store) == sorted(foreign)


# --- damage


@given(st.data())
@settings(max_examples=60)
def test_any_flipped_bit_in_an_object_is_found_and_heals(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder), digest_of)
        plan = data.draw(st.binary(min_size=1, max_size=40).filter(lambda b: b[:3] != b"bad"))
        digest = store.put(plan)
        store.record(KEY, digest)
        path = store.path(digest)
        flip(path, data.draw(st.integers(0, len(plan) * 8 - 1)))
        by_get = data.draw(st.booleans())
        if by_get:
            with pytest.raises(StoreError, match="damaged"):
                store.get(digest)
        else:
            assert store.lookup(KEY) is None
        assert files(store) == [action_path(store, KEY)]
        assert store.put(plan) == digest
        assert store.lookup(KEY) == digest
        assert store.get(digest) == plan


@given(st.data())
@settings(max_examples=60)
def test_any_flipped_bit_in_an_action_is_a_miss_and_heals(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder), digest_of)
        digest = store.put(b"plan")
        store.record(KEY, digest)
        path = action_path(store, KEY)
        flip(path, data.draw(st.integers(0, path.stat().st_size * 8 - 1)))
        assert store.lookup(KEY) is None
        assert len(store.verify().damage) == 1
        store.record(KEY, digest)
        assert store.lookup(KEY) == digest
        assert store.verify().damage == ()


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"{",
        b"[" * 100_000,
        b'{"key":' * 100_000,
        b"\xff\xfe",
        msgspec.json.encode({"key": KEY, "plan": "../../../etc/passwd"}),
        msgspec.json.encode({"key": KEY, "plan": digest_of(b"plan").upper()}),
        msgspec.json.encode({"key": KEY, "plan": digest_of(b"plan"), "more": 1}),
    ],
    ids=["empty", "null", "open", "deep-list", "deep-key", "not-utf8", "path", "case", "unknown"],
)
def test_a_malformed_action_is_a_miss(store: Store, text: bytes) -> None:
    store.record(KEY, store.put(b"plan"))
    action_path(store, KEY).write_bytes(text)
    assert store.lookup(KEY) is None
    (problem,) = store.verify().damage
    assert problem.where == str(action_path(store, KEY))


def test_an_action_under_the_name_of_another_key_is_a_miss(store: Store) -> None:
    store.record(KEY, store.put(b"plan"))
    other = key_of(spec="s2")
    action_path(store, other).parent.mkdir(exist_ok=True)
    action_path(store, other).write_bytes(action_path(store, KEY).read_bytes())
    assert store.lookup(other) is None
    assert KEY.digest in store.verify().damage[0].message


def test_an_object_under_the_name_of_another_is_damaged(store: Store) -> None:
    a, b = store.put(b"a"), store.put(b"b")
    store.path(a).write_bytes(b"b")
    with pytest.raises(StoreError, match=f"its bytes are those of {b}; it was removed"):
        store.get(a)
    assert not store.has(a)


def test_the_reason_of_the_damage_is_told(store: Store) -> None:
    digest = store.put(b"plan")
    store.path(digest).write_bytes(b"bad plan")
    with pytest.raises(StoreError, match="plan file is damaged line 1: unexpected bytes"):
        store.get(digest)


def test_putting_again_replaces_a_damaged_object(store: Store) -> None:
    digest = store.put(b"plan")
    store.path(digest).write_bytes(b"pl")
    assert store.put(b"plan") == digest
    assert store.get(digest) == b"plan"


def test_verify_lists_all_damage_and_mends_only_when_asked(store: Store) -> None:
    sound, flipped, lost = store.put(b"sound"), store.put(b"flipped"), store.put(b"lost")
    keys = [key_of(spec=str(n)) for n in range(4)]
    for key, digest in zip(keys, (sound, flipped, lost, sound), strict=True):
        store.record(key, digest)
    flip(store.path(flipped), 0)
    store.path(lost).unlink()
    action_path(store, keys[3]).write_bytes(b"{}")
    before = {path: path.read_bytes() for path in files(store)}

    result = store.verify()
    assert (result.objects, result.actions, result.repaired) == (2, 4, 0)
    assert {problem.where for problem in result.damage} == {
        str(store.path(flipped)),
        str(action_path(store, keys[2])),
        str(action_path(store, keys[3])),
    }
    assert {path: path.read_bytes() for path in files(store)} == before

    # Without its object, the action of the flipped one is damage too.
    assert (len(store.verify(repair=True).damage), store.verify().damage) == (4, ())
    assert files(store) == sorted([store.path(sound), action_path(store, keys[0])])


def test_an_object_beyond_the_bound_is_not_read(store: Store) -> None:
    digest = store.put(b"plan")
    store.record(KEY, digest)
    os.truncate(store.path(digest), MAX_OBJECT_BYTES + 1)  # sparse
    unread = Store(store.root, lambda data: pytest.fail("it was read"))
    assert f"at most {MAX_OBJECT_BYTES}" in unread.verify().damage[0].message
    assert unread.lookup(KEY) is None
    assert not store.has(digest)


def test_an_object_beyond_the_bound_is_not_put(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"at most {MAX_OBJECT_BYTES} bytes"):
        store.put(bytes(MAX_OBJECT_BYTES + 1))
    assert not store.root.exists()


# --- collecting


def filled(store: Store, ages: dict[str, float]) -> dict[str, str]:
    """One object of 10 bytes for each name, used so many seconds before NOW, and its action."""
    digests = {}
    for name, seconds in ages.items():
        digests[name] = store.put(name.encode().ljust(10))
        store.record(key_of(spec=name), digests[name])
        age(store.path(digests[name]), seconds)
    return digests


def left(store: Store) -> set[str]:
    return {key.components[0][1] for entry in store.entries() for key in entry.actions}


AGES = {"c": 300.0, "a": 500.0, "d": 200.0, "b": 400.0}


@pytest.mark.parametrize(
    ("keep_bytes", "keep_seconds", "gone"),
    [
        (None, None, ""),
        (40, None, ""),
        (39, None, "a"),
        (30, None, "a"),
        (29, None, "ab"),
        (0, None, "abcd"),
        (None, 500, ""),
        (None, 499, "a"),
        (None, 250, "abc"),
        (None, 0, "abcd"),
        (30, 350, "ab"),
        (10, 450, "abc"),
    ],
)
def test_gc_removes_the_least_recently_used_first(
    store: Store, keep_bytes: int | None, keep_seconds: float | None, gone: str
) -> None:
    digests = filled(store, AGES)
    before = files(store)
    limits = {"keep_bytes": keep_bytes, "keep_seconds": keep_seconds}
    foreseen = store.gc(**limits, now=NOW, dry_run=True)  # type: ignore[arg-type]
    assert files(store) == before
    result = store.gc(**limits, now=NOW)  # type: ignore[arg-type]
    assert result == foreseen
    assert [entry.digest for entry in result.removed] == [digests[name] for name in gone]
    assert result.freed_bytes == 10 * len(gone)
    assert result.kept_bytes == 40 - result.freed_bytes
    assert (result.actions, result.spared, result.leftovers) == (len(gone), 0, 0)
    assert left(store) == set("abcd") - set(gone)
    assert len(files(store)) == 2 * (4 - len(gone))


@pytest.mark.parametrize("use", ["lookup", "get", "put"])
def test_a_use_counts_as_the_latest(store: Store, use: str) -> None:
    digests = filled(store, AGES)
    calls: dict[str, Callable[[], object]] = {
        "lookup": lambda: store.lookup(key_of(spec="a")),
        "get": lambda: store.get(digests["a"]),
        "put": lambda: store.put(b"a".ljust(10)),
    }
    calls[use]()
    used = store.path(digests["a"]).stat().st_mtime
    assert used not in (NOW - seconds for seconds in AGES.values())
    for name in "bcd":
        os.utime(store.path(digests[name]), (used - 100, used - 100))
    store.gc(keep_bytes=10, keep_seconds=None, now=used + 1000)
    assert left(store) == {"a"}


def test_gc_spares_what_was_just_used(store: Store) -> None:
    filled(store, {"a": GRACE_SECONDS + 1, "b": GRACE_SECONDS - 1, "c": 0, "d": -1e6})
    result = store.gc(keep_bytes=0, keep_seconds=0, now=NOW)
    assert left(store) == {"b", "c", "d"}
    assert (result.kept_bytes, len(result.removed)) == (30, 1)
    assert result.spared == 3  # d is dated ahead of now
    assert store.gc(keep_bytes=0, keep_seconds=None, now=NOW + 1e7).kept_bytes == 0


def test_gc_drops_actions_that_lead_nowhere(store: Store) -> None:
    digests = filled(store, {"a": 100, "b": 100, "c": 100})
    store.path(digests["a"]).unlink()
    action_path(store, key_of(spec="b")).write_bytes(b"{}")
    for dry_run in (True, False):
        result = store.gc(keep_bytes=None, keep_seconds=None, now=NOW, dry_run=dry_run)
        assert (result.actions, result.removed) == (2, ())
    assert files(store) == sorted(
        [
            store.path(digests["b"]),
            store.path(digests["c"]),
            action_path(store, key_of(spec="c")),
        ]
    )


def test_gc_sweeps_what_dead_processes_left_after_an_hour(store: Store) -> None:
    digest = store.put(b"plan")
    store.record(KEY, digest)
    kept: list[Path] = []
    swept: list[Path] = []
    for file in files(store):
        for suffix in ("tmp", "aside"):
            for seconds, where in ((3500, kept), (3700, swept)):
                path = file.with_name(f"{file.name}.{len(swept + kept):016x}.{suffix}")
                path.write_bytes(b"pl")
                age(path, seconds)
                where.append(path)
    before = files(store)
    assert store.gc(keep_bytes=None, keep_seconds=None, now=NOW, dry_run=True).leftovers == 4
    assert files(store) == before
    assert store.gc(keep_bytes=None, keep_seconds=None, now=NOW).leftovers == 4
    assert files(store) == sorted(set(before) - set(swept))


def test_collecting_nowhere_makes_nothing(store: Store) -> None:
    assert store.gc(keep_bytes=0, keep_seconds=0, now=NOW).removed == ()
    assert store.verify().damage == ()
    assert not store.root.exists()


# --- two processes, interleaved at a chosen point


class Meanwhile(float):
    """A time; the first subtraction from it, which is after gc's listing, runs `act`."""

    act: Callable[[], object]

    def __sub__(self, other: float) -> float:
        act, self.act = self.act, lambda: None
        act()
        return float(self) - other


@pytest.mark.parametrize("use", ["put", "lookup", "replace"])
def test_what_is_used_between_listing_and_removal_stays(store: Store, use: str) -> None:
    digest = store.put(b"plan")
    store.record(KEY, digest)
    age(store.path(digest), 1000)
    if use == "replace":
        store.path(digest).write_bytes(b"pl")
        age(store.path(digest), 1000)
    now = Meanwhile(NOW)
    now.act = lambda: store.lookup(KEY) if use == "lookup" else store.put(b"plan")
    result = store.gc(keep_bytes=0, keep_seconds=None, now=now)
    assert (result.removed, result.actions) == ((), 0)
    assert store.get(digest) == b"plan"
    assert store.lookup(KEY) == digest
    assert len(files(store)) == 2


def test_put_writes_anew_when_gc_removes_the_object_that_it_found(store: Store) -> None:
    digest = store.put(b"plan")
    age(store.path(digest), 1000)

    def collect_after_reading(data: bytes) -> str:
        calls.append(data)
        if len(calls) == 2:  # the first digest is that of the argument
            assert store.gc(keep_bytes=0, keep_seconds=None, now=NOW).freed_bytes == 4
        return digest_of(data)

    calls: list[bytes] = []
    assert Store(store.root, collect_after_reading).put(b"plan") == digest
    assert len(calls) == 2
    assert store.get(digest) == b"plan"


def test_lookup_misses_when_gc_removes_the_object_that_it_found(store: Store) -> None:
    digest = store.put(b"plan")
    store.record(KEY, digest)
    age(store.path(digest), 1000)

    def collect_after_reading(data: bytes) -> str:
        store.gc(keep_bytes=0, keep_seconds=None, now=NOW)
        return digest_of(data)

    assert Store(store.root, collect_after_reading).lookup(KEY) is None


def test_a_concurrent_gc_does_not_make_another_remove_more(store: Store) -> None:
    filled(store, AGES)
    now = Meanwhile(NOW)
    now.act = lambda: store.gc(keep_bytes=20, keep_seconds=None, now=NOW)
    result = store.gc(keep_bytes=20, keep_seconds=None, now=now)
    assert (result.removed, result.kept_bytes) == ((), 20)
    assert left(store) == {"c", "d"}


def test_an_object_healed_before_its_removal_stays_and_can_be_read_throughout(
    store: Store,
) -> None:
    digest = store.put(b"plan")
    store.path(digest).write_bytes(b"pl")
    seen: list[tuple[bytes, bool]] = []

    def meddle(data: bytes) -> str:
        # First the reader sees the damage, then it looks at what it took aside.
        if not seen:
            store.put(b"plan")
        else:
            assert not store.path(digest).exists()
            assert store.get(digest) == b"plan"
            assert store.has(digest)
        seen.append((data, store.path(digest).exists()))
        return digest_of(data)

    with pytest.raises(StoreError, match="damaged"):
        Store(store.root, meddle).get(digest)
    assert seen == [(b"pl", True), (b"plan", False)]
    assert files(store) == [store.path(digest)]
    assert store.get(digest) == b"plan"


def test_what_a_killed_process_took_aside_is_read_only_while_sound(store: Store) -> None:
    digest = store.put(b"plan")
    aside = store.path(digest).with_name(f"{digest}.json.{0:016x}.aside")
    store.path(digest).rename(aside)
    assert store.has(digest)
    assert store.get(digest) == b"plan"
    flip(aside, 0)
    with pytest.raises(StoreError, match="not in the store"):
        store.get(digest)
    assert files(store) == [aside]

    def put_meanwhile(data: bytes) -> str:
        if data != b"plan":
            store.put(b"plan")
        return digest_of(data)

    assert Store(store.root, put_meanwhile).get(digest) == b"plan"


def test_a_dangling_action_recorded_anew_stays(store: Store) -> None:
    digest = store.put(b"plan")
    store.record(KEY, digest)
    age(store.path(digest), 1000)
    other = store.put(b"other")
    now = Meanwhile(NOW)
    now.act = lambda: store.record(KEY, other)
    age(store.path(other), 0)
    result = store.gc(keep_bytes=0, keep_seconds=None, now=now)
    assert [entry.digest for entry in result.removed] == [digest]
    assert result.actions == 0
    assert store.lookup(KEY) == other


# --- refusals


def every_write(store: Store) -> list[Callable[[], object]]:
    return [lambda: store.put(b"plan"), lambda: store.record(KEY, "0" * 64)]


def every_read(store: Store) -> list[Callable[[], object]]:
    return [
        lambda: store.get("0" * 64),
        lambda: store.has("0" * 64),
        lambda: store.lookup(KEY),
        lambda: store.explain(KEY),
        lambda: store.resolve("000000"),
        store.entries,
        store.verify,
        lambda: store.gc(keep_bytes=0, keep_seconds=0, now=NOW),
    ]


@pytest.mark.parametrize("below", ["", "deep/store"])
def test_a_root_that_is_a_file_is_one_error_naming_the_file(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    store = Store(file / below, digest_of)
    for call in every_write(store) + every_read(store):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.problems == (
            Problem(
                str(file),
                "expected a folder, found a file",
                "choose another folder with M2NCOMPILE_CACHE",
            ),
        )
    assert file.read_text() == "mine"


def test_a_root_that_is_a_dangling_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "root").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=f"{tmp_path}/root: expected a folder"):
        Store(tmp_path / "root", digest_of).put(b"plan")


def test_what_the_system_refuses_is_told_with_path_and_reason(store: Store) -> None:
    digest = store.put(b"plan")
    store.path(digest).unlink()
    store.path(digest).mkdir()
    with pytest.raises(StoreError) as caught:
        store.put(b"plan")
    (problem,) = caught.value.problems
    assert (problem.where, problem.message) == (str(store.path(digest)), "Is a directory")
    assert files(store) == []


def test_a_folder_in_the_place_of_an_object_is_damage_that_can_not_be_mended(store: Store) -> None:
    digest = store.put(b"plan")
    store.record(KEY, digest)
    store.path(digest).unlink()
    store.path(digest).mkdir()
    result = store.verify(repair=True)
    assert [(p.where, p.message) for p in result.damage] == [
        (str(store.path(digest)), "it is not a regular file")
    ]
    assert result.repaired == 0
    assert store.path(digest).is_dir()
    assert store.lookup(KEY) is None
    assert store.entries() == []
    assert store.gc(keep_bytes=0, keep_seconds=0, now=NOW).removed == ()


def test_a_pipe_in_the_place_of_an_object_does_not_block(store: Store) -> None:
    digest = store.put(b"plan")
    store.path(digest).unlink()
    os.mkfifo(store.path(digest))
    with pytest.raises(StoreError, match="not a regular file; it was removed"):
        store.get(digest)


# --- links


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = Store(tmp_path / "link", digest_of)
    assert store.get(store.put(b"plan")) == b"plan"
    assert Store(tmp_path / "real", digest_of).entries() == store.entries() != []


@pytest.mark.parametrize("level", ["kind", "shard"])
@pytest.mark.parametrize("kind", ["objects", "actions"])
def test_a_linked_folder_is_not_entered(
    store: Store, tmp_path: Path, kind: str, level: str
) -> None:
    digest = store.put(b"plan")
    store.record(KEY, digest)
    path = store.path(digest) if kind == "objects" else action_path(store, KEY)
    folder = path.parent if level == "shard" else path.parent.parent
    outside = tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    before = sorted(outside.rglob("*"))
    calls: list[Callable[[], object]] = [
        lambda: store.lookup(KEY),
        store.entries,
        store.verify,
        lambda: store.gc(keep_bytes=0, keep_seconds=0, now=NOW * 2),
    ]
    if kind == "objects":
        calls += [lambda: store.get(digest), lambda: store.put(b"plan")]
    else:
        calls += [lambda: store.record(KEY, digest), lambda: store.explain(KEY)]
    for call in calls:
        with pytest.raises(StoreError, match=f"{folder}: is a symbolic link"):
            call()
    assert sorted(outside.rglob("*")) == before


def test_a_linked_object_is_not_read_and_its_target_not_written(
    store: Store, tmp_path: Path
) -> None:
    digest = store.put(b"plan")
    store.record(KEY, digest)
    outside = tmp_path / "outside"
    store.path(digest).rename(outside)
    age(outside, 500)
    store.path(digest).symlink_to(outside)
    assert "symbolic link" in store.verify().damage[0].message
    assert store.entries() == []
    assert store.lookup(KEY) is None
    assert not store.path(digest).is_symlink()
    store.path(digest).symlink_to(outside)
    store.put(b"plan")
    assert not store.path(digest).is_symlink()
    assert outside.read_bytes() == b"plan"
    assert outside.stat().st_mtime == NOW - 500


# --- where


def test_the_default_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("M2NCOMPILE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_root() == Path("/home/someone/.cache/m2ncompile")
    for relative in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert default_root() == Path("/home/someone/.cache/m2ncompile")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert default_root() == Path("/var/cache/m2ncompile")
    monkeypatch.setenv("M2NCOMPILE_CACHE", "")
    assert default_root() == Path("/var/cache/m2ncompile")
    monkeypatch.setenv("M2NCOMPILE_CACHE", "~/plans")
    assert default_root() == Path("/home/someone/plans")
    monkeypatch.setenv("M2NCOMPILE_CACHE", "~nobody-has-this-name/plans")
    with pytest.raises(StoreError, match="M2NCOMPILE_CACHE"):
        default_root()


def test_the_store_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, m2ncompile.store\n"
        "print({'torch', 'vllm', 'numpy', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "set()"


# --- any interleaving


class Interleaving(RuleBasedStateMachine):
    """The store against a dictionary, through two handles; each use is dated one second later."""

    digests = Bundle("digests")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.stores = [Store(Path(self.folder.name) / "store", digest_of) for _ in range(2)]
        self.turn = count()
        self.clock = count(1_000_000_000)
        self.last = 0
        self.known: dict[str, tuple[bytes, int]] = {}
        self.actions: dict[ActionKey, str] = {}

    def teardown(self) -> None:
        self.folder.cleanup()

    @property
    def store(self) -> Store:
        return self.stores[next(self.turn) % 2]

    def used(self, digest: str, data: bytes) -> None:
        self.last = next(self.clock)
        os.utime(self.store.path(digest), (self.last, self.last))
        self.known[digest] = data, self.last

    @rule(target=digests, data=st.sampled_from([bytes([n]) * (n + 1) for n in range(6)]))
    def put(self, data: bytes) -> str:
        digest = self.store.put(data)
        assert digest == digest_of(data)
        self.used(digest, data)
        return digest

    @rule(digest=digests)
    def get(self, digest: str) -> None:
        if digest in self.known:
            data, _ = self.known[digest]
            assert self.store.get(digest) == data
            self.used(digest, data)
        else:
            with pytest.raises(StoreError, match="not in the store"):
                self.store.get(digest)

    @rule(digest=digests, spec=st.sampled_from("abc"))
    def record(self, digest: str, spec: str) -> None:
        if digest in self.known:
            self.store.record(key_of(spec=spec), digest)
            self.actions[key_of(spec=spec)] = digest

    @rule(spec=st.sampled_from("abc"))
    def lookup(self, spec: str) -> None:
        expected = self.actions.get(key_of(spec=spec))
        if expected not in self.known:
            expected = None
        assert self.store.lookup(key_of(spec=spec)) == expected
        if expected is not None:
            self.used(expected, self.known[expected][0])

    @rule(digest=digests)
    def damage(self, digest: str) -> None:
        if digest in self.known:
            flip(self.store.path(digest), 0)
            assert len(self.store.verify(repair=True).damage) >= 1
            del self.known[digest]
            self.drop_dangling()

    @rule(keep=st.integers(0, 21), dry_run=st.booleans())
    def gc(self, keep: int, dry_run: bool) -> None:
        order = sorted(self.known, key=lambda digest: self.known[digest][1])
        total = sum(len(data) for data, _ in self.known.values())
        expected = []
        for digest in order:
            if total <= keep:
                break
            expected.append(digest)
            total -= len(self.known[digest][0])
        now = self.last + GRACE_SECONDS + 1
        result = self.store.gc(keep_bytes=keep, keep_seconds=None, now=now, dry_run=dry_run)
        assert [entry.digest for entry in result.removed] == expected
        assert result.kept_bytes == total
        if not dry_run:
            for digest in expected:
                del self.known[digest]
            self.drop_dangling()

    def drop_dangling(self) -> None:
        self.actions = {k: digest for k, digest in self.actions.items() if digest in self.known}

    @invariant()
    def lists_what_was_put(self) -> None:
        entries = self.store.entries()
        assert [(e.digest, e.last_used) for e in entries] == sorted(
            ((digest, used) for digest, (_, used) in self.known.items()), key=lambda e: -e[1]
        )
        assert {k: e.digest for e in entries for k in e.actions} == self.actions
        assert self.store.verify().damage == ()


TestInterleaving = Interleaving.TestCase
TestInterleaving.settings = settings(max_examples=40, stateful_step_count=25)


def test_the_bytes_of_an_action_are_fixed(store: Store) -> None:
    """What another version of the program would read."""
    digest = store.put(b"plan")
    store.record(key_of(spec="s", model="m"), digest)
    assert action_path(store, key_of(spec="s", model="m")).read_bytes() == (
        b'{"key":{"components":[["model","m"],["spec","s"]]},"plan":"' + digest.encode() + b'"}\n'
    )
