"""How a command ends: output that is lost or refused, interrupts, names and files of any kind."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from m2ncompile.cli.common import console, print_json, spec_files, write_file
from m2ncompile.errors import SpecError, StoreError
from tests.plans import make_inputs, make_plan
from tests.test_cli import COMMAND, SPEC, run

ROOT = Path(__file__).parents[1]
LONG = "x" * 300


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "p.plan.json"
    path.write_bytes(make_plan().encoded)
    return path


def spec_in(folder: Path) -> Path:
    """A spec of a model that its config alone describes; no engine builds it here."""
    (folder / "model").mkdir(parents=True)
    source = ROOT / "plans" / "models" / "Qwen3-0.6B" / "config.json"
    (folder / "model" / "config.json").write_bytes(source.read_bytes())
    spec = folder / "p.toml"
    spec.write_text(SPEC.format(model="model"))
    return spec


def scripted(script: str, *args: object, **how: Any) -> subprocess.Popen[bytes]:
    """The command line in a process that runs `script` first."""
    code = f"{script}\nfrom m2ncompile.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], **how)


#: Gives a checked-in plan in place of compiling.
COMPILED = f"""
from pathlib import Path
import m2ncompile.compile.pipeline as pipeline
from m2ncompile.plan_check import load
def build_plan(spec, progress):
    progress("trace [modules]", 1, 2)
    return load(Path({str(ROOT / "plans" / "gpt2-fsdp4-tp2.plan.json")!r}))
