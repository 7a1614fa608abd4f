"""All that is to be seen on GPUs, in one command: tests, benchmarks, a real vLLM; to a file.

usage: python tools/gpu.py --prepare FOLDER       anywhere with the compiler
       python tools/gpu.py FOLDER [--results FILE] [--only PART,...] [--match GLOB]

`--prepare` builds the plans: real dims, as few layers as fit a GPU, 1+1 to 4+4 ranks. On the
GPUs it runs `tests` (tests/gpu), `m2n` (bench_m2n.py), `shapes` (bench_shapes.py and
bench_pack.py: what stacks are shaped for), and where vLLM is installed `engines`
(bench_engines.py, vLLM's own backend and this project's in the same workers) and `llm`
(gpu_engine.py, a whole vLLM). What each printed is added to the results file as soon as it
has ended, whatever comes after.

Where ranks share a GPU they take turns on it, some milliseconds each, unless NVIDIA's MPS lets
them in together: `nvidia-cuda-mps-control -d` before, with CUDA_MPS_PIPE_DIRECTORY set. Their
kernels wait for each other, so that all must fit: NCCL_MAX_CTAS=8 NCCL_RESHARD_NUM_CTAS=8 for up
to eight ranks. `tests` kills processes, which MPS does not bear: without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RANKS = ((1, 1), (2, 2), (4, 4), (4, 2))
#: Model, layers, whether workers also go by experts.
MODELS = (
    ("Qwen3-30B-A3B", 4, True),
    ("Qwen3-30B-A3B", 16, False),
    ("Llama-3.1-8B", 8, False),
    ("DeepSeek-V2-Lite", 6, True),
    ("gemma-3-1b-it", 26, False),
)
#: Where all ranks are on one GPU, this one fits at few of them alone.
LARGE = ("Qwen3-30B-A3B", 16)
#: Kind, tp, layers at real dims.
LLMS = (
    *((kind, tp, None) for kind in ("llama", "qwen3moe") for tp in (1, 2)),
    *((kind, tp, layers) for kind, layers in (("llama", 8), ("qwen3moe", 4)) for tp in (1, 2)),
)
#: Ranks at which vLLM's own backend is run beside.
ENGINES = ((1, 1), (2, 2))
PARTS = ("tests", "m2n", "shapes", "engines", "llm")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--results", type=Path, default=Path("results.md"))
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--match", default="*", help="which plans and folders, by name")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for each command")
    options = parser.parse_args()
    if options.prepare:
        prepare(options.folder)
        return
    failed = run(options)
    print(f"failed: {', '.join(failed)}" if failed else "all passed", flush=True)
    sys.exit(bool(failed))


def prepare(folder: Path) -> None:
    (folder / "plans").mkdir(parents=True, exist_ok=True)
    for model, layers, experts in MODELS:
        for trainers, workers in RANKS:
            if (model, layers) == LARGE and (trainers, workers) not in ((1, 1), (2, 2)):
                continue
            for ep in (False, True) if experts and workers > 1 else (False,):
                build(folder, ROOT / "plans" / "models" / model, layers, trainers, workers, ep)
    for kind, tp, layers in LLMS:
        for resolver in ("traced", "vllm") if layers is None else ("traced",):
            name = f"{kind}-tp{tp}" + ("-stock" if resolver == "vllm" else "")
            name += "" if layers is None else f"-{layers}layers"
            command = [sys.executable, str(ROOT / "tools" / "gpu_engine.py"), "--prepare"]
            command += [str(folder / "llm" / name), kind, str(tp), resolver]
            subprocess.run([*command, *([] if layers is None else [str(layers)])], check=True)


def build(folder: Path, model: Path, layers: int, trainers: int, workers: int, ep: bool) -> None:
    from m2ncompile.compile.pipeline import build_plan
    from m2ncompile.spec import EngineSpec, ModelSpec, Spec, TrainerSpec

    name = f"{model.name}-{layers}-{trainers}x{workers}{'-ep' if ep else ''}"
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    reduced = folder / "models" / f"{model.name}-{layers}"
    reduced.mkdir(parents=True, exist_ok=True)
    (reduced / "config.json").write_text(json.dumps(config))
    engine = EngineSpec(
        version="0.33.0", target="cuda-sm90", tp=workers, ep=workers if ep else 1, dtype="bfloat16"
    )
    trainer = TrainerSpec(ranks=trainers, layout="fsdp", uneven="replicate")
    model_spec = ModelSpec(path=str(reduced), name=reduced.name)
    plan = build_plan(Spec(model=model_spec, engine=engine, trainer=trainer))
    (folder / "plans" / f"{name}.plan.json").write_bytes(plan.encoded)
    if (trainers, workers) in ENGINES:
        both = folder / "engines" / name
        both.mkdir(parents=True, exist_ok=True)
        (both / "config.json").write_text(json.dumps(config))
        (both / "plan.json").write_bytes(plan.encoded)
    print(f"{name}: {len(plan.tensors)} tensors in {len(plan.transfers)} transfers", flush=True)


def run(options: argparse.Namespace) -> list[str]:
    import torch

    here = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        here += ", MPS"
    with options.results.open("a") as file:
        file.write(f"# {here}, torch {torch.__version__}\n")
    plans = sorted((options.folder / "plans").glob(f"{options.match}.plan.json"))
    python, wanted, failed = sys.executable, options.only.split(","), []
    commands: list[tuple[str, list[str]]] = []
    if "tests" in wanted:
        commands.append(("tests", [python, "-m", "pytest", "-q", str(ROOT / "tests" / "gpu")]))
    if "m2n" in wanted and plans:
        results = options.results.with_suffix(".json")
        tool = [python, str(ROOT / "tools" / "bench_m2n.py"), "--timeout", "60"]
        commands.append(("m2n", [*tool, "--results", str(results), *map(str, plans)]))
    if "shapes" in wanted:
        for name in ("bench_shapes", "bench_pack"):
            commands.append((name, [python, str(ROOT / "tools" / f"{name}.py")]))
    if importlib.util.find_spec("vllm") is not None:
        for part, script in (("engines", "bench_engines.py"), ("llm", "gpu_engine.py")):
            for path in sorted(
                (options.folder / part).glob(options.match) if part in wanted else ()
            ):
                tool = [python, str(ROOT / "tools" / script)]
                commands.append((f"{part} {path.name}", [*tool, str(path)]))
    for name, command in commands:
        began = time.monotonic()
        printed, good = ran(command, options.limit)
        with options.results.open("a") as file:
            file.write(f"\n## {name}, {time.monotonic() - began:.0f} s\n\n{printed}\n")
        if not good:
            failed.append(name)
    return failed


def ran(command: list[str], limit: float) -> tuple[str, bool]:
    """What a command printed, here too as it goes, and whether it passed in time."""
    process = subprocess.Popen(
        ["timeout", "--kill-after=5", str(limit), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return "".join(lines), process.wait() == 0


if __name__ == "__main__":
    main()
