"""What packing and unpacking of a stack take, each by itself.

usage: python tools/bench_pack.py [--device cuda] [--members 128] [--blocks 2]

Of bfloat16 matrices as Qwen3-30B-A3B's experts have them on one of two trainer ranks: one
after the other, by rows, and by rows for workers that have shares of the columns; and from
rows to their places in a parameter, as one copy and one by one. The mean of ten in a row: the
device's time, bytes read and written a second, and the host's time a member.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from m2ncompile.runtime.copies import Copies  # noqa: E402
from m2ncompile.runtime.pack import pack_rows  # noqa: E402
from m2ncompile.stacking import Rows  # noqa: E402

SHAPES = {"gate_proj": (384, 2048), "down_proj": (1024, 768)}
TIMES = 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--members", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=2)
    options = parser.parse_args()
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {options.members} members\n")
    print("| matrices | what | ms | GB/s | host us a member |\n| --- | --- | ---: | ---: | ---: |")
    for name, shape in SHAPES.items():
        for what, action in actions(shape, options).items():
            took, host = timed(action, options.device)
            nbytes = 2 * options.members * shape[0] * shape[1] * 2
            cells = f"{1e3 * took:.3f} | {nbytes / took / 1e9:.0f}"
            print(f"| {name} | {what} | {cells} | {1e6 * host / options.members:.1f} |", flush=True)


def actions(shape: tuple[int, int], options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    rows, columns = shape
    count, blocks, device = options.members, options.blocks, options.device
    matrices = [
        torch.randint(0, 2**15, shape, dtype=torch.int16, device=device).view(torch.bfloat16)
        for _ in range(count)
    ]
    packed = torch.empty(count * rows * columns, dtype=torch.bfloat16, device=device)
    scratch = torch.empty_like(packed)
    places = torch.empty(count, rows, columns, dtype=torch.bfloat16, device=device)
    came = packed.view(rows, count, columns)
    at_once = Copies([places.transpose(0, 1)], [came])
    each = Copies(list(places), list(came.transpose(0, 1)))
    return {
        "one after the other": lambda: torch.stack(matrices, out=packed.view(count, rows, columns)),
        "by rows": lambda: pack_rows(matrices, packed, Rows()),
        "by rows, dealt to blocks": lambda: pack_rows(matrices, packed, Rows(blocks)),
        "by rows, columns cut": lambda: pack_rows(
            matrices, packed, Rows(blocks, cut=True), scratch
        ),
        "unpacked as one": at_once.run,
        "unpacked one by one": each.run,
    }


def timed(action: Callable[[], object], device: str) -> tuple[float, float]:
    """Seconds of one: until it is done, and until it is issued."""
    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    action()
    settle()
    began = time.perf_counter()
    for _ in range(TIMES):
        action()
    host = time.perf_counter() - began
    settle()
    return (time.perf_counter() - began) / TIMES, host / TIMES


if __name__ == "__main__":
    main()
