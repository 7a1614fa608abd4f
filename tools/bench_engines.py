"""vLLM's own weight transfer and this project's, inside of the same workers, side by side.

usage: python tools/bench_engines.py [--backends nccl_m2n,m2n_plan] [--device cuda] FOLDER...
       VLLM_TARGET_DEVICE=cpu python tools/bench_engines.py --backends m2n_plan --device cpu ...

Each FOLDER has a `config.json` and a `plan.json` of the `traced` resolver for it. Trainer ranks
share the first half of the GPUs, workers the second. A worker is a process with vLLM's model in
load and kernel format of its tp rank, whose groups know their sizes and can't communicate, and
vLLM's engine of the backend; trainers are vLLM's trainer engines over a `WeightSource` of random
bits. Before each sync every parameter is filled with other bits; after it every one must be, to
the bit, what `load_weights` makes of the same checkpoint in a second model.

Sync: the median after the first, from `send_weights` to its return. Held: the most that a worker
allocated over what it held before the start, without NCCL M2N's pool. Stated: what the plan says
of that, with the module that vLLM's own reload holds a second time.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing as mp
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_m2n import Shards, tensor_at  # noqa: E402

LIMIT = 240.0
COLUMNS = (
    *("model", "ranks", "backend", "GB", "start s", "sync ms", "GB/s", "x"),
    *("held GB", "stated GB", "equal"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--backends", default="nccl_m2n,m2n_plan")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--syncs", type=int, default=4)
    options = parser.parse_args()
    os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="0", VLLM_NO_USAGE_STATS="1")
    for name in ("HF_HUB_OFFLINE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    os.environ["PYTHONPATH"] = path  # inherited by the ranks
    print("| " + " | ".join(COLUMNS) + " |")
    print("| --- | --- | --- |" + " ---: |" * (len(COLUMNS) - 4) + " --- |", flush=True)
    good = True
    for folder in options.folders:
        first, names = None, options.backends.split(",")
        for backend in names:
            row = run(folder, backend, options.device, options.syncs)
            good = good and row is not None and row["equal"]
            if row is None:
                print(f"| {folder.name} | | {backend} | failed |", flush=True)
                continue
            if backend == names[0]:
                first = row["sync"]
            cells = [folder.name, row["ranks"], backend, f"{row['gigabytes']:.2f}"]
            cells += [f"{row['start']:.2f}", f"{1e3 * row['sync']:.1f}"]
            cells.append(f"{row['gigabytes'] / row['sync']:.1f}")
            cells.append(f"{first / row['sync']:.1f}" if first else "")
            cells += [f"{row['held']:.2f}", row["stated"], "yes" if row["equal"] else "NO"]
            print("| " + " | ".join(cells) + " |", flush=True)
            for name in row["wrong"]:
                print(f"  wrong: {name}")
    sys.exit(not good)


def run(folder: Path, backend: str, device: str, syncs: int) -> dict[str, Any] | None:
    """One backend's row, None where a rank failed."""
    from m2ncompile.plan_check import load

    plan = load(folder / "plan.json")
    trainers, workers = plan.inputs.trainer.ranks, plan.inputs.engine.workers
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    pipes = [context.Pipe() for _ in range(workers)]
    answer, told = context.Pipe(duplex=False)
    ready = context.Barrier(trainers, timeout=LIMIT)
    ranks: list[Any] = [
        context.Process(target=worker, args=(folder, backend, device, rank, pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    for rank in range(trainers):
        client = Client([pipe[0] for pipe in pipes] if rank == 0 else [])
        arguments = (folder, backend, device, rank, port, syncs, ready, client)
        tells = told if rank == 0 else None
        ranks.append(context.Process(target=trainer, args=(tells, *arguments)))
    for process in ranks:
        process.start()
    for end in (told, *(end for pipe in pipes for end in pipe)):
        end.close()  # so that the end of a rank is the end of its pipes
    stated = max(one.unpacked + one.reloaded + one.whole for one in plan.staging[trainers:])
    stated += max(one.module for one in plan.staging[trainers:])
    try:
        until = time.monotonic() + 2 * LIMIT
        while not answer.poll(1):
            if time.monotonic() > until or any(one.exitcode for one in ranks):
                return None
        row: dict[str, Any] | None = answer.recv()
    except EOFError:
        return None
    else:
        if row is not None:
            row["stated"] = f"{stated / 1e9:.2f}" if backend == "m2n_plan" else ""
        return row
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def index_of(device: str, rank: int, ranks: int, second: bool) -> Any:
    """The device of a rank of one side."""
    import torch

    if device == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    side = max(1, gpus // 2)
    index = (gpus - side if second else 0) + rank * side // ranks
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


# A worker.


def worker(folder: Path, backend: str, device: str, rank: int, calls: Connection) -> None:
    try:
        serve(folder, backend, device, rank, calls)
    except BaseException as error:
        traceback.print_exc()
        calls.send((False, f"worker {rank}: {type(error).__name__}: {error}"))


def serve(folder: Path, backend: str, device: str, rank: int, calls: Connection) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from m2ncompile.engine.kernels import plain_cpu
    from m2ncompile.engine.vllm_meta import stand_in_groups
    from m2ncompile.plan_check import load
    from m2ncompile.runtime import vllm_target
    from m2ncompile.runtime.vllm_plugin import register

    register()
    plan = load(folder / "plan.json")
    spec = plan.inputs.engine
    where = index_of(device, rank, spec.workers, second=True)
    if device == "cpu":  # stands in for the plan's target
        vllm_target._platform = lambda _: spec.target  # type: ignore[assignment]
        torch.accelerator.empty_cache = lambda: None  # there is none
    config = config_of(folder, spec, rank, device)
    machine = plain_cpu() if device == "cpu" else nullcontext()
    with machine, stand_in_groups(spec, rank), set_current_vllm_config(config):
        model = loaded(config, where)
        engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=backend), config, where, model
        )
        if backend == "m2n_plan":  # no group is there over which workers tell each other
            engine.peers.told = lambda error, _: error
        cuda = where.type == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        calls.send((True, None))

        def poison(_: Any) -> None:
            for parameter in model.parameters():
                memory = torch.empty(0, dtype=torch.uint8, device=where)
                memory.set_(parameter.data.untyped_storage()).fill_(0xA5)
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()

        def check(step: int) -> tuple[float, list[str]]:
            held = torch.cuda.max_memory_allocated() - before if cuda else 0
            other = loaded(config, where)
            with torch.no_grad():
                other.load_weights(
                    (tensor.name, tensor_at(plan, index, step, where))
                    for index, tensor in enumerate(plan.tensors)
                )
            wanted = dict(other.named_parameters())
            wrong = [
                name
                for name, parameter in model.named_parameters()
                if not torch.equal(bits(parameter), bits(wanted[name]))
            ]
            # The second model is part of many cycles, and must be gone before the next sync.
            del other, wanted
            config.compilation_config.static_forward_context.clear()
            gc.collect()
            torch.accelerator.empty_cache()
            return held / 1e9, wrong

        methods: dict[str, Any] = {
            "init": lambda info: engine.init_transfer_engine(engine.parse_init_info(info)),
            "start": lambda _: engine.start_weight_update(),
            "update": engine.update_weights,
            "finish": lambda _: engine.finish_weight_update(),
            "poison": poison,
            "check": check,
        }
        while True:
            name, argument = calls.recv()
            if name == "stop":
                engine.shutdown()
                return
            value = methods[name](argument)
            if cuda:
                torch.cuda.synchronize()
            calls.send((True, value))


def bits(tensor: Any) -> Any:
    import torch

    return tensor.detach().contiguous().flatten().view(torch.uint8)


def config_of(folder: Path, spec: Any, rank: int, device: str) -> Any:
    from vllm.config import (
        CacheConfig,
        CompilationConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
    )

    parallel = ParallelConfig(
        tensor_parallel_size=spec.tp,
        enable_expert_parallel=spec.ep > 1,
        distributed_executor_backend="mp" if spec.tp > 1 else None,
    )
    parallel.rank = rank
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=2048,
            enforce_eager=True,
        ),
        parallel_config=parallel,
        cache_config=CacheConfig(block_size=16),
        device_config=DeviceConfig(device=device),
        load_config=LoadConfig(load_format="dummy"),
        compilation_config=CompilationConfig(mode=0, cudagraph_mode="NONE"),
    )


