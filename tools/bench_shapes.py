"""Bare reshards of NCCL M2N by shape, layout and size: what stacks are shaped for.

usage: python tools/bench_shapes.py [TRAINERS] [WORKERS]

Ranks share GPUs as in `bench_m2n.py`. A row is one tensor of bfloat16, about 300 MB where no
size is named: dims, which of them each side shards, the rate of one reshard alone and of eight in
a row, and the host's microseconds for one of those.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from math import prod
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_engines import index_of  # noqa: E402
from bench_m2n import Meeting  # noqa: E402

from m2ncompile.layout import REPLICATE, Layout, Mesh  # noqa: E402
from m2ncompile.legs import Leg  # noqa: E402

MEMBERS, SHAPE = 96, (768, 2048)
LIMIT = 60.0
ALONE, TOGETHER = 7, 8
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trainers", type=int, nargs="?", default=2)
    parser.add_argument("workers", type=int, nargs="?", default=2)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--address")
    options = parser.parse_args()
    if options.rank is not None:
        measure(options.trainers, options.workers, options.rank, options.address)
        os._exit(0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", **os.environ}
    command = [sys.executable, __file__, str(options.trainers), str(options.workers)]
    print("| ranks | what | MB | alone GB/s | in a row GB/s | host us |", flush=True)
    print("| --- | --- | ---: | ---: | ---: | ---: |", flush=True)
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank), "--address", address], env=environment)
        for rank in range(options.trainers + options.workers)
    ]
    until = time.monotonic() + 2 * LIMIT
    try:
        codes = [rank.wait(max(0.0, until - time.monotonic())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    sys.exit(any(codes))


def kinds(trainers: int, workers: int) -> dict[str, Leg]:
    def side(ranks: int, start: int, dim: int | None) -> Layout:
        placements = None if dim is None else (REPLICATE, dim)
        return Layout(Mesh((1, ranks), start), placements)

    def leg(shape: tuple[int, ...], source: int | None, destination: int | None) -> Leg:
        layouts = side(trainers, 0, source), side(workers, trainers, destination)
        return Leg("bfloat16", 1, shape, *layouts)

    rows, columns = SHAPE
    members = MEMBERS
    block = members * rows * columns // (trainers * workers)
    found = {
        "members, rows, columns: rows to rows": leg((members, rows, columns), 1, 1),
        "members, rows, columns: rows to columns": leg((members, rows, columns), 1, 2),
        "members, rows, columns: rows to members": leg((members, rows, columns), 1, 0),
        "members, rows, columns: rows to whole": leg((members, rows, columns), 1, None),
        "members, rows, columns: whole to whole": leg((members, rows, columns), None, None),
        "rows, members x columns: rows to rows": leg((rows, members * columns), 0, 0),
        "rows, members x columns: rows to whole": leg((rows, members * columns), 0, None),
        "worker, trainer, block: by trainer to by worker": leg((workers, trainers, block), 1, 0),
    }
    for size in (1, 4, 16, 64, 256):
        found[f"rows to rows, {size} MiB"] = leg((size * MIB // 4096, 2048), 0, 0)
    return found


def measure(trainers: int, workers: int, rank: int, address: str) -> None:
    import torch

    from m2ncompile.runtime.deadline import Deadline
    from m2ncompile.runtime.rendezvous import meet
    from m2ncompile.runtime.transports.m2n import M2nTransport

    world, sends = trainers + workers, rank < trainers
    place = (rank, trainers) if sends else (rank - trainers, workers)
    device = index_of("cuda", *place, second=not sends)
    store = meet(address, rank, LIMIT)
    meeting, legs = Meeting(store, world), kinds(trainers, workers)
    transport = M2nTransport(store, rank, world, device)
    transport.prepare(list(legs.values()))
    transport.connect(Deadline(LIMIT))
    for number, (what, leg) in enumerate(legs.items()):
        shape = leg.sent_shape if sends else leg.received_shape
        memory = torch.randint(0, 2**15, shape, dtype=torch.int16, device=device)
        mine = memory.view(torch.bfloat16)
        send, receive = (mine, None) if sends else (None, mine)
        alone = []
        for _ in range(ALONE):
            torch.cuda.synchronize()
            meeting.wait()
            began = time.perf_counter()
            transport.run(number, send, receive, Deadline(LIMIT))
            transport.wait(Deadline(LIMIT))
            alone.append(time.perf_counter() - began)
        meeting.wait()
        began = time.perf_counter()
        for _ in range(TOGETHER):
            transport.run(number, send, receive, Deadline(LIMIT))
        host = (time.perf_counter() - began) / TOGETHER
        transport.wait(Deadline(LIMIT))
        row = (time.perf_counter() - began) / TOGETHER
        store.set(f"took/{number}/{rank}", f"{median(alone[2:])} {row} {host}")
        meeting.wait()
        if rank == 0:
            took = [store.get(f"took/{number}/{r}").decode().split() for r in range(world)]
            one, row, host = (max(map(float, values)) for values in zip(*took, strict=True))
            nbytes = 2 * prod(leg.shape)
            cells = f"{nbytes / 1e6:.1f} | {nbytes / one / 1e9:.0f} | {nbytes / row / 1e9:.0f}"
            print(f"| {trainers}+{workers} | {what} | {cells} | {1e6 * host:.0f} |", flush=True)
    meeting.wait()


if __name__ == "__main__":
    main()
