// Elements, amounts, ranks, and the one tooltip. Text is only ever set as text.

const ROUTES = ["direct", "reload", "fallback"];
const byId = (id) => document.getElementById(id);

function build(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (key === "style") for (const [name, set] of Object.entries(value)) node.style.setProperty(name, set);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const el = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const UNITS = ["B", "kB", "MB", "GB", "TB"];

function unitOf(bytes) {
  let power = 0;
  for (let value = bytes; value >= 1000 && power < UNITS.length - 1; power += 1) value /= 1000;
  return power;
}

/** Bytes in decimal units. */
function size(bytes) {
  const power = unitOf(bytes);
  return `${(bytes / 1000 ** power).toFixed(power ? 2 : 0)} ${UNITS[power]}`;
}

const count = (number) => number.toLocaleString("en-US");
const exact = (bytes) => (bytes < 1000 ? size(bytes) : `${size(bytes)} (${count(bytes)} bytes)`);
const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}%` : "");
const shapeText = (shape) => shape.join(" × ") || "scalar";

/** [0, 1, 2, 5] as "0–2, 5". */
function spans(ranks) {
  const runs = [];
  for (const rank of ranks) {
    const run = runs.at(-1);
    if (run && rank === run[1] + 1) run[1] = rank;
    else runs.push([rank, rank]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
}

const side = (noun, ranks) => `${noun}${ranks.length === 1 ? "" : "s"} ${spans(ranks)}`;

function table(head, rows, numeric = []) {
  const right = (column) => (numeric.includes(column) ? "n" : null);
  const cells = (row) =>
    row.map((cell, i) => (i ? el("td", { class: right(i) }, cell) : el("th", { scope: "row" }, cell)));
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: "rows" },
      el("thead", {}, el("tr", {}, ...head.map((text, i) => el("th", { scope: "col", class: right(i) }, text)))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row)))),
    ),
  );
}

let tipAnchor = null;

function placeTip() {
  const tip = byId("tip");
  if (tip.hidden) return;
  const box = tipAnchor.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.max(4, Math.min(box.left + box.width / 2 - width / 2, innerWidth - width - 4));
  const above = box.top - height - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above < 4 ? box.bottom + 6 : above}px`;
}

function showTip(anchor, text) {
  tipAnchor = anchor;
  byId("tip").textContent = text;
  byId("tip").hidden = false;
  placeTip();
}

const hideTip = () => {
  byId("tip").hidden = true;
};

/** The index that an arrow key leads to, or null for any other key. */
function stepped(key, at, length, page = 10) {
  const to = {
    ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1,
    PageUp: at - page, PageDown: at + page, Home: 0, End: length - 1,
  }[key];
  return to === undefined ? null : Math.max(0, Math.min(length - 1, to));
}
