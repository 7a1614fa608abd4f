"""What both sides of a run have in common: the agreements around it, and its state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from hashlib import sha256
from typing import TypeVar

import msgspec

from m2ncompile.errors import M2nCompileError, PlanError, Problem, RunError
from m2ncompile.legs import legs_of
from m2ncompile.plan import Plan
from m2ncompile.runtime.agree import Envelope, agree, rank_name
from m2ncompile.runtime.control import ControlPlane, Watch
from m2ncompile.runtime.deadline import Aside, Deadline
from m2ncompile.runtime.transports.base import Transport

__all__ = ["GRACE", "Session", "attempt", "bounded", "destination_digest"]

#: What is added to a deadline for telling everyone that it has passed, in seconds.
GRACE = 10.0

#: For a transfer to end by itself once its deadline has passed, in seconds.
_SLACK = 2.0

#: How often a rank in a transfer looks whether another has failed, in seconds.
_LOOK = 0.5

T = TypeVar("T")


def destination_digest(plan: Plan) -> str:
    """Of where everything goes and by which route, whatever the trainer holds."""
    found = (plan.dtypes, plan.meshes, plan.layouts, plan.geometries, plan.params, plan.landings)
    routes = [(d.tensor, d.route, d.layout, d.landing, d.offset) for d in plan.destinations]
    return sha256(msgspec.json.encode((found, routes))).hexdigest()


class Session:
    """One rank's part of a run. All ranks call the same methods in the same order.

    `unusable` says why no more syncs are possible, once something failed.
    """

    def __init__(
        self,
        control: ControlPlane,
        transport: Transport,
        trainers: int,
        timeout: float,
        watch: Watch | None = None,
    ) -> None:
        self.control, self.transport, self.timeout = control, transport, timeout
        self.trainers = trainers
        self.unusable: str | None = None
        self._watch = watch
        self._syncs = 0
        self._closed = threading.Event()
        self._busy = threading.Lock()
        self._aside = Aside()

    @property
    def rank(self) -> int:
        return self.control.rank

    def _agree(
        self,
        phase: str,
        digest: str,
        title: str,
        error: str | None = None,
        note: str = "",
        deadline: Deadline | None = None,
    ) -> list[str]:
        return agree(
            self.control,
            phase,
            digest,
            deadline or Deadline(self.timeout),
            trainers=self.trainers,
            title=title,
            error=error,
            note=note,
            watch=self._watch,
        )

    def establish(self, load: Callable[[], Plan], bind: Callable[[Plan], T]) -> tuple[Plan, T]:
        """Loads, binds, agrees on every part of the plan, then connects the transport.

        Raises RunError, the same on all ranks, if any of them can't go on.
        """
        title = "the run can't start; no data was moved"
        try:
            plan, error = attempt(lambda: self._checked(load()))
            source = plan.digests.source if plan else ""
            self._agree("source", source, title, error)
            assert plan is not None
            self._agree("destination", destination_digest(plan), title)

            def prepare() -> str:
                self.transport.prepare(legs_of(plan))
                return self.transport.identity

            identity, error = attempt(prepare)
            self._agree("data plane", identity or "", title, error)
            bound, error = attempt(lambda: bind(plan))
            self._agree("readiness", "ready", title, error)
            self._agree("plan", plan.digest, title)
            deadline = Deadline(self.timeout)
            _, error = attempt(lambda: self.transport.connect(deadline))
            patience = deadline.extended(GRACE)
            self._agree("connection", "connected", title, error, deadline=patience)
        except BaseException as failure:
            self._leave(failure)
            raise
        assert bound is not None
        self._program = plan.digests.program
        return plan, bound

    def _checked(self, plan: Plan) -> Plan:
        inputs = plan.inputs
        if (inputs.trainer.ranks, inputs.engine.workers) != (
            self.trainers,
            self.control.world - self.trainers,
        ):
            raise PlanError(
                f"the plan is for {inputs.trainer.ranks} trainer ranks and "
                f"{inputs.engine.workers} workers, the run has {self.trainers} and "
                f"{self.control.world - self.trainers}"
            )
        return plan

    def sync(
        self, note: str, run: Callable[[str, Deadline], T], flaw: str | None = None
    ) -> tuple[str, T, float]:
        """One sync: all ranks begin, `run` moves the data, all ranks end.

        `note` is the version that a trainer sends, empty on a worker; `flaw` why this
        rank can't begin. `timeout` bounds the wait for all ranks, then the data. Returns the
        version, what `run` gave, and the seconds spent on agreeing. Raises
        RunError, the same on all ranks that still answer; `unusable` says what
        is left of the weights.
        """
        if self.unusable is not None:
            raise RunError(f"this run has ended: {self.unusable}")
        if not self._busy.acquire(blocking=False):
            raise RunError("another thread of this rank is in a sync, or closed the run")
        try:
            return self._sync(note, run, flaw)
        finally:
            if self._closed.is_set():
                self.control.close()
            else:
                self._busy.release()

    def _sync(
        self, note: str, run: Callable[[str, Deadline], T], flaw: str | None
    ) -> tuple[str, T, float]:
        called = time.monotonic()
        try:
            notes = self._agree(
                "begin",
                f"sync {self._syncs} of program {self._program[:16]}",
                "the sync did not begin; no data was moved",
                flaw,
                note=note,
            )
            version = self._one_version(notes)
        except BaseException as failure:
            self._leave(failure)
            raise
        began, deadline = time.monotonic(), Deadline(self.timeout)
        try:
            result, error = bounded(
                self._aside,
                self.transport,
                lambda: run(version, deadline),
                deadline,
                self._broken,
            )
            if self._closed.is_set():
                error = "it was closed during the sync"
            if error is not None:
                self.transport.close()  # wakes those who wait for this rank
            # What failed here is over on the others at once, but for those that are gone.
            ending = deadline.extended(GRACE) if error is None else Deadline(GRACE)
            moved = time.monotonic()
            self._agree(
                "end",
                f'sync {self._syncs} of version "{version}"',
                f'the sync of version "{version}" failed',
                error,
                deadline=ending,
            )
            self.control.settle()
        except BaseException as failure:
            self._leave(failure, version)
            raise
        assert result is not None
        self._syncs += 1
        return version, result, began - called + time.monotonic() - moved

    def _broken(self) -> str | None:
        """Whether another rank says already that it failed, in words.

        Most often that breaks the connections of the others; where it does not, they would
        sit out the deadline.
        """
        with suppress(Exception):  # who hosts the store may be gone: then there is the deadline
            for rank, said in enumerate(self.control.ahead()):
                if said is not None and msgspec.json.decode(said, type=Envelope).error is not None:
                    return f"it broke off, since {rank_name(rank, self.trainers)} failed"
        return None

    def _one_version(self, notes: list[str]) -> str:
        versions = notes[: self.trainers]
        if len(set(versions)) > 1:
            failure = RunError(
                "the sync did not begin; no data was moved",
                [
                    Problem(f"trainer {rank}", f'it sends version "{one}"')
                    for rank, one in enumerate(versions)
                ],
            )
            failure.agreed = True
            raise failure
        return versions[0]

    def _leave(self, failure: BaseException, version: str | None = None) -> None:
        """After a failure no rank can know what the others do next."""
        words = _words(failure)
        weights = "" if version is None else f"; weights may be partly those of version {version}"
        self.unusable = f"{words}{weights}. Connect again, then send everything"
        if not getattr(failure, "agreed", False):
            # Such as an interrupt: the others need not wait for this rank.
            gone = Envelope("gone", self.control.world, "", f"it left: {words}")
            with suppress(Exception):
                self.control.leave(f"it left: {words}", msgspec.json.encode(gone))
        self.transport.close()
        with suppress(Exception):
            self.control.settle()

    def close(self) -> None:
        """Ends the run for this rank. Ranks in the middle of a sync get an error."""
        self._closed.set()
        if self.unusable is None:
            self.unusable = "it was closed"
        self.transport.close()
        if self._busy.acquire(blocking=False):  # and never again
            gone = Envelope("gone", self.control.world, "", "it closed the run")
            with suppress(Exception):  # most often the others have closed theirs
                self.control.leave("it closed the run", msgspec.json.encode(gone))
                self.control.settle()
            self.control.close()


def _words(failure: BaseException) -> str:
    """A failure and its causes in one line."""
    lines = [" ".join(line.split()) for line in str(failure).splitlines()]
    text = "; ".join(line for line in lines if line) or type(failure).__name__
    return text if len(text) <= 1000 else f"{text[:1000]}..."


def attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """What it returns, or why it failed in words for everyone."""
    try:
        return action(), None
    except M2nCompileError as error:
        return None, str(error)
    except Exception as error:  # anything: the other ranks must hear of it
        text = " ".join(str(error).split())
        return None, f"{type(error).__name__}: {text[:500]}"


def bounded(
    aside: Aside,
    transport: Transport,
    action: Callable[[], T],
    deadline: Deadline,
    broken: Watch | None = None,
) -> tuple[T | None, str | None]:
    """As `attempt`, in no more time than there is; at once where `broken` says why.

    A GPU that waits for a rank that is gone may hold whoever touches it, and so may a
    collective of the trainer's source; nothing ends that: then it is left to a thread.
    """
    around = transport.detached() or nullcontext()

    def run() -> tuple[T | None, str | None]:
        with around:
            return attempt(action)

    call, end, why = aside.begin(run), Deadline(deadline.remaining + _SLACK), None
    ends = (
        f"the transfer did not end within {deadline.seconds:g} s, and goes on: restart the process"
    )
    while True:
        try:
            found, error = call.result(min(_LOOK, end.remaining))
        except TimeoutError:
            if end.passed:
                return None, ends
            # Once the deadline has passed the others fail too, because of this one perhaps.
            if broken is None or why is not None or deadline.passed or (why := broken()) is None:
                continue
            with suppress(Exception):
                transport.close()  # wakes the call
            # But gloo (torch 2.13) can lose a send to a connection that is closed.
            end, ends = Deadline(_LOOK), f"{why}; its transfer goes on: restart the process"
        else:
            return (found, error) if why is None else (None, why)
