"""Runs plans over NCCL M2N on this machine's GPUs, checks every element, prints times.

usage: python tools/bench_m2n.py [--syncs N] [--transport m2n|torch] [--results FILE] PLAN...

Trainer ranks share the first half of the GPUs, workers the second, ranks of one side share
GPUs where there are fewer (NCCL_MULTI_RANK_GPU_ENABLE=1). Weights are random bits. Workers
hold plain tensors in place of an engine's module: `direct` is written into them, `reload`
is copied into one more, as an engine's processing would. They are filled with other bits
before each sync, which all ranks enter together, and compared after it.

Per plan: seconds of the start, of the median sync after the first (of the slowest rank), how
much of it all ranks agreed and the GPU was at it (packing, transfers, unpacking), GB/s of the
whole model, and host microseconds to issue a transfer with all that is packed and unpacked for
it. Beside it, on the same ranks in the same run: the same transfers alone, out of and into
the same memory, without agreements or packing; bare reshards of one tensor of 2 GB, which is the
peak; and an NCCL broadcast of the model's bytes from one trainer to all. `held` is the most
that a worker allocated over its parameters; `stated` what the plan says it needs. `besides` is
what else of the GPU's memory a rank took, for the pool and NCCL itself, where every rank has a
GPU of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from queue import Empty, Queue
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Thread
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
    parser.add_argument("--addresses")
    options = parser.parse_args()
    if options.rank is not None:
        for path, address in zip(options.plans, options.addresses.split(","), strict=True):
            print(json.dumps(rank_main(path, address, options)), flush=True)
        os._exit(0)  # a communicator that was aborted may keep threads
    rows: list[dict[str, Any]] = []
    groups: dict[tuple[int, int], list[Path]] = {}
    for path in options.plans:
        inputs = load(path).inputs
        groups.setdefault((inputs.trainer.ranks, inputs.engine.workers), []).append(path)
    print("| " + " | ".join(COLUMNS) + " |")
    print("| --- | --- |" + " ---: |" * (len(COLUMNS) - 3) + " --- |", flush=True)
    for paths in groups.values():
        peak = None
        with TemporaryDirectory() as folder:
            first = Path(folder) / "one-tensor.plan.json"
            first.write_bytes(one_tensor(load(paths[0])).encoded)
            for path, reports, errors in measured([first, *paths], options):
                if errors:
                    print(f"| {path.stem} | failed |", *errors, sep="\n", flush=True)
                    rows.append({"plan": path.stem, "equal": False, "errors": errors})
                else:
                    rows.append(row_of(path, reports, peak))
                peak = peak or rows[-1].get("peak")
                if options.results:
                    options.results.write_text(json.dumps(rows, indent=1))
    if not all(row["equal"] for row in rows):
        sys.exit(1)


COLUMNS = (
    *("plan", "ranks", "GB", "transfers", "start s", "sync ms", "agree ms", "GPU ms", "alone ms"),
    *("GB/s", "of peak", "broadcast ms", "host us", "held GB", "stated GB", "besides GB", "equal"),
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


def measured(
    paths: Sequence[Path], options: argparse.Namespace
) -> Iterator[tuple[Path, list[dict[str, Any]], list[str]]]:
    """What the ranks of each plan report, or why they failed; all plans are of as many ranks.

    The same processes run them one after the other, until one fails.
    """
    left = list(paths)
    while left:
        ranks = Ranks(left, options)
        try:
            for path in left.copy():
                left.remove(path)
                reports, errors = ranks.answers()
                yield path, reports, errors
                if errors:
                    break
        finally:
            ranks.end()


class Ranks:
    """The processes of all ranks, for some plans."""

    def __init__(self, paths: Sequence[Path], options: argparse.Namespace) -> None:
        inputs = load(paths[0]).inputs
        addresses = []
        for _ in paths:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                addresses.append(f"127.0.0.1:{free.getsockname()[1]}")
        command = [sys.executable, __file__, *map(str, paths), "--syncs", str(options.syncs)]
        command += ["--transport", options.transport, "--timeout", str(options.timeout)]
        environment = {
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        }
        self.limit = options.timeout * 3
        self.processes, self.lines, self.logs = [], [], []
        for rank in range(inputs.trainer.ranks + inputs.engine.workers):
            log = TemporaryFile("w+")  # noqa: SIM115
            process = subprocess.Popen(
                [*command, "--addresses", ",".join(addresses), "--rank", str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            lines: Queue[str | None] = Queue()
            Thread(target=self._read, args=(process, lines), daemon=True).start()
            self.processes.append(process)
            self.lines.append(lines)
            self.logs.append(log)

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: Queue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                lines.put(line)
        lines.put(None)

    def answers(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Of the next plan."""
        reports, errors, limit = [], [], self.limit
        for rank, lines in enumerate(self.lines):
            try:
                line = lines.get(timeout=limit)
            except Empty:
                line = None
            if line is not None:
                reports.append(json.loads(line))
                continue
            limit = 10.0  # the others have as much time to say more of it
            self.logs[rank].seek(0)
            said = self.logs[rank].read().strip()[-1500:]
            errors.append(f"rank {rank}: {self.processes[rank].poll()}: {said}")
        return reports, errors

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def row_of(path: Path, reports: list[dict[str, Any]], peak: float | None) -> dict[str, Any]:
    """Prints a plan's row, and returns all that there is of it."""
    plan = load(path)
    trainers, workers = plan.inputs.trainer.ranks, plan.inputs.engine.workers
    nbytes = sum(
        prod(plan.geometries[t.geometry].shape) * 2 for t in plan.tensors
    )  # these plans are of 16-bit models
    sync = median(max(times) for times in zip(*(r["seconds"][1:] for r in reports), strict=True))
    issuing = max(median(report["issuing"][1:]) for report in reports) / len(plan.transfers)
    gpu = max(median(report["gpu"][1:]) for report in reports)
    agreeing = max(median(report["agreeing"][1:]) for report in reports)
    alone = median(map(max, zip(*(report["alone"] for report in reports), strict=True)))
    stated = max(one.unpacked + one.reloaded + one.whole for one in plan.staging[trainers:])
    row = {
        "plan": path.stem,
        "ranks": f"{trainers}+{workers}",
        "gigabytes": nbytes / 1e9,
        "transfers": len(plan.transfers),
        "start": max(report["start"] for report in reports),
        "sync": sync,
        "agreeing": agreeing,
        "gpu": gpu,
        "alone": alone,
        "rate": nbytes / sync / 1e9,
        "peak": nbytes / alone / 1e9 if is_one_tensor(plan) else peak,
        "broadcast": max(report["broadcast"] for report in reports),
        "issuing": issuing,
        "hosts": [report["hosts"] for report in reports],
        "stated": stated / 1e9,
        "equal": not any(report["wrong"] for report in reports),
        "memory": [report["memory"] for report in reports],
        "besides": max(report["besides"] for report in reports),
        "seconds": [report["seconds"] for report in reports],
    }
    cells = [row["plan"], row["ranks"], f"{row['gigabytes']:.2f}", row["transfers"]]
    cells += [f"{row['start']:.2f}", f"{1e3 * sync:.1f}", f"{1e3 * agreeing:.1f}"]
    cells += [f"{1e3 * gpu:.1f}", f"{1e3 * alone:.1f}", f"{row['rate']:.1f}"]
    cells.append(f"{100 * row['rate'] / row['peak']:.0f}%" if row["peak"] else "")
    cells += [f"{1e3 * row['broadcast']:.1f}", f"{1e6 * issuing:.0f}"]
    cells += [f"{max(row['memory'][trainers:]):.2f}", f"{row['stated']:.2f}"]
    cells.append(f"{row['besides']:.2f}" if row["besides"] else "")
    cells.append("yes" if row["equal"] else "NO")
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    for report in reports:
        if report["wrong"]:
            print(f"rank {report['rank']}: {len(report['wrong'])} wrong: {report['wrong'][:5]}")
    return row


