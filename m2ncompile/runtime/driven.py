"""A trainer that also drives the engine: start, update and finish around each sync."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from m2ncompile.errors import RunError
from m2ncompile.plan import Plan
from m2ncompile.runtime.agree import Envelope, agree, rank_name
from m2ncompile.runtime.control import ControlPlane
from m2ncompile.runtime.deadline import Deadline
from m2ncompile.runtime.driver import Driver
from m2ncompile.runtime.session import GRACE
from m2ncompile.runtime.stats import SyncStats
from m2ncompile.runtime.trainer import Trainer

__all__ = ["DrivenTrainer"]


class DrivenTrainer:
    """`driver` is rank 0's, None on the others. `among` joins the trainers alone."""

    def __init__(
        self,
        construct: Callable[[Driver | None], Trainer],
        init_info: dict[str, Any],
        driver: Driver | None,
        among: ControlPlane,
        timeout: float,
    ) -> None:
        self._driver, self._among, self._timeout = driver, among, timeout
        #: Why no more updates are possible, where the run itself does not say it.
        self._ended: str | None = None
        if driver is not None:
            client = driver.client
            driver.start(
                "init_weight_transfer_engine",
                lambda: client.init_weight_transfer_engine(init_info),
            )
        self._trainer = construct(driver)
        self._together("the engine did not come up", None if driver is None else driver.join(GRACE))

    @property
    def plan(self) -> Plan:
        return self._trainer.plan

    @property
    def unusable(self) -> str | None:
        """As `Trainer.unusable`."""
        return self._ended or self._trainer.unusable

    def send(
        self,
        version: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> SyncStats:
        """As `Trainer.send`; when it returns, the engine serves the new weights."""
        if (why := self.unusable) is not None:
            raise RunError(f"this run has ended: {why}")
        driver, opened, failure = self._driver, False, None
        try:
            if driver is not None:
                client = driver.client
                driver.start("start_weight_update", client.start_weight_update)
                failure = driver.join(self._timeout)
                opened = failure is None
            self._together("the engine did not start the update; no data was moved", failure)
            if driver is not None:
                driver.start("update_weights", lambda: client.update_weights({}))
            stats = self._trainer.send(version, progress)
            failure = None if driver is None else driver.join(GRACE)
            if driver is not None and failure is None:
                driver.start(
                    "finish_weight_update", lambda: client.finish_weight_update(stats.version)
                )
                failure = driver.join(self._timeout)
                opened = failure is not None
            self._together(f'the engine did not finish the update to "{stats.version}"', failure)
        except BaseException as error:
            if driver is not None and opened:
                # The engine would hold an open update against the next one.
                driver.join(GRACE)
                driver.start("finish_weight_update", driver.client.finish_weight_update)
                driver.join(GRACE)
            self._fail(error)
            raise
        return stats

    def _fail(self, error: BaseException) -> None:
        """A refusal of the engine's, which trainer 0 tells, ends nothing; all else does."""
        agreed = getattr(error, "agreed", False)
        told = {problem.where for problem in getattr(error, "problems", ())}
        if not (agreed and told == {rank_name(0, self._among.world)}):
            self._ended = self._trainer.unusable or " ".join(f"{error}".split())
        if not agreed:
            self._leave(f"it left: {type(error).__name__}: {error}")

    def _leave(self, why: str) -> None:
        gone = Envelope("gone", self._among.world, "", why)
        with suppress(Exception):
            self._among.leave(why, msgspec.json.encode(gone))
            self._among.settle()

    def _together(self, title: str, failure: str | None) -> None:
        """All trainers raise what rank 0's call failed with, or none does."""
        agree(
            self._among,
            "engine",
            "done",
            Deadline(2 * self._timeout + GRACE),
            trainers=self._among.world,
            title=title,
            error=failure,
        )

    def close(self) -> None:
        """As `Trainer.close`. The engine is left as it is."""
        self._trainer.close()
        self._leave("it closed the run")
        self._among.close()
