"""Runs over real NCCL M2N, on this machine's GPUs; ranks share a GPU where there are fewer."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from m2ncompile.compile.assemble import assemble
from m2ncompile.compile.coalesce import coalesce
from m2ncompile.compile.rows import by_rows
from m2ncompile.compile.split import split
from m2ncompile.inventory import TensorInfo
from m2ncompile.layout import REPLICATE, Layout, Limits, Mesh
from m2ncompile.plan import Plan
from m2ncompile.routes import Destination, Landing, Param, Wire
from tests.plans import make_inputs
from tests.runs import experts_plan, varied_plan

ROOT = Path(__file__).parents[2]
LIMIT = 120.0


def missing() -> str | None:
    if not torch.cuda.is_available():
        return "no GPU here"
    if importlib.util.find_spec("nccl") is None or importlib.util.find_spec("nccl.m2n") is None:
        return "NCCL M2N is not installed: pip install 'm2ncompile[nccl]'"
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def run_ranks(
    folder: Path,
    plan: Plan,
    syncs: int,
    timeout: float = 60.0,
    dies: tuple[int, int] | None = None,
    unique: Sequence[str] | None = None,
) -> list[dict[str, object] | None]:
    """What every rank said, None of one that died. `dies` is a rank, and its leg in sync 2."""
    path = folder / "plan.json"
    path.write_bytes(plan.encoded)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = []
    for rank in range(plan.inputs.trainer.ranks + plan.inputs.engine.workers):
        command = [sys.executable, "-m", "tests.gpu.rank", str(path), address, str(rank)]
        command += [str(syncs), str(timeout)]
        if dies is not None and dies[0] == rank:
            command.append(str(dies[1]))
        environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", **os.environ}
        if unique is not None:
            environment["UNIQUE_ID"] = unique[rank]
        ranks.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    said: list[dict[str, object] | None] = []
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=LIMIT)
            if dies is not None and dies[0] == rank:
                assert process.returncode == 9, err.decode()[-2000:]
                said.append(None)
            else:
                assert process.returncode == 0, f"rank {rank}: {err.decode()[-3000:]}"
                said.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
    return said


@pytest.mark.parametrize(
    ("seed", "trainers", "workers", "stacked"),
    [(1, 1, 1, True), (2, 2, 2, False), (3, 2, 2, True), (4, 4, 2, True), (5, 4, 4, True)],
)
def test_every_kind_of_transfer(
    seed: int, trainers: int, workers: int, stacked: bool, tmp_path: Path
) -> None:
    plan = varied_plan(seed, trainers, workers, tensors=16, stacked=stacked)
    said = run_ranks(tmp_path, plan, syncs=3)
    assert said == [{"done": 3, "error": None}] * (trainers + workers)


def wide_plan(layers: int = 24, stage_bytes: int = 1 << 24) -> Plan:
    """Stacks of 8 MB between large tensors: both packing buffers are in use at once, again and
    again, and long after another was sent."""
    source = Layout(Mesh((2, 1), 0), (0, REPLICATE))
    workers = Mesh((1, 2), 2)
    infos, destinations = [], []
    for layer in range(layers):
        for name in "abcd":
            infos.append(TensorInfo(f"layers.{layer}.{name}.weight", "bfloat16", (1024, 1024)))
        if layer % 3 == 0:
            infos.append(TensorInfo(f"layers.{layer}.wide.weight", "bfloat16", (2048, 6144)))
    for index, info in enumerate(infos):
        rows, columns = info.shape
        # What is large can be cut along the dim that neither side shards.
        dim = 0 if "wide" in info.name else 1
        local = (rows // 2, columns) if dim == 0 else (rows, columns // 2)
        layout = Layout(workers, (REPLICATE, dim))
        landing = Landing(Param(info.name, info.dtype, local), (0,), ((rows * columns // 2, 1),))
        wire = Wire(0, info.shape, source)
        destinations.append(Destination(index, wire, "direct", layout, landing, None))
    limits = Limits(stack_bytes=1 << 22, stage_bytes=stage_bytes)
    inputs = msgspec.structs.replace(make_inputs(trainers=2, tp=2), limits=limits)
    groups = coalesce(infos, destinations, limits)
    transfers = by_rows(destinations, split(infos, destinations, groups, limits))
    return assemble(inputs, infos, [source] * len(infos), destinations, transfers)


def test_no_buffer_is_used_while_it_is_in_use(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, wide_plan(), syncs=4) == [{"done": 4, "error": None}] * 4


def test_large_tensors_in_parts_and_experts_where_they_lie(tmp_path: Path) -> None:
    plan = wide_plan(6, stage_bytes=1 << 23)
    assert any(transfer.part is not None for transfer in plan.transfers)
    experts = experts_plan(12), experts_plan(12, "direct", 200), experts_plan(12, rows=True)
    for number, one in enumerate((plan, *experts)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert run_ranks(folder, one, syncs=3) == [{"done": 3, "error": None}] * 4


def test_an_id_that_was_shared_beforehand(tmp_path: Path) -> None:
    plan = varied_plan(2)
    unique = make_unique_id()
    assert run_ranks(tmp_path, plan, syncs=2, unique=[unique] * 4) == (
        [{"done": 2, "error": None}] * 4
    )


def test_ranks_with_other_ids_do_not_connect(tmp_path: Path) -> None:
    unique = [make_unique_id(), make_unique_id()]
    said = run_ranks(tmp_path, varied_plan(2), syncs=2, unique=[unique[0]] * 3 + unique[1:])
    (error,) = {str(one["error"]) for one in said if one is not None}
    assert "worker 1: its data plane is" in error and "no data was moved" in error


def make_unique_id() -> str:
    import nccl.core as nccl

    return base64.b64encode(bytes(nccl.get_unique_id().as_bytes)).decode()


@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_that_dies_in_the_middle_of_a_sync(rank: int, tmp_path: Path) -> None:
    """A trainer, a worker: the others raise the same, inside of the deadline."""
    said = run_ranks(tmp_path, wide_plan(), syncs=3, timeout=30.0, dies=(rank, 10))
    left = [one for one in said if one is not None]
    assert len(left) == 3
    assert {one["done"] for one in left} == {1}
    (error,) = {str(one["error"]) for one in left}
    name = f"trainer {rank}" if rank < 2 else f"worker {rank - 2}"
    assert f"{name}: it did not answer within" in error
