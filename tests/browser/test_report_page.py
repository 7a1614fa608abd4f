"""The page in a real browser: what it draws is what the plan says, by mouse and by keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Locator, Page

from m2ncompile.layout import shard_box
from m2ncompile.pieces import pieces
from m2ncompile.plan import Plan
from m2ncompile.plan_check import layouts_of, load
from m2ncompile.report import Report, report
from m2ncompile.report import page as make_page
from m2ncompile.report.records import Move, Shard
from tests.browsers import executable, launched
from tests.plans import make_inputs, make_plan
from tests.test_split import destination, plan_in_parts

PLANS = Path(__file__).parents[2] / "plans"
#: Elements of a page with all that can be open; a row or cell for each tensor would be more.
MOST_NODES = 1500


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as opened:
        yield opened


Show = Callable[..., Page]


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    """Opens a plan's page. Whatever a test does there, nothing is fetched and nothing fails."""
    context = browser.new_context()
    said: list[str] = []
    requests: list[str] = []

    def open_page(shown: Plan | Report, against: Plan | None = None, **options: Any) -> Page:
        file = tmp_path / "page.html"
        made = report(shown, against) if isinstance(shown, Plan) else shown
        file.write_text(make_page(made))
        page = context.new_page()
        page.set_viewport_size({"width": options.get("width", 1280), "height": 900})
        page.emulate_media(color_scheme=options.get("scheme", "light"))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri() + options.get("address", ""))
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open_page
    context.close()
    assert said == []
    assert {url.partition("#")[0] for url in requests} == {(tmp_path / "page.html").as_uri()}


def plan_of(name: str) -> Plan:
    return load(PLANS / f"{name}.plan.json")


def rows(page: Page) -> list[str]:
    return page.locator("#list .row .name").all_inner_texts()


def find(page: Page, query: str) -> None:
    page.fill("#query", query)


def ranks(shard: Locator) -> tuple[int, ...]:
    return tuple(map(int, str(shard.get_attribute("data-ranks")).split(",")))


def focused(page: Page) -> str:
    return str(
        page.evaluate(
            "(() => { const e = document.activeElement;"
            " return e.id || e.getAttribute('aria-label') || e.textContent; })()"
        )
    )


def check_drawing(
    page: Page, plan: Plan, number: int, axes: tuple[int | None, int] = (0, 1)
) -> None:
    """What is drawn of a destination is what `pieces` says; `axes` are the dims down and across."""
    layouts, first = layouts_of(plan), plan.inputs.trainer.ranks
    d = plan.destinations[number]
    wire = plan.wires[d.wire]
    shape = plan.geometries[wire.geometry].shape
    source, destination = layouts[wire.source], layouts[d.layout]
    expected = {(p.worker - first, p.trainers) for p in pieces(shape, source, destination)}
    drawn = set()
    for shard in page.locator(".workers .shard").all():
        shard.focus()
        feeding = [ranks(one) for one in page.locator(".trainers .shard.feeds").all()]
        drawn |= {(worker, trainers) for worker in ranks(shard) for trainers in feeding}
    assert drawn == expected
    back = set()
    for shard in page.locator(".trainers .shard").all():
        shard.hover()
        fed = [ranks(one) for one in page.locator(".workers .shard.feeds").all()]
        back |= {(worker, ranks(shard)) for group in fed for worker in group}
    assert back == expected
    for side, layout, start in (("trainers", source, 0), ("workers", destination, first)):
        whole = page.locator(f".whole.{side}").bounding_box()
        assert whole
        held = set()
        for shard in page.locator(f".{side} .shard").all():
            held |= set(ranks(shard))
            box = shard_box(layout, shape, ranks(shard)[0] + start)
            assert box is not None and json.loads(str(shard.get_attribute("data-box"))) == [
                list(interval) for interval in box
            ]
            seen = shard.bounding_box()
            assert seen
            for dim, at, length in ((axes[0], "y", "height"), (axes[1], "x", "width")):
                start_of, end_of = (0, 1) if dim is None else (b / shape[dim] for b in box[dim])
                assert (seen[at] - whole[at]) / whole[length] == pytest.approx(start_of, abs=0.03)
                assert seen[length] / whole[length] == pytest.approx(end_of - start_of, abs=0.03)
        assert held == {rank - start for rank in layout.mesh.ranks}


