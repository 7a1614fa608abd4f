"""The documentation against what it is about: commands, options, messages, links."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest
import typer

from m2ncompile.cli.app import app
from tests.repositories import blocks, sh

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Commands of the documentation that other tests run, by page.
ELSEWHERE = {
    "README.md": {
        "make demo",  # packaging runs what it does; CI runs the rest
        "make test",
        ".venv/bin/m2ncompile build plans/*.toml",  # the golden plans
        "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL",  # the end-to-end test, by its module's name
    },
    "running.md": {
        "VLLM_SERVER_DEV_MODE=1 vllm serve model",  # the same
        "m2ncompile rehearse plan.json --model model --syncs 2",  # the test of `rehearse`
    },
}


def page(name: str) -> str:
    return next(path for path in PAGES if path.name == name).read_text()


# --- commands


@pytest.mark.engine
def test_every_command_of_the_reference_runs(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2NCOMPILE_REMOTE", (repo.parent / "shared").as_uri())
    commands = blocks(page("cli.md"), "sh")
    assert len(commands) == sum(1 for _ in real_commands())
    for command in (*commands, *blocks(page("report.md"), "sh")):
        sh(command, repo)


def test_no_other_page_has_commands_that_nothing_runs() -> None:
    for path in PAGES:
        if path.name in ("cli.md", "ci.md", "report.md"):
            continue  # all of theirs run
        known = ELSEWHERE.get(path.name, set())
        for block in blocks(path.read_text(), "sh"):
            for line in block.replace("\\\n", "").strip().splitlines():
                assert any(line.startswith(command) for command in known), (path.name, line)


def test_make_targets_and_extras_of_the_readme_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for path in PAGES:
        text = path.read_text()
        assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets, path
        named = set(re.findall(r"m2ncompile\[([a-z0-9]+)\]", text))
        assert named <= project["optional-dependencies"].keys(), path
    for target in ("demo", "test"):
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def real_commands() -> Iterator[tuple[str, click.Command]]:
    def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
            return
        for key, value in inner.items():
            yield from walk(f"{name} {key}", value)

    yield from walk("m2ncompile", typer.main.get_command(app))


def test_the_reference_has_every_command_and_option_and_no_other() -> None:
    text = page("cli.md")
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    documented = {section.partition("\n")[0]: section for section in sections}
    found = dict(real_commands())
    assert documented.keys() == found.keys()
    everywhere = set(re.findall(r"^\| `(--[a-z-]+)", head, re.MULTILINE))
    assert everywhere == {"--cache", "--json", "--remote"}
    for name, command in found.items():
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o[0] == "-"}
        assert everywhere & options or name == "m2ncompile"
        rows = re.findall(r"^\| (`-.*?) \|", documented[name], re.MULTILINE)
        told = {option for row in rows for option in re.findall(r"`(-[a-z-]+)`", row)}
        assert told == options - everywhere - {"--help"}, name


def test_the_readme_has_every_command() -> None:
    text = page("README.md")
    for name, _ in real_commands():
        first, *rest = name.removeprefix("m2ncompile ").split()
        lines = re.findall(rf"`m2ncompile {first}\b.*", text)
        assert any(all(word in line for word in rest) for line in lines), name


def test_every_schema_is_in_the_reference() -> None:
    named = set()
    for path in sorted((ROOT / "m2ncompile" / "cli").glob("*.py")):
        named |= set(re.findall(r'"(m2ncompile\.[a-z.-]+/\d+)"', path.read_text()))
    assert named
    for schema in named:
        assert f"`{schema}`" in page("cli.md"), schema


# --- messages


def literals() -> list[str]:
    """Every text in the package; what an f-string fills in is a line feed."""
    found = []
    for path in sorted((ROOT / "m2ncompile").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts = (p.value if isinstance(p, ast.Constant) else "\n" for p in node.values)
                found.append("".join(map(str, texts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_message_of_troubleshooting_is_one() -> None:
    ours, _, _ = page("troubleshooting.md").partition("## vLLM's own messages")
    rows = re.findall(r"^\| (.*?`.*?) \| ", ours, re.MULTILINE)
    assert len(rows) > 40
    known = literals()
    for row in rows:
        for message in re.findall(r"`([^`]+)`", row):
            parts = [part.strip() for part in message.split("...") if part.strip(" ,.:()")]
            pattern = re.compile("[^\\0]*?".join(map(re.escape, parts)))
            assert any(pattern.search(text) for text in known), message


# --- pages


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_link_leads_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if "://" in target:
                continue
            file, _, anchor = target.partition("#")
            other = path.parent / file if file else path
            assert other.exists(), (path.name, target)
            if anchor:
                assert anchor in anchors(other.read_text()), (path.name, target)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"({path.name})" in index


def test_the_map_of_the_code_has_every_module() -> None:
    text = page("CONTRIBUTING.md")
    for path in (ROOT / "m2ncompile").iterdir():
        if path.name.startswith("__") or path.suffix not in ("", ".py"):
            continue
        name = f"{path.name}/" if path.is_dir() else path.name
        assert f"`{name}" in text or f"`{path.name}`" in text, name


def test_modules_import_only_what_the_map_has_above_them() -> None:
    rows = re.findall(r"^\| (`.*?) \|", page("CONTRIBUTING.md"), re.MULTILINE)
    line = {
        name.removesuffix(".py").rstrip("/"): number
        for number, row in enumerate(rows)
        for name in re.findall(r"`([\w/.]+)`", row)
    }
    for path in sorted((ROOT / "m2ncompile").rglob("*.py")):
        own = path.relative_to(ROOT / "m2ncompile").parts[0].removesuffix(".py")
        if own.startswith("__"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if name.startswith("m2ncompile."):
                assert line[name.split(".")[1]] <= line[own], (path, name)


def test_python_of_the_pages_imports_what_there_is() -> None:
    for path in PAGES:
        for block in blocks(path.read_text(), "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("m2n"):
                    module = import_module(node.module or "")
                    assert all(hasattr(module, alias.name) for alias in node.names)
