"""Runs plans over NCCL M2N on this machine's GPUs, checks every element, prints times.

usage: python tools/bench_m2n.py [--syncs N] [--transport m2n|torch] [--results FILE] PLAN...

Trainer ranks share the first half of the GPUs, workers the second, ranks of one side share
GPUs where there are fewer (NCCL_MULTI_RANK_GPU_ENABLE=1). Weights are random bits. Workers
hold plain tensors in place of an engine's module: `direct` is written into them, `reload`
is copied into one more, as an engine's processing would. Per plan: seconds of the start,
of the best sync, GB/s of the whole model, host microseconds a transfer.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plans", type=Path, nargs="+")
    parser.add_argument("--syncs", type=int, default=4)
    parser.add_argument("--transport", default="m2n")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--address")
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(rank_main(options)), flush=True)
        return
    rows = []
    print("| plan | ranks | GB | transfers | start s | sync ms | GB/s | host us | equal |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for plan in options.plans:
        rows.append(run(plan, options))
    if options.results:
        options.results.write_text(json.dumps(rows, indent=1))
    if not all(row["equal"] for row in rows):
        sys.exit(1)


def run(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    from m2ncompile.plan_check import load

    plan = load(path)
    trainers, workers = plan.inputs.trainer.ranks, plan.inputs.engine.workers
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, str(path), "--syncs", str(options.syncs)]
    command += ["--transport", options.transport, "--timeout", str(options.timeout)]
    environment = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    ranks = [
        subprocess.Popen(
            [*command, "--address", address, "--rank", str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(trainers + workers)
    ]
    reports, errors = [], []
    for rank, process in enumerate(ranks):
        try:
            out, err = process.communicate(timeout=options.timeout * 3)
        except subprocess.TimeoutExpired:
            for one in ranks:
                one.kill()
            out, err = process.communicate()
        if process.returncode:
            errors.append(f"rank {rank}: {process.returncode}: {err.strip()[-1500:]}")
        else:
            reports.append(json.loads(out.strip().splitlines()[-1]))
    if errors:
        print(f"| {path.stem} | failed |")
        print("\n".join(errors), flush=True)
        return {"plan": path.stem, "equal": False, "errors": errors}
    nbytes = sum(
        prod(plan.geometries[t.geometry].shape) * 2 for t in plan.tensors
    )  # these plans are of 16-bit models
    sync = max(min(report["seconds"][1:] or report["seconds"]) for report in reports)
    host = max(min(report["host"]) for report in reports) / len(plan.transfers)
    row = {
        "plan": path.stem,
        "ranks": f"{trainers}+{workers}",
        "gigabytes": nbytes / 1e9,
        "transfers": len(plan.transfers),
        "start": max(report["start"] for report in reports),
        "sync": sync,
        "host": host,
        "equal": not any(report["wrong"] for report in reports),
        "memory": [report["memory"] for report in reports],
        "seconds": [report["seconds"] for report in reports],
    }
    print(
        f"| {row['plan']} | {row['ranks']} | {row['gigabytes']:.2f} | {row['transfers']} "
        f"| {row['start']:.2f} | {1e3 * sync:.1f} | {nbytes / sync / 1e9:.1f} "
        f"| {1e6 * host:.0f} | {'yes' if row['equal'] else 'NO'} |",
        flush=True,
    )
    for report in reports:
        if report["wrong"]:
            print(f"rank {report['rank']}: {len(report['wrong'])} wrong: {report['wrong'][:5]}")
    return row


# One rank.


def rank_main(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from m2ncompile.plan_check import load
    from m2ncompile.runtime.api import transport_of
    from m2ncompile.runtime.control import StoreControl
    from m2ncompile.runtime.rendezvous import meet
    from m2ncompile.runtime.trainer import Trainer
    from m2ncompile.runtime.worker import Worker

    plan = load(options.plans[0])
    trainers, workers = plan.inputs.trainer.ranks, plan.inputs.engine.workers
    rank, gpus = options.rank, torch.cuda.device_count()
    side = max(1, gpus // 2)
    index = rank * side // trainers
    if rank >= trainers:
        index = gpus - side + (rank - trainers) * side // workers
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    store = meet(options.address, rank, options.timeout)
    control = StoreControl(store, rank, trainers + workers)
    transport = timed(transport_of(options.transport, store, rank, trainers + workers, device))
    common: dict[str, Any] = dict(trainers=trainers, timeout=options.timeout)
    seconds, host, wrong = [], [], []
    if rank < trainers:
        shards = Shards(plan, rank, device)
        shards.make(0)
        began = time.perf_counter()
        trainer = Trainer(lambda: plan, shards, control, transport, device=device, **common)
        start = time.perf_counter() - began
        for step in range(options.syncs):
            shards.make(step)
            torch.cuda.synchronize()
            transport.host = 0.0
            seconds.append(trainer.send().seconds)
            host.append(transport.host)
        trainer.close()
    else:
        target = PlainTarget(plan, device)
        began = time.perf_counter()
        worker = Worker(lambda: plan, target, control, transport, **common)
        start = time.perf_counter() - began
        for step in range(options.syncs):
            transport.host = 0.0
            seconds.append(worker.receive().seconds)
            host.append(transport.host)
            if step in (0, options.syncs - 1):
                wrong += target.wrong(step, rank)
        worker.close()
    return {
        "rank": rank,
        "start": start,
        "seconds": seconds,
        "host": host,
        "wrong": wrong,
        "memory": torch.cuda.max_memory_allocated() / 1e9,
    }


def timed(transport: Any) -> Any:
    """Counts the host's seconds inside of `run`."""
    run = transport.run

    def counted(*arguments: Any) -> None:
        began = time.perf_counter()
        run(*arguments)
        transport.host += time.perf_counter() - began

    transport.run, transport.host = counted, 0.0
    return transport


