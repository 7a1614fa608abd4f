"""Checked-in plans: locked and frozen builds, the workflow, the hooks, docs/ci.md, misses."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from m2ncompile import __version__
from m2ncompile.diff import compare, input_paths
from m2ncompile.inputs import known_inputs
from m2ncompile.inventory import read_inventory, write_manifest
from m2ncompile.locking import check_frozen, plan_beside
from m2ncompile.plan import Plan
from m2ncompile.plan_check import load
from m2ncompile.spec import load_spec
from tests.browsers import launched
from tests.plans import make_plan
from tests.repositories import blocks, git, listing, sh
from tests.test_cli import COMMAND, SPEC, core_files, run

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "plans" / "models" / "Qwen3-0.6B" / "config.json"


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_spec(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


# Diffs on the command line.


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two plans that differ in one route."""
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_bytes(make_plan().encoded)
    after.write_bytes(make_plan([("model.embed.weight", "bfloat16", (8, 4), 0)]).encoded)
    return before, after


def test_diff_exit_codes_and_first_line(pair: tuple[Path, Path]) -> None:
    before, after = pair
    assert run("diff", before, before).stdout.startswith("same program: the plans are identical")
    found = run("diff", before, after, code=1)
    assert found.stdout.startswith("the program differs: no input changed")
    assert found.stderr == ""
    assert run("diff", before, after, "--markdown", code=1).stdout.startswith(
        "**The program differs"
    )


def test_diff_json(pair: tuple[Path, Path]) -> None:
    document = json.loads(run("diff", *pair, "--json", code=1).stdout)
    assert document["schema"] == "m2ncompile.diff/1"
    assert document["same_program"] is False
    assert document["tripped"] is None
    assert [g["name"] for g in document["routes"]] == ["model.embed.weight"]
    assert sum(g["tensors"] for g in document["removed"]) == 3
    gated = json.loads(run("diff", *pair, "--json", "--fail-on", "wire-bytes").stdout)
    assert gated["tripped"] == []


def test_diff_gates_decide_the_exit_code(pair: tuple[Path, Path]) -> None:
    before, after = pair
    run("diff", before, after, "--fail-on", "fallback-bytes,new-fallback,tensors")
    found = run("diff", after, before, "--fail-on", "program,new-fallback,tensors+3", code=1)
    assert "new-fallback: 2 tensors fall back that did not before" in found.stderr
    assert "program: what runs differs" in found.stderr
    assert "tensors+3" not in found.stderr
    text = run("diff", after, before, "--fail-on", "tensors+50%", "--markdown", code=1).stdout
    assert "`tensors+50%`: tensors grew from 1 to 4" in text


def test_diff_bad_input(pair: tuple[Path, Path], tmp_path: Path) -> None:
    before, after = pair
    error = run("diff", before, after, "--fail-on", "new-fallbak", code=2).stderr
    assert 'did you mean "new-fallback"?' in error
    cut = tmp_path / "cut.json"
    cut.write_bytes(before.read_bytes()[:-30])
    assert "cut short" in run("diff", before, cut, code=2).stderr
    newer = before.read_bytes().replace(b'"major":1', b'"major":2').replace(b'"0.1.0"', b'"9.9.9"')
    from hashlib import sha256

    body = newer[: newer.rindex(b'"digest":')]
    cut.write_bytes(body + b'"digest":"%s"\n}\n' % sha256(body).hexdigest().encode())
    error = run("diff", before, cut, code=2).stderr
    assert f"{cut}: plan format 2.0; this m2ncompile reads 1.x" in error
    assert error.count("\n") == 1
    assert "no such file" in run("diff", before, tmp_path / "none", code=2).stderr
    assert "can't read the spec" in run("diff", before, tmp_path / "none.toml", code=2).stderr
    golden = ROOT / "plans" / "gpt2-fsdp4-tp2.plan.json"
    error = run("diff", before, golden, code=2).stderr
    assert "the plans are of different models" in error
    assert "gpt2 (GPT2LMHeadModel)" in error
    run("diff", before, after, "--json", "--markdown", code=2)


