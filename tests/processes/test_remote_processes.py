"""A remote store under real processes: many that push the same and different plans at once."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from hashlib import sha256
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import pytest

from m2ncompile.remote import Remote
from m2ncompile.sharing import push
from m2ncompile.store import ActionKey
from m2ncompile.store.records import decode_action
from tests.remotes import CREDENTIALS, Bucket, Folder, s3_client, s3_server, with_digest

SPAWN = multiprocessing.get_context("spawn")
#: From a few bytes to several parts of a read.
PLANS = [f"{n}:".encode() * (17 ** (n % 6)) for n in range(12)]
KEYS = [ActionKey.of({"spec": str(n)}) for n in range(len(PLANS))]
WRITERS, ROUNDS = 6, 3


def digest_of(data: bytes) -> str:
    return sha256(data).hexdigest()


DIGESTS = [digest_of(plan) for plan in PLANS]


def remote_at(url: str) -> Remote:
    return with_digest(url, digest_of, seconds=60)


def paths(n: int) -> tuple[str, str]:
    key, digest = KEYS[n].digest, DIGESTS[n]
    return f"objects/{digest[:2]}/{digest}.json", f"actions/{key[:2]}/{key}.json"


@pytest.fixture(params=["s3", "file"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket | Folder]:
    if request.param == "file":
        yield Folder(tmp_path / "remote")
        return
    with s3_server() as url:
        for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": url}).items():
            monkeypatch.setenv(name, value)
        yield Bucket("b" + digest_of(request.node.nodeid.encode())[:20])


def write(url: str, seed: int, barrier: Barrier) -> None:
    """Each round all writers begin with the same plan, then go their own ways."""
    remote, order = remote_at(url), list(range(len(PLANS)))
    for turn in range(ROUNDS):
        random.Random(f"{seed} {turn}").shuffle(order)
        barrier.wait(120)
        for n in [turn, *order]:
            push(remote, DIGESTS[n], PLANS[n], [KEYS[n]])


def reader(url: str) -> Callable[[str], bytes | None]:
    """Reads what lies there, without the checks of what is tested."""
    root = Path(url.removeprefix("file://"))
    if url.startswith("file://"):
        return lambda path: (root / path).read_bytes() if (root / path).exists() else None
    client, bucket = s3_client(), url.split("/")[2]

    def read(path: str) -> bytes | None:
        try:
            found: bytes = client.get_object(Bucket=bucket, Key=f"plans/{path}")["Body"].read()
        except client.exceptions.NoSuchKey:
            return None
        return found

    return read


def watch(url: str, done: Event) -> None:
    """Whatever is seen is whole, and what leads to a plan is never there without it."""
    read = reader(url)
    while not done.is_set():
        for n in range(len(PLANS)):
            at_object, at_action = paths(n)
            action, data = read(at_action), read(at_object)
            assert data is None or digest_of(data) == DIGESTS[n]
            if action is not None:
                assert decode_action(action, KEYS[n].digest).plan == DIGESTS[n]
                assert data is not None


def ended_well(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(240)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * len(processes)


def test_writers_at_once_leave_every_file_whole(place: Bucket | Folder) -> None:
    done, barrier = SPAWN.Event(), SPAWN.Barrier(WRITERS)
    watcher = SPAWN.Process(target=watch, args=(place.url, done))
    writers: list[BaseProcess] = [
        SPAWN.Process(target=write, args=(place.url, seed, barrier)) for seed in range(WRITERS)
    ]
    for process in (watcher, *writers):
        process.start()
    try:
        ended_well(writers)
    finally:
        done.set()
    ended_well([watcher])
    found = place.files()
    assert sorted(found) == sorted(path for n in range(len(PLANS)) for path in paths(n))
    for n, plan in enumerate(PLANS):
        at_object, at_action = paths(n)
        assert found[at_object] == plan
        assert decode_action(found[at_action], KEYS[n].digest).plan == DIGESTS[n]


def write_and_die(url: str, started: Event) -> None:
    remote = remote_at(url)
    started.set()
    for n in range(len(PLANS)):
        remote.put(DIGESTS[n], PLANS[n])
    os.abort()


def test_a_writer_that_is_killed_leaves_whole_files(place: Bucket | Folder) -> None:
    started = SPAWN.Event()
    for wait in (0.0, 0.05, 0.2):
        started.clear()
        writer = SPAWN.Process(target=write_and_die, args=(place.url, started))
        writer.start()
        assert started.wait(120)
        writer.join(wait)
        writer.kill()
        writer.join(60)
        found = {path: data for path, data in place.files().items() if path.endswith(".json")}
        for path, data in found.items():
            assert digest_of(data) == path.split("/")[-1].removesuffix(".json")
    write(place.url, 0, SPAWN.Barrier(1))
    assert sorted(remote_at(place.url).digests()) == sorted(DIGESTS)