def tensor_at(plan: Any, index: int, step: int, device: Any) -> Any:
    """The global tensor `index` of a step: random bits, the same on every GPU."""
    import torch

    geometry = plan.geometries[plan.tensors[index].geometry]
    dtype = getattr(torch, plan.dtypes[geometry.dtype])
    count = prod(geometry.shape) * dtype.itemsize
    generator = torch.Generator(device).manual_seed(1000 * index + step)
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device, generator=generator)
    return bits.view(dtype).view(geometry.shape)


class Shards:
    """This rank's shards, in memory that stays."""

    def __init__(self, plan: Any, rank: int, device: Any) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        self.held: dict[int, Any] = {}

    def make(self, step: int) -> None:
        from m2ncompile.layout import shard_box
        from m2ncompile.plan_check import layouts_of

        layouts = layouts_of(self.plan)
        for index, tensor in enumerate(self.plan.tensors):
            whole = tensor_at(self.plan, index, step, self.device)
            box = shard_box(layouts[tensor.source], tuple(whole.shape), self.rank)
            assert box is not None
            piece = whole[tuple(slice(a, b) for a, b in box)].contiguous()
            if index in self.held:
                self.held[index].copy_(piece)
            else:
                self.held[index] = piece.clone()

    def describe(self) -> Sequence[Any]:
        from m2ncompile.runtime.shards import held_as_planned

        return held_as_planned(self.plan)

    def items(self, whole: frozenset[str]) -> Iterator[tuple[str, Any]]:
        for index, tensor in enumerate(self.plan.tensors):
            yield tensor.name, self.held[index]


class PlainTarget:
    """Every parameter of the plan as a tensor of its own; stands for an engine's module."""

    def __init__(self, plan: Any, device: Any) -> None:
        import torch

        self.plan, self.device, self.version = plan, device, plan.inputs.engine.version
        self.platform = None
        self.params = {}
        for param in plan.params:
            geometry = plan.geometries[param.geometry]
            dtype = getattr(torch, plan.dtypes[geometry.dtype])
            self.params[param.name] = torch.zeros(geometry.shape, dtype=dtype, device=device)
        self.fallen: dict[str, Any] = {}

    def live(self) -> Mapping[str, Any]:
        return self.params

    def load_form(self, name: str) -> Any:
        from m2ncompile.runtime.bind_worker import form_of

        return form_of(self.params[name]) if name in self.params else None

    def kept(self, name: str, loaded: Collection[str]) -> bool:
        return False

    def begin(self, reloaded: Collection[str], everything: bool) -> None:
        pass

    def load(self, name: str, value: Any) -> None:
        self.params[name].copy_(value)

    def load_weights(self, tensors: Iterator[tuple[str, Any]]) -> None:
        self.fallen = {name: tensor.clone() for name, tensor in tensors}

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self.device)

    def wrong(self, step: int, rank: int) -> list[str]:
        """The tensors that are not where the plan puts them."""
        import torch

        from m2ncompile.layout import shard_box
        from m2ncompile.plan_check import layouts_of

        plan, layouts = self.plan, layouts_of(self.plan)
        found: list[str] = []
        for d in plan.destinations:
            layout, wire = layouts[d.layout], plan.wires[d.wire]
            if rank not in layout.mesh.ranks:
                continue
            tensor = tensor_at(plan, d.tensor, step, self.device)
            shape = plan.geometries[wire.geometry].shape
            box = shard_box(layout, shape, rank)
            assert box is not None
            moved = tensor.flatten()[wire.base : wire.base + prod(shape)].view(shape)
            expected = moved[tuple(slice(a, b) for a, b in box)].contiguous()
            if d.landing is None:
                got = self.fallen[plan.tensors[d.tensor].name]
            else:
                landing = plan.landings[d.landing]
                sizes, strides = zip(*landing.dims, strict=True)
                param = self.params[plan.params[landing.param].name]
                offset = d.offset_at(rank - layout.mesh.start)
                got = param.as_strided(sizes, strides, offset)
            if not torch.equal(
                got.contiguous().view(torch.uint8).flatten(), expected.view(torch.uint8).flatten()
            ):
                found.append(plan.tensors[d.tensor].name)
        return found


if __name__ == "__main__":
    main()