# One rank.


def rank_main(path: Path, address: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from m2ncompile.runtime.api import transport_of
    from m2ncompile.runtime.control import StoreControl
    from m2ncompile.runtime.rendezvous import meet
    from m2ncompile.runtime.trainer import Trainer
    from m2ncompile.runtime.worker import Worker

    plan = load(path)
    trainers, workers = plan.inputs.trainer.ranks, plan.inputs.engine.workers
    rank, gpus = options.rank, torch.cuda.device_count()
    side = max(1, gpus // 2)
    index = rank * side // trainers
    if rank >= trainers:
        index = gpus - side + (rank - trainers) * side // workers
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    gc.collect()
    torch.cuda.empty_cache()  # of the plan before
    store = meet(address, rank, options.timeout)
    control = StoreControl(store, rank, trainers + workers)
    transport = transport_of(options.transport, store, rank, trainers + workers, device)
    meeting = Meeting(store, trainers + workers)
    common: dict[str, Any] = dict(trainers=trainers, timeout=options.timeout)
    stats, clock, wrong = [], Clock(transport, device), []
    if rank < trainers:
        shards = Shards(plan, rank, device)
        shards.make(0)
        torch.cuda.empty_cache()
        free, held_before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        began = time.perf_counter()
        trainer = Trainer(lambda: plan, shards, control, transport, device=device, **common)
        start = time.perf_counter() - began
        clock.watch(trainer)
        for step in range(options.syncs):
            shards.make(step)
            torch.cuda.synchronize()
            meeting.wait()
            stats.append(trainer.send())
        bare = alone(transport, meeting, options.timeout, clock.moved)
        besides = free - torch.cuda.mem_get_info()[0]
        besides -= torch.cuda.memory_reserved() - held_before
        copied = broadcast(plan, transport, device, options.transport)
        meeting.wait()
        trainer.close()
    else:
        target = PlainTarget(plan, device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        free, held_before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        began = time.perf_counter()
        worker = Worker(lambda: plan, target, control, transport, **common)
        start = time.perf_counter() - began
        held = 0
        clock.watch(worker)
        for step in range(options.syncs):
            target.poison()
            torch.cuda.synchronize()
            meeting.wait()
            stats.append(worker.receive())
            held = max(held, torch.cuda.max_memory_allocated() - resident)
            wrong += target.wrong(step, rank)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        bare = alone(transport, meeting, options.timeout, clock.moved)
        besides = free - torch.cuda.mem_get_info()[0]
        besides -= torch.cuda.memory_reserved() - held_before
        copied = broadcast(plan, transport, device, options.transport)
        meeting.wait()
        worker.close()
    return {
        "rank": rank,
        "start": start,
        "seconds": [one.seconds for one in stats],
        "agreeing": [one.agreeing for one in stats],
        "issuing": clock.issuing,
        "hosts": clock.hosts,
        "gpu": clock.gpu,
        "alone": bare,
        "besides": besides / 1e9 if trainers + workers <= gpus else 0.0,
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


class Meeting:
    """Of all ranks, so that what one does before a sync is not counted as another's sync."""

    def __init__(self, store: Any, world: int) -> None:
        self.store, self.world, self.number = store, world, 0

    def wait(self) -> None:
        self.number += 1
        key = f"meeting/{self.number}"
        if self.store.add(key, 1) == self.world:
            self.store.set(f"{key}/all", b"")
        self.store.wait([f"{key}/all"])


class Clock:
    """Of each sync, in seconds: how long the host issues it, the transfers of that, and the GPU."""

    def __init__(self, transport: Any, device: Any) -> None:
        self.transport, self.device = transport, device
        self.issuing: list[float] = []
        self.hosts: list[float] = []
        self.gpu: list[float] = []
        #: What the last sync gave the transport.
        self.moved: list[tuple[int, Any, Any]] = []

    def watch(self, end: Any) -> None:
        import torch

        run, move, wait = end._run, self.transport.run, self.transport.wait
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)

        def started(*arguments: Any) -> Any:
            self.began, self.host = time.perf_counter(), 0.0
            self.moved.clear()
            first.record(torch.cuda.current_stream(self.device))
            return run(*arguments)

        def moved(leg: int, send: Any, receive: Any, deadline: Any) -> None:
            self.moved.append((leg, send, receive))
            began = time.perf_counter()
            move(leg, send, receive, deadline)
            self.host += time.perf_counter() - began

        def waited(deadline: Any) -> None:
            self.issuing.append(time.perf_counter() - self.began)
            self.hosts.append(self.host)
            wait(deadline)  # the current stream waits for all others
            last.record(torch.cuda.current_stream(self.device))
            last.synchronize()
            self.gpu.append(first.elapsed_time(last) / 1e3)

        end._run, self.transport.run, self.transport.wait = started, moved, waited


def is_one_tensor(plan: Any) -> bool:
    return len(plan.tensors) == 1


def alone(
    transport: Any, meeting: Meeting, timeout: float, moved: Sequence[tuple[int, Any, Any]]
) -> list[float]:
    """Seconds of a sync's transfers, without a run around them."""
    from m2ncompile.runtime.deadline import Deadline

    kind, times = type(transport), []
    for _ in range(8):
        meeting.wait()
        began, deadline = time.perf_counter(), Deadline(timeout)
        for leg, send, receive in moved:
            kind.run(transport, leg, send, receive, deadline)
        kind.wait(transport, deadline)
        times.append(time.perf_counter() - began)
    return times[3:]


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

    def check(self, plan: Any) -> None:
        pass

    def held(self, name: str) -> Any:
        return self.params.get(name)

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
                expected = expected.to(param.dtype).view(sizes)
            if not torch.equal(
                got.contiguous().view(torch.uint8).flatten(), expected.view(torch.uint8).flatten()
            ):
                found.append(plan.tensors[d.tensor].name)
        return found


if __name__ == "__main__":
    main()
