"""Where the ranks of a run meet: a store that trainer rank 0 hosts."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING

from m2ncompile.errors import RunError
from m2ncompile.runtime.deadline import within

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["meet", "split_address"]

#: What a connection gets over its own time limit, in seconds.
_SLACK = 1.0


def split_address(address: str) -> tuple[str, int]:
    """`host:port`, an IPv6 host in brackets. Raises RunError."""
    match = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d{1,5})", address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise RunError(f'"{address}" is no address; expected host:port')
    return match[1], int(match[2])


def meet(address: str, rank: int, timeout: float) -> Store:
    """The store at `address` (`host:port`), which rank 0 opens and the others wait for.

    Raises RunError when nobody is there within `timeout` seconds, or the
    address is none.
    """
    import torch.distributed as dist

    host, port = split_address(address)

    def connect() -> Store:
        return dist.TCPStore(
            host,
            port,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )

    try:
        # It waits for ever where somebody takes the connection and says nothing.
        return within(connect, timeout + _SLACK)
    except (RuntimeError, OSError) as error:
        what = "open the control plane" if rank == 0 else "reach trainer 0's control plane"
        first = str(error).strip().splitlines()[0]
        raise RunError(f"can't {what} at {address} within {timeout:g} s: {first}") from None