def loaded(config: Any, device: Any) -> Any:
    """vLLM's model of this rank, after its own processing of dummy weights."""
    import torch
    from vllm.model_executor.model_loader import get_model_loader

    config.compilation_config.static_forward_context.clear()
    loader: Any = get_model_loader(config.load_config)
    with torch.no_grad():
        return loader.load_model(vllm_config=config, model_config=config.model_config)


# A trainer.


class Client:
    """vLLM's four calls, to all workers at once."""

    def __init__(self, workers: list[Connection]) -> None:
        self.workers = workers

    def call(self, name: str, argument: Any = None) -> list[Any]:
        for one in self.workers:
            one.send((name, argument))
        return self.answers()

    def answers(self) -> list[Any]:
        found = []
        for one in self.workers:
            if not one.poll(LIMIT):
                raise RuntimeError("a worker did not answer")
            good, value = one.recv()
            if not good:
                raise RuntimeError(value)
            found.append(value)
        return found

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self.call("init", init_info)

    def start_weight_update(self) -> None:
        self.call("start")

    def update_weights(self, update_info: Any) -> None:
        self.call("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish", weight_version)


@contextmanager
def failing_together(told: Connection | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        traceback.print_exc()
        if told is not None:
            told.send(None)
        os._exit(1)  # the others' threads may wait for ever


def trainer(told: Connection | None, *arguments: Any) -> None:
    with failing_together(told):
        row = sent(*arguments)
        if told is not None:
            told.send(row)


def sent(
    folder: Path,
    backend: str,
    device: str,
    rank: int,
    port: int,
    syncs: int,
    ready: Any,
    client: Client,
) -> dict[str, Any]:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from m2ncompile.plan_check import load
    from m2ncompile.runtime.vllm_plugin import register

    register()
    plan = load(folder / "plan.json")
    trainers, count = plan.inputs.trainer.ranks, plan.inputs.engine.workers
    where = index_of(device, rank, trainers, second=False)
    source = source_of(plan, rank, where)
    source.make(0)
    client.answers()  # their models are loaded
    ready.wait()
    began = time.perf_counter()
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info_of(backend, folder, rank, port, trainers, count, where),
        client=client,
        source=source,
    )
    start, times, held, wrong = time.perf_counter() - began, [], 0.0, []
    for step in range(syncs):
        source.make(step)
        client.call("poison")
        ready.wait()
        began = time.perf_counter()
        engine.send_weights()
        times.append(time.perf_counter() - began)
        for most, names in client.call("check", step):
            held = max(held, most)
            wrong += names
        ready.wait()
    for one in client.workers:
        one.send(("stop", None))
    engine.shutdown()
    nbytes = sum(prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata)
    return {
        "ranks": f"{trainers}+{count}",
        "gigabytes": nbytes / 1e9,
        "start": start,
        "sync": median(times[1:]),
        "held": held,
        "equal": not wrong,
        "wrong": sorted(set(wrong))[:5],
    }