def test_diff_shows_hostile_names_as_text(tmp_path: Path) -> None:
    name = "a\x1b[31m[bold]b\nc"
    (tmp_path / "a").write_bytes(make_plan([("x", "bfloat16", (8,), 0)]).encoded)
    (tmp_path / "b").write_bytes(
        make_plan([("x", "bfloat16", (8,), 0), (name, "bfloat16", (8,), 0)]).encoded
    )
    text = run("diff", tmp_path / "a", tmp_path / "b", code=1).stdout
    assert "a?[31m[bold]b?c" in text
    assert "\x1b" not in text


# Locked and frozen builds.


def test_where_a_plan_is_kept(tmp_path: Path) -> None:
    spec = Path("plans/a.toml")
    assert plan_beside(spec, None, several=True) == Path("plans/a.plan.json")
    assert plan_beside(spec, Path("x.json"), several=False) == Path("x.json")
    assert plan_beside(spec, Path("x.json"), several=True) == Path("x.json/a.plan.json")
    assert plan_beside(spec, tmp_path, several=False) == tmp_path / "a.plan.json"


@pytest.mark.engine
def test_story(repo: Path) -> None:
    """Check in, change the model's config and the trainer's ranks: found, named, shown."""
    plans = repo / "plans"
    spec, plan = plans / "policy.toml", plans / "policy.plan.json"
    before = listing(repo.parent)
    for mode in ("--locked", "--frozen"):
        run("build", mode, spec)
    run("diff", plan, spec)
    assert listing(repo.parent) == before

    change_config(plans / "model", num_hidden_layers=3)
    change_spec(spec, "ranks = 2", "ranks = 4")
    before = listing(repo.parent)
    frozen = run("build", "--frozen", plans, code=1)
    locked = run("build", "--locked", plans, code=1)
    assert listing(repo.parent) == before, "a check wrote something"
    for found in (frozen, locked):
        assert f"{plan}: stale" in found.stderr
        assert "model.config: " in found.stderr
        assert "trainer.ranks: 2 in the plan, 4 now" in found.stderr
        assert f"m2ncompile build {spec} -o {plan}" in found.stderr
    assert "model.inventory: " in locked.stderr  # only the engine's environment can list them
    assert "model.layers.2.*" in locked.stdout

    text = run("diff", plan, spec, "--markdown", code=1).stdout
    assert text.startswith("**The program differs: 3 inputs changed**")
    assert "| `trainer.ranks` | `2` | `4` |" in text
    assert "| `model.config` |" in text
    assert "| `model.layers.2.*` | 11 |" in text
    assert "dim 0 / 2 | dim 0 / 4 |" in text

    page = plans.parent / "report.html"
    shutil.copy(plan, page.with_name("before.plan.json"))
    run("build", spec, "-o", page.with_name("after.plan.json"))
    after, before_plan = page.with_name("after.plan.json"), page.with_name("before.plan.json")
    run("report", after, "--against", before_plan, "-o", page)
    with launched() as browser:
        shown = browser.new_page()
        shown.goto(page.as_uri())
        shown.wait_for_selector("html[data-ready]", state="attached")
        assert "3 inputs changed" in shown.inner_text("#changes")
        shown.fill("#query", "model.layers.2.mlp.down_proj")
        shown.press("#query", "Enter")
        assert "on the trainer: dim 0 / 4" in shown.inner_text("#tensor")

    # The difference built it into the store: from here on it is a hit.
    document = json.loads(run("build", "--locked", spec, "--json", code=1).stdout)
    assert document["schema"] == "m2ncompile.locked/1"
    (entry,) = document["plans"]
    assert entry["fresh"] is False
    assert {c["path"] for c in entry["inputs"]} == {
        "model.config",
        "model.inventory",
        "trainer.ranks",
    }
    assert entry["difference"]["same_program"] is False
    run("build", spec, "-o", plan)
    assert "is what" in run("build", "--locked", spec).stdout
    assert "fits" in run("build", "--frozen", spec).stdout