@pytest.mark.parametrize(
    ("plan", "tensor"),
    [
        ("gpt2-fsdp4-tp2", "h.3.attn.c_attn.weight"),  # strided: sharded across
        ("gpt2-fsdp4-tp2", "h.3.attn.c_attn.bias"),  # in parts, 1-D
        ("deepseek-v2-lite-hsdp8-ep4", "model.layers.5.mlp.experts.17.up_proj.weight"),
        ("llama-3.1-8b-fsdp8-tp4-stock", "model.layers.3.self_attn.k_proj.weight"),  # fallback
        ("qwen3-30b-a3b-fsdp8-ep4", "model.layers.3.self_attn.k_proj.weight"),
    ],
)
def test_click_on_a_tensor_draws_its_pieces(show: Show, plan: str, tensor: str) -> None:
    made = plan_of(plan)
    page = show(made)
    find(page, tensor)
    assert rows(page) == [tensor]
    page.click("#list .row")
    assert page.inner_text("#tensor h3") == tensor
    numbers = [
        number
        for number, d in enumerate(made.destinations)
        if made.tensors[d.tensor].name == tensor
    ]
    position = {d: i for i, t in enumerate(made.transfers) for d in t.destinations}
    for place, number in enumerate(numbers):
        d = made.destinations[number]
        if place:
            page.click(".pager button:has-text('next')")
            assert f"destination {place + 1} of {len(numbers)}" in page.inner_text(".pager")
        axes = (0, 1) if len(made.geometries[made.wires[d.wire].geometry].shape) == 2 else (None, 0)
        check_drawing(page, made, number, axes)
        text = page.inner_text("#tensor")
        assert f"transfer {position[number] + 1} of {len(made.transfers)}" in text
        assert re.search(rf"route\s+{d.route}\b", text)
        if d.reason is not None:
            assert made.reasons[d.reason].text in text
        if d.landing is not None:
            param = made.params[made.landings[d.landing].param]
            assert param.name in text
            offset = d.offset if isinstance(d.offset, int) else d.offset_at(0)
            assert f"from element {offset:,} " in text
        wire = made.wires[d.wire]
        whole = prod(made.geometries[made.tensors[d.tensor].geometry].shape)
        if prod(made.geometries[wire.geometry].shape) != whole:
            assert f"elements {wire.base:,} to " in text
            bar = page.locator(".range i").bounding_box()
            around = page.locator(".range").bounding_box()
            assert bar and around
            part = (bar["x"] - around["x"]) / around["width"]
            assert part == pytest.approx(wire.base / whole, abs=0.01)


@pytest.mark.parametrize(("shape", "dim", "across"), [((8, 6, 8), 1, 1), ((8, 6, 8), 2, 2)])
def test_tensors_of_three_dims_are_drawn_flat(
    show: Show, shape: tuple[int, ...], dim: int, across: int
) -> None:
    plan = make_plan((("w", "float32", shape, dim),))
    page = show(plan)
    page.click("#list .row")
    check_drawing(page, plan, 0, (0, across))
    assert "across: dim 1, 2 (6 \u00d7 8)" in page.inner_text(".axes") or dim == 2
    assert "down: dim 0, 1 (8 \u00d7 6)" in page.inner_text(".axes") or dim == 1


def test_a_scalar_and_a_plan_of_nothing(show: Show) -> None:
    made = report(make_plan((("w", "float32", (4,), None),)))
    everyone = (Shard((), (0, 1)),)
    scalar = Move("float32", (), 4, "whole on all 2", "whole on all 2", everyone, everyone, ((0,),))
    tensor = msgspec.structs.replace(made.tensors[0], shape=())
    page = show(msgspec.structs.replace(made, moves=(scalar,), tensors=(tensor,)))
    page.click("#list .row")
    page.locator(".workers .shard").focus()
    assert page.inner_text("#tensor .readout") == (
        "Workers 0\u20131 each receive the scalar: the scalar from any of trainers 0\u20131."
    )
    assert show(make_plan(())).inner_text("#count") == "0 of 0"


