"""Runs plans over NCCL M2N on this machine's GPUs, checks every element, prints times.

usage: python tools/bench_m2n.py [--syncs N] [--transport m2n|torch] [--results FILE] PLAN...

Trainer ranks share the first half of the GPUs, workers the second, ranks of one side share
GPUs where there are fewer (NCCL_MULTI_RANK_GPU_ENABLE=1). Weights are random bits. Workers
hold plain tensors in place of an engine's module: `direct` is written into them, `reload`
is copied into one more, as an engine's processing would. They are filled with other bits
before each sync, and compared after it.

Per plan: seconds of the start, of the median sync after the first (of the slowest rank), GB/s
of the whole model, host microseconds a transfer. Beside it, on the same ranks in the same
run, one reshard of a tensor of 2 GB, which is the peak, and an NCCL broadcast of the model's
bytes from one trainer to all. `held` is the most that a worker allocated over its
parameters, without the pool; `stated` what the plan says it needs.
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
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from m2ncompile.compile.assemble import assemble  # noqa: E402
from m2ncompile.inventory import TensorInfo  # noqa: E402
from m2ncompile.layout import REPLICATE, Layout, Mesh, local_shape  # noqa: E402
from m2ncompile.plan import Plan  # noqa: E402
from m2ncompile.plan_check import load  # noqa: E402
from m2ncompile.routes import Destination, Landing, Param, Wire  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plans", type=Path, nargs="+")
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--transport", default="m2n")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--address")
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(rank_main(options)), flush=True)
        return
    rows: list[dict[str, Any]] = []
    peaks: dict[str, float] = {}
    print("| " + " | ".join(COLUMNS) + " |")
    print("| --- | --- |" + " ---: |" * (len(COLUMNS) - 3) + " --- |")
    for path in options.plans:
        plan = load(path)
        ranks = f"{plan.inputs.trainer.ranks}+{plan.inputs.engine.workers}"
        if ranks not in peaks:
            with TemporaryDirectory() as folder:
                peak = Path(folder) / "one-tensor.plan.json"
                peak.write_bytes(one_tensor(plan).encoded)
                rows.append(run(peak, options, None))
            peaks[ranks] = rows[-1].get("rate", 0.0)
        rows.append(run(path, options, peaks[ranks]))
    if options.results:
        options.results.write_text(json.dumps(rows, indent=1))
    if not all(row["equal"] for row in rows):
        sys.exit(1)


COLUMNS = (
    *("plan", "ranks", "GB", "transfers", "start s", "sync ms", "GB/s", "of peak"),
    *("broadcast ms", "host us", "held GB", "stated GB", "equal"),
)


def one_tensor(like: Plan) -> Plan:
    """A tensor of 2 GB between the ranks of another plan, dim 0 over all on both sides."""
    trainers, workers = like.inputs.trainer.ranks, like.inputs.engine.workers
    shape = (1 << 15, 1 << 15)
    source = Layout(Mesh((1, trainers), 0), (REPLICATE, 0))
    layout = Layout(Mesh((1, workers), trainers), (REPLICATE, 0))
    local = local_shape(layout, shape)
    param = Param("w", "bfloat16", local)
    landing = Landing(param, (0,), ((prod(local), 1),))
    destination = Destination(0, Wire(0, shape, source), "direct", layout, landing, None)
    tensor = TensorInfo("w", "bfloat16", shape)
    return assemble(like.inputs, [tensor], [source], [destination])


def run(path: Path, options: argparse.Namespace, peak: float | None) -> dict[str, Any]:
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
    sync = median(max(times) for times in zip(*(r["seconds"][1:] for r in reports), strict=True))
    host = max(median(report["host"][1:]) for report in reports) / len(plan.transfers)
    stated = max(one.unpacked + one.reloaded + one.whole for one in plan.staging[trainers:])
    row = {
        "plan": path.stem,
        "ranks": f"{trainers}+{workers}",
        "gigabytes": nbytes / 1e9,
        "transfers": len(plan.transfers),
        "start": max(report["start"] for report in reports),
        "sync": sync,
        "rate": nbytes / sync / 1e9,
        "broadcast": max(report["broadcast"] for report in reports),
        "host": host,
        "stated": stated / 1e9,
        "equal": not any(report["wrong"] for report in reports),
        "memory": [report["memory"] for report in reports],
        "seconds": [report["seconds"] for report in reports],
    }
    cells = [row["plan"], row["ranks"], f"{row['gigabytes']:.2f}", row["transfers"]]
    cells += [f"{row['start']:.2f}", f"{1e3 * sync:.1f}", f"{row['rate']:.1f}"]
    cells.append("" if not peak else f"{100 * row['rate'] / peak:.0f}%")
    cells += [f"{1e3 * row['broadcast']:.1f}", f"{1e6 * host:.0f}"]
    cells += [f"{max(row['memory'][trainers:]):.2f}", f"{row['stated']:.2f}"]
    cells.append("yes" if row["equal"] else "NO")
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    for report in reports:
        if report["wrong"]:
            print(f"rank {report['rank']}: {len(report['wrong'])} wrong: {report['wrong'][:5]}")
    return row


# One rank.


def rank_main(options: argparse.Namespace) -> dict[str, Any]:
    import torch

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
        copied = broadcast(plan, transport, device, options.transport)
        trainer.close()
    else:
        target = PlainTarget(plan, device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
        began = time.perf_counter()
        worker = Worker(lambda: plan, target, control, transport, **common)
        start = time.perf_counter() - began
        held = 0
        for step in range(options.syncs):
            target.poison()
            transport.host = 0.0
            torch.cuda.synchronize()
            seconds.append(worker.receive().seconds)
            host.append(transport.host)
            held = max(held, torch.cuda.max_memory_allocated() - resident)
            wrong += target.wrong(step, rank)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        copied = broadcast(plan, transport, device, options.transport)
        worker.close()
    return {
        "rank": rank,
        "start": start,
        "seconds": seconds,
        "host": host,
        "wrong": wrong,
        "broadcast": copied,
        "memory": 0.0 if rank < trainers else held / 1e9,
    }


def broadcast(plan: Any, transport: Any, device: Any, kind: str) -> float:
    """Seconds to broadcast as many bytes as the model has, the median of three."""
    import torch

    if kind != "m2n":
        return 0.0
    total = sum(prod(plan.geometries[t.geometry].shape) * 2 for t in plan.tensors)
    buffer = torch.empty(min(total, 1 << 29), dtype=torch.uint8, device=device)
    stream, times = torch.cuda.current_stream(device), []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for start in range(0, total, buffer.numel()):
            part = buffer[: min(buffer.numel(), total - start)]
            transport._comm.broadcast(part, part, 0, stream=stream)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[1:])


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

    def poison(self) -> None:
        import torch

        for tensor in self.params.values():
            tensor.flatten().view(torch.uint8).fill_(0xA5)
        self.fallen = {}

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
