"""The ranks of a rehearsal as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from m2ncompile.progress import Progress
from m2ncompile.runtime.rehearsal import RankReport

__all__ = ["Ended", "run_ranks"]

#: How long the others may go on once one has failed, in seconds.
GRACE = 5.0


class Ended(msgspec.Struct, frozen=True):
    """What a rank reported; None where it did not, and then how it ended and what it printed.

    `code` is the exit code, negative for a signal, None where it was stopped since
    another rank had failed.
    """

    report: RankReport | None
    code: int | None
    printed: str

    @property
    def died(self) -> str | None:
        """How, in words, or None when it reported or was stopped."""
        if self.report is not None or self.code is None:
            return None
        if self.code < 0:
            return f"its process was killed by {signal.Signals(-self.code).name}"
        return f"its process ended with exit code {self.code}"


def run_ranks(
    folder: Path, ranks: int, syncs: int, timeout: float, progress: Progress
) -> list[Ended]:
    """Starts all ranks of what was prepared in `folder`, and waits for them.

    This process holds the store where they meet, so that any of them may die.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "m2ncompile.runtime.rehearsal", str(folder)]
    command += ["--syncs", str(syncs), "--timeout", str(timeout)]
    command += ["--store", f"127.0.0.1:{store.port}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "WORLD_SIZE": str(ranks)}
    processes: list[subprocess.Popen[bytes]] = []
    codes: list[int | None] = []
    try:
        for rank in range(ranks):
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        env={**environment, "RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait(processes, folder, progress)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    return [
        Ended(
            _report(folder, rank),
            code,
            (folder / f"rank{rank}.log").read_text(errors="replace"),
        )
        for rank, code in enumerate(codes)
    ]


def _report(folder: Path, rank: int) -> RankReport | None:
    path = folder / f"rank{rank}.json"
    return msgspec.json.decode(path.read_bytes(), type=RankReport) if path.exists() else None


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, progress: Progress) -> None:
    """Until all have ended, or `GRACE` seconds after one failed: others may wait for it long."""
    latest = None
    while True:
        ended = [process.poll() is not None for process in processes]
        progress("ranks", sum(ended), len(ended))
        if all(ended) or (latest is not None and time.monotonic() > latest):
            return
        if latest is None:
            for rank, gone in enumerate(ended):
                report = _report(folder, rank)
                if gone if report is None else report.error is not None:
                    latest = time.monotonic() + GRACE
        time.sleep(0.1)
