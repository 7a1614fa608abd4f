"""A stock peer: an unmodified vLLM whose workers run its own `nccl_m2n` backend.

The plan must be of the `vllm` resolver, so that both sides decide alike. vLLM's init protocol
(0.33.0, `m2n_trainer`, `m2n_common`) is followed with vLLM's own functions: a metadata group;
agreement on the source digest, the data plane and each rank's readiness; then NCCL; then the
workers publish their placements, and all agree on the complete digest. The workers check
everything there is to check before NCCL but those placements: if they are not the plan's, that is
said after NCCL is up, and before any weight moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from m2ncompile.errors import PlanError, RunError
from m2ncompile.layout import Mesh
from m2ncompile.legs import legs_of
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of
from m2ncompile.runtime.agree import agree
from m2ncompile.runtime.control import StoreControl
from m2ncompile.runtime.deadline import Aside, Deadline
from m2ncompile.runtime.driver import Client, Driver
from m2ncompile.runtime.session import GRACE, attempt, bounded
from m2ncompile.runtime.transports.m2n import M2nTransport
from m2ncompile.wire import WireParam

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.m2n_common import M2NWireParam

__all__ = ["StockSession", "stock_init_info", "wire_params"]

T = TypeVar("T")


def wire_params(plan: Plan) -> list[WireParam]:
    """The records that vLLM's digests cover, in plan order."""
    layouts = layouts_of(plan)
    tensors = [plan.tensors[plan.destinations[t.destinations[0]].tensor] for t in plan.transfers]
    return [
        WireParam(
            tensor.name,
            plan.dtypes[plan.geometries[tensor.geometry].dtype],
            plan.geometries[tensor.geometry].shape,
            layouts[tensor.source].mesh.dims,
            layouts[tensor.source].placements,
        )
        for tensor in tensors
    ]


def _workers(plan: Plan) -> Mesh:
    engine = plan.inputs.engine
    return Mesh((engine.dp * engine.pp, engine.tp), plan.inputs.trainer.ranks)


def stock_init_info(plan: Plan, host: str, port: int) -> dict[str, Any]:
    """What vLLM's `nccl_m2n` workers are told. Raises PlanError for another resolver's plan."""
    if plan.inputs.resolver.name != "vllm" or plan.digests.complete is None:
        raise PlanError(
            "vLLM's own workers decide as its own backend does: build the plan with "
            'resolver.name = "vllm"'
        )
    return {
        "schema_version": 2,
        "master_address": host,
        "master_port": port,
        "rank_offset": plan.inputs.trainer.ranks,
        "world_size": plan.inputs.trainer.ranks + plan.inputs.engine.workers,
        "dst_mesh_dims": list(_workers(plan).dims),
        "source_digest": plan.digests.source,
        "params": [param.to_dict() for param in wire_params(plan)],
    }


