"""What only one rank gets wrong, all ranks hear of at once."""

from __future__ import annotations

import base64
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from m2ncompile.errors import RunError
from m2ncompile.runtime import api
from m2ncompile.runtime.driver import worker_init_info
from m2ncompile.runtime.rendezvous import meet
from m2ncompile.runtime.transports.m2n import decoded_id
from m2ncompile.verify.transfers import random_tensors
from tests.runs import DictTarget, GivenShards, params_of, varied_plan

#: Far more than a test takes: what waits for it fails the test.
TIMEOUT = 600.0


def errors(tmp_path: Path, **changed: tuple[int, Any]) -> list[str]:
    """What two trainers and two workers raise; `changed` is an argument of one trainer."""
    plan = varied_plan(5)
    path = tmp_path / "plan.json"
    path.write_bytes(plan.encoded)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    tensors = random_tensors(plan, 0)

    def start(rank: int) -> Any:
        if rank >= 2:
            target = DictTarget(params_of(plan, rank - 2))
            return api.worker(plan, target, address=address, rank=rank - 2, timeout=TIMEOUT)
        given: dict[str, Any] = {"plan": path, "transport": "torch"}
        given["source"] = GivenShards(plan, rank, tensors)
        given |= {name: value for name, (who, value) in changed.items() if who == rank}
        return api.trainer(address=address, rank=rank, timeout=TIMEOUT, **given)

    with ThreadPoolExecutor(4) as pool:
        starts = [pool.submit(start, rank) for rank in range(4)]
    return [str(one.exception()) for one in starts if one.exception() is not None]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plan_that_one_trainer_lacks(rank: int, tmp_path: Path) -> None:
    found = errors(tmp_path, plan=(rank, str(tmp_path / "other.json")))
    assert len(found) == 4
    for text in found:
        assert "other.json: no such file" in text
    agreed = {text for text in found if text.startswith("the run can't start; no data was moved")}
    assert len(agreed) == 1 and f"trainer {rank}: " in agreed.pop()


def test_a_source_that_is_none_on_one_trainer(tmp_path: Path) -> None:
    found = errors(tmp_path, source=(1, object()))
    assert len(found) == 4
    for text in found:
        assert "a trainer sends a torch module, or a source with" in text


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_the_plan_has_not(rank: int, tmp_path: Path) -> None:
    plan = varied_plan(5)
    target = DictTarget(params_of(plan, 0))
    with pytest.raises(RunError, match=f"worker rank {rank}: the plan has 2 worker ranks"):
        api.worker(plan, target, address="127.0.0.1:1", rank=rank)
    with pytest.raises(RunError, match=f"trainer rank {rank}: the plan has 2 trainer ranks"):
        api.trainer(plan, GivenShards(plan, 0, []), address="127.0.0.1:1", rank=rank)


def test_an_address_that_answers_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(RunError, match=f"can't reach trainer 0's control plane at {address}"):
            meet(address, 1, 0.5)


@pytest.mark.parametrize("text", ["", "x", "AAAA", base64.b64encode(bytes(127)).decode()])
def test_an_id_that_is_none(text: str) -> None:
    with pytest.raises(RunError, match="base64 of the 128 bytes") as found:
        decoded_id(text)
    assert not text or text not in str(found.value)
    assert decoded_id(base64.b64encode(bytes(range(128))).decode()) == bytes(range(128))


def test_workers_are_told_the_id_of_the_trainers() -> None:
    plan, unique = varied_plan(5), base64.b64encode(bytes(128)).decode()
    info = worker_init_info(plan, "127.0.0.1:1", "m2n", 1.0, None, unique)
    assert info["nccl_unique_id_b64"] == unique
    assert "nccl_unique_id_b64" not in worker_init_info(plan, "127.0.0.1:1", "m2n", 1.0)


def test_a_transport_that_one_rank_misspells(tmp_path: Path) -> None:
    (text,) = set(errors(tmp_path, transport=(1, "mn2")))
    assert 'trainer 1: there is no transport "mn2"; known: m2n, torch' in text
