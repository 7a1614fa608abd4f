"""`m2ncompile rehearse`: plans of real models between real processes, and named failures."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from m2ncompile.compile.pipeline import build_plan
from m2ncompile.layout import Limits
from m2ncompile.plan import Digests, Plan, program_digest
from m2ncompile.plan_check import wire_digests
from m2ncompile.spec import EngineSpec, ModelSpec, Spec, TrainerSpec
from m2ncompile.verify.check import reduce_plan
from m2ncompile.verify.reduce import reduced_config

pytestmark = pytest.mark.engine

replace = msgspec.structs.replace
MODELS = Path(__file__).parents[2] / "plans" / "models"
COMMAND = [sys.executable, "-c", "from m2ncompile.cli import main; main()"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
#: Between them: experts on one rank each, derived matrices, MXFP4 blocks and biases, tied
#: embeddings, transposed weights, parts of fused tensors. Few layers where a build takes long.
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "Qwen3-30B-A3B": (dict(tp=2, ep=2), dict(num_hidden_layers=2)),
    "DeepSeek-V2-Lite": (dict(tp=2), dict(num_hidden_layers=3)),
    "gpt-oss-20b": (dict(tp=2), {}),
    "gemma-3-1b-it": (dict(tp=2), {}),
    "gpt2": (dict(tp=2), {}),
    "phi-4": (dict(tp=2), {}),
}
DEFAULT = Limits()
OTHERS = sorted({path.name for path in MODELS.iterdir()} - CASES.keys())


def plan_of(folder: Path, limits: Limits = DEFAULT, **engine: Any) -> Plan:
    """For two trainers, of the model in `folder`."""
    return build_plan(
        Spec(
            model=ModelSpec(path=str(folder), name=folder.name),
            engine=EngineSpec(version="0.33.0", target="cuda-sm90", **engine),
            trainer=TrainerSpec(ranks=2, layout="fsdp", uneven="replicate"),
            limits=limits,
        )
    )


def configured(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(model: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / model / "config.json").read_text())
    return config


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A model that is small itself, and its plan for two workers."""
    config = reduced_config(config_of("Qwen3-0.6B"), 2, 1, 1, 2)
    folder = configured(tmp_path_factory.mktemp("small") / "model", config)
    return folder, plan_of(folder, tp=2)