def test_words_of_a_focused_shard(show: Show) -> None:
    page = show(plan_of("deepseek-v2-lite-hsdp8-ep4"))
    find(page, "layers.5.self_attn.kv_b_proj")
    page.press("#query", "Enter")
    page.locator(".workers .shard").nth(1).focus()
    said = "Worker 1 receives [1024:2048, 0:512]: [1024:2048, 0:512] from any of trainers 1, 5."
    assert page.inner_text("#tensor .readout") == said
    assert f"{page.locator('.workers .shard').nth(1).get_attribute('aria-label')}." == (
        said.replace("Worker", "worker")
    )
    page.locator(".trainers .shard").nth(1).focus()
    assert page.inner_text("#tensor .readout") == (
        "Trainers 1, 5 each hold [1024:2048, 0:512]: for worker 1."
    )


def test_search_by_part_glob_transfer_and_filter(show: Show) -> None:
    plan = plan_of("gpt2-fsdp4-tp2")
    page = show(plan)
    names = [tensor.name for tensor in plan.tensors]
    largest = max(plan.transfers, key=lambda transfer: len(transfer.destinations))
    stack = [names[plan.destinations[d].tensor] for d in largest.destinations]
    assert page.inner_text("#count") == f"{len(names)} of {len(names)}"
    for query, expected in (
        ("H.1.MLP", [n for n in names if "h.1.mlp" in n]),
        ("h.?.ln_1.bias", [n for n in names if re.fullmatch(r"h\.\d\.ln_1\.bias", n)]),
        ("*.1.*weight", [n for n in names if ".1." in n and n.endswith("weight")]),
        ("H.?.LN_1.BIAS", [n for n in names if re.fullmatch(r"h\.\d\.ln_1\.bias", n)]),
        ("h.?.ln_1", []),
        ("h.[0]", []),
        ("nowhere", []),
        (f"#{plan.transfers.index(largest) + 1}", stack),
        ("#9999", []),
    ):
        find(page, query)
        seen = rows(page)
        assert seen == expected[: len(seen)] and len(seen) >= min(len(expected), 16)
        assert page.inner_text("#count").startswith(f"{len(expected)} of")
    find(page, "h.1.")
    for route in ("direct", "reload"):
        page.select_option("#filter", route)
        assert rows(page) == [
            name
            for i, name in enumerate(names)
            if "h.1." in name and any(d.tensor == i and d.route == route for d in plan.destinations)
        ]
    page.select_option("#filter", "reason 1")
    assert rows(page) == [
        name
        for i, name in enumerate(names)
        if "h.1." in name and any(d.tensor == i and d.reason == 1 for d in plan.destinations)
    ]


def test_stack_neighbours_open_and_are_listed(show: Show) -> None:
    plan = plan_of("deepseek-v2-lite-hsdp8-ep4")
    name = "model.layers.5.mlp.experts.17.up_proj.weight"
    page = show(plan)
    find(page, name)
    page.press("#query", "Enter")
    (index,) = (i for i, tensor in enumerate(plan.tensors) if tensor.name == name)
    (stack,) = (
        [plan.destinations[d].tensor for d in t.destinations]
        for t in plan.transfers
        if any(plan.destinations[d].tensor == index for d in t.destinations)
    )
    at = stack.index(index)
    near = [plan.tensors[t].name for t in stack[at - 4 : at + 5]]
    assert page.locator(".stack li").all_inner_texts() == near
    assert page.inner_text(".stack [aria-current]") == name
    assert f"and {len(stack) - 9} more" in page.inner_text("#tensor")
    page.click(f".stack button:has-text('{near[0]}')")
    assert page.inner_text("#tensor h3") == near[0]
    page.click("#tensor button:has-text('List them')")
    assert page.inner_text("#count").startswith(f"{len(stack)} of")
    assert rows(page)[:3] == [plan.tensors[t].name for t in stack[:3]]


