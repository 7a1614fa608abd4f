"""The report: its figures against the plan by other ways, and a page that is whole and safe."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import zlib
from collections import Counter, defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from m2ncompile.diff import compare
from m2ncompile.diff.records import SECTIONS
from m2ncompile.dtypes import nbytes
from m2ncompile.errors import PlanError
from m2ncompile.pieces import pieces
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of, load
from m2ncompile.report import page, report
from m2ncompile.report.records import ROUTES
from m2ncompile.stacking import Stack, stacked
from m2ncompile.summary import summarize
from tests.plans import make_inputs, make_plan
from tests.test_cli import run
from tests.test_split import destination, plan_in_parts

PLANS = Path(__file__).parents[1] / "plans"
GPT2 = PLANS / "gpt2-fsdp4-tp2.plan.json"
LLAMA = PLANS / "llama-3.1-8b-fsdp8-tp4.plan.json"
STOCK = PLANS / "llama-3.1-8b-fsdp8-tp4-stock.plan.json"
REPLICATED = PLANS / "deepseek-v2-lite-hsdp8-ep4.plan.json"


@pytest.fixture(scope="module", params=[GPT2, STOCK, REPLICATED], ids=lambda path: path.stem)
def plan(request: pytest.FixtureRequest) -> Plan:
    return load(request.param)


def box_bytes(dtype: str, box: tuple[tuple[int, int], ...]) -> int:
    return nbytes(dtype, tuple(b - a for a, b in box))


def stacks(plan: Plan) -> list[tuple[str, int, Stack]]:
    """(dtype, tensors, what moves) of each transfer."""
    layouts = layouts_of(plan)
    found = []
    for transfer in plan.transfers:
        carried = [plan.destinations[d] for d in transfer.destinations]
        wire = plan.wires[carried[0].wire]
        form = plan.geometries[wire.geometry]
        stack = stacked(form.shape, layouts[wire.source], [layouts[d.layout] for d in carried])
        found.append((plan.dtypes[form.dtype], len(carried), stack))
    return found


def test_bytes_add_up_to_the_summary(plan: Plan) -> None:
    made, summary = report(plan), summarize(plan)
    by_route = {route.route: route.nbytes for route in summary.routes}
    for place, route in enumerate(ROUTES):
        assert sum(layer.nbytes[place] for layer in made.layers) == by_route.get(route, 0)
        assert sum(t.nbytes for t in made.transfers if t.route == route) == by_route.get(route, 0)
    received = [sum(row[w] for row in made.traffic) for w in range(plan.inputs.engine.workers)]
    assert tuple(received) == summary.wire_bytes_per_worker


def test_layers_go_by_the_first_number(plan: Plan) -> None:
    expected: Counter[tuple[int | None, str]] = Counter()
    for d in plan.destinations:
        found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", plan.tensors[d.tensor].name)
        form = plan.geometries[plan.wires[d.wire].geometry]
        expected[int(found[1]) if found else None, d.route] += nbytes(
            plan.dtypes[form.dtype], form.shape
        )
    layers = report(plan).layers
    assert expected == Counter(
        {
            (layer.number, route): held
            for layer in layers
            for route, held in zip(ROUTES, layer.nbytes, strict=True)
            if held
        }
    )
    assert [layer.number for layer in layers] == [None, *range(len(layers) - 1)]


def test_traffic_is_the_pieces_dealt_out_among_those_who_hold_them(plan: Plan) -> None:
    first = plan.inputs.trainer.ranks
    expected = [[0] * plan.inputs.engine.workers for _ in range(first)]
    for dtype, _, stack in stacks(plan):
        turns: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for piece in pieces(stack.shape, stack.source, stack.destination):
            sender = piece.trainers[turns[piece.trainers] % len(piece.trainers)]
            turns[piece.trainers] += 1
            expected[sender][piece.worker - first] += box_bytes(dtype, piece.box)
    assert report(plan).traffic == tuple(map(tuple, expected))


def test_moves_are_the_pieces(plan: Plan) -> None:
    made, layouts = report(plan), layouts_of(plan)
    first = plan.inputs.trainer.ranks
    checked = set()
    for stop, d in zip(made.stops, plan.destinations, strict=True):
        wire = plan.wires[d.wire]
        assert (stop.tensor, stop.base, stop.route, stop.landing, stop.offset, stop.reason) == (
            *(d.tensor, wire.base, d.route, d.landing, d.offset, d.reason),
        )
        key = stop.move, wire.geometry, wire.source, d.layout
        if key in checked:
            continue
        checked.add(key)
        shape = plan.geometries[wire.geometry].shape
        source, destination = layouts[wire.source], layouts[d.layout]
        move = made.moves[stop.move]
        assert (move.dtype, move.shape) == (
            plan.dtypes[plan.geometries[wire.geometry].dtype],
            shape,
        )
        drawn = set()
        for worker, feeding in zip(move.workers, move.feeds, strict=True):
            for t in feeding:
                held = move.trainers[t]
                common = tuple(
                    (max(a, c), min(b, d))
                    for (a, b), (c, d) in zip(worker.box, held.box, strict=True)
                )
                drawn |= {(rank + first, common, held.ranks) for rank in worker.ranks}
        assert drawn == {
            (piece.worker, piece.box, piece.trainers)
            for piece in pieces(shape, source, destination)
        }
        ranks = sorted(rank for shard in move.trainers for rank in shard.ranks)
        assert ranks == list(source.mesh.ranks)
    assert len(checked) == len(made.moves)


def test_staging_is_what_the_plan_states(plan: Plan) -> None:
    first, summary = plan.inputs.trainer.ranks, summarize(plan)
    modules = [one.module for one in plan.staging]
    found: dict[str, int] = {}
    for label, held in report(plan).staging:
        side, *ends = re.findall(r"trainer|worker|\d+", label)
        for rank in range(int(ends[0]), int(ends[-1]) + 1):
            assert f"{side} {rank}" not in found
            found[f"{side} {rank}"] = sum(size for _, size in held)
            assert all(size for _, size in held)
    for rank, (mine, module) in enumerate(
        zip(summary.staging_bytes_per_rank, modules, strict=True)
    ):
        name = f"trainer {rank}" if rank < first else f"worker {rank - first}"
        assert found.pop(name) == mine + summary.pool_bytes + module
    assert not found


def test_a_tensor_in_parts_is_several_transfers() -> None:
    made = report(plan_in_parts(destination((8, 4), 0), 24))
    assert [one.part for one in made.transfers] == [(1, 0, 2), (1, 2, 2)]
    assert [one.nbytes for one in made.transfers] == [32, 32]


def test_changes_are_the_difference_and_mark_its_tensors() -> None:
    before, after = load(STOCK), load(LLAMA)
    difference = compare(before, after)
    changes = report(after, before).changes
    assert changes is not None
    assert changes.headline == "the program differs: 1 input changed"
    assert changes.plans == (before.digest, after.digest)
    assert changes.inputs == (("resolver.name", '"vllm"', '"traced"'),)
    for section in changes.sections:
        (name,) = (name for name, title in SECTIONS.items() if title == section.title)
        marked = [index for index, aspects in changes.marks.items() if name in aspects]
        assert sum(group[1] for group in section.groups) == len(marked)
    named = {aspect for aspects in changes.marks.values() for aspect in aspects}
    assert named == {name for name in SECTIONS if getattr(difference, name)}
    assert report(after, after).changes.marks == {}  # type: ignore[union-attr]


def test_marks_of_added_renamed_and_changed_tensors() -> None:
    rows = [
        ("model.embed.weight", "bfloat16", (8, 4), None),
        ("model.layers.0.down.weight", "bfloat16", (4, 8), 1),
        ("model.layers.0.norm.weight", "float32", (4,), None),
    ]
    now = [
        ("model.embed.weight", "float32", (8, 8), None),
        ("model.layers.0.up.weight", "bfloat16", (4, 8), 1),
        ("model.layers.0.norm.weight", "float32", (4,), 0),
        ("model.layers.1.norm.weight", "float32", (4,), None),
    ]
    changes = report(make_plan(now), make_plan(rows)).changes
    assert changes is not None
    assert {now[index][0]: set(aspects) for index, aspects in changes.marks.items()} == {
        "model.embed.weight": {"reshaped", "retyped"},
        "model.layers.0.up.weight": {"renamed", "landings"},
        "model.layers.0.norm.weight": {"routes", "destinations"},
        "model.layers.1.norm.weight": {"added"},
    }


def test_against_another_model_is_refused() -> None:
    other = make_plan((("w", "float32", (4,), None),), make_inputs(name="other"))
    kept = {name: getattr(other, name) for name in other.__struct_fields__}
    model = msgspec.structs.replace(other.inputs.model, inventory="2" * 64)
    other = Plan(**kept | {"inputs": msgspec.structs.replace(other.inputs, model=model)})
    with pytest.raises(PlanError, match="different models"):
        report(make_plan(), other)


def parts(text: str) -> dict[str, str]:
    """What the page holds: title, style, data, script."""
    found = re.fullmatch(
        r".*<title>(?P<title>.*?)</title>\n<style>(?P<style>.*?)</style>.*"
        r'id="data">(?P<data>.*?)</script>\n<script type="module">(?P<script>.*)</script>\n'
        r"</body>\n</html>\n",
        text,
        re.DOTALL,
    )
    assert found, text[-300:]
    return found.groupdict()


def data_of(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(parts(text)["data"])))


HOSTILE = "</script><script>alert(1)</script><!-- {{data}} {{script}} & \" ' ` \u2028 \x00"


def test_nothing_that_a_plan_says_becomes_markup() -> None:
    rows = ((f"a.0.{HOSTILE}", "float32", (4,), None), ("</style>", "float32", (4,), 0))
    plain, hostile = (
        page(report(make_plan(rows, make_inputs(name=name)))) for name in ("m", HOSTILE)
    )
    held = data_of(hostile)
    assert [tensor[0] for tensor in held["tensors"]] == [f"a.0.{HOSTILE}", "</style>"]
    assert held["model"] == HOSTILE
    kept, found = parts(plain), parts(hostile)
    assert found["script"] == kept["script"] and found["style"] == kept["style"]
    assert "<" not in found["title"] and "{{data}}" in found["title"]
    tags = [re.findall(r"<[a-z!/]+", text) for text in (plain, hostile)]
    assert tags[0] == tags[1]
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", found["data"])


def test_page_reaches_for_nothing_and_its_policy_forbids_it() -> None:
    text = page(report(load(GPT2)))
    held = parts(text)
    own = text.replace(held["data"], "").replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?:|[\"'(]//|url\(|@import|@font-face|\bsrc=|\bfetch\(", own)
    assert set(re.findall(r'href="(.*?)"', own)) == {"#tensors"}
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', own)
    hashes = {
        name: base64.b64encode(sha256(held[name].encode()).digest()).decode()
        for name in ("style", "script")
    }
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{hashes['style']}'",
        f"script-src 'sha256-{hashes['script']}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_data_is_the_report() -> None:
    made = report(load(LLAMA), load(STOCK))
    assert data_of(page(made)) == json.loads(msgspec.json.encode(made))


def test_same_plan_same_page_in_any_process() -> None:
    script = (
        "import sys, hashlib; from pathlib import Path; from m2ncompile.plan_check import load; "
        "from m2ncompile.report import page, report; a, b = map(Path, sys.argv[1:]); "
        "print(hashlib.sha256(page(report(load(a), load(b))).encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script, LLAMA, STOCK],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_command_writes_beside_the_plan(tmp_path: Path) -> None:
    plan = tmp_path / "small.plan.json"
    plan.write_bytes(make_plan().encoded)
    out = run("report", plan).stdout
    written = tmp_path / "small.report.html"
    assert out.startswith(f"{written}: ")
    assert written.read_text() == page(report(load(plan)))
    assert sorted(tmp_path.iterdir()) == [plan, written]
    run("report", plan, "-o", tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_bytes() == written.read_bytes()


def test_command_by_digest_writes_here(tmp_path: Path) -> None:
    from m2ncompile.build import open_store

    digest = open_store(tmp_path / "cache").put(make_plan().encoded)
    code = "import os, sys; os.chdir(sys.argv.pop(1)); from m2ncompile.cli import main; main()"
    subprocess.run(
        [sys.executable, "-c", code, tmp_path, "report", digest[:10], "--cache", "cache"],
        check=True,
    )
    assert (tmp_path / f"{digest[:12]}.report.html").is_file()


def test_command_as_json(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    found = json.loads(run("report", LLAMA, "--against", STOCK, "-o", out, "--json").stdout)
    plan = load(LLAMA)
    assert found["schema"] == "m2ncompile.report/1"
    assert (found["path"], found["nbytes"]) == (str(out), out.stat().st_size)
    assert found["plan_digest"] == plan.digest
    assert found["summary"] == json.loads(msgspec.json.encode(summarize(plan)))
    assert [sum(column) for column in zip(*found["traffic"], strict=True)] == list(
        summarize(plan).wire_bytes_per_worker
    )
    assert found["layers"][1]["prefix"] == "model.layers."
    assert found["staging"][0] == [
        "trainers 0 to 7",
        [["packed to be sent", 100663296], ["NCCL M2N\u2019s pool", 525336576]],
    ]
    assert found["against"] == {
        "plan_digest": load(STOCK).digest,
        "same_program": False,
        "changed_tensors": 291,
    }
    assert json.loads(run("report", LLAMA, "-o", out, "--json").stdout)["against"] is None


def test_bad_input_is_one_message_and_no_file(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_bytes(make_plan().encoded[:-9])
    good = tmp_path / "good.json"
    good.write_bytes(make_plan().encoded)
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    for args, says in (
        ((plan,), "no plan"),
        ((tmp_path / "none",), "no such file"),
        ((good, "--against", plan), "no plan"),
        ((good, "--against", GPT2), "different models"),
        ((good, "-o", good), "take the plan's place"),
        ((good, "-o", tmp_path / "folder"), "can't write the page"),
        ((good, "-o", good / "page.html"), "can't write the page"),
    ):
        found = run("report", *args, code=2)
        assert says in found.stderr and found.stderr.startswith("error: ")
        assert found.stdout == ""
    assert sorted(tmp_path.iterdir()) == before
    assert good.read_bytes() == make_plan().encoded


def test_needs_neither_torch_nor_the_engine(tmp_path: Path) -> None:
    script = (
        "import sys; from m2ncompile.cli import app; "
        f"app.app(['report', {str(GPT2)!r}, '--against', {str(GPT2)!r}, "
        f"'-o', {str(tmp_path / 'page.html')!r}], standalone_mode=False); "
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
