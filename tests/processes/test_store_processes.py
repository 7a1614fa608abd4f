"""The store under real processes: many at once, killed in the middle, refused by the system."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from hashlib import sha256
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import pytest

from m2ncompile.errors import StoreError
from m2ncompile.store import ActionKey, Store

SPAWN = multiprocessing.get_context("spawn")
#: From a few bytes to many blocks.
PLANS = [f"{n}:".encode() * (7 ** (n % 6)) for n in range(12)]
KEYS = [ActionKey.of({"spec": str(n)}) for n in range(len(PLANS))]


def digest_of(data: bytes) -> str:
    return sha256(data).hexdigest()


DIGESTS = [digest_of(plan) for plan in PLANS]


def finish(processes: list[BaseProcess]) -> None:
    """All must end, and end well."""
    for process in processes:
        process.join(120)
    ended = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert ended == [0] * len(processes)


def build(store: Store, n: int) -> bytes:
    """A hit is read; a miss is made, kept, recorded and read."""
    digest = store.lookup(KEYS[n])
    if digest is None:
        digest = store.put(PLANS[n])
        store.record(KEYS[n], digest)
    return store.get(digest)


# --- no build loses its plan to a gc


def build_in_rounds(root: Path, seed: int, rounds: int, barrier: Barrier) -> None:
    store, order = Store(root, digest_of), list(range(len(PLANS)))
    for turn in range(rounds):
        random.Random(f"{seed} {turn}").shuffle(order)
        barrier.wait(60)
        for n in order:
            assert build(store, n) == PLANS[n]
        barrier.wait(60)


def collect_in_rounds(root: Path, rounds: int, barrier: Barrier) -> None:
    store = Store(root, digest_of)
    for _ in range(rounds):
        for entry in store.entries():  # all unused for long, when the builds begin
            os.utime(store.path(entry.digest), (1, 1))
        barrier.wait(60)
        store.gc(keep_bytes=0, keep_seconds=None, now=time.time())
        barrier.wait(60)


def test_no_build_loses_its_plan_to_a_gc(tmp_path: Path) -> None:
    rounds, builders, collectors = 15, 6, 2
    barrier = SPAWN.Barrier(builders + collectors)
    processes: list[BaseProcess] = [
        *(
            SPAWN.Process(target=build_in_rounds, args=(tmp_path, seed, rounds, barrier))
            for seed in range(builders)
        ),
        *(
            SPAWN.Process(target=collect_in_rounds, args=(tmp_path, rounds, barrier))
            for _ in range(collectors)
        ),
    ]
    for process in processes:
        process.start()
    finish(processes)
    store = Store(tmp_path, digest_of)
    assert [entry.digest for entry in store.entries() if entry.digest not in DIGESTS] == []
    assert store.verify().damage == ()
    assert all(path.suffix == ".json" for path in tmp_path.rglob("*") if path.is_file())


# --- whatever goes on, nobody sees anything but a whole object


def write_at_random(root: Path, seed: int, steps: int) -> None:
    store, pick = Store(root, digest_of), random.Random(seed)
    for _ in range(steps):
        n = pick.randrange(len(PLANS))
        match pick.randrange(4):
            case 0:
                assert store.put(PLANS[n]) == DIGESTS[n]
            case 1:
                assert store.lookup(KEYS[n]) in (None, DIGESTS[n])
            case 2:
                try:
                    assert store.get(DIGESTS[n]) == PLANS[n]
                except StoreError as error:
                    assert error.title in (
                        "the plan is not in the store",
                        "the plan in the store is damaged",
                    )
            case _:
                store.put(PLANS[n])
                try:
                    store.record(KEYS[n], DIGESTS[n])
                except StoreError as error:
                    assert error.title == "the plan is not in the store"


def collect_without_mercy(root: Path, done: Event) -> None:
    """As if every object were half an hour old, and so no protection but that of `_remove`."""
    store = Store(root, digest_of)
    while not done.is_set():
        store.gc(keep_bytes=20_000, keep_seconds=None, now=time.time() + 1800)


def watch(root: Path, done: Event) -> None:
    """Reads the files themselves, without the store's checks."""
    while not done.is_set():
        for path in root.glob("objects/??/*.json"):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            assert digest_of(data) == path.stem


def vandalize(root: Path, done: Event) -> None:
    """Flips bits in place, as a failing disk would, and has them found."""
    pick, store = random.Random(0), Store(root, digest_of)
    while not done.is_set():
        for path in root.glob("*/??/*.json"):
            try:
                with open(path, "r+b") as stream:
                    at = pick.randrange(os.fstat(stream.fileno()).st_size)
                    stream.seek(at)
                    byte = stream.read(1)[0]
                    stream.seek(at)
                    stream.write(bytes([byte ^ 1 << pick.randrange(8)]))
            except FileNotFoundError:
                continue
        store.verify(repair=pick.random() < 0.5)


@pytest.mark.parametrize("other", [watch, vandalize])
def test_nothing_but_whole_objects_is_seen(
    tmp_path: Path, other: Callable[[Path, Event], None]
) -> None:
    done = SPAWN.Event()
    others: list[BaseProcess] = [
        SPAWN.Process(target=target, args=(tmp_path, done))
        for target in (collect_without_mercy, other)
    ]
    writers: list[BaseProcess] = [
        SPAWN.Process(target=write_at_random, args=(tmp_path, seed, 80)) for seed in range(8)
    ]
    for process in [*others, *writers]:
        process.start()
    try:
        finish(writers)
    finally:
        done.set()
    finish(others)

    store = Store(tmp_path, digest_of)
    store.verify(repair=True)
    assert store.verify().damage == ()
    for n, plan in enumerate(PLANS):
        assert build(store, n) == plan
    assert all(path.suffix == ".json" for path in tmp_path.rglob("*") if path.is_file())


