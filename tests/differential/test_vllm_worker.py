"""The backend `m2n_plan` as vLLM's worker calls it, on one of vLLM's real models."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from m2ncompile.compile.pipeline import build_plan
from m2ncompile.engine.processing import load
from m2ncompile.engine.vllm_meta import MetaEngine
from m2ncompile.errors import RunError
from m2ncompile.plan import Plan
from m2ncompile.runtime import api
from m2ncompile.runtime.driver import worker_init_info
from m2ncompile.spec import EngineSpec, ModelSpec, Spec, TrainerSpec
from m2ncompile.verify.reduce import reduced_config
from m2ncompile.verify.transfers import bits, random_tensors
from tests.runs import GivenShards

pytestmark = pytest.mark.engine


MODELS = Path(__file__).parents[2] / "plans" / "models"


def reduced(name: str, folder: Path, tp: int = 1, ep: int = 1) -> Path:
    config = json.loads((MODELS / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(reduced_config(config, tp, ep, 1, 1)))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reduced("Qwen3-0.6B", tmp_path_factory.mktemp("model"), tp=2)


def planned(model: Path, tp: int) -> Plan:
    return build_plan(
        Spec(
            model=ModelSpec(path=str(model), name="tiny"),
            engine=EngineSpec(version="0.33.0", target="cuda-sm90", tp=tp),
            trainer=TrainerSpec(ranks=1, layout="ddp"),
        )
    )


@pytest.fixture(scope="module")
def plan(model: Path) -> Plan:
    return planned(model, 1)


@pytest.fixture(scope="module")
def split_plan(model: Path) -> Plan:
    return planned(model, 2)


def parallel_config(rank: int = 0, world_size: int = 1, **more: Any) -> SimpleNamespace:
    """What the backend reads of vLLM's."""
    given: dict[str, Any] = dict(
        rank=rank,
        world_size=world_size,
        data_parallel_index=0,
        distributed_executor_backend="mp",
        enable_eplb=False,
    )
    return SimpleNamespace(**given | more)


class Peer:
    """vLLM's worker, and a trainer beside it in a thread of its own."""

    def __init__(self, engine: Any, plan: Plan) -> None:
        self.engine, self.plan = engine, plan
        self.shards = GivenShards(plan, 0, random_tensors(plan, 1))
        self.pool = ThreadPoolExecutor(1)

    def start(self, **changed: Any) -> api.Trainer:  # type: ignore[name-defined]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        info = worker_init_info(self.plan, address, "torch", 20.0) | changed
        trainer = self.pool.submit(
            api.trainer, self.plan, self.shards, address=address, rank=0, timeout=info["timeout"]
        )
        try:
            self.engine.init_transfer_engine(self.engine.parse_init_info(info))
        except RunError:
            with pytest.raises(RunError):
                trainer.result()
            raise
        return trainer.result()

    def sync(self, trainer: Any, step: int) -> None:
        self.shards.tensors = random_tensors(self.plan, step)
        sent = self.pool.submit(trainer.send, str(step))
        self.engine.start_weight_update()
        self.engine.update_weights({})
        self.engine.finish_weight_update()
        sent.result()


def test_init_info_takes_all_that_workers_are_told(plan: Plan) -> None:
    from m2ncompile.runtime.vllm_worker import PlanInitInfo

    info = PlanInitInfo(**worker_init_info(plan, "127.0.0.1:1", "m2n", 1.0, "there", "secret"))
    assert (info.plan, info.nccl_unique_id_b64) == ("there", "secret")
    assert "secret" not in repr(info)


@pytest.fixture
def peer(plan: Plan, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Peer]]:
    from m2ncompile.runtime import vllm_target
    from m2ncompile.runtime.vllm_worker import PlanWeightTransferEngine

    # This machine stands in for one with such a GPU, where vLLM leaves loaded weights as they are.
    monkeypatch.setattr(vllm_target, "_platform", lambda device: "cuda-sm90")
    meta = MetaEngine(plan.inputs.engine, model)
    made = []
    with meta.worker(0, device="cpu") as module:
        load(module, zip([t.name for t in plan.tensors], random_tensors(plan, 0), strict=True))

        def make(**parallel: Any) -> Peer:
            config = SimpleNamespace(
                parallel_config=parallel_config(**parallel), model_config=meta.model_config
            )
            engine = PlanWeightTransferEngine(None, config, torch.device("cpu"), module)
            made.append(engine)
            return Peer(engine, plan)

        yield make
        for engine in made:
            engine.shutdown()


