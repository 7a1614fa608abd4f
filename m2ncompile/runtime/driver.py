"""Trainer 0's calls to the engine's control plane, made while the trainers work.

Workers take part in a start and in a sync from inside such a call, so it is made on
another thread, and what it fails with is what the ranks are told.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from m2ncompile.errors import RunError
from m2ncompile.plan import MAX_BYTES, Plan
from m2ncompile.runtime.deadline import Aside, Call
from m2ncompile.runtime.rendezvous import split_address

__all__ = ["Client", "Driver", "packed_plan", "unpacked_plan", "worker_init_info"]


class Client(Protocol):
    """vLLM's `VLLMWeightSyncClient`: HTTP, Ray, or any object with the four methods."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Driver:
    """One call at a time."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._name = ""
        #: Why the last call failed, if it has: one that was given up may fail still.
        self._failed: list[str] = []
        # Its threads are daemons: a call that never returns must not keep the process alive.
        self._aside = Aside()
        self._call: Call[None] | None = None

    def start(self, name: str, call: Callable[[], object]) -> None:
        failed: list[str] = []
        self._name, self._failed = name, failed

        def run() -> None:
            try:
                call()
            except BaseException as error:  # the engine's, over whatever carries it
                # A client over HTTP has what the server said in the answer that it raises for.
                said = getattr(getattr(error, "response", None), "text", "")
                text = " ".join(f"{error} {said}".split()) or "no message"
                failed.append(f"{name}: {type(error).__name__}: {text[:1000]}")

        self._call = self._aside.begin(run)

    def watch(self) -> str | None:
        """Why the call failed, None while it has not."""
        return self._failed[0] if self._failed else None

    def join(self, timeout: float) -> str | None:
        """Waits for the call to return; why it failed or did not return, None where it did."""
        if self._call is not None:
            try:
                self._call.result(timeout)
            except TimeoutError:
                return f"{self._name} did not return within {timeout:g} s"
        return self.watch()


def packed_plan(plan: Plan) -> str:
    """A plan's file as text for a JSON message."""
    return base64.b64encode(zlib.compress(plan.encoded)).decode()


def unpacked_plan(text: str) -> bytes:
    """The file again. Raises RunError for what is none."""
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
    except (ValueError, zlib.error) as error:
        raise RunError(f"plan_data is no packed plan: {error}") from None
    if not reader.eof:
        raise RunError("plan_data is cut short, or unpacks to more than a plan can have")
    return data


def worker_init_info(
    plan: Plan,
    address: str,
    transport: str,
    timeout: float,
    reference: str | None = None,
    nccl_unique_id_b64: str | None = None,
) -> dict[str, Any]:
    """What vLLM's workers are told: where to meet, and the plan or where they find it."""
    host, port = split_address(address)
    found = {"plan_data": packed_plan(plan)} if reference is None else {"plan": reference}
    return {
        "master_address": host,
        "master_port": port,
        "rank_offset": plan.inputs.trainer.ranks,
        "world_size": plan.inputs.trainer.ranks + plan.inputs.engine.workers,
        "transport": transport,
        "timeout": timeout,
        "plan_digest": plan.digest,
        **found,
        **({} if nccl_unique_id_b64 is None else {"nccl_unique_id_b64": nccl_unique_id_b64}),
    }