def rehearse(*args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, "rehearse", *map(str, args)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def passes(folder: Path, plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(plan.encoded)
    done = rehearse(tmp_path / "plan.json", "--model", folder, "--syncs", 2, "--json")
    document = json.loads(done.stdout)
    assert document["passed"] and len(document["ranks"]) == 4
    routes = {d.route for d in plan.destinations}
    for report in document["ranks"][2:]:
        assert report["compared"] > 0 and not report["differences"]
        assert {route["route"] for route in report["syncs"][-1]["routes"]} == routes
    run = reduce_plan(plan, folder, tmp_path).plan
    assert [report["syncs"][-1]["staging"] for report in document["ranks"]] == [
        stated.packed + stated.unpacked + stated.reloaded for stated in run.staging
    ]


@pytest.mark.parametrize("model", CASES)
def test_real_models(model: str, tmp_path: Path) -> None:
    engine, change = CASES[model]
    folder = configured(tmp_path / model, config_of(model) | change)
    passes(folder, plan_of(folder, **engine), tmp_path)


def test_large_tensors_in_parts(tmp_path: Path) -> None:
    """Also when reduced, where the largest must be cut still."""
    engine, change = CASES["Qwen3-30B-A3B"]
    folder = configured(tmp_path / "model", config_of("Qwen3-30B-A3B") | change)
    engine = engine | {"moe_backend": "flashinfer_cutlass"}  # which experts are reloaded for
    plan = plan_of(folder, Limits(stack_bytes=1, stage_bytes=1 << 20), **engine)
    cut = {t.destinations[0] for t in plan.transfers if t.part is not None}
    assert {plan.destinations[d].route for d in cut} == {"direct", "reload"}
    passes(folder, plan, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", OTHERS)
def test_every_other_model(model: str, tmp_path: Path) -> None:
    folder = configured(tmp_path / model, config_of(model) | {"num_hidden_layers": 4})
    passes(folder, plan_of(folder, tp=2), tmp_path)


def test_the_document_and_what_is_printed(small: tuple[Path, Plan], tmp_path: Path) -> None:
    folder, plan = small
    (tmp_path / "plan.json").write_bytes(plan.encoded)
    args = (tmp_path / "plan.json", "--model", folder, "--syncs", 2, "--full")
    document = json.loads(rehearse(*args, "--json").stdout)
    assert document.keys() == {
        "schema",
        "plan_digest",
        "model",
        "reduced",
        "notes",
        "tensors",
        "collectives",
        "syncs",
        "passed",
        "ranks",
        "problems",
    }
    assert document["schema"] == "m2ncompile.rehearse/1"
    assert document["plan_digest"] == plan.digest
    assert document["reduced"] == {}
    assert document["tensors"] == len(plan.tensors)
    assert document["problems"] == []
    for rank, report in enumerate(document["ranks"]):
        assert report.keys() == {
            "rank",
            "syncs",
            "compared",
            "differences",
            "unprocessed",
            "error",
        }
        assert report["rank"] == rank
        assert [sync["version"] for sync in report["syncs"]] == ["1", "2"]
        assert all(sync["nbytes"] > 0 for sync in report["syncs"])

    lines = rehearse(*args).stdout.splitlines()
    assert lines[0] == f"model, plan {plan.digest}"
    assert "(full size)" in lines[1]
    ranks = [line.split("  ")[0] for line in lines if re.match(r"(trainer|worker) \d", line)]
    assert ranks == ["trainer 0", "trainer 1", "worker 0", "worker 1"]
    elements = sum(report["compared"] for report in document["ranks"])
    last = f"passed: {elements:,} elements compared, all equal to the bit (syncs: 2)"
    assert lines[-1] == last


@pytest.mark.parametrize("full", [(), ("--full",)])
def test_another_model_is_refused(
    full: tuple[str, ...], small: tuple[Path, Plan], tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_bytes(small[1].encoded)
    args = (tmp_path / "plan.json", "--model")
    done = rehearse(*args, MODELS / "gpt2", *full, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {MODELS / 'gpt2'}: the plan was made from another model")
    done = rehearse(*args, tmp_path / "nowhere", *full, code=2)
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'nowhere' / 'config.json'}: can't read it")


# --- a plan that does something else


def swapped(plan: Plan, one: str, other: str) -> Plan:
    """With two live parameters of equal shape exchanged, and good digests."""
    names = {one: other, other: one}
    params = tuple(replace(p, name=names.get(p.name, p.name)) for p in plan.params)
    assert params != plan.params
    plan = replace(plan, params=params)
    source, complete = wire_digests(plan)
    return replace(plan, digests=Digests(program_digest(plan), source, complete))


def test_a_difference_names_parameter_and_worker(small: tuple[Path, Plan], tmp_path: Path) -> None:
    folder, plan = small
    names = [f"model.layers.1.self_attn.{norm}.weight" for norm in ("q_norm", "k_norm")]
    (tmp_path / "plan.json").write_bytes(swapped(plan, *names).encoded)
    args = (tmp_path / "plan.json", "--model", folder, "--syncs", 2, "--full")
    done = rehearse(*args, "--json", code=1)
    document = json.loads(done.stdout)
    assert not document["passed"]
    for report in document["ranks"][2:]:
        (size,) = {plan.geometries[p.geometry].shape[0] for p in plan.params if p.name in names}
        wrong = f"{size} of {size} elements are not what load_weights makes"
        assert report["differences"] == [
            {"name": name, "sync": sync, "message": wrong}
            for sync in (1, 2)
            for name in sorted(names)
        ]
    assert done.stderr.splitlines() == [
        "error: model: the rehearsal failed",
        *(f"  {name}: {wrong} (worker 0, worker 1; sync {{1..2}})" for name in sorted(names)),
    ]


# --- ranks that fail


def test_what_all_fail_with_is_said_once(small: tuple[Path, Plan], tmp_path: Path) -> None:
    """The workers' modules are not built within a second."""
    folder, plan = small
    (tmp_path / "plan.json").write_bytes(plan.encoded)
    args = (tmp_path / "plan.json", "--model", folder, "--full", "--timeout", 1)
    done = rehearse(*args, code=1)
    assert done.stderr.count("the run can't start; no data was moved") == 1
    assert "worker 1: it did not answer within 1 s" in done.stderr


def test_a_killed_rank_is_named(small: tuple[Path, Plan], tmp_path: Path) -> None:
    folder, plan = small
    (tmp_path / "plan.json").write_bytes(plan.encoded)
    command = [*COMMAND, "rehearse", str(tmp_path / "plan.json"), "--model", str(folder), "--full"]
    command += ["--syncs", "9", "--timeout", "300"]
    started = time.monotonic()
    running = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        while (rank := child(running.pid, b"RANK=3")) is None:
            assert running.poll() is None and time.monotonic() < started + 120
            time.sleep(0.05)
        children = offspring(running.pid)
        os.kill(rank, signal.SIGKILL)
        _, printed = running.communicate(timeout=120)  # far less than --timeout
    finally:
        running.kill()
    assert running.returncode == 1
    assert printed.startswith(
        "error: model: the rehearsal failed\n  worker 1: its process was killed by SIGKILL"
    )
    assert "worker 0" not in printed and "trainer" not in printed
    assert not [pid for pid in children if alive(pid)]


def offspring(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def child(pid: int, variable: bytes) -> int | None:
    for one in offspring(pid):
        try:
            if variable in Path(f"/proc/{one}/environ").read_bytes().split(b"\0"):
                return one
        except (FileNotFoundError, PermissionError):
            continue
    return None


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- across machines


def test_what_prepare_prints_works(small: tuple[Path, Plan], tmp_path: Path) -> None:
    """Two launchers of two ranks each, as on two machines."""
    folder, plan = small
    (tmp_path / "plan.json").write_bytes(plan.encoded)
    ready = tmp_path / "ready"
    ready.mkdir()
    (ready / "rank7.json").write_text("of a rehearsal before")
    args = (tmp_path / "plan.json", "--model", folder, "--syncs", 2, "--full", "--prepare", ready)
    printed = rehearse(*args).stdout
    assert sorted(path.name for path in ready.iterdir()) == ["config.json", "plan.json"]
    command = re.search(r"^  (torchrun .*)$", printed, re.MULTILINE)
    assert command is not None
    document = json.loads(rehearse(*args, "--json").stdout)
    assert document == {
        "schema": "m2ncompile.rehearse-prepare/1",
        "folder": str(ready),
        "processes": 4,
        "command": command[1],
    }
    words = shlex.split(command[1].replace("HOST:PORT", f"127.0.0.1:{free_port()}"))
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words[1:]],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        output = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()  # passed on to its ranks
    assert [launcher.returncode for launcher in launchers] == [0, 0], output
    lines = "".join(output).splitlines()
    for rank in range(4):
        report = json.loads((ready / f"rank{rank}.json").read_text())
        where = f"trainer {rank}" if rank < 2 else f"worker {rank - 2}"
        what = "all sent" if rank < 2 else f"{report['compared']:,} elements equal to the bit"
        assert f"{where}: {what} (syncs: 2)" in lines


def test_a_wrong_number_of_processes_is_said(small: tuple[Path, Plan], tmp_path: Path) -> None:
    folder, plan = small
    (tmp_path / "plan.json").write_bytes(plan.encoded)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "1", "-m", "m2ncompile.runtime.rehearsal", str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "2 trainer ranks and 2 workers, so start 4 processes; these are 1" in done.stdout


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