class StockSession:
    """A trainer rank's part of a run with stock workers; what `Session` is for our own.

    `client` is used on rank 0 alone. `timeout` in seconds.
    """

    def __init__(
        self,
        client: Client,
        host: str,
        port: int,
        rank: int,
        timeout: float,
        device: torch.device,
    ) -> None:
        self.rank, self.timeout = rank, timeout
        self.unusable: str | None = None
        self._driver = Driver(client) if rank == 0 else None
        self._client, self._host, self._port, self._device = client, host, port, device
        self._aside = Aside()
        self.transport: M2nTransport | None = None

    def establish(self, load: Callable[[], Plan], bind: Callable[[Plan], T]) -> tuple[Plan, T]:
        """Raises PlanError for a plan that stock workers can't run, RunError for what fails."""
        plan = load()
        info = stock_init_info(plan, self._host, self._port)
        try:
            return plan, self._establish(plan, info, bind)
        except BaseException as failure:
            self._fail(failure)
            raise

    def _establish(self, plan: Plan, info: dict[str, Any], bind: Callable[[Plan], T]) -> T:
        from vllm.distributed.weight_transfer import m2n_common as vllm
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_metadata_group

        trainers, world = info["rank_offset"], info["world_size"]
        self._names = [param["name"] for param in info["params"]]
        params = [_theirs(param) for param in wire_params(plan)]
        bound, error = attempt(lambda: bind(plan))
        if self._driver is not None:
            client = self._client
            self._driver.start(
                "init_weight_transfer_engine", lambda: client.init_weight_transfer_engine(info)
            )
        group = stateless_init_metadata_group(self._host, self._port, self.rank, world)
        # The pool must be the same on all ranks, and the workers' is their own affair.
        self.transport = M2nTransport(group.store, self.rank, world, self._device, pool=False)
        self._among = StoreControl(group.store, self.rank, trainers, "m2ncompile/trainers")

        def runtime() -> tuple[Any, Any]:
            assert self.transport is not None
            self.transport.prepare(legs_of(plan))
            nccl, _, handle = vllm.prepare_m2n_local_runtime(vllm.import_m2n(), None)
            return nccl, handle

        with _as_run_errors("the run can't start; no data was moved"):
            vllm.check_source_plan_agreement(group, params, plan.digests.source, error)
            vllm.check_data_plane_agreement(group, None, None)
            made, error = attempt(runtime)
            vllm.check_runtime_ready_agreement(group, error)
            assert made is not None
            nccl, handle = made

            def meet() -> Any:
                assert self.transport is not None
                comm = vllm.create_m2n_communicator(nccl, group, None)
                self.transport.adopt(comm, handle)
                stream = torch.cuda.current_stream(self._device)
                return vllm.publish_destination_placements(
                    comm, self._device, stream, trainers, None, len(params)
                )

            published, error = bounded(self._aside, self.transport, meet, Deadline(self.timeout))
            if published is None:
                raise RunError(f"no connection to the workers: {error}")
            mesh = vllm.M2NMesh(_workers(plan).dims, trainers)
            vllm.check_complete_plan_agreement(
                group, plan.digests.source, mesh, published, _difference(plan, published)
            )
        if self._driver is not None and (failure := self._driver.join(self.timeout)):
            raise RunError(f"the workers did not come up: {failure}")
        assert bound is not None
        return bound

    def sync(self, note: str, run: Callable[[str, Deadline], T]) -> tuple[str, T, float]:
        """One update of the workers: start, all tensors in plan order, finish."""
        if self.unusable is not None:
            raise RunError(f"this run has ended: {self.unusable}")
        try:
            return note, self._sync(note, run), 0.0
        except BaseException as failure:
            self._fail(failure)
            raise

    def _sync(self, version: str, run: Callable[[str, Deadline], T]) -> T:
        driver, client = self._driver, self._client
        failure = None
        if driver is not None:
            driver.start("start_weight_update", client.start_weight_update)
            failure = driver.join(self.timeout)
        self._together("the workers did not start the update; no data was moved", failure)
        if driver is not None:
            names = {"names": self._names}
            driver.start("update_weights", lambda: client.update_weights(names))
        assert self.transport is not None
        deadline = Deadline(self.timeout)
        result, failure = bounded(
            self._aside, self.transport, lambda: run(version, deadline), deadline
        )
        if driver is not None and failure is None:
            failure = driver.join(self.timeout)
            if failure is None:
                driver.start("finish_weight_update", lambda: client.finish_weight_update(version))
                failure = driver.join(self.timeout)
        self._together(f'the sync of version "{version}" failed', failure)
        assert result is not None
        return result

    def _together(self, title: str, error: str | None) -> None:
        """All trainers raise what one of them has, or none does."""
        agree(
            self._among,
            "engine",
            "done",
            Deadline(2 * self.timeout + GRACE),
            trainers=self._among.world,
            title=title,
            error=error,
        )

    def _fail(self, failure: BaseException) -> None:
        words = " ".join(str(failure).split())[:1000]
        self.unusable = f"{words}. Connect again, then send everything"
        if self.transport is not None:
            self.transport.close()

    def close(self) -> None:
        """Ends the run for this rank; the workers' end stays until they are shut down."""
        if self.unusable is None:
            self.unusable = "it was closed"
        if self.transport is not None:
            self.transport.close()


def _theirs(param: WireParam) -> M2NWireParam:
    from vllm.distributed.weight_transfer.m2n_common import M2NWireParam

    return M2NWireParam(
        param.name, param.dtype_name, param.shape, param.src_mesh_dims, param.src_placements
    )


def _difference(plan: Plan, published: Any) -> str | None:
    """Where the workers' placements are not the plan's."""
    layouts = layouts_of(plan)
    for transfer, theirs in zip(plan.transfers, published, strict=True):
        d = plan.destinations[transfer.destinations[0]]
        ours = layouts[d.layout].placements
        if theirs != ours:
            return (
                f"the workers place {plan.tensors[d.tensor].name} by {theirs}, the plan by {ours}: "
                f"they run another model, layout or version than the plan's "
                f"{plan.inputs.engine.version}"
            )
    return None


@contextmanager
def _as_run_errors(title: str) -> Iterator[None]:
    """vLLM raises RuntimeError with the same words on every rank."""
    try:
        yield
    except RuntimeError as error:
        raise RunError(f"{title}: {error}") from error