def expected(plan: Plan, model: Path, step: int) -> dict[str, torch.Tensor]:
    with MetaEngine(plan.inputs.engine, model).worker(0, device="cpu") as module:
        load(module, zip([t.name for t in plan.tensors], random_tensors(plan, step), strict=True))
        return {name: bits(p).clone() for name, p in module.named_parameters()}


def test_updates_arrive_where_the_loaders_put_them(
    peer: Callable[..., Peer], plan: Plan, model: Path
) -> None:
    one = peer()
    addresses = {n: p.data_ptr() for n, p in one.engine.model.named_parameters()}
    trainer = one.start()
    for step in (1, 2):
        one.sync(trainer, step)
        wanted = expected(plan, model, step)
        live = dict(one.engine.model.named_parameters())
        assert live.keys() == wanted.keys()
        assert all(torch.equal(bits(live[name]), wanted[name]) for name in live)
        assert {n: p.data_ptr() for n, p in live.items()} == addresses
        assert one.engine.worker.version == str(step)
    trainer.close()


def test_calls_out_of_order(peer: Callable[..., Peer]) -> None:
    one = peer()
    for _ in range(2):  # whichever failed leaves nothing behind
        one.engine.start_weight_update()
        with pytest.raises(RunError, match="no plan is bound yet"):
            one.engine.update_weights({})
        one.engine.finish_weight_update()
    trainer = one.start()

    def start() -> None:
        info = worker_init_info(one.plan, "127.0.0.1:1", "torch", 1.0)
        one.engine.init_transfer_engine(one.engine.parse_init_info(info))

    with pytest.raises(RunError, match="bound already; call shutdown_weight_transfer_engine first"):
        start()
    with pytest.raises(RunError, match="update_weights came without start_weight_update"):
        one.engine.update_weights({})
    one.engine.finish_weight_update()  # none is open: nothing to end
    one.engine.start_weight_update()
    with pytest.raises(RunError, match="bound already; call finish_weight_update, then shutdown"):
        start()

    sent = one.pool.submit(trainer.send)
    one.engine.update_weights({})
    sent.result()
    with pytest.raises(RunError, match="came twice: version 1 is complete"):
        one.engine.update_weights({})
    one.engine.finish_weight_update()
    one.sync(trainer, 3)
    assert one.engine.worker.version == "3"


def test_a_failed_update_and_a_new_start(
    peer: Callable[..., Peer], plan: Plan, model: Path
) -> None:
    one = peer()
    trainer = one.start()
    one.engine.start_weight_update()
    sent = one.pool.submit(trainer.send, "bad")
    one.shards.tensors = random_tensors(plan, 2)[:-1]  # the source yields one tensor less
    with pytest.raises(RunError, match='the sync of version "bad" failed'):
        one.engine.update_weights({})
    with pytest.raises(RunError):
        sent.result()
    one.engine.finish_weight_update()  # ends vLLM's update; it raised already
    one.engine.start_weight_update()
    with pytest.raises(RunError, match=r"no update is possible.*partly those of version bad"):
        one.engine.update_weights({})
    one.engine.finish_weight_update()
    # Every parameter is there again, and the next start makes them whole.
    assert not any(p.is_meta for p in one.engine.model.parameters())
    one.sync(one.start(), 4)
    live = dict(one.engine.model.named_parameters())
    wanted = expected(plan, model, 4)
    assert all(torch.equal(bits(live[name]), wanted[name]) for name in live)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"plan_digest": "0" * 64}, "worker 0: the trainer sends by plan 0000000000000000"),
        ({"plan_data": "AAAA"}, "worker 0: plan_data is no packed plan"),
        ({"plan_data": None, "plan": "nowhere.json"}, "worker 0: nowhere.json: no such file"),
        ({"transport": "pigeon"}, 'there is no transport "pigeon"; known: m2n, torch'),
    ],
)
def test_init_infos_that_can_not_be(
    changed: dict[str, Any], says: str, peer: Callable[..., Peer]
) -> None:
    one = peer()
    with pytest.raises(Exception, match=says):
        one.start(timeout=3.0, **changed)