def test_by_keyboard_alone(show: Show) -> None:
    plan = plan_of("qwen3-0.6b-fsdp4-tp2")
    page = show(plan)
    press = page.keyboard.press
    walk = []
    for _ in range(40):
        press("Tab")
        walk.append(focused(page))
        if walk[-1] == "list":
            break
    assert walk[0].startswith("Skip")
    order = ["theme", "Bytes by layer", "trainer 0 to worker 0", "Transfers in order", "query"]
    places = [next(i for i, one in enumerate(walk) if one.startswith(o)) for o in order]
    assert places == sorted(places) and walk[-2:] == ["filter", "list"]
    assert len([one for one in walk if one.startswith("trainer ")]) == 1  # one stop for all cells
    page.evaluate("document.activeElement.blur()")
    press("/")
    assert focused(page) == "query"
    page.keyboard.type("layers.2.self_attn")
    names = [t.name for t in plan.tensors if "layers.2.self_attn" in t.name]
    press("ArrowDown")
    assert focused(page) == "list"
    press("ArrowDown")
    chosen = page.get_attribute("#list", "aria-activedescendant")
    assert page.inner_text(f"[id='{chosen}'] .name") == names[1]
    press("Enter")
    assert page.inner_text("#tensor h3") == names[1]
    assert focused(page) == "tensor"
    assert page.get_attribute(f"[id='{chosen}']", "aria-selected") == "true"
    press("Tab")
    assert focused(page).startswith("trainer 0 holds")
    press("ArrowRight")
    assert focused(page).startswith("trainer 1 holds")
    press("Tab")
    assert focused(page).startswith("worker 0 receives")
    press("End")
    assert focused(page).startswith("worker 1 receives")
    assert page.locator(".trainers .shard.feeds").count()
    press("Escape")
    assert focused(page) == "list"
    press("Home")
    press("ArrowUp")
    assert focused(page) == "query"
    press("Escape")
    assert page.input_value("#query") == ""
    assert page.inner_text("#count") == "310 of 310"


def test_charts_by_keyboard_and_pointer(show: Show) -> None:
    plan = plan_of("deepseek-v2-lite-hsdp8-ep4")
    made = report(plan)
    page = show(plan)
    chart = page.get_by_role("slider", name="Transfers in order")
    chart.focus()
    page.keyboard.press("End")
    last = len(made.transfers)
    assert chart.get_attribute("aria-valuenow") == str(last) == chart.get_attribute("aria-valuemax")
    page.keyboard.press("Home")
    for number, transfer in enumerate(made.transfers[:12]):
        text = str(chart.get_attribute("aria-valuetext"))
        assert text.startswith(f"transfer {number + 1} of {last}: ")
        assert f", {transfer.route}, " in text
        stops = len(transfer.stops)
        assert text.endswith("one tensor" if stops == 1 else f"a stack of {stops}")
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.input_value("#query") == "#13"
    assert page.inner_text("#count").startswith(f"{len(made.transfers[12].stops)} of")
    layers = page.get_by_role("slider", name="Bytes by layer")
    box = layers.bounding_box()
    assert box
    layers.hover(position={"x": box["width"] * 20.5 / len(made.layers), "y": 20})
    text = str(layers.get_attribute("aria-valuetext"))
    assert text.startswith("model.layers.19: direct 1.17 GB, reload 4")
    page.locator("#layers summary").click()
    page.locator("#layers tbody tr").first.wait_for()
    assert page.locator("#layers tbody tr").count() == len(made.layers)


def test_column_heights_are_the_bytes(show: Show) -> None:
    plan = plan_of("deepseek-v2-lite-hsdp8-ep4")
    layers = report(plan).layers
    page = show(plan)
    top, feet = {}, {}  # per column and route, in the picture's units
    for route in ("direct", "reload"):
        path = str(page.locator(f"#layers path.{route}").get_attribute("d"))
        for x, low, high in re.findall(r"M([\d.]+) ([\d.]+)V([\d.]+)", path):
            top[int(float(x)), route] = float(low) - float(high)
            feet[int(float(x)), route] = float(low)
    for i in range(len(layers)):
        if (i, "reload") in top:
            under = top.get((i, "direct"), 0)
            assert feet[i, "reload"] == pytest.approx(feet[i, "direct"] - under, abs=0.2)
    most = max(range(len(layers)), key=lambda i: layers[i].nbytes[0])
    scale = layers[most].nbytes[0] / top[most, "direct"]
    for i, layer in enumerate(layers):
        for route, held in zip(("direct", "reload"), layer.nbytes, strict=False):
            assert top.get((i, route), 0) * scale == pytest.approx(held, abs=scale * 0.2)


