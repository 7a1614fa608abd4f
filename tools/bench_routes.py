"""What crosses the wire, per model and layout, under both resolvers, as a Markdown table.

usage: python tools/bench_routes.py [MODEL...]

"sharded" is the share of bytes that no worker receives whole against its need
(direct and reload); "wire" is what one worker receives in a sync, the most of
all workers. What does not divide by four lies whole on each trainer. Build time is
wall clock of the whole command for the traced plan, peak its largest process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[1] / "plans" / "models"
COMMAND = Path(sys.executable).parent / "m2ncompile"
LAYOUTS = {"tp 2": "tp = 2", "tp 4": "tp = 4", "tp 8": "tp = 8", "ep 8": "tp = 8\nep = 8"}
#: What their heads divide by, beside tp 2.
WIDE = {
    "Llama-3.1-70B": ["tp 8"],
    "Llama-3.1-8B": ["tp 4", "tp 8"],
    "Mixtral-8x7B-v0.1": ["tp 8", "ep 8"],
    "Qwen3-30B-A3B": ["tp 4", "tp 8", "ep 8"],
    "Qwen3-235B-A22B": ["tp 8", "ep 8"],
    "Qwen3-Next-80B-A3B": ["tp 8", "ep 8"],
    "DeepSeek-V2-Lite": ["tp 8", "ep 8"],
    "DeepSeek-V3-bf16": ["ep 8"],
    "GLM-4.5-Air": ["tp 8", "ep 8"],
    "gpt-oss-20b": ["tp 8", "ep 8"],
}


def main() -> None:
    wanted = sys.argv[1:]
    print(f"{os.cpu_count()} CPU cores; trainer FSDP over 4 ranks, target cuda-sm90\n")
    print(
        "| model | workers | tensors | sharded | sharded by vLLM | wire GB | wire GB by vLLM "
        "| build s | peak MB | not sharded, and why |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for folder in sorted(MODELS.iterdir()):
        if not wanted or folder.name in wanted:
            for layout in ["tp 2", *WIDE.get(folder.name, [])]:
                print(row(folder, layout), flush=True)


def row(folder: Path, layout: str) -> str:
    traced, seconds, peak = build(folder, layout, "traced")
    vllm, _, _ = build(folder, layout, "vllm")
    if isinstance(traced, str):
        return f"| {folder.name} | {layout} | | | | | | | | {traced} |"
    fallback = "; ".join(
        f"{r['tensors']} tensors, {r['nbytes'] / 1e9:.2f} GB: {r['text']}"
        for r in traced["reasons"]
        if r["code"] in ("no-transfer", "data")
    )
    theirs = ("", "") if isinstance(vllm, str) else (f"{sharded(vllm):.1f}%", f"{wire(vllm):.2f}")
    return (
        f"| {folder.name} | {layout} | {traced['tensors']:,} | {sharded(traced):.1f}% "
        f"| {theirs[0]} | {wire(traced):.2f} | {theirs[1]} | {seconds:.1f} "
        f"| {peak / 1e6:.0f} | {fallback} |"
    )


def sharded(plan: dict[str, Any]) -> float:
    total = sum(r["nbytes"] for r in plan["routes"])
    return 100 * sum(r["nbytes"] for r in plan["routes"] if r["route"] != "fallback") / total


def wire(plan: dict[str, Any]) -> float:
    return float(max(plan["wire_bytes_per_worker"])) / 1e9


def build(folder: Path, layout: str, resolver: str) -> tuple[dict[str, Any] | str, float, float]:
    """The built plan's summary, or why there is none; wall seconds; peak resident bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        spec = Path(scratch, "spec.toml")
        spec.write_text(
            f'[model]\npath = "{folder}"\n'
            f'[engine]\nversion = "0.33.0"\ntarget = "cuda-sm90"\n{LAYOUTS[layout]}\n'
            f'[trainer]\nranks = 4\nlayout = "fsdp"\nuneven = "replicate"\n'
            f'[resolver]\nname = "{resolver}"\n'
        )
        start = time.perf_counter()
        out, err = Path(scratch, "out"), Path(scratch, "err")
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [COMMAND, "build", "--no-cache", "--json", spec], stdout=stdout, stderr=stderr
            )
            _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            lines = err.read_text().splitlines()
            return " ".join(line.strip() for line in lines[:3]), seconds, 0
        (plan,) = json.loads(out.read_text())["plans"]
        return plan, seconds, usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