def test_a_plan_for_another_version_of_the_engine(peer: Callable[..., Peer]) -> None:
    import vllm

    one = peer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "__version__", "0.99.0+cpu")
        with pytest.raises(
            RunError, match=r"the plan is for vLLM 0\.33\.0, this worker runs 0\.99\.0"
        ):
            one.start()


def test_a_plan_for_another_platform(
    peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from m2ncompile.runtime import vllm_target

    one = peer()
    monkeypatch.undo()
    assert vllm_target._platform(torch.device("cpu")) == "cpu"
    with pytest.raises(RunError, match="the plan is for cuda-sm90, this worker runs on cpu"):
        one.start()


def test_the_run_ends_with_the_connection(peer: Callable[..., Peer]) -> None:
    one = peer()
    trainer = one.start()
    worker = one.engine.worker
    one.engine.shutdown()
    assert "it was closed" in worker.unusable
    with pytest.raises(RunError, match="worker 0: it closed the run"):
        trainer.send()
    one.start().close()


@pytest.mark.parametrize(
    ("parallel", "number", "raises"),
    [
        (parallel_config(0, 2), 0, False),
        (parallel_config(1, 2), 1, True),
        (parallel_config(0, 2, data_parallel_index=3), 6, False),
        (parallel_config(0, 1, data_parallel_index=2), 2, True),
        # One world over all replicas, and an executor for each process.
        (
            parallel_config(
                2, 4, data_parallel_index=1, distributed_executor_backend="external_launcher"
            ),
            2,
            True,
        ),
    ],
)
def test_a_workers_rank_and_whether_it_raises(
    parallel: Any,
    number: int,
    raises: bool,
    peer: Callable[..., Peer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from m2ncompile.runtime import vllm_worker

    asked = []

    def nobody(address: str, rank: int, timeout: float) -> None:
        asked.append((address, rank))
        raise RunError("nobody there")

    monkeypatch.setattr(vllm_worker, "meet", nobody)
    one = peer(**vars(parallel))
    monkeypatch.setattr(one.engine.peers, "told", lambda error, timeout: error)
    info = worker_init_info(one.plan, "127.0.0.1:1", "torch", 1.0) | dict(
        rank_offset=5, world_size=20
    )
    with pytest.raises(RunError, match="nobody there") if raises else nullcontext():
        one.engine.init_transfer_engine(one.engine.parse_init_info(info))
    assert asked == [("127.0.0.1:1", 5 + number)]


class Executor:
    """vLLM's executor and worker loop for several processes, and its workers' calls; on threads."""

    def __init__(self, engines: list[Any]) -> None:
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
        from vllm.v1.worker.gpu_worker import Worker

        self.engines = engines
        self.workers: list[Any] = []
        calls: list[queue.Queue[Any]] = [queue.Queue() for _ in engines]
        answers: list[queue.Queue[Any]] = [queue.Queue() for _ in engines]
        for rank, engine in enumerate(engines):
            worker: Any = object.__new__(Worker)
            vars(worker).update(
                rank=rank,
                vllm_config=engine.vllm_config,
                weight_transfer_engine=engine,
                model_runner=SimpleNamespace(reset_lora_state=lambda: None),
                _weight_update_active=False,
                _weight_update_is_draft=False,
            )
            self.workers.append(worker)
            process: Any = object.__new__(WorkerProc)
            process.rank, process.worker, process.use_async_scheduling = rank, worker, False
            process.worker_response_mq = SimpleNamespace(enqueue=answers[rank].put)

            def work(process: Any = process, mine: queue.Queue[Any] = calls[rank]) -> None:
                while (call := mine.get()) is not None:
                    process._execute_worker_rpc(call)

            threading.Thread(target=work, daemon=True).start()
        executor: Any = object.__new__(MultiprocExecutor)
        executor.is_failed, executor.futures_queue = False, deque()
        executor.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(enable_fault_tolerance=False)
        )

        def broadcast(call: Any) -> None:
            for mine in calls:
                mine.put(call)

        executor.rpc_broadcast_mq = SimpleNamespace(enqueue=broadcast)
        executor.response_mqs = [
            SimpleNamespace(dequeue=lambda timeout, mine=mine: mine.get(timeout=60))
            for mine in answers
        ]
        self._calls, self._executor = calls, executor
        self._asked = 0

    def __call__(self, method: str, *args: Any) -> Any:
        return self._executor.collective_rpc(method, args=args)

    def in_step(self) -> bool:
        """Whether what it reads is the answer to what it asks."""
        self._asked += 1
        found = self._executor.collective_rpc(
            lambda worker, n: (worker.rank, n), args=(self._asked,)
        )
        return bool(found == [(rank, self._asked) for rank in range(len(self.workers))])

    def close(self) -> None:
        for engine, mine in zip(self.engines, self._calls, strict=True):
            engine.shutdown()
            mine.put(None)


class Split:
    """Two workers behind one executor, and a trainer."""

    def __init__(self, executor: Executor, plan: Plan) -> None:
        self.executor, self.plan = executor, plan
        self.shards = GivenShards(plan, 0, random_tensors(plan, 1))
        self.pool = ThreadPoolExecutor(1)

    def start(self, **changed: Any) -> Any:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        info = worker_init_info(self.plan, address, "torch", 5.0) | changed
        trainer = self.pool.submit(
            api.trainer, self.plan, self.shards, address=address, rank=0, timeout=info["timeout"]
        )
        self.executor("init_weight_transfer_engine", info)
        return trainer.result()

    def arrives(self, trainer: Any, step: int) -> bool:
        self.shards.tensors = random_tensors(self.plan, step)
        self.executor("start_weight_update")
        sent = self.pool.submit(trainer.send, str(step))
        self.executor("update_weights", {})
        self.executor("finish_weight_update")
        sent.result()
        return all(engine.worker.version == str(step) for engine in self.executor.engines)


@pytest.fixture
def split(split_plan: Plan, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Split]:
    from vllm.v1.worker import gpu_worker

    from m2ncompile.runtime import vllm_target
    from m2ncompile.runtime.vllm_peers import Peers
    from m2ncompile.runtime.vllm_worker import PlanWeightTransferEngine

    monkeypatch.setattr(vllm_target, "_platform", lambda device: "cuda-sm90")
    # It is the process's, and these are threads.
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda config: nullcontext())
    meta = MetaEngine(split_plan.inputs.engine, model)
    store = torch.distributed.HashStore()
    engines = []
    for rank in range(2):
        with meta.worker(rank, device="cpu") as module:
            names = [tensor.name for tensor in split_plan.tensors]
            load(module, zip(names, random_tensors(split_plan, 0), strict=True))
        parallel = parallel_config(rank, 2)
        config = SimpleNamespace(parallel_config=parallel, model_config=meta.model_config)
        engine = PlanWeightTransferEngine(None, config, torch.device("cpu"), module)
        engine.peers = Peers(parallel, lambda: store)
        engines.append(engine)
    executor = Executor(engines)
    yield Split(executor, split_plan)
    executor.close()


def gone(*_: object) -> None:
    raise RunError("rank 0, which hosts the control plane, did not answer in time, or is gone")


def test_what_all_workers_find_leaves_the_executor_in_step(split: Split) -> None:
    """It reads no answer after the first error, and takes it for the next call's."""
    call = split.executor
    info = worker_init_info(split.plan, "127.0.0.1:1", "torch", 0.5)
    for wrong, says in (
        (info, "can't reach trainer 0's control plane"),
        (info | {"plan": "another"}, "give either `plan`"),
        (info | {"timeout": -1.0}, "timeout must be"),
        ({}, "Invalid init_info"),
    ):
        with pytest.raises(RuntimeError, match=says):
            call("init_weight_transfer_engine", wrong)
        assert call.in_step(), says
    call("start_weight_update")
    with pytest.raises(RuntimeError, match=r"no update is possible: [\s\S]*can't reach trainer 0"):
        call("update_weights", {})
    with pytest.raises(RuntimeError, match="without a matching start"):  # of the last worker
        call("finish_weight_update")
    assert call.in_step()

    trainer = split.start()
    assert split.arrives(trainer, 1)
    call("start_weight_update")
    with pytest.raises(RuntimeError, match="finish_weight_update came before update_weights"):
        call("finish_weight_update")
    assert call.in_step()
    assert split.arrives(trainer, 2)  # no update was left open
    call("start_weight_update")
    with pytest.raises(RuntimeError, match="Invalid update_info"):
        call("update_weights", {"names": []})
    assert call.in_step()
    with pytest.raises(RunError, match="it closed the run"):
        trainer.send()
    assert split.arrives(split.start(), 3)


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "trainer gone"])
def test_after_a_failed_update_a_new_start_is_enough(
    finished: bool, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = split.executor
    trainer = split.start()
    with monkeypatch.context() as patch:
        for engine in call.engines:
            patch.setattr(engine, "receive_weights", gone)
        call("start_weight_update")
        with pytest.raises(RuntimeError, match="did not answer in time"):
            call("update_weights", {})
    if finished:
        with pytest.raises(RuntimeError, match="without a matching start"):
            call("finish_weight_update")
        call("start_weight_update")
        with pytest.raises(RuntimeError, match="no update is possible: rank 0, which hosts"):
            call("update_weights", {})
    assert call.in_step()
    trainer.close()
    assert split.arrives(split.start(), 4)
    assert not any(worker._weight_update_active for worker in call.workers)


@pytest.mark.parametrize("alone", [0, 1])
def test_what_one_worker_fails_with_all_take_for_a_failure(
    alone: int, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = split.executor
    trainer = split.start()
    engine = call.engines[alone]
    received = engine.receive_weights

    def fails_late(info: Any) -> None:
        received(info)
        gone()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "receive_weights", fails_late)
        sent = split.pool.submit(trainer.send, "1")
        call("start_weight_update")
        with pytest.raises(RuntimeError) as told:
            call("update_weights", {})
        assert f"worker {alone}: rank 0, which hosts the control plane" in str(told.value)
        assert f"worker {1 - alone}:" not in str(told.value)
        sent.result()
    assert call.in_step()
    assert [engine.worker for engine in call.engines] == [None, None]
    assert split.arrives(split.start(), 2)


def test_workers_wait_for_each_other_no_longer_than_they_may() -> None:
    from m2ncompile.runtime.vllm_peers import Peers

    store = torch.distributed.HashStore()
    last = Peers(parallel_config(0, 2), lambda: store)
    failure = last.told(None, 0.2)
    assert "worker 1: it did not say within 0.2 s how it fared" in str(failure)

    def away() -> Any:
        raise ValueError("no store")

    peers = [Peers(parallel_config(rank, 2), away) for rank in range(2)]
    first = RunError("first")
    assert peers[0].told(first, 0.2) is first
    assert "no store" in str(peers[1].told(None, 0.2))


# --- experts


def test_all_ranks_hear_of_a_worker_that_moves_experts(peer: Callable[..., Peer]) -> None:
    with pytest.raises(RunError, match=r"worker 0: .*\n.*EPLB"):
        peer(enable_eplb=True).start()


def test_all_ranks_hear_of_a_worker_that_has_its_weights_on_the_host(
    peer: Callable[..., Peer],
) -> None:
    from vllm.model_executor.offloader import PrefetchOffloader, get_offloader, set_offloader

    before = get_offloader()
    set_offloader(object.__new__(PrefetchOffloader))
    try:
        with pytest.raises(RunError, match="worker 0: vLLM keeps weights on the host"):
            peer().start()
    finally:
        set_offloader(before)


# --- the module


def target_of(
    meta: MetaEngine, module: torch.nn.Module, dtype: torch.dtype = torch.bfloat16
) -> Any:
    from m2ncompile.runtime.vllm_target import VllmTarget

    config = SimpleNamespace(dtype=dtype)
    return VllmTarget(module, config, torch.device("cpu"), "0.33.0", rehearsed=True)


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: bits(p).clone() for name, p in module.named_parameters()}


