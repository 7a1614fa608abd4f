"""A trainer of FSDP2 ranks, started by torchrun: sends its weights, trains, sends again.

usage: torchrun ... train.py KIND FOLDER ENGINE_URL ADDRESS [dies]

Rank 0 writes the tokens that transformers gives to FOLDER/tokens.json, by version; after each
send it waits for FOLDER/go-VERSION, which the test writes when it has looked. With `dies` it is
killed in the middle of the first send.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

import m2ncompile
from m2ncompile.errors import RunError
from tests.end_to_end.models import build, greedy


def die(done: int, legs: int) -> None:
    if dist.get_rank() == 0 and done > legs // 2:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    kind, folder, url, address = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = build(kind, seed=1)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    client = HTTPVLLMWeightSyncClient(url)
    options: dict[str, Any] = dict(address=address, client=client, timeout=60.0)

    if sys.argv[5:] == ["dies"]:
        options["timeout"] = 10.0
        m2ncompile.trainer(folder / "plan.json", model, **options).send("lost", die)

    # A worker that finds another plan: nobody starts, all say why, and a later start works.
    try:
        m2ncompile.trainer(
            folder / "plan.json", model, worker_plan=str(folder / "other.json"), **options
        )
        refused = "nothing"
    except RunError as error:
        refused = str(error)
    (folder / f"refused-{dist.get_rank()}").write_text(refused)

    host, port = address.split(":")
    options["address"] = f"{host}:{int(port) + 1}"
    trainer = m2ncompile.trainer(folder / "plan.json", model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = {}
    for version in ("1", "2", "3"):
        if version != "1":
            batch = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(7))
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = trainer.send(version)
        assert stats.version == version and stats.nbytes > 0
        whole = build(kind, seed=0)
        values = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        whole.load_state_dict(values)
        tokens[version] = greedy(whole)
        if dist.get_rank() == 0:
            (folder / "tokens.tmp").write_text(json.dumps(tokens))
            (folder / "tokens.tmp").rename(folder / "tokens.json")
        while not (folder / f"go-{version}").exists():
            time.sleep(0.05)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
