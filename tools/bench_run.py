"""What a worker does before its first sync, and in the loop of each, as Markdown tables.

usage: python tools/bench_run.py [MODEL...]

One worker rank of a model at its real dims on the meta device, trainer FSDP over 4 ranks,
workers tp 4. "load", "bind" and "agree" are this project's: the plan's file with all checks;
the module compared with it and all views made, with the digests that are agreed on; the six
phases among all ranks, a thread each over a TCP store. Beside them, in the same process, what
vLLM's backends work out at the same place: `nccl_m2n` its source and destination plan,
`sharded_rdt` its recording of `load_weights`; agreeing on them and fetching comes on top there.
"/ sum" is theirs by this project's sum. Nobody's connecting is in it.

The second table is the host's time in the loops of `Trainer.send` and `Worker.receive`, over a
transport that moves nothing and an engine that loads nothing: as many tensors, so narrow that
copying them takes no time.

Times are wall clock, the best of five.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "plans" / "models"
COMMAND = Path(sys.executable).parent / "m2ncompile"
TRAINERS, TP, RANK = 4, 4, 1
PHASES = 6
NARROW = dict(
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    head_dim=16,
    vocab_size=1024,
)
CASES = ["Llama-3.1-8B", "Qwen3-30B-A3B"]


def main() -> None:
    cases = sys.argv[1:] or CASES
    with tempfile.TemporaryDirectory() as folder:
        plans = {case: build(case, MODELS / case, Path(folder)) for case in cases}
        thin = {case: narrow(case, Path(folder)) for case in cases}
        # Only then: a build is a process of its own.
        rows = [measured(case, path, thin[case]) for case, path in plans.items()]
    print(f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}\n")
    print(
        "| model | tensors | load ms | bind ms | agree ms | sum ms | nccl_m2n ms | / sum "
        "| sharded_rdt ms | / sum |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        total = row.load + row.bind + row.agree
        print(
            f"| {row.name} | {row.tensors:,} | {ms(row.load)} | {ms(row.bind)} | {ms(row.agree)} "
            f"| {ms(total)} | {ms(row.m2n)} | {row.m2n / total:.2f} | {ms(row.rdt)} "
            f"| {row.rdt / total:.2f} |"
        )
    print("\n| model | tensors | transfers | trainer ms | us a tensor | worker ms | us a tensor |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        each = [
            f"{ms(seconds)} | {seconds / row.tensors * 1e6:.1f}"
            for seconds in (row.send, row.receive)
        ]
        print(f"| {row.name} | {row.tensors:,} | {row.transfers:,} | {each[0]} | {each[1]} |")


def narrow(case: str, folder: Path) -> Path:
    """The plan of as many layers and experts, of few elements each."""
    config = json.loads((MODELS / case / "config.json").read_text())
    model = folder / f"{case}-narrow"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({k: NARROW.get(k, v) for k, v in config.items()}))
    return build(model.name, model, folder)


def build(case: str, model: Path, folder: Path) -> Path:
    spec, path = folder / f"{case}.toml", folder / f"{case}.json"
    spec.write_text(
        f'[model]\npath = "{model}"\n'
        f'[engine]\nversion = "0.33.0"\ntarget = "cuda-sm90"\ntp = {TP}\n'
        f'[trainer]\nranks = {TRAINERS}\nlayout = "fsdp"\n'
    )
    subprocess.run(
        [COMMAND, "build", spec, "--no-cache", "-o", path], check=True, stdout=subprocess.DEVNULL
    )
    return path


def measured(case: str, path: Path, thin: Path) -> SimpleNamespace:
    from m2ncompile.engine.vllm_meta import MetaEngine
    from m2ncompile.plan_check import load

    plan = load(path)
    engine = MetaEngine(plan.inputs.engine, MODELS / case)
    row = SimpleNamespace(name=f"{case} tp {TP}", tensors=len(plan.tensors))
    row.load = best(lambda: load(path))
    row.agree = best(lambda: rounds(TRAINERS + TP))
    with engine.worker(RANK) as model:
        row.m2n = best(nccl_m2n(plan, model, engine.model_config))
    with engine.worker(RANK) as model:
        row.rdt = best(sharded_rdt(plan, model))
    with engine.worker(RANK) as model:
        row.bind = best(lambda: worker(plan, model, engine.model_config))
    plan = load(thin)
    row.transfers = len(plan.transfers)
    engine = MetaEngine(plan.inputs.engine, thin.with_suffix(""))
    with engine.worker(RANK, device="cpu") as model:
        row.receive = best(worker(plan, model, engine.model_config).receive)
    row.send = best(trainer(plan).send)
    return row


def best(action: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.01 else f"{seconds * 1e3:.0f}"


# --- vLLM's


def nccl_m2n(plan: Any, model: Any, config: Any) -> Callable[[], object]:
    """The plans that its engine makes in `init_transfer_engine`, without its agreement."""
    from vllm.distributed.weight_transfer.m2n_common import M2NWireParam
    from vllm.distributed.weight_transfer.m2n_engine import M2NWeightTransferEngine

    engine: Any = object.__new__(M2NWeightTransferEngine)
    engine.model, engine.model_config = model, config
    engine.parallel_config = SimpleNamespace(
        pipeline_parallel_size=1, world_size=TP, data_parallel_size=1
    )
    wire = tuple(
        M2NWireParam(name, dtype, shape, (TRAINERS, 1), (0, -1))
        for name, dtype, shape in tensors_of(plan)
    )
    init_info = SimpleNamespace(dst_mesh_dims=[1, TP], rank_offset=TRAINERS)

    def plans() -> None:
        engine._prepare_source_plan(wire, TRAINERS)
        engine._prepare_destination_plan(init_info)
        assert len(engine._parameter_destinations) == len(wire)

    return plans


def sharded_rdt(plan: Any, model: Any) -> Callable[[], object]:
    """Its dry run of `load_weights`."""
    import torch
    from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine

    engine: Any = object.__new__(ShardedRDTWeightTransferEngine)
    engine.model, engine.device = model, torch.device("meta")
    names, dtypes, shapes = zip(*tensors_of(plan), strict=True)
    init_info = SimpleNamespace(names=names, dtype_names=dtypes, shapes=shapes)

    def bake() -> None:
        engine._name_to_plan = {}
        engine._bake(init_info)
        assert engine._live_names <= engine._name_to_plan.keys()
        assert len(engine._live_names) == len(names)

    return bake


def tensors_of(plan: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        (
            tensor.name,
            plan.dtypes[plan.geometries[tensor.geometry].dtype],
            plan.geometries[tensor.geometry].shape,
        )
        for tensor in plan.tensors
    ]


# --- this project's


class Echo:
    """A control plane on which all say what this rank says."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def exchange(self, mine: bytes, deadline: Any, watch: Any = None) -> Any:
        from m2ncompile.runtime.control import Answers

        return Answers((mine,) * self.world)

    def leave(self, why: str, mine: bytes) -> None:
        pass

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class Still:
    """A transport that moves nothing."""

    identity = "still"

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def worker(plan: Any, model: Any, config: Any) -> Any:
    import torch

    from m2ncompile.runtime.vllm_target import VllmTarget
    from m2ncompile.runtime.worker import Worker

    class Target(VllmTarget):
        """vLLM's module to bind to; it loads nothing."""

        def begin(self, reloaded: Any, everything: bool) -> None:
            pass

        def load(self, name: str, value: torch.Tensor) -> None:
            pass

        def finish(self) -> None:
            pass

        def abandon(self) -> None:
            pass

    version = plan.inputs.engine.version
    device = next(model.parameters()).device
    target = Target(model, config, device, version, rehearsed=True)
    echo: Any = Echo(TRAINERS + RANK, TRAINERS + TP)
    still: Any = Still()
    return Worker(lambda: plan, target, echo, still, trainers=TRAINERS, timeout=60.0)