def test_vllm_can_reload_the_module_itself_after_a_sync(plan: Plan, model: Path) -> None:
    meta = MetaEngine(plan.inputs.engine, model)
    names = [tensor.name for tensor in plan.tensors]
    with meta.worker(0, device="cpu") as module:
        load(module, zip(names, random_tensors(plan, 0), strict=True))
        target = target_of(meta, module)
        live = target.live()
        before = {name: (id(one), one.data_ptr(), one.stride()) for name, one in live.items()}
        name = "model.layers.0.self_attn.qkv_proj.weight"
        target.begin([name], False)
        target.load(name, torch.ones(target.load_form(name).shape, dtype=torch.bfloat16))
        target.finish()
        assert bool((live[name] == 1).all())
        target.begin((), True)
        target.load_weights(zip(names, random_tensors(plan, 1), strict=True))
        target.finish()
        wanted = expected(plan, model, 1)
        assert all(torch.equal(bits(p), wanted[n]) for n, p in module.named_parameters())
        # What the kernels read is the same memory throughout, and that is what `live` says.
        again = target.live()
        assert {n: (id(one), one.data_ptr(), one.stride()) for n, one in again.items()} == before
        layer = module.get_submodule("model.layers.0.self_attn.qkv_proj")
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        assert target.live()[name] is layer.weight


