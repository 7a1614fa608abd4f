"""A real vLLM on this machine's GPUs, fed by a trainer over NCCL M2N.

usage: python tools/gpu_engine.py FOLDER...

Each FOLDER has a `config.json` and a `plan.json` for it, for one trainer rank and a vLLM of the
plan's tp; `python tools/gpu_engine.py --prepare FOLDER KIND TP RESOLVER [LAYERS]` makes one, on
any machine with the compiler: of small dims, or of so many layers at the model's own. By a plan
of the `vllm` resolver the workers are stock: they run vLLM's own `nccl_m2n`. By others they run
`m2n_plan`, which vLLM finds where this project is installed. Checkpoints are written to FOLDER.
The trainer is transformers' model on the first GPU; vLLM has the last GPUs and
starts with the same weights. On fewer GPUs than tp all of its ranks share the last one: each is
then a process with an executor of its own, as under torchrun. Checked after each of three syncs,
the first of negated weights: every parameter of every worker is, to the bit, what vLLM's own
reload of the same checkpoint makes it. Greedy tokens are counted that are those after that
reload, and transformers' (both differ by rounding: vLLM batches as requests arrive, and has
other kernels).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], list(range(100, 140)), [9, 900, 33, 512, 77]]
NEW_TOKENS = 12
SIZES = dict(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=1024,
    max_position_embeddings=4096,
    initializer_range=0.2,
)
EXPERTS = dict(moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2)
KINDS = {"llama": "Llama-3.1-8B", "qwen3moe": "Qwen3-30B-A3B"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arguments", nargs="+")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # vLLM has to end with it
    if options.prepare:
        folder, kind, tp, resolver, *layers = options.arguments
        prepare(Path(folder), kind, int(tp), resolver, int(layers[0]) if layers else None)
    elif options.serve:
        folder, port = options.arguments
        serve(Path(folder), int(port))
    else:
        failed = [folder for folder in options.arguments if not run(Path(folder))]
        print("failed:" if failed else "all passed", *failed, flush=True)
        os._exit(bool(failed))


def prepare(folder: Path, kind: str, tp: int, resolver: str, layers: int | None) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import m2ncompile
    from m2ncompile.compile.pipeline import build_plan
    from m2ncompile.spec import load_spec

    source = ROOT / "plans" / "models" / KINDS[kind] / "config.json"
    small = SIZES | (EXPERTS if kind == "qwen3moe" else {})
    changed = small if layers is None else {"num_hidden_layers": layers}
    config = json.loads(source.read_text()) | changed
    for key in ("rope_scaling", "layer_types", "max_window_layers"):
        config.pop(key, None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    (folder / "manifest.json").write_bytes(m2ncompile.capture(model))
    (folder / "spec.toml").write_text(
        '[model]\npath = "."\nmanifest = "manifest.json"\n'
        f'[engine]\nversion = "0.33.0"\ntarget = "cuda-sm90"\ndtype = "bfloat16"\ntp = {tp}\n'
        f'[trainer]\nranks = 1\nlayout = "ddp"\n[resolver]\nname = "{resolver}"\n'
    )
    (folder / "plan.json").write_bytes(build_plan(load_spec(folder / "spec.toml")).encoded)


# The engine's process.


def digests(worker: Any) -> dict[str, str]:
    """Of every live parameter, inside of a worker: all bits, weighted by where they are."""
    import torch

    def digest(parameter: Any) -> str:
        words = parameter.detach().contiguous().flatten().view(torch.uint8)
        words = words.view(torch.int32) if words.numel() % 4 == 0 else words
        total = 0
        for start in range(0, words.numel(), 1 << 26):
            part = words[start : start + (1 << 26)].long()
            weights = torch.arange(start, start + part.numel(), device=part.device)
            total += int((part * (weights * weights + 2 * weights + 3)).sum())
        return f"{list(parameter.shape)} {total}"

    return {name: digest(parameter) for name, parameter in worker.get_model().named_parameters()}


def serve(folder: Path, port: int) -> None:
    from vllm import LLM, SamplingParams

    inputs = json.loads((folder / "plan.json").read_text())["inputs"]
    tp, stock = inputs["engine"]["tp"], inputs["resolver"]["name"] == "vllm"
    backend: dict[str, Any] = {}
    if "RANK" in os.environ:
        # Their memory can't be told apart by looking at the GPU.
        backend = {
            "distributed_executor_backend": "external_launcher",
            "kv_cache_memory_bytes": 1 << 30,
        }
    elif tp > 1:
        backend = {"distributed_executor_backend": "mp"}
    llm = LLM(
        str(folder / "start"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        gpu_memory_utilization=0.15,
        tensor_parallel_size=tp,
        seed=0,
        disable_custom_all_reduce=True,
        enable_prefix_caching=False,
        weight_transfer_config={"backend": "nccl_m2n" if stock else "m2n_plan"},
        **backend,
    )

    def generate(_: Any) -> Any:
        params = SamplingParams(
            max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    routes = {
        "/init_weight_transfer_engine": llm.init_weight_transfer_engine,
        "/start_weight_update": lambda _: llm.start_weight_update(),
        "/update_weights": llm.update_weights,
        "/finish_weight_update": lambda body: llm.finish_weight_update(body.get("weight_version")),
        "/shutdown_weight_transfer_engine": lambda _: llm.shutdown_weight_transfer_engine(),
        "/generate": generate,
        "/digests": lambda _: llm.collective_rpc(digests),
        "/reload": lambda body: (
            llm.collective_rpc("reload_weights", kwargs={"weights_path": body["path"]}) and None
        ),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {})

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                self._answer(200, routes[self.path](json.loads(data or b"{}") or {}))
            except Exception as error:
                self._answer(500, f"{type(error).__name__}: {error}")

        def _answer(self, status: int, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: object) -> None:
            pass

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


class Client:
    """The engine's four calls, and those of this check, to all of its processes at once."""

    def __init__(self, ports: list[int]) -> None:
        self._ports, self._pool = ports, ThreadPoolExecutor(len(ports))

    def call(self, route: str, body: Any = None) -> list[Any]:
        """What each process answers."""
        calls = [self._pool.submit(self._call, port, route, body) for port in self._ports]
        wait(calls)
        return [call.result() for call in calls]

    def _call(self, port: int, route: str, body: Any) -> Any:
        request = Request(
            f"http://127.0.0.1:{port}/{route}",
            json.dumps(body or {}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urlopen(request, timeout=180) as answer:
                return json.loads(answer.read())
        except OSError as error:
            detail = error.read().decode() if hasattr(error, "read") else str(error)
            raise RuntimeError(f"{route}: {detail}") from None

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self.call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", {"weight_version": weight_version})


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run(folder: Path) -> bool:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    plan = json.loads((folder / "plan.json").read_text())
    tp, gpus = plan["inputs"]["engine"]["tp"], torch.cuda.device_count()
    alone = tp <= gpus  # one process for all ranks, each with a GPU
    ports = [free_port() for _ in range(1 if alone else tp)]
    stock = plan["inputs"]["resolver"]["name"] == "vllm"
    if not stock and not entry_points(group="vllm.general_plugins", name="m2n_plan"):
        print(f"{folder}: vLLM can't find m2n_plan; install m2ncompile in this environment")
        return False
    environment = {
        # Multicast stays off, in vLLM's own collectives too: on some hosts it harms the GPUs.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus - tp if alone else gpus - 1, gpus))),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `digests` is sent to the workers
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="0")
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder / "start")
    launched = {"WORLD_SIZE": str(tp), "LOCAL_RANK": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    engines, log = [], folder / "engine.log"
    with log.open("wb") as out:
        for rank, port in enumerate(ports):
            command = [sys.executable, __file__, "--serve", str(folder), str(port)]
            of_rank = {} if alone else launched | {"RANK": str(rank)}
            engines.append(
                subprocess.Popen(
                    command,
                    env=environment | of_rank,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        return drive(folder, model, Client(ports), engines, stock)
    except Exception as error:
        print(f"{folder.name}: {type(error).__name__}: {error}\n{log.read_text()[-3000:]}")
        return False
    finally:
        for engine in engines:
            os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()
        for name in ("start", "checkpoint"):
            shutil.rmtree(folder / name, ignore_errors=True)


def alike(tokens: list[list[int]], others: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(chain(*tokens), chain(*others), strict=True))


def drive(
    folder: Path, model: Any, client: Client, engines: list[subprocess.Popen[bytes]], stock: bool
) -> bool:
    import torch

    import m2ncompile

    def digests_of() -> list[dict[str, str]]:
        """By worker."""
        return list(chain(*client.call("digests")))

    def generated() -> list[list[int]]:
        first, *others = client.call("generate")
        if any(one != first for one in others):
            raise RuntimeError("ranks of one engine generate different tokens")
        return first  # type: ignore[no-any-return]

    began = time.monotonic()
    while True:
        try:
            before = digests_of()
            break
        except RuntimeError:
            ended = any(engine.poll() is not None for engine in engines)
            if ended or time.monotonic() - began > 300:
                raise
            time.sleep(0.5)
    size = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    print(
        f"{folder.name}, {size:.2f} GB: vLLM up after {time.monotonic() - began:.0f} s", flush=True
    )

    @torch.no_grad()
    def greedy() -> list[list[int]]:
        found = []
        for prompt in PROMPTS:
            ids = list(prompt)
            for _ in range(NEW_TOKENS):
                logits = model(input_ids=torch.tensor([ids], device="cuda:0")).logits
                ids.append(int(logits[0, -1].float().argmax()))
            found.append(ids[len(prompt) :])
        return found

    began = time.monotonic()
    trainer = m2ncompile.trainer(
        folder / "plan.json",
        model,
        address=f"127.0.0.1:{free_port()}",
        rank=0,
        client=client,
        device="cuda:0",
        transport="m2n",
        timeout=60.0,
        stock=stock,
    )
    print(f"  start {time.monotonic() - began:.2f} s", flush=True)
    good = True
    for step in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_((-1, -1.25, 0.5)[step])
        began = time.monotonic()
        stats = trainer.send()
        seconds = time.monotonic() - began
        tokens, expected = generated(), greedy()
        sent = digests_of()
        checkpoint = folder / "checkpoint"
        model.save_pretrained(checkpoint)
        client.call("reload", {"path": str(checkpoint)})
        loaded, again = digests_of(), generated()
        differ = [n for a, b in zip(sent, loaded, strict=True) for n in a if a[n] != b[n]]
        stayed = [n for a, b in zip(sent, before, strict=True) for n in a if a[n] == b[n]]
        good, before = good and not differ and not stayed, sent
        count = sum(map(len, sent))
        same, as_loaded = (alike(tokens, other) for other in (expected, again))
        print(
            f"  sync {stats.version}: {1e3 * seconds:.0f} ms in all, {1e3 * stats.seconds:.0f} ms "
            f"the transfer; {count - len(differ)} of {count} parameters as vLLM's own reload makes "
            f"them {differ[:3]}, {len(stayed)} unchanged; of {NEW_TOKENS * len(PROMPTS)} tokens "
            f"{as_loaded} as after that reload, {same} as transformers'",
            flush=True,
        )
    trainer.close()
    return good


if __name__ == "__main__":
    main()
