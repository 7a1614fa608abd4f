"""Trainers for vLLM's own `nccl_m2n` workers: what those workers make of what they are told."""

from __future__ import annotations

import importlib.util
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import m2ncompile
from m2ncompile.errors import M2nCompileError, PlanError
from m2ncompile.plan import Plan
from m2ncompile.plan_check import load
from m2ncompile.runtime.stock import stock_init_info
from m2ncompile.spec import ResolverSpec
from m2ncompile.verify.transfers import random_tensors
from tests.conftest import ROOT
from tests.plans import make_inputs, make_plan
from tests.runs import GivenShards

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def stock() -> Plan:
    return load(ROOT / "plans" / "llama-3.1-8b-fsdp8-tp4-stock.plan.json")


def test_workers_accept_the_init_info(stock: Plan) -> None:
    """vLLM's own parser: strict records, the mesh, and the digest worked out again."""
    from vllm.distributed.weight_transfer.m2n_common import M2NMesh, complete_plan_digest
    from vllm.distributed.weight_transfer.m2n_engine import M2NWeightTransferInitInfo

    info = M2NWeightTransferInitInfo(**stock_init_info(stock, "127.0.0.1", 29600))
    params = info.parse_wire_params()
    assert [p.name for p in params] == [
        stock.tensors[stock.destinations[t.destinations[0]].tensor].name for t in stock.transfers
    ]
    placements = [
        stock.layouts[stock.destinations[t.destinations[0]].layout].placements
        for t in stock.transfers
    ]
    mesh = M2NMesh(tuple(info.dst_mesh_dims), info.rank_offset)
    assert complete_plan_digest(info.source_digest, mesh, placements) == stock.digests.complete


def test_a_plan_of_the_other_resolver_is_refused() -> None:
    with pytest.raises(PlanError, match=r'resolver\.name = "vllm"'):
        stock_init_info(make_plan(), "127.0.0.1", 29600)


def test_a_worker_that_can_not_start_is_told_before_nccl() -> None:
    """vLLM's real worker, where NCCL M2N is not installed; both sides raise its words."""
    if importlib.util.find_spec("nccl") is not None:
        pytest.skip("NCCL M2N is installed here")
    from vllm.distributed.weight_transfer.m2n_engine import M2NWeightTransferEngine

    inputs = make_inputs(trainers=1, tp=1)
    plan = make_plan(inputs=replace(inputs, resolver=ResolverSpec(name="vllm")))
    parallel = SimpleNamespace(rank=0, world_size=1, data_parallel_index=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    engine = M2NWeightTransferEngine(None, config, torch.device("cpu"), torch.nn.Module())
    told: list[str] = []

    class Client:
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            try:
                engine.init_transfer_engine(engine.parse_init_info(init_info))
            except RuntimeError as error:
                told.append(str(error))
                raise

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with ThreadPoolExecutor(1) as pool, pytest.raises(M2nCompileError) as caught:
        shards = GivenShards(plan, 0, random_tensors(plan, 0))
        pool.submit(
            m2ncompile.trainer,
            plan,
            shards,
            address=address,
            rank=0,
            client=Client(),  # type: ignore[arg-type]
            stock=True,
            timeout=20.0,
        ).result(60)
    assert "the run can't start; no data was moved" in str(caught.value)
    assert "rank 1: ImportError: The nccl_m2n weight transfer backend" in str(caught.value)
    assert told and told[0] in str(caught.value)