def test_what_came_of_a_module_is_not_used_where_not_all_did(tmp_path: Path) -> None:
    spec = EngineSpec(version="0.33.0", target="cuda-sm90")
    meta = MetaEngine(spec, reduced("Qwen3-30B-A3B", tmp_path))
    with meta.worker(0, device="cpu") as module:
        with torch.no_grad():
            for param in module.parameters():
                param.uniform_(-1, 1)
        target, before = target_of(meta, module), whole(module)
        (name, *_) = [n for n in before if n.endswith("w13_weight")]
        sibling = name.replace("w13", "w2")
        target.begin([name, sibling], False)
        target.load(name, torch.ones(target.load_form(name).shape, dtype=torch.bfloat16))
        target.abandon()
        after = whole(module)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[n], before[n]) for n in before)
        target.abandon()  # again, with nothing under way


@pytest.mark.parametrize("route", ["direct", "reload"])
def test_what_attention_derives_follows_the_weights(route: str, tmp_path: Path) -> None:
    from m2ncompile.engine.processing import process

    spec = EngineSpec(version="0.33.0", target="cuda-sm90")
    meta = MetaEngine(spec, reduced("DeepSeek-V2-Lite", tmp_path))
    with meta.worker(0, device="cpu") as module:
        name = "model.layers.0.self_attn.kv_b_proj.weight"
        weight = module.get_parameter(name)
        with torch.no_grad():
            weight.fill_(1)
        # Activations of another dtype than the weights: what is derived is a copy.
        process(module, torch.float32)
        (attention,) = [
            one
            for path, one in module.named_modules()
            if path.startswith("model.layers.0.") and hasattr(one, "W_UV")
        ]
        assert bool((attention.W_UV == 1).all() and (attention.W_UK_T == 1).all())
        target = target_of(meta, module, torch.float32)
        with torch.no_grad():
            if route == "direct":
                target.begin((), False)
                weight.fill_(2)
            else:
                target.begin([name], False)
                target.load(name, torch.full_like(weight, 2))
            target.finish()
        assert bool((attention.W_UV == 2).all() and (attention.W_UK_T == 2).all())


def test_an_update_need_not_have_the_layers_for_speculation() -> None:
    from vllm.model_executor.model_loader.mtp_validation import is_mtp_completeness_check_enabled

    class Model(torch.nn.Module):
        asked = True

        def load_weights(self, weights: Any) -> None:
            self.asked = is_mtp_completeness_check_enabled()

    model = Model()
    from m2ncompile.runtime.vllm_target import VllmTarget

    VllmTarget(model, None, torch.device("cpu"), "0.33.0").load_weights(iter(()))
    assert not model.asked and is_mtp_completeness_check_enabled()


def test_vllm_finds_the_backend_by_its_name() -> None:
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )
    from vllm.plugins import load_plugins_by_group

    from m2ncompile.runtime.vllm_trainer import PlanTrainerWeightTransferEngine
    from m2ncompile.runtime.vllm_worker import PlanWeightTransferEngine

    register = load_plugins_by_group("vllm.general_plugins")["m2n_plan"]
    register()
    register()  # in one process, vLLM may
    assert WeightTransferEngineFactory._registry["m2n_plan"]() is PlanWeightTransferEngine
    assert WeightTransferTrainerFactory._registry["m2n_plan"]() is PlanTrainerWeightTransferEngine
