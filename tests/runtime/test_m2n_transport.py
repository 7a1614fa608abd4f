"""What the transport over NCCL M2N does before it needs a GPU; tests/gpu has the rest."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed import HashStore

from m2ncompile.errors import RunError
from m2ncompile.legs import legs_of
from m2ncompile.runtime.transports import m2n
from m2ncompile.runtime.transports.m2n import M2nTransport
from tests.plans import make_plan


def transport(store: HashStore, unique_id: str | None = None) -> M2nTransport:
    return M2nTransport(store, 0, 4, torch.device("cpu"), unique_id=unique_id)


def test_where_rank_0_fails_nobody_waits_for_its_id() -> None:
    store = HashStore()
    with pytest.raises(RunError, match="moves GPU memory, this rank's is on cpu"):
        transport(store).prepare(legs_of(make_plan()))
    assert store.check([m2n._ID]) and store.get(m2n._ID) == b""


def test_an_id_that_was_given_is_not_sent() -> None:
    store = HashStore()
    with pytest.raises(RunError, match="moves GPU memory"):
        transport(store, "QUJD").prepare(legs_of(make_plan()))
    assert not store.check([m2n._ID])


def test_no_second_run_over_what_a_broken_one_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m2n, "_left_behind", True)
    with pytest.raises(RunError, match=r"was broken off, .* restart the process"):
        transport(HashStore()).prepare(legs_of(make_plan()))


@pytest.mark.parametrize("outside", [None, "4096:4"])
def test_a_pool_set_from_outside_stays(
    outside: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m2n, "_pool_set", None)
    monkeypatch.delenv(m2n._POOL, raising=False)
    if outside is not None:
        monkeypatch.setenv(m2n._POOL, outside)
    for value in ("2048:2", "1024:2"):
        m2n._set_pool(value)
        assert os.environ[m2n._POOL] == (outside or value)
