"""A trainer that also drives the engine: start, update and finish around each sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from m2ncompile.plan import Plan
from m2ncompile.runtime.agree import agree
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
        return self._trainer.unusable

    def send(
        self,
        version: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> SyncStats:
        """As `Trainer.send`; when it returns, the engine serves the new weights."""
        driver = self._driver
        if driver is not None:
            client = driver.client
            driver.start("start_weight_update", client.start_weight_update)
        failure = None if driver is None else driver.join(self._timeout)
        self._together("the engine did not start the update; no data was moved", failure)
        if driver is not None:
            driver.start("update_weights", lambda: client.update_weights({}))
        try:
            stats = self._trainer.send(version, progress)
        except BaseException:
            if driver is not None:
                # Ends the engine's session, which it would otherwise hold against the next one.
                driver.join(GRACE)
                driver.start("finish_weight_update", client.finish_weight_update)
                driver.join(GRACE)
            raise
        failure = None if driver is None else driver.join(GRACE)
        if driver is not None and failure is None:
            driver.start("finish_weight_update", lambda: client.finish_weight_update(stats.version))
            failure = driver.join(self._timeout)
        self._together(f'the engine did not finish the update to "{stats.version}"', failure)
        return stats

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