@pytest.mark.engine
def test_locked_finds_what_no_input_tells(repo: Path) -> None:
    """The plan of an edited compiler: its inputs are the same, and frozen can't see it."""
    spec, path = repo / "plans" / "policy.toml", repo / "plans" / "policy.plan.json"
    plan = load(path)
    kept = {name: getattr(plan, name) for name in plan.__struct_fields__}
    from m2ncompile.plan import program_digest
    from m2ncompile.plan_check import wire_digests

    other = Plan(**kept | {"transfers": plan.transfers[::-1]})
    source, complete = wire_digests(other)
    digests = type(plan.digests)(program_digest(other), source, complete)
    other = Plan(**kept | {"transfers": plan.transfers[::-1], "digests": digests})
    path.write_bytes(other.encoded)
    run("build", "--frozen", spec)
    error = run("build", "--locked", spec, code=1).stderr
    assert "the program differs: no input changed" in error
    assert "none that a plan records differs; the code of m2ncompile" in error


@pytest.mark.engine
@pytest.mark.parametrize("mode", ["--locked", "--frozen"])
def test_checks_of_missing_and_damaged_plans(repo: Path, mode: str) -> None:
    spec, plan = repo / "plans" / "policy.toml", repo / "plans" / "policy.plan.json"
    whole = plan.read_bytes()
    plan.write_bytes(whole[:-20])
    assert "cut short" in run("build", mode, spec, code=2).stderr
    plan.unlink()
    error = run("build", mode, spec, code=2).stderr
    assert f"there is no plan for {spec}. Build it: m2ncompile build {spec} -o {plan}" in error
    # One missing, one stale: all are looked at, and the worse code counts.
    shutil.copy(spec, spec.with_name("other.toml"))
    change_spec(spec, "ranks = 2", "ranks = 1")
    plan.write_bytes(whole)
    if mode == "--frozen":
        found = run("build", mode, repo / "plans", code=2)
        assert "other.plan.json: there is no plan" in found.stderr
        assert "trainer.ranks: 2 in the plan, 1 now" in found.stderr
    run("build", "--locked", "--frozen", spec, code=2)


def test_build_of_a_folder_without_specs(tmp_path: Path) -> None:
    assert "holds no spec" in run("build", tmp_path, code=2).stderr


@pytest.mark.engine
@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("tp = 2", "tp = 1", "engine.tp"),
        ('layout = "fsdp"', 'layout = "ddp"', "trainer.layout"),
        ("cuda-sm90", "cuda-sm100", "engine.target"),
        ("0.33.0", "0.34.0", "engine.version"),
        ('path = "model"', 'path = "model"\nname = "x"', "model.name"),
        ('path = "model"', 'path = "model"\nexclude = ["x"]', "model.exclude"),
        ("[trainer]", '[resolver]\nname = "vllm"\n[trainer]', "resolver.name"),
        ("[trainer]", "[limits]\nmax_sources = 8\n[trainer]", "limits.max_sources"),
    ],
)
def test_frozen_names_each_changed_input(repo: Path, old: str, new: str, path: str) -> None:
    spec, plan = repo / "plans" / "policy.toml", repo / "plans" / "policy.plan.json"
    assert check_frozen(spec, plan).changes == ()
    change_spec(spec, old, new)
    assert [change.path for change in check_frozen(spec, plan).changes] == [path]