def test_matrix_is_the_traffic(show: Show) -> None:
    plan = plan_of("deepseek-v2-lite-hsdp8-ep4")
    traffic = report(plan).traffic
    page = show(plan)
    cells = page.locator(".matrix td.cell")
    found = [int(str(cell.get_attribute("data-bytes"))) for cell in cells.all()]
    assert found == [held for row in traffic for held in row]
    shades = [
        float(cell.evaluate("e => parseFloat(e.style.getPropertyValue('--heat'))"))
        for cell in cells.all()
    ]
    most = max(found)
    assert shades == pytest.approx([100 * held / most for held in found], abs=0.01)
    texts = cells.all_inner_texts()
    assert texts == [f"{held / 1e9:.2f}" if held else "0" for held in found]
    cells.first.focus()
    assert page.inner_text("#tip").startswith("trainer 0 to worker 0: ")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    held = traffic[1][1]
    words = f"trainer 1 to worker 1: {held / 1e6:.2f} MB ({held:,} bytes)"
    assert focused(page) == words == page.inner_text("#tip")
    page.keyboard.press("End")
    assert focused(page).startswith("trainer 1 to worker 3")
    page.keyboard.press("ArrowRight")
    assert focused(page).startswith("trainer 1 to worker 3")
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    cells.nth(4).hover()
    assert page.inner_text("#tip").startswith("trainer 1 to worker 0")


def test_matrix_of_many_ranks_is_summed_in_blocks(show: Show) -> None:
    plan = make_plan((("w", "float32", (1600, 4), 0),), make_inputs(trainers=160, tp=100))
    page = show(plan, width=400)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    cells = page.locator(".matrix td.cell")
    found = [int(str(value)) for value in cells.evaluate_all("es => es.map(e => e.dataset.bytes)")]
    traffic = report(plan).traffic
    assert len(found) == 54 * 50
    assert found[51] == sum(traffic[t][w] for t in (3, 4, 5) for w in (2, 3))
    assert sum(found) == sum(map(sum, traffic))
    label = str(cells.nth(51).get_attribute("aria-label"))
    assert label.startswith("trainers 3\u20135 to workers 2\u20133: ")
    assert "neighbouring ranks are summed" in page.inner_text(".heat-scale")


def test_facts_routes_reasons_and_staging(show: Show) -> None:
    plan = plan_of("llama-3.1-8b-fsdp8-tp4-stock")
    page = show(plan)
    header = page.inner_text("header")
    for text in (
        "Llama-3.1-8B",
        "LlamaForCausalLM",
        "vllm 0.33.0 on cuda-sm90",
        "4: tp 4, ep 1, pp 1, dp 1" if plan.inputs.engine.ep == 1 else "4: tp 4, ep 4",
        "8 ranks, fsdp",
        plan.digest,
        plan.digests.program,
        "12.44 GB",
    ):
        assert text in header
    assert "fallback\t227\t11.23 GB\t69.9%" in page.inner_text("#routes")
    assert "no-loader fallback\t65\t532.48 kB" in re.sub(
        r"\s*\n?\t", "\t", page.inner_text("#reasons")
    ).replace("no-loader\tfallback", "no-loader fallback")
    assert "tensors that fall back, at most" in page.inner_text("#staging")
    assert "2.10 GB" in page.inner_text("#staging")  # the pool, for an embedding sent whole


def test_a_tensor_in_parts(show: Show) -> None:
    page = show(plan_in_parts(destination((8, 4), 0), 24))
    find(page, "w")
    page.click("#list .row")
    assert "2 transfers, 1 to 2 of 2: parts of dim 1" in page.inner_text("#tensor")
    find(page, "#2")
    assert rows(page) == ["w"]
    page.focus("#transfers [role=slider]")
    page.keyboard.press("End")
    text = page.get_attribute("#transfers [role=slider]", "aria-valuetext")
    assert text == "transfer 2 of 2: 32 B, direct, 2 to 4 of dim 1 of one tensor"