pipeline.build_plan = build_plan
"""


def compiled(*args: object) -> subprocess.CompletedProcess[str]:
    process = scripted(COMPILED, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = process.communicate()
    return subprocess.CompletedProcess(args, process.returncode, out.decode(), error.decode())


# --- where plans and pages are written


def test_an_output_that_would_cost_a_file_is_refused(tmp_path: Path, plan: Path) -> None:
    one, other = spec_in(tmp_path / "a"), spec_in(tmp_path / "b")
    notes = tmp_path / "notes.json"
    notes.write_text("{}")
    for args, says in (
        (["-o", one, other], "not written to a spec's name"),
        (["-o", one, other, other], "not written to a spec's name"),
        (["-o", tmp_path / "new.toml", other], "not written to a spec's name"),
        (["-o", notes, other], f"{notes}: is there and is no plan"),
    ):
        found = run("build", *args, code=2)
        assert found.stdout == "" and says in found.stderr
    assert one.read_text() == SPEC.format(model="model")
    assert notes.read_text() == "{}"
    page = tmp_path / "q.plan.json"
    run("report", plan, "-o", page)
    page.write_bytes(make_plan(inputs=make_inputs(name="other")).encoded)
    assert "take the plan's place" in run("report", plan, "-o", page, code=2).stderr


def test_a_damaged_plan_and_an_empty_file_are_replaced(tmp_path: Path) -> None:
    spec, out = spec_in(tmp_path / "a"), tmp_path / "out"
    for before in (make_plan().encoded[:-20], b""):
        out.write_bytes(before)
        found = compiled("build", spec, "-o", out, "--no-cache")
        assert found.returncode == 0, found.stderr
        assert b"m2ncompile-plan" in out.read_bytes()


def test_two_specs_of_one_output_are_refused(tmp_path: Path) -> None:
    one, other = spec_in(tmp_path / "a"), spec_in(tmp_path / "b")
    for mode in ([], ["--locked"], ["--frozen"]):
        error = run("build", *mode, one, other, "-o", tmp_path / "out", code=2).stderr
        target = tmp_path / "out" / "p.plan.json"
        assert f"{target}: would be the plan of {one} and of {other}" in error
    assert not (tmp_path / "out").exists()
    found = compiled("build", one, one, "-o", tmp_path / "out", "--no-cache")
    assert found.returncode == 0, found.stderr


def test_links_stay_and_pipes_are_written_to(tmp_path: Path, plan: Path) -> None:
    spec = spec_in(tmp_path / "a")
    for args, name in (
        (["report", plan], "page.html"),
        (["build", spec, "--no-cache"], "plan.json"),
    ):
        link, target, pipe = tmp_path / name, tmp_path / "deep" / name, tmp_path / name[:-4]
        link.symlink_to(target)
        found = compiled(*args, "-o", link)
        assert found.returncode == 0, found.stderr
        assert link.is_symlink() and target.is_file() and not target.is_symlink()
        os.mkfifo(pipe)
        reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
        try:
            assert compiled(*args, "-o", pipe).returncode == 0
            assert reader.communicate(timeout=60)[0] == target.read_bytes()
        finally:
            reader.kill()
        assert pipe.is_fifo()


def test_a_write_that_fails_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StoreError, match=r"page\.html: can't write the page: Operation not"):
        write_file(path, b"new", "the page")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("page.html", "old")]


def test_a_name_that_just_fits_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250 + ".json")
    write_file(path, b"new", "the plan")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# --- what the system refuses


def test_bad_paths_are_one_message(tmp_path: Path, plan: Path) -> None:
    below, spec = plan / "below", spec_in(tmp_path / "a")
    for args, says in (
        (["show", LONG], f"{LONG}: can't read the plan: File name too long"),
        (["show", below], f"{below}: no such file"),
        (["verify", LONG, "--model", tmp_path], "can't read the plan"),
        (["report", LONG], "can't read the plan"),
        (["report", plan, "-o", LONG], "can't write the page"),
        (["diff", plan, LONG], "can't read the plan"),
        (["build", LONG], f"{LONG}: can't read the spec"),
        (["build", "--frozen", spec, "-o", f"{LONG}.json"], "can't read the plan"),
        (["build", "--locked", spec, "-o", LONG], "can't read the plan"),
        (["cache", "explain", LONG], f"{LONG}: can't read the spec"),
        (["cache", "explain", tmp_path], "can't read the spec"),
        (["cache", "push", LONG, "--remote", tmp_path.as_uri()], "can't read the plan"),
        (["cache", "pull", LONG, "--remote", tmp_path.as_uri()], "not a digest"),
    ):
        error = run(*args, code=2).stderr
        assert error.startswith("error: ") and says in error, error
    for folder in (plan, below, Path("/proc/none"), tmp_path / LONG):
        args = ["rehearse", plan, "--model", tmp_path, "--prepare", folder]
        assert f"error: {folder}: can't be prepared: " in run(*args, code=2).stderr


def test_a_folder_that_can_not_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(SpecError, match="can't read the folder: Permission denied"):
        spec_files([tmp_path])


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        ('OSError(13, "Permission denied", "a.json")', "a.json: Permission denied"),
        ('OSError("odd")', "odd"),
        ("MemoryError()", "out of memory"),
        ("RecursionError()", "nested too deeply"),
    ],
)
def test_what_nobody_foresaw_is_one_line(plan: Path, raised: str, says: str) -> None:
    script = (
        "import m2ncompile.cli.show as show\n"
        f"def fail(*args): raise {raised}\n"
        "show.open_plan = fail"
    )
    process = scripted(script, "show", plan, stderr=subprocess.PIPE)
    error = process.communicate()[1].decode()
    assert process.returncode == 2
    assert error.startswith("error: ") and says in error and error.count("\n") == 1


def test_what_is_refused_during_a_build_names_the_spec(tmp_path: Path) -> None:
    one, other = spec_in(tmp_path / "a"), spec_in(tmp_path / "b")
    script = (
        "import m2ncompile.compile.pipeline as pipeline\n"
        "def build_plan(spec, progress): raise OSError(13, 'Permission denied', 'w.bin')\n"
        "pipeline.build_plan = build_plan"
    )
    process = scripted(script, "build", one, other, "--no-cache", stderr=subprocess.PIPE)
    error = process.communicate()[1].decode()
    assert process.returncode == 2
    assert error == "".join(f"error: {s}: w.bin: Permission denied\n" for s in (one, other))


# --- what is printed


def test_names_are_no_markup(tmp_path: Path) -> None:
    name, tensor = "Qw[/b]en:smile:", "a[/i][red]:x:"
    path = tmp_path / "p.json"
    inputs = make_inputs(name=name)
    path.write_bytes(make_plan([(tensor, "bfloat16", (8, 4), 0)], inputs).encoded)
    text = run("show", path).stdout
    assert text.startswith(f"{name} (") and tensor in text


def test_documents_of_other_commands_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    from m2ncompile.cli import rehearse, verify

    name = "Qw[/b]en:smile:"
    plan = make_plan(inputs=make_inputs(name=name))
    module = {
        "name": "m[/b]",
        "kind": "K[/i]",
        "routes": [],
        "tensors": 1,
        "ranks": 1,
        "elements": 1,
        "modules": 1,
        "processed": None,
        "why": None,
    }
    common = {"model": name, "plan_digest": "0", "reduced": {}, "notes": ["[/x]"], "tensors": 1}
    checked = {**common, "modules": [module], "unchecked": [], "passed": True, "workers": 1}
    verify._print(plan, checked)
    rehearse._print(plan, {**common, "collectives": 1, "syncs": 1, "ranks": [], "passed": True})
    text = capsys.readouterr().out
    assert text.count(name) == 2 and "m[/b]" in text and "K[/i]" in text
    assert not console()._markup


@pytest.mark.parametrize("args", [[], ["--json"]])
def test_output_that_is_lost(plan: Path, args: list[str]) -> None:
    command = " ".join(f"'{part}'" for part in [*COMMAND, "show", str(plan), *args])
    for to, code, says in (
        ("> /dev/full", 2, "can't write to the standard output: No space left on device"),
        (">&-", 0, ""),
        ("> /dev/full 2> /dev/full", 2, ""),
    ):
        found = subprocess.run(
            ["bash", "-c", f"{command} {to}"],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": ""},
        )
        assert (found.returncode, found.stdout) == (code, "")
        assert found.stderr == (f"error: {says}\n" if says else "")
    for to in ("2> /dev/full", "2>&-"):
        missing = " ".join(f"'{part}'" for part in [*COMMAND, "show", "none"])
        found = subprocess.run(["bash", "-c", f"{missing} {to}"], capture_output=True)
        assert (found.returncode, found.stdout, found.stderr) == (2, b"", b"")


def test_names_that_the_terminal_can_not_show(tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    path = os.fsdecode(os.fsencode(tmp_path) + b"/p\xff.plan.json")
    Path(path).write_bytes(make_plan(inputs=make_inputs(name="Qw\u00e9n")).encoded)
    for env in (ascii_only, {"LC_ALL": "C.UTF-8"}):
        assert json.loads(run("show", path, "--json", **env).stdout)["inputs"]["model"]["name"] == (
            "Qw\u00e9n"
        )
        assert run("show", path, **env).stdout.startswith("Qw")
        assert "p\\udcff.report.html: " in run("report", path, **env).stdout
        document = json.loads(run("report", path, "--json", **env).stdout)
        assert document["path"] == f"{tmp_path}/p\\udcff.report.html"
        assert "p\\udcff" in run("build", path + ".toml", code=2, **env).stderr


def test_json_of_structs_with_paths_that_are_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    problem = StoreError("t", []).problems
    print_json("s/1", {"a\udcff": [{"b": ("c\udcff", 1, None)}], "none": problem})
    assert json.loads(capsys.readouterr().out) == {
        "schema": "s/1",
        "a\\udcff": [{"b": ["c\\udcff", 1, None]}],
        "none": [],
    }


# --- interrupts, progress


@pytest.mark.parametrize("module", ["typer", "m2ncompile.cli.app", "m2ncompile.cli.show"])
def test_an_interrupt_while_commands_are_imported(module: str) -> None:
    script = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())"""
    process = scripted(script, "--version", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.communicate() == (b"", b"")
    assert process.returncode == 130


def test_an_interrupt_while_a_command_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/p.json"
        process = subprocess.Popen([*COMMAND, "show", url], stderr=subprocess.PIPE)
        listener.settimeout(60)
        connection, _ = listener.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            error = process.communicate()[1]
    assert (process.returncode, error) == (130, b"")


def on_terminal(*args: object) -> str:
    """What a command shows on a terminal that is its stderr."""
    ours, theirs = pty.openpty()
    process = scripted(
        COMPILED,
        *args,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # how Linux tells that nobody has it open any more
        pass
    os.close(ours)
    assert process.wait() == 0, shown
    return shown.decode()


def test_a_build_shows_its_progress_on_a_terminal_only(tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "a")
    args = ["build", spec, "--no-cache"]
    shown = on_terminal(*args)
    assert "p.toml: trace [modules]" in shown and "1/2" in shown
    assert compiled(*args).stderr == ""
