"""One rank of a run over NCCL M2N, on the GPU that is its; started by `test_m2n.py`.

usage: python -m tests.gpu.rank PLAN ADDRESS RANK SYNCS TIMEOUT [DIES_AT_LEG]

Prints one JSON object: how many syncs arrived bit for bit, and the error that ended it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from m2ncompile.errors import M2nCompileError, RunError
from m2ncompile.plan import Plan
from m2ncompile.plan_check import load
from m2ncompile.runtime import api
from m2ncompile.runtime.worker import Worker
from m2ncompile.verify.transfers import random_tensors
from tests.runs import DictTarget, GivenShards, assert_same, expect, params_of


class GpuShards(GivenShards):
    """On a GPU before the sync, so that the host runs ahead of it; every third is a copy that
    nobody else keeps, as of a source that converts."""

    held: Sequence[tuple[str, torch.Tensor]] = ()

    def hold(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.tensors = tensors
        self.held = [(name, shard.to(device)) for name, shard in super().items(frozenset())]
        torch.cuda.synchronize(device)

    def items(self, whole: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, shard) in enumerate(self.held):
            yield name, shard if number % 3 else shard.clone()


def device_of(plan: Plan, rank: int) -> torch.device:
    """Trainers have the first half of the GPUs, workers the second; one has all where it is one."""
    gpus, trainers = torch.cuda.device_count(), plan.inputs.trainer.ranks
    side = max(1, gpus // 2)
    if rank < trainers:
        return torch.device("cuda", rank * side // trainers)
    workers = plan.inputs.engine.workers
    return torch.device("cuda", gpus - side + (rank - trainers) * side // workers)


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)  # says where it hangs, if it does
    path, address, rank, syncs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    timeout, dies = float(sys.argv[5]), int(sys.argv[6]) if len(sys.argv) > 6 else None
    plan = load(Path(path))
    device = device_of(plan, rank)
    torch.cuda.set_device(device)
    trainers = plan.inputs.trainer.ranks
    target = None
    shards = GpuShards(plan, rank, [])
    done, error = 0, None
    try:
        options = dict(address=address, transport="m2n", timeout=timeout)
        options["nccl_unique_id_b64"] = os.environ.get("UNIQUE_ID")
        if rank < trainers:
            end = api.trainer(plan, shards, rank=rank, device=device, **options)
        else:
            live = params_of(plan, rank - trainers)
            target = DictTarget({name: value.to(device) for name, value in live.items()})
            target.device = device
            end = api.worker(plan, target, rank=rank - trainers, **options)

        def progress(leg: int, of: int) -> None:
            if dies == leg and done == 1:
                os._exit(9)

        for sync in range(1, syncs + 1):
            tensors = random_tensors(plan, sync % 10)
            if not isinstance(end, Worker):
                shards.hold(tensors, device)
                end.send(progress=progress)
            else:
                assert target is not None
                before = {name: value.cpu() for name, value in target.params.items()}
                params, whole = expect(plan, rank - trainers, before, tensors)
                end.receive(progress)
                assert_same({name: value.cpu() for name, value in target.params.items()}, params)
                assert_same({name: value.cpu() for name, value in target.whole.items()}, whole)
            done += 1
        end.close()
    except (RunError, M2nCompileError) as failure:
        error = str(failure)
    print(json.dumps({"done": done, "error": error}), flush=True)
    os._exit(0)  # a communicator that was aborted may keep threads


if __name__ == "__main__":
    main()
