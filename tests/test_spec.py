"""Reading specs: what is accepted, and that every violation is reported where it stands."""

from __future__ import annotations

import os
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
        ("tp = 2", "tp = 2\ndp = 2\nep = 2", "engine.ep", "tp * dp = 2 * 2 = 4"),
        ("cuda-sm90", "cuda-sm9", "engine.target", 'did you mean "cuda-sm90"?'),
        ('"fsdp"', '"hsdp"', "trainer.shard_ranks", "needs it"),
        (
            '"fsdp"',
            '"hsdp"\nshard_ranks = 3',
            "trainer.shard_ranks",
            "3 does not divide ranks 4 (remainder 1)",
        ),
        ('"fsdp"', '"fsdp"\nshard_ranks = 2', "trainer.shard_ranks", 'goes with layout "hsdp"'),
        (
            'layout = "fsdp"',
            'layout = "fsdp"\n[[trainer.rules]]\nmatch="*"\nmesh=[2, 3]\nplacements="replicated"',
            "trainer.rules[0].mesh",
            "2 * 3 = 6 ranks",
        ),
        (
            'layout = "fsdp"',
            'layout = "fsdp"\n[[trainer.rules]]\nmatch = "*"\nplacements = [0, 1]',
            "trainer.rules[0].placements",
            "shard over both mesh axes",
        ),
        (
            'layout = "fsdp"',
            'layout = "fsdp"\n[[trainer.rules]]\nmatch = "*"\n'
            'placements = ["replicate", "replicate"]',
            "trainer.rules[0].placements",
            'write "replicated"',
        ),
        ('path = "model"', 'path = "elsewhere"', "model.path", "a folder with a config.json"),
        (
            'path = "model"',
            'path = "model"\nmanifest = "none.json"',
            "model.manifest",
            "no such file",
        ),
        (
            'layout = "fsdp"',
            'layout = "fsdp"\n[limits]\nmax_dims = 0',
            "limits.max_dims",
            "at least 1",
        ),
        (
            'layout = "fsdp"',
            'layout = "fsdp"\n[limits]\nstage_bytes = 9223372036854775808',
            "limits.stage_bytes",
            "below 2**63",
        ),
        (
            "tp = 2",
            "tp = 64\npp = 13\ndp = 5",
            "engine.tp",
            "64 * 13 * 5 = 4160 workers; at most 4096",
        ),
        ("tp = 2", "tp = 65537", "engine.tp", "<= 65536"),
        ("ranks = 4", "ranks = 65537", "trainer.ranks", "<= 65536"),
        ("ranks = 4", f"ranks = 0x{'f' * 5000}", "trainer.ranks", "a very large int"),
        ('path = "model"', 'path = "model"\nname.a' + ".a" * 2000 + " = 1", "model.name", "a very"),
        ('path = "model"', 'path = "model"\nexclude = ["a", 1]', "model.exclude[1]", "got `int`"),
        ('path = "model"', f'path = "{"x" * 5000}"', "model.path", ""),
        ('path = "model"', f'path = "model"\nmanifest = "{"x" * 5000}"', "model.manifest", ""),
        ('path = "model"', 'path = "a\\u0000"', "model.path", "a folder with a config.json"),
    ],
)
def test_impossible_values(write, old: str, new: str, where: str, says: str) -> None:
    assert old in GOOD
    found = problems(write(GOOD.replace(old, new)))
    assert list(found) == [f"spec.toml: {where}"]
    assert says in found[f"spec.toml: {where}"]


def test_bounds_are_within_what_is_accepted(write) -> None:
    spec = load_spec(write(GOOD.replace("tp = 2", "tp = 64\npp = 64").replace("= 4", "= 65536")))
    assert (spec.engine.workers, spec.trainer.ranks) == (4096, 65536)


def test_what_depends_on_each_other_is_reported_with_the_rest(write) -> None:
    found = problems(
        write(
            """
            [model]
            path = "elsewhere"
            manifest = "none.json"
            [engine]
            version = "0.33.0"
            target = "cuda-sm9"
            tp = 2
            ep = 3
            [trainer]
            ranks = 4
            layout = "hsdp"
            [[trainer.rules]]
            match = "*"
            placements = [0, "x"]
            [[trainer.rules]]
            match = "a"
            mesh = [3, 1]
            placements = "replicated"
            [limits]
            max_dims = 0
            max_sources = -1
            stack_bytes = true
            """
        )
    )
    assert set(found) == {
        "spec.toml: model.path",
        "spec.toml: model.manifest",
        "spec.toml: engine.target",
        "spec.toml: engine.ep",
        "spec.toml: trainer.shard_ranks",
        "spec.toml: trainer.rules[0].placements",
        "spec.toml: trainer.rules[1].mesh",
        "spec.toml: limits.max_dims",
        "spec.toml: limits.max_sources",
        "spec.toml: limits.stack_bytes",
    }
    expected = 'expected "replicated", or for each of two mesh axes the tensor dim (0 to 15)'
    assert expected in found["spec.toml: trainer.rules[0].placements"]


def test_the_folder_that_names_the_model_must_have_a_name_in_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    text = GOOD.replace('path = "model"', 'path = "."')
    (folder / "spec.toml").write_text(text)
    assert "UTF-8" in problems(folder / "spec.toml")["spec.toml: model.name"]
    (folder / "spec.toml").write_text(text.replace('path = "."', 'path = "."\nname = "m"'))
    assert load_spec(folder / "spec.toml").model.name == "m"


@pytest.mark.parametrize(
    "text",
    ["[model", "a = 1\na = 2", "\x00", f"a = {'9' * 5000}", f"a = {'[' * 5000}{']' * 5000}"],
)
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

    from m2ncompile import layout, spec

    reference = (Path(__file__).parents[1] / "docs" / "spec.md").read_text()
    sections = {
        "model": spec.ModelSpec,
        "engine": spec.EngineSpec,
        "trainer": spec.TrainerSpec,
        "trainer.rules": spec.RuleSpec,
        "resolver": spec.ResolverSpec,
        "limits": layout.Limits,
    }
    for section, struct in sections.items():
        for field in msgspec.structs.fields(struct):
            if field.name != "rules":
                assert f"| `{section}.{field.encode_name}` |" in reference
    for target in spec.TARGETS:
        assert f"`{target}`" in reference
