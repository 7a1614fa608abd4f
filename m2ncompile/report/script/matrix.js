// The traffic matrix: a table whose cells are the heat map.

/** More ranks than this on a side are shown in blocks of neighbours, summed. */
const MOST_RANKS = 64;

function blocks(ranks) {
  const length = Math.ceil(ranks / MOST_RANKS);
  const found = [];
  for (let start = 0; start < ranks; start += length) {
    found.push(Array.from({ length: Math.min(length, ranks - start) }, (_, i) => start + i));
  }
  return found;
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

/** Where the text of a cell turns: in the dark from white to black, in the light to white. */
const inkOf = (part) => (part > 0.71 ? " high" : part > 0.555 ? " mid" : "");

function drawMatrix(host, traffic) {
  const rows = blocks(traffic.length);
  const columns = blocks(traffic[0].length);
  const bytes = rows.map((ts) => columns.map((ws) => sum(ts.map((t) => sum(ws.map((w) => traffic[t][w]))))));
  const top = Math.max(1, ...bytes.map((row) => Math.max(...row)));
  const power = unitOf(top);
  /** Too many columns for figures: the cells are colours, said in full in focus. */
  const small = columns.length > 16;
  const short = (value) => {
    const text = (value / 1000 ** power).toFixed(power ? 2 : 0);
    return value && !Number(text) ? "<0.01" : text;
  };
  const cells = [];
  const cell = (value, r, c) => {
    const part = value / top;
    const words = `${side("trainer", rows[r])} to ${side("worker", columns[c])}: ${exact(value)}`;
    const td = el(
      "td",
      {
        class: `cell${inkOf(part)}${value ? "" : " none"}`,
        tabindex: r + c ? "-1" : "0", "aria-label": words, "data-bytes": value,
        style: { "--heat": `${(100 * part).toFixed(2)}%` },
        on: { focus: () => showTip(td, words), blur: hideTip, pointerenter: () => showTip(td, words), pointerleave: hideTip },
      },
      small ? "" : value ? short(value) : "0",
    );
    cells.push(td);
    return td;
  };
  const name = (ranks) => (ranks.length === 1 ? `${ranks[0]}` : spans(ranks));
  const total = (value) => el("td", { class: "total", title: exact(value) }, short(value));
  const grid = el(
    "table",
    { class: `matrix${small ? " small" : ""}`, role: "grid", "aria-label": "Bytes from each trainer rank to each worker", style: { "max-width": small ? "none" : `${columns.length * 90 + 190}px` } },
    el(
      "thead",
      {},
      el("tr", {}, el("th", { scope: "col" }, "trainer ↓ worker →"), ...columns.map((ws) => el("th", { scope: "col" }, name(ws))), el("th", { scope: "col" }, "sent")),
    ),
    el(
      "tbody",
      {},
      ...rows.map((ts, r) =>
        el("tr", {}, el("th", { scope: "row" }, name(ts)), ...bytes[r].map((value, c) => cell(value, r, c)), total(sum(bytes[r]))),
      ),
      small
        ? null
        : el("tr", {}, el("th", { scope: "row" }, "received"), ...columns.map((_, c) => total(sum(bytes.map((row) => row[c])))), total(sum(bytes.flat()))),
    ),
  );
  grid.addEventListener("keydown", (event) => {
    const at = cells.indexOf(event.target);
    if (at < 0) return;
    const width = columns.length;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -width, ArrowDown: width }[event.key];
    const edge = { Home: at - (at % width), End: at - (at % width) + width - 1 }[event.key];
    if (step === undefined && edge === undefined) return;
    event.preventDefault();
    const to = edge ?? at + step;
    const leaves = Math.abs(step) === 1 && Math.floor(to / width) !== Math.floor(at / width);
    if (!cells[to] || leaves) return;
    cells[at].tabIndex = -1;
    cells[to].tabIndex = 0;
    cells[to].focus();
  });
  const grouped = Math.max(traffic.length, traffic[0].length) > MOST_RANKS;
  host.append(
    el("div", { class: "scroll" }, grid),
    el("div", { class: "heat-scale" }, "0", el("i", { "aria-hidden": "true" }), tickText(top), el("span", {}, `cells in ${UNITS[power]}${grouped ? "; neighbouring ranks are summed" : ""}`)),
  );
}