# --- killed in the middle


def big_plan() -> bytes:
    return bytes(range(256)) * (1 << 17)


def put_big(root: Path) -> None:
    Store(root, digest_of).put(big_plan())


def test_a_writer_killed_in_the_middle_leaves_nothing_to_see(tmp_path: Path) -> None:
    plan = big_plan()
    digest = digest_of(plan)
    store = Store(tmp_path, digest_of)
    for _ in range(20):
        writer = SPAWN.Process(target=put_big, args=(tmp_path,))
        writer.start()
        while writer.is_alive() and not list(tmp_path.glob("objects/*/*.tmp")):
            pass
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(60)
        if writer.exitcode == -signal.SIGKILL and not store.has(digest):
            break
        store.path(digest).unlink()  # it had been too quick
    (torn,) = tmp_path.glob("objects/*/*.tmp")
    assert store.entries() == []
    assert store.verify().objects == 0
    with pytest.raises(StoreError, match="not in the store"):
        store.get(digest)

    store.put(plan)
    assert store.get(digest) == plan
    now = time.time()
    assert store.gc(keep_bytes=None, keep_seconds=None, now=now).leftovers == 0
    assert torn.exists()
    assert store.gc(keep_bytes=None, keep_seconds=None, now=now + 3700).leftovers == 1
    assert not torn.exists()
    assert store.get(digest) == plan


# --- refused by the system


def put_with_limited_file_size(root: Path, fatal: bool) -> None:
    if fatal:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    store = Store(root, digest_of)
    kept = store.put(b"small")
    with pytest.raises(StoreError) as caught:
        store.put(bytes(10_000))
    (problem,) = caught.value.problems
    assert problem.where == str(store.path(digest_of(bytes(10_000))))
    assert problem.message == "File too large"
    assert store.get(kept) == b"small"


@pytest.mark.parametrize("fatal", [False, True])
def test_a_write_that_stops_half_way(tmp_path: Path, fatal: bool) -> None:
    writer = SPAWN.Process(target=put_with_limited_file_size, args=(tmp_path, fatal))
    writer.start()
    writer.join(60)
    assert writer.exitcode == (-signal.SIGXFSZ if fatal else 0)
    torn = list(tmp_path.glob("objects/*/*.tmp"))
    assert [path.stat().st_size for path in torn] == ([4096] if fatal else [])
    store = Store(tmp_path, digest_of)
    assert [entry.nbytes for entry in store.entries()] == [5]
    assert store.verify().damage == ()


def use_read_only(folder: Path) -> None:
    """Run by a user whom the permissions bind: root gives itself up."""
    os.chdir(folder)
    if os.geteuid() == 0:
        os.setuid(65534)
    store = Store(Path("store"), digest_of)
    digest, damaged = DIGESTS[0], DIGESTS[1]
    used = store.path(digest).stat().st_mtime
    assert store.lookup(KEYS[0]) == digest
    assert store.get(digest) == PLANS[0]
    assert store.resolve(digest[:6]) == digest
    assert len(store.entries()) == 2
    miss = store.explain(ActionKey.of({"spec": "x"}))
    assert miss is not None

    assert store.lookup(KEYS[1]) is None
    with pytest.raises(StoreError, match="it could not be removed"):
        store.get(damaged)
    result = store.verify(repair=True)
    assert (len(result.damage), result.repaired) == (1, 0)

    with pytest.raises(StoreError) as caught:
        store.put(PLANS[2])
    (problem,) = caught.value.problems
    assert problem.where == str(store.path(DIGESTS[2]))
    assert problem.message == "Permission denied"
    for call in (
        lambda: store.record(KEYS[0], digest),
        lambda: store.gc(keep_bytes=0, keep_seconds=0, now=used + 1000),
        lambda: Store(Path("hidden"), digest_of).lookup(KEYS[0]),
    ):
        with pytest.raises(StoreError, match="Permission denied"):
            call()
    assert not store.gc(keep_bytes=0, keep_seconds=0, now=used + 1000, dry_run=True).leftovers


def test_a_read_only_store_is_read_and_says_what_it_can_not_do(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", digest_of)
    for n in range(2):
        build(store, n)
    path = store.path(DIGESTS[1])
    path.write_bytes(b"x" + path.read_bytes()[1:])
    (tmp_path / "hidden").mkdir(mode=0)
    folders = [folder for folder in (tmp_path / "store").rglob("*") if folder.is_dir()]
    folders += [tmp_path / "store", tmp_path]
    for file in (tmp_path / "store").rglob("*.json"):
        file.chmod(0o444)
    for folder in folders:
        folder.chmod(0o555)
    before = sorted(tmp_path.rglob("*"))
    try:
        user = SPAWN.Process(target=use_read_only, args=(tmp_path,))
        user.start()
        finish([user])
        assert sorted(tmp_path.rglob("*")) == before
    finally:
        for folder in [*folders, tmp_path / "hidden"]:
            folder.chmod(0o755)