def test_hostile_names_stay_text(show: Show) -> None:
    name = "a.0.</script><img src=x onerror=alert(1)><b>&amp;"
    plan = make_plan(((name, "float32", (4,), 0), ("w\u202e", "float32", (4,), None)))
    page = show(plan)
    assert rows(page)[0] == name
    page.click("#list .row")
    assert page.inner_text("#tensor h3") == name
    assert page.locator("img, #tensor b b, #list b").count() == 0
    again = show(plan, address=page.url.partition("page.html")[2])
    assert again.inner_text("#tensor h3") == name


def test_nothing_can_be_fetched(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(make_page(report(make_plan())))
    page = browser.new_page()
    page.goto(file.as_uri())
    (tmp_path / "other.js").write_text("window.fetched = true")
    blocked = page.evaluate(
        """async () => {
          const found = [];
          addEventListener("securitypolicyviolation", (e) => found.push(e.effectiveDirective));
          const script = document.createElement("script");
          script.src = "other.js";
          const image = new Image();
          image.src = "x.png";
          const style = document.createElement("style");
          style.textContent = "body { color: red }";
          document.body.append(script, image, style);
          await fetch("page.html").catch(() => {});
          await new Promise((done) => setTimeout(done, 100));
          return found.sort();
        }"""
    )
    assert blocked == ["connect-src", "img-src", "script-src-elem", "style-src-elem"]
    assert page.evaluate("window.fetched") is None
    page.close()


#: WCAG's contrast of every visible text with what is behind it, where below 4.5.
CONTRAST = """() => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = rgb(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  let checked = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (node.closest("script, .skip, :disabled")) continue;
    const [a, b] = [rgb(getComputedStyle(node).color), behind(node)].map(luminance);
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    checked += 1;
    if (contrast < 4.5) poor.push([walker.currentNode.data, contrast]);
  }
  return [checked, poor];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(show: Show, scheme: str) -> None:
    plan = plan_of("llama-3.1-8b-fsdp8-tp4")
    page = show(plan, plan_of("llama-3.1-8b-fsdp8-tp4-stock"), scheme=scheme)
    find(page, "layers.3.mlp.down")
    page.press("#query", "Enter")
    checked, poor = page.evaluate(CONTRAST)
    assert checked > 150
    assert poor == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_stand_out_on_every_heat(show: Show, scheme: str) -> None:
    heats = tuple(
        tuple(range(row * 16 * 10**7, (row + 1) * 16 * 10**7, 10**7)) for row in range(16)
    )
    page = show(msgspec.structs.replace(report(make_plan()), traffic=heats), scheme=scheme)
    assert page.locator(".matrix td.cell").count() == 256
    shade = "e => e.style.getPropertyValue('--heat')"
    assert page.locator(".matrix td.cell").first.evaluate(shade) == "0.00%"
    assert page.locator(".matrix td.cell").last.evaluate(shade) == "100.00%"
    checked, poor = page.evaluate(CONTRAST)
    assert checked > 256
    assert poor == []


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))


def test_dark_by_preference_and_by_choice(show: Show) -> None:
    page = show(make_plan())
    light = background(page)
    page.emulate_media(color_scheme="dark")
    dark = background(page)
    assert light != dark
    seen = []
    for _ in range(3):
        page.click("#theme")
        seen.append((page.inner_text("#theme"), background(page)))
    assert seen == [("Theme: light", light), ("Theme: dark", dark), ("Theme: auto", dark)]


def test_print_is_light_and_without_controls(show: Show) -> None:
    page = show(plan_of("gpt2-fsdp4-tp2"), scheme="dark")
    page.emulate_media(media="print")
    assert background(page) == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 32, 39)"
    for selector in ("#theme", "#list", ".search", "#tensors"):
        assert page.locator(selector).is_hidden()
    assert page.locator(".matrix td.cell").first.is_visible()
    page.emulate_media(media="screen")
    find(page, "h.3.attn.c_attn.weight")
    page.press("#query", "Enter")
    page.emulate_media(media="print")
    assert page.locator("#tensor .shard").first.is_visible()
    assert page.locator("#list").is_hidden()
    assert len(page.pdf()) > 10_000


@pytest.mark.parametrize("width", [400, 700, 1280])
def test_no_width_scrolls_sideways(show: Show, width: int) -> None:
    after, before = (plan_of(f"llama-3.1-8b-fsdp8-tp4{end}") for end in ("", "-stock"))
    page = show(after, before, width=width)
    find(page, "layers.3.mlp.down")
    page.press("#query", "Enter")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        """() => [...document.querySelectorAll("h2, h3, p, dd, input, select, button, .whole")]
          .filter((e) => e.checkVisibility() && !e.closest(".skip, .scroll"))
          .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
          .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert outside == []


def test_against_says_and_marks_what_changed(show: Show) -> None:
    after = plan_of("llama-3.1-8b-fsdp8-tp4")
    before = plan_of("llama-3.1-8b-fsdp8-tp4-stock")
    marks = report(after, before).changes.marks  # type: ignore[union-attr]
    page = show(after, before)
    text = page.inner_text("#changes")
    for words in (
        "The program differs: 1 input changed.",
        'resolver.name\t"vllm"\t"traced"',
        "fallback-bytes\t11.23 GB\t0 B\t-100.0%",
        "collectives of 65 tensors: 0 -> 1",
        "model.layers.{0..31}.self_attn.k_proj.weight\t32\t268.44 MB\twhole on all 4\tdim 0 / 4",
        before.digest[:12],
    ):
        assert words in text
    page.select_option("#filter", "changed")
    assert page.inner_text("#count") == f"{len(marks)} of {len(after.tensors)}"
    find(page, "layers.3.self_attn.k_proj")
    assert "changed: routes, destinations" in page.inner_text("#list .row")
    page.click("#list .row")
    assert "Changed: routes, destinations" in page.inner_text("#tensor")
    alone = show(after)
    assert alone.locator("#changes").is_hidden()
    assert alone.locator("#filter option[value=changed]").count() == 0


def test_unchanged_tensors_bear_no_mark(show: Show) -> None:
    page = show(
        make_plan((("a", "float32", (4,), None), ("b", "float32", (4,), 0))),
        make_plan((("a", "float32", (4,), None), ("b", "float32", (4,), None))),
    )
    assert ["changed" in text for text in page.locator("#list .row").all_inner_texts()] == [
        False,
        True,
    ]
    page.select_option("#filter", "changed")
    assert rows(page) == ["b"]


def test_a_plan_of_46000_tensors(show: Show) -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(60)
        for expert in range(256)
        for part in ("gate", "up", "down")
    ][:46_000]
    plan = make_plan([(name, "bfloat16", (16, 16), i % 2) for i, name in enumerate(names)])
    page = show(plan)
    nodes = "document.querySelectorAll('*').length"
    assert page.inner_text("#count") == "46,000 of 46,000"
    assert rows(page)[0] == names[0]
    page.focus("#list")
    page.keyboard.press("End")
    assert rows(page)[-1] == names[-1]
    assert page.locator("#list .row").count() < 60
    find(page, "layers.41.*.up_proj.weight")
    assert page.inner_text("#count") == "0 of 46,000"
    find(page, "*layers.41.*.up_proj.weight")
    assert page.inner_text("#count") == "256 of 46,000"
    find(page, "layers.41.mlp.experts.200.up")
    assert rows(page) == ["model.layers.41.mlp.experts.200.up_proj.weight"]
    page.press("#query", "Enter")
    check_drawing(page, plan, names.index("model.layers.41.mlp.experts.200.up_proj.weight"))
    page.get_by_role("slider", name="Transfers in order").focus()
    page.keyboard.press("End")
    assert page.evaluate(nodes) < MOST_NODES


def test_a_named_browser_has_to_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for absent in (str(tmp_path / "none"), ""):
        monkeypatch.setenv("M2NCOMPILE_BROWSER", absent)
        with pytest.raises(BaseException, match="M2NCOMPILE_BROWSER") as found:
            executable()
        assert found.type is pytest.fail.Exception  # a skip would skip this test
    monkeypatch.delenv("M2NCOMPILE_BROWSER")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        executable()