@pytest.mark.engine
def test_frozen_knows_configs_tensors_and_releases(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, plan = repo / "plans" / "policy.toml", repo / "plans" / "policy.plan.json"
    model = repo / "plans" / "model"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert check_frozen(spec, plan).changes == ()
    manifest = repo / "plans" / "manifest.json"
    manifest.write_bytes(write_manifest(read_inventory(model)))
    change_spec(spec, 'path = "model"', 'path = "model"\nmanifest = "manifest.json"')
    assert [c.path for c in check_frozen(spec, plan).changes] == ["model.origin"]
    run("build", spec, "-o", plan)
    assert check_frozen(spec, plan).changes == ()
    text = manifest.read_text().replace("[151936,1024]", "[151936,512]", 1)
    manifest.write_text(text)
    assert [c.path for c in check_frozen(spec, plan).changes] == ["model.inventory"]
    monkeypatch.setattr("m2ncompile.inputs.__version__", "9.9.9")
    first = check_frozen(spec, plan).changes[0]
    assert (first.path, first.before, first.after) == ("compiler", __version__, "9.9.9")


@pytest.mark.engine
def test_known_inputs_are_those_that_a_build_records(repo: Path) -> None:
    """A new input must be known to the frozen check, or be listed here as beyond it."""
    known = known_inputs(load_spec(repo / "plans" / "policy.toml"))
    recorded = input_paths(load(repo / "plans" / "policy.plan.json").inputs)
    beyond = {
        path
        for path in recorded
        if path in ("model.architecture", "model.inventory") or path.startswith("model.missing[")
    }
    assert known == {path: value for path, value in recorded.items() if path not in beyond}


@pytest.mark.engine
def test_frozen_without_an_engine(repo: Path, tmp_path: Path) -> None:
    """An interpreter that has only the core dependencies, as after a plain install."""
    site = tmp_path / "site"
    site.mkdir()
    for entry in core_files():
        (site / entry.name).symlink_to(entry)

    def frozen(code: int) -> str:
        found = subprocess.run(
            [sys.executable, "-S", "-c", COMMAND[2], "build", "--frozen", str(repo / "plans")],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(site), "PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        )
        assert found.returncode == code, found.stderr
        return found.stderr

    frozen(0)
    change_spec(repo / "plans" / "policy.toml", "tp = 2", "tp = 1")
    assert "engine.tp: 2 in the plan, 1 now" in frozen(1)


# Misses.


@pytest.mark.engine
def test_a_miss_is_explained(repo: Path) -> None:
    spec = repo / "plans" / "policy.toml"
    assert "stored as" in run("cache", "explain", spec).stdout
    assert "\n  miss " not in run("build", "-v", spec).stdout
    change_spec(spec, "ranks = 2", "ranks = 4")
    document = json.loads(run("cache", "explain", spec, "--json").stdout)
    assert document["schema"] == "m2ncompile.cache.explain/1"
    assert document["plan"] is None
    assert [c["name"] for c in document["miss"]["changes"]] == ["spec"]
    assert document["miss"]["inputs"] == [{"path": "trainer.ranks", "before": 2, "after": 4}]
    text = run("cache", "explain", spec).stdout
    assert "spec changed" in text
    assert "trainer.ranks: 2 -> 4" in text
    found = run("build", "-v", spec)
    assert re.search(r"^  miss +trainer.ranks: 2 -> 4$", found.stdout, re.MULTILINE)
    assert "stored as" in run("cache", "explain", spec).stdout


def test_a_miss_names_versions_and_what_else_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from m2ncompile.build import action_key, open_store
    from m2ncompile.missing import explain_lookup
    from m2ncompile.store import ActionKey

    (tmp_path / "model").mkdir()
    shutil.copy(CONFIG, tmp_path / "model")
    path = tmp_path / "spec.toml"
    path.write_text(SPEC.format(model="model"))
    spec, store = load_spec(path), open_store(tmp_path / "cache")
    assert explain_lookup(spec, store) == (None, None)
    assert "nothing else is" in run("cache", "explain", path, "--cache", store.root).stdout
    key = dict(action_key(spec).components)
    digest = store.put(make_plan().encoded)
    far = {name: "other" for name in key}
    store.record(ActionKey.of(far), digest)
    store.record(ActionKey.of(key | {"engine": "0.32.0", "compiler": "x"}), digest)
    _, why = explain_lookup(spec, store)
    assert why is not None
    assert why.plan == digest
    assert why.lines == [
        "compiler changed (m2ncompile's own code)",
        f"engine changed: 0.32.0 -> {key['engine']}",
    ]
    store.record(ActionKey.of(key), digest)
    store.path(digest).unlink()
    _, why = explain_lookup(spec, store)
    assert why is not None
    assert why.lines == ["these very inputs were built before; the plan was removed or damaged"]


# What is given to others: the workflow, the hooks, the recipes.


def workflow() -> Any:
    text = (ROOT / ".github" / "workflows" / "plans.yml").read_text()
    return yaml.load(text, yaml.BaseLoader)  # as strings: YAML 1.1 takes `on` for a truth value


def steps(**inputs: str) -> tuple[dict[str, str], dict[str, str]]:
    """The environment and the commands by name, for a call with `inputs`."""
    call = workflow()
    known = call["on"]["workflow_call"]["inputs"]
    assert set(inputs) <= set(known)
    values = {name: inputs.get(name, entry["default"]) for name, entry in known.items()}
    (job,) = call["jobs"].values()
    environment = {
        key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: values[m[1]], text)
        for key, text in job["env"].items()
    }
    assert "${{" not in "".join(environment.values())
    commands = {step["name"]: step["run"] for step in job["steps"] if "run" in step}
    for command in commands.values():
        assert "${{" not in command, "what a caller gives must not become code"
    return environment, commands


def runner(repo: Path, tmp_path: Path) -> dict[str, str]:
    """What a runner sets, for a pull request against main."""
    git(repo, "clone", "-q", "--bare", ".", str(tmp_path / "origin.git"))
    git(repo, "remote", "add", "origin", str(tmp_path / "origin.git"))
    git(repo, "fetch", "-q", "origin")
    git(repo, "checkout", "-q", "-b", "change")
    (tmp_path / "runner").mkdir()
    gh = tmp_path / "bin" / "gh"
    # Lists the number of the comment that there is, if any, and keeps what it is to write.
    gh.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f'  *--jq*) cat "{tmp_path}/known" ;;\n'
        f'  *) printf "%s\\n" "$@" > "{tmp_path}/gh" ;;\nesac\n'
    )
    (tmp_path / "known").write_text("")
    gh.chmod(0o755)
    return {
        "GITHUB_BASE_REF": "main",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "RUNNER_TEMP": str(tmp_path / "runner"),
        "GITHUB_REPOSITORY": "o/r",
        "NUMBER": "7",
    }


