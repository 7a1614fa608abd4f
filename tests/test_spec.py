"""Reading specs: what is accepted, and that every violation is reported where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2ncompile.errors import SpecError
from m2ncompile.spec import load_spec

GOOD = """
[model]
path = "model"

[engine]
version = "0.33.0"
target = "cuda-sm90"
tp = 2

[trainer]
ranks = 4
layout = "fsdp"
"""


@pytest.fixture
def write(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def write(text: str) -> Path:
        path = tmp_path / "spec.toml"
        path.write_text(text)
        return path

    return write


def problems(path: Path) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert caught.value.exit_code == 2
    return {p.where: f"{p.message} / {p.fix}" for p in caught.value.problems}


def test_defaults(write, tmp_path: Path) -> None:
    spec = load_spec(write(GOOD))
    assert spec.model.path == str(tmp_path / "model")
    assert spec.model.name == "model"
    assert (spec.engine.tp, spec.engine.ep, spec.engine.pp, spec.engine.dp) == (2, 1, 1, 1)
    assert spec.engine.dtype == spec.engine.quantization == "auto"
    assert spec.resolver.name == "traced"
    assert (spec.limits.max_dims, spec.limits.max_sources, spec.limits.max_destinations) == (
        3,
        16,
        64,
    )


def test_all_violations_at_once(write) -> None:
    found = problems(
        write(
            """
            [model]
            path = ""
            [engine]
            version = "0.33"
            target = "cuda-sm90"
            tpp = 2
            dp = 0
            ep = true
            [trainer]
            ranks = "4"
            layout = "fspd"
            [[trainer.rules]]
            match = "*"
            placements = [0, "replicat"]
            [limit]
            """
        )
    )
    assert set(found) == {
        "spec.toml: model.path",
        "spec.toml: engine.version",
        "spec.toml: engine.tpp",
        "spec.toml: engine.dp",
        "spec.toml: engine.ep",
        "spec.toml: trainer.ranks",
        "spec.toml: trainer.layout",
        "spec.toml: trainer.rules[0].placements",
        "spec.toml: limit",
    }
    assert "did you mean `engine.tp`?" in found["spec.toml: engine.tpp"]
    assert 'did you mean "fsdp"?' in found["spec.toml: trainer.layout"]
    assert "did you mean `limits`?" in found["spec.toml: limit"]
    assert "Expected `int`, got `str`" in found["spec.toml: trainer.ranks"]
    assert "Expected `int`, got `bool`" in found["spec.toml: engine.ep"]


def test_missing_keys_are_named(write) -> None:
    assert set(problems(write("[model]\n[trainer]\nranks = 1"))) == {
        "spec.toml: model.path",
        "spec.toml: engine",
        "spec.toml: trainer.layout",
    }


@pytest.mark.parametrize(
    ("old", "new", "where", "says"),
    [
        ("tp = 2", "tp = 2\ndp = 2\nep = 2", "engine", "tp * dp = 2 * 2 = 4"),
        ("cuda-sm90", "cuda-sm9", "engine", 'did you mean "cuda-sm90"?'),
        ('"fsdp"', '"hsdp"', "trainer", "needs shard_ranks"),
        ('"fsdp"', '"hsdp"\nshard_ranks = 3', "trainer", "does not divide ranks 4 (remainder 1)"),
        ('"fsdp"', '"fsdp"\nshard_ranks = 2', "trainer", 'goes with layout "hsdp"'),
        (
            'layout = "fsdp"',
            'layout = "fsdp"\n[[trainer.rules]]\nmatch="*"\nmesh=[2, 3]\nplacements="replicated"',
            "trainer",
            "2 * 3 = 6 ranks",
        ),
        (
            'layout = "fsdp"',
            'layout = "fsdp"\n[[trainer.rules]]\nmatch = "*"\nplacements = [0, 1]',
            "trainer.rules[0]",
            "shard over both mesh axes",
        ),
        (
            'layout = "fsdp"',
            'layout = "fsdp"\n[[trainer.rules]]\nmatch = "*"\n'
            'placements = ["replicate", "replicate"]',
            "trainer.rules[0]",
            'write placements = "replicated"',
        ),
        ('path = "model"', 'path = "elsewhere"', "model.path", "a folder with a config.json"),
        (
            'path = "model"',
            'path = "model"\nmanifest = "none.json"',
            "model.manifest",
            "no such file",
        ),
        ('layout = "fsdp"', 'layout = "fsdp"\n[limits]\nmax_dims = 0', "limits", "at least 1"),
    ],
)
def test_impossible_values(write, old: str, new: str, where: str, says: str) -> None:
    assert old in GOOD
    found = problems(write(GOOD.replace(old, new)))
    assert list(found) == [f"spec.toml: {where}"]
    assert says in found[f"spec.toml: {where}"]


@pytest.mark.parametrize("text", ["[model", "a = 1\na = 2", "\x00"])
def test_not_toml(write, text: str) -> None:
    with pytest.raises(SpecError, match="not valid TOML"):
        load_spec(write(text))


def test_not_utf8(write) -> None:
    path = write(GOOD)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="not valid TOML"):
        load_spec(path)


def test_absent(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        load_spec(tmp_path / "none.toml")


def test_every_checked_in_spec_loads() -> None:
    specs = sorted((Path(__file__).parents[1] / "plans").glob("*.toml"))
    assert specs
    for spec in specs:
        load_spec(spec)


def test_every_key_is_documented() -> None:
    import msgspec

    from m2ncompile import spec

    reference = (Path(__file__).parents[1] / "docs" / "spec.md").read_text()
    sections = {
        "model": spec.ModelSpec,
        "engine": spec.EngineSpec,
        "trainer": spec.TrainerSpec,
        "trainer.rules": spec.RuleSpec,
        "resolver": spec.ResolverSpec,
        "limits": spec.Limits,
    }
    for section, struct in sections.items():
        for field in msgspec.structs.fields(struct):
            if field.name != "rules":
                assert f"| `{section}.{field.encode_name}` |" in reference
    for target in spec.TARGETS:
        assert f"`{target}`" in reference
