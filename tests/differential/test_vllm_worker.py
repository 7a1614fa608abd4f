"""The backend `m2n_plan` as vLLM's worker calls it, on one of vLLM's real models."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(__file__).parents[2] / "plans" / "models" / "Qwen3-0.6B" / "config.json"
    folder = tmp_path_factory.mktemp("model")
    config = reduced_config(json.loads(root.read_text()), 1, 1, 1, 1)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def plan(model: Path) -> Plan:
    return build_plan(
        Spec(
            model=ModelSpec(path=str(model), name="tiny"),
            engine=EngineSpec(version="0.33.0", target="cuda-sm90"),
            trainer=TrainerSpec(ranks=1, layout="ddp"),
        )
    )


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

        def make(rank: int = 0, world_size: int = 1) -> Peer:
            parallel = SimpleNamespace(
                rank=rank, world_size=world_size, data_parallel_index=-rank if world_size > 1 else 0
            )
            config = SimpleNamespace(parallel_config=parallel, model_config=meta.model_config)
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
    calls = one.engine.start_weight_update, one.engine.finish_weight_update
    for call in (*calls, lambda: one.engine.update_weights({})):
        with pytest.raises(RunError, match="no plan is bound yet"):
            call()
    trainer = one.start()
    with pytest.raises(RunError, match="a plan is bound already"):
        one.engine.init_transfer_engine(
            one.engine.parse_init_info(worker_init_info(one.plan, "127.0.0.1:1", "torch", 1.0))
        )
    with pytest.raises(RunError, match="update_weights came without start_weight_update"):
        one.engine.update_weights({})
    with pytest.raises(RunError, match="finish_weight_update came without start_weight_update"):
        one.engine.finish_weight_update()
    one.engine.start_weight_update()
    with pytest.raises(RunError, match="came before update_weights: the weights are still"):
        one.engine.finish_weight_update()

    sent = one.pool.submit(trainer.send)
    one.engine.start_weight_update()
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
    with pytest.raises(RunError, match=r"no update is possible.*partly those of version bad"):
        one.engine.start_weight_update()
    one.engine.finish_weight_update()  # ends vLLM's session; it raised already
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
    from m2ncompile.runtime import vllm_worker

    one = peer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_worker.vllm, "__version__", "0.99.0+cpu")
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


def test_of_several_workers_the_last_raises(peer: Callable[..., Peer]) -> None:
    """vLLM's executor reads no answer after the first error, and takes it for the next call's."""
    peer(rank=0, world_size=2).engine.start_weight_update()
    with pytest.raises(RunError, match="no plan is bound yet"):
        peer(rank=1, world_size=2).engine.start_weight_update()


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
