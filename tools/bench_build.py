"""Build time and memory, plan size, load time and cache-hit time, as a Markdown table.

usage: python tools/bench_build.py [NAME...]

Each case runs the installed command in a process of its own, against a store of
its own. Times are wall clock; "load" is the best of 20 loads with all checks.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from m2ncompile.plan_check import load

MODELS = Path(__file__).parents[1] / "plans" / "models"
COMMAND = Path(sys.executable).parent / "m2ncompile"

#: name, model, [engine] sizes, trainer ranks
CASES = [
    ("Llama-3.1-8B tp 4", "Llama-3.1-8B", "tp = 4", 8),
    ("Qwen3-30B-A3B tp 4", "Qwen3-30B-A3B", "tp = 4", 8),
    ("Qwen3-30B-A3B ep 4", "Qwen3-30B-A3B", "tp = 4\nep = 4", 8),
    ("DeepSeek-V3-bf16 ep 16", "DeepSeek-V3-bf16", "tp = 16\nep = 16", 16),
]


def main() -> None:
    wanted = sys.argv[1:]
    print(f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}\n")
    print("| plan | tensors | build s | peak MB | plan MB | load ms | hit s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, model, sizes, ranks in CASES:
        if not wanted or name in wanted:
            print(row(name, model, sizes, ranks), flush=True)


def row(name: str, model: str, sizes: str, ranks: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "spec.toml")
        spec.write_text(
            f'[model]\npath = "{MODELS / model}"\n'
            f'[engine]\nversion = "0.33.0"\ntarget = "cuda-sm90"\n{sizes}\n'
            f'[trainer]\nranks = {ranks}\nlayout = "fsdp"\n'
        )
        os.environ["M2NCOMPILE_CACHE"] = str(Path(folder, "cache"))
        build, peak = run(spec)
        hit = min(run(spec)[0] for _ in range(5))
        (path,) = Path(folder, "cache", "objects").rglob("*.json")
        times = []
        for _ in range(20):
            start = time.perf_counter()
            plan = load(path)
            times.append(time.perf_counter() - start)
        return (
            f"| {name} | {len(plan.tensors):,} | {build:.1f} | {peak / 1e6:.0f} "
            f"| {path.stat().st_size / 1e6:.2f} | {min(times) * 1e3:.0f} | {hit:.2f} |"
        )


def run(spec: Path) -> tuple[float, float]:
    """Wall seconds and peak resident bytes of one `build`."""
    start = time.perf_counter()
    process = subprocess.Popen([COMMAND, "build", spec], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"build {spec} failed")
    return seconds, usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