def init_info_of(
    backend: str, folder: Path, rank: int, port: int, trainers: int, workers: int, device: Any
) -> Any:
    if backend == "m2n_plan":
        from m2ncompile.runtime.vllm_trainer import PlanTrainerInitInfo

        return PlanTrainerInitInfo(
            rank=rank,
            plan=str(folder / "plan.json"),
            master_address="127.0.0.1",
            master_port=port,
            transport="torch" if device.type == "cpu" else "m2n",
            device=str(device),
            timeout=LIMIT / 2,
        )
    from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo

    return M2NTrainerInitInfo(
        rank=rank,
        master_address="127.0.0.1",
        master_port=port,
        world_size=trainers + workers,
        num_trainer_ranks=trainers,
        dst_mesh_dims=(1, workers),
    )


def source_of(plan: Any, rank: int, device: Any) -> Any:
    """This rank's shards as vLLM's `WeightSource`, in memory that stays."""
    import torch
    from vllm.distributed.weight_transfer.base import ParamMeta, Shard, WeightSource

    from m2ncompile.plan_check import layouts_of

    layouts, trainers = layouts_of(plan), plan.inputs.trainer.ranks

    class Source(WeightSource):  # type: ignore[misc]
        def __init__(self) -> None:
            self.shards = Shards(plan, rank, device)

        @cached_property
        def metadata(self) -> list[Any]:
            found = []
            for tensor in plan.tensors:
                geometry, split = plan.geometries[tensor.geometry], layouts[tensor.source].split
                cut = split is not None and split[1] > 1
                dtype = getattr(torch, plan.dtypes[geometry.dtype])
                found.append(
                    ParamMeta(
                        tensor.name,
                        dtype,
                        geometry.shape,
                        owners=tuple(range(trainers)),
                        mesh_shape=(trainers,),
                        placements=(Shard(split[0]),) if cut else None,
                    )
                )
            return found

        def make(self, step: int) -> None:
            self.shards.make(step)
            if device.type == "cuda":
                torch.cuda.synchronize()

        def iter_local(self) -> Iterator[tuple[str, Any]]:
            return self.shards.items(frozenset())

    return Source()


if __name__ == "__main__":
    main()