class Shards:
    """A trainer's."""

    def __init__(self, plan: Any) -> None:
        import torch

        from m2ncompile.layout import local_shape
        from m2ncompile.plan_check import layouts_of
        from m2ncompile.runtime.shards import Held

        self.held, self.tensors = [], []
        layouts = layouts_of(plan)
        for (name, dtype, shape), entry in zip(tensors_of(plan), plan.tensors, strict=True):
            layout = layouts[entry.source]
            self.held.append(Held(name, dtype, shape, layout))
            local = local_shape(layout, shape)
            one = torch.empty(local, dtype=getattr(torch, dtype))
            self.tensors.append((name, one))

    def describe(self) -> Sequence[Any]:
        return self.held

    def items(self, whole: frozenset[str]) -> Iterator[tuple[str, Any]]:
        return iter(self.tensors)


def trainer(plan: Any) -> Any:
    from m2ncompile.runtime.trainer import Trainer

    echo: Any = Echo(0, TRAINERS + TP)
    still: Any = Still()
    return Trainer(
        lambda: plan,
        Shards(plan),
        echo,
        still,
        trainers=TRAINERS,
        timeout=60.0,
    )


def rounds(world: int) -> None:
    """The phases of a start among all ranks, each with a connection of its own."""
    import torch.distributed as dist

    from m2ncompile.runtime.agree import agree
    from m2ncompile.runtime.control import StoreControl
    from m2ncompile.runtime.deadline import Deadline

    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number: int) -> None:
        store = dist.TCPStore("127.0.0.1", master.port, is_master=False)
        control = StoreControl(store, number, world)
        for phase in range(PHASES):
            agree(control, str(phase), "0" * 64, Deadline(60), trainers=TRAINERS, title="")

    with ThreadPoolExecutor(world) as threads:
        list(threads.map(rank, range(world)))


if __name__ == "__main__":
    main()