@pytest.mark.engine
def test_workflow(repo: Path, tmp_path: Path) -> None:
    environment, commands = steps()
    assert list(commands) == ["Install", "Check the plans", "Compare with the base", "Comment"]
    assert commands["Install"] == 'python -m pip install "$REQUIREMENT"'
    env = environment | runner(repo, tmp_path)
    check, compared, comment = list(commands.values())[1:]
    sh(check, repo, **env)
    sh(check, repo, **env | {"MODE": "locked"})
    # Where nothing can be compiled, a plan that the store lacks comes from the remote.
    run("cache", "push", "--remote", f"file://{tmp_path}/shared")
    (tmp_path / "broken" / "vllm").mkdir(parents=True)
    (tmp_path / "broken" / "vllm" / "__init__.py").write_text("raise ImportError")
    bare = {
        "MODE": "locked",
        "M2NCOMPILE_CACHE": str(tmp_path / "empty"),
        "PYTHONPATH": f"{tmp_path / 'broken'}{os.pathsep}{ROOT}",
    }
    sh(check, repo, code=2, **env | bare)
    shared, _ = steps(remote=f"file://{tmp_path}/shared")
    sh(check, repo, **env | shared | bare)
    sh(compared, repo, **env)
    sh(comment, repo, **env)
    assert not (tmp_path / "gh").exists()  # nothing changed, nothing to say

    spec = repo / "plans" / "policy.toml"
    change_spec(spec, "ranks = 2", "ranks = 4")
    assert "trainer.ranks" in sh(check, repo, code=1, **env).stderr
    run("build", repo / "plans", "-o", repo / "plans")
    git(repo, "commit", "-q", "-a", "-m", "More ranks")
    sh(check, repo, **env)
    sh(compared, repo, **env)
    text = (tmp_path / "summary.md").read_text()
    assert text.startswith("### plans/policy.plan.json\n\n**The program differs: 1 input changed**")
    sh(comment, repo, **env)
    asked = (tmp_path / "gh").read_text().splitlines()
    assert asked[:2] == ["api", "repos/o/r/issues/7/comments"]
    body = Path(asked[-1].removeprefix("body=@"))
    assert body.read_text() == f"<!-- m2ncompile: plans -->\n{text}"
    (tmp_path / "known").write_text("12\n")
    sh(comment, repo, **env)
    asked = (tmp_path / "gh").read_text().splitlines()
    assert asked[:4] == ["api", "--method", "PATCH", "repos/o/r/issues/comments/12"]
    (tmp_path / "runner" / "plans.md").write_text("")
    sh(comment, repo, **env)
    assert "No plan changes any more" in body.read_text()

    sh(compared, repo, **env | {"FAIL_ON": "fallback-bytes+1%,new-fallback"})
    failed = sh(compared, repo, code=1, **env | {"FAIL_ON": "inputs"})
    assert "inputs: an input differs" in failed.stderr

    (repo / "plans" / "policy.plan.json").write_text("{}")
    git(repo, "commit", "-q", "-a", "-m", "Damage")
    assert "digest line" in sh(check, repo, code=2, **env).stderr
    sh(compared, repo, **env)
    assert "were not compared" in (tmp_path / "runner" / "plans.md").read_text()
    sh(compared, repo, code=1, **env | {"FAIL_ON": "program"})


@pytest.mark.engine
def test_hooks(repo: Path) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert [hook["id"] for hook in hooks] == ["m2ncompile-frozen", "m2ncompile-locked"]
    for hook in hooks:
        assert hook["pass_filenames"] is False and hook["always_run"] is True
        command = shlex.join([*shlex.split(hook["entry"]), *hook["args"]])
        sh(command, repo)
    change_config(repo / "plans" / "model", rms_norm_eps=1e-5)
    for hook in hooks:
        command = shlex.join([*shlex.split(hook["entry"]), *hook["args"]])
        error = sh(command, repo, code=1).stderr
        assert "plans/policy.plan.json: stale" in error
        assert "model.config" in error
        if hook["id"] == "m2ncompile-locked":
            assert "same program: 1 input changed" in error


RECIPES = (ROOT / "docs" / "ci.md").read_text()


@pytest.mark.engine
def test_every_command_of_the_recipes_runs(repo: Path) -> None:
    git(repo, "rm", "-q", "plans/policy.plan.json")
    git(repo, "commit", "-q", "-m", "Without the plan")
    commands = blocks(RECIPES, "sh")
    assert len(commands) == 6
    for command in commands:
        sh(command, repo)
    assert "plans/policy.plan.json" in git(repo, "ls-files")
    assert len(list((repo.parent / "shared").rglob("*.json"))) == 2


def test_yaml_of_the_recipes_fits_what_it_names() -> None:
    action, hooks = (yaml.load(text, yaml.BaseLoader) for text in blocks(RECIPES, "yaml"))
    (job,) = action["jobs"].values()
    assert job["uses"].partition("/m2ncompile/")[2].split("@")[0] == ".github/workflows/plans.yml"
    (own,) = workflow()["jobs"].values()
    assert job["permissions"] == own["permissions"]
    assert set(job["with"]) <= set(workflow()["on"]["workflow_call"]["inputs"])
    known = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    (used,) = hooks["repos"][0]["hooks"]
    assert used["id"] in {hook["id"] for hook in known}


def test_recipes_name_every_gate() -> None:
    from m2ncompile.diff.gates import AMOUNTS, FLAGS

    text = (ROOT / "docs" / "ci.md").read_text()
    for gate in (*AMOUNTS, *FLAGS):
        assert f"`{gate}`" in text


def test_compare_is_quick_to_import_and_total() -> None:
    """Any two plans can be compared, those of different models too: locked builds do."""
    golden = load(ROOT / "plans" / "gpt2-fsdp4-tp2.plan.json")
    assert not compare(golden, make_plan()).same_program
