// One tensor: each of its destinations, drawn and in words.

/** Stack neighbours shown on each side. */
const NEIGHBOURS = 4;
/** Offsets shown one by one. */
const OFFSETS = 64;

function makeTensor(report, index, search, open) {
  const { tensors, stops, moves, transfers, params, landings, reasons, changes } = report;
  const host = byId("tensor");

  const offsetText = (offset, move) => {
    if (!Array.isArray(offset)) return `from element ${count(offset)} on`;
    const ranks = moves[move][6].flatMap((shard) => shard[1]).sort((a, b) => a - b);
    const each = offset.slice(0, OFFSETS).map((start, i) => `${count(start)} on worker ${ranks[i]}`);
    return `from element ${each.join(", ")}${offset.length > OFFSETS ? ", …" : ""} on`;
  };

  function neighbours(stop) {
    const [number, ...more] = index.transfers[stop];
    const members = transfers[number][2];
    const at = members.indexOf(stop);
    const first = Math.max(0, at - NEIGHBOURS);
    const near = members.slice(first, at + NEIGHBOURS + 1);
    const items = near.map((one) => {
      const tensor = stops[one][0];
      const name = tensors[tensor][0];
      if (one === stop) return el("li", { "aria-current": "true" }, name);
      return el("li", {}, el("button", { type: "button", class: "link", on: { click: () => open(tensor, true) } }, name));
    });
    const rest = members.length - near.length;
    return el(
      "div",
      {},
      el(
        "p",
        {},
        more.length
          ? `${count(more.length + 1)} transfers, ${count(number + 1)} to ${count(more.at(-1) + 1)} of ${count(transfers.length)}: parts of dim ${transfers[number][3][0]}`
          : `${transferText(transfers[number], number, transfers.length)}. `,
        members.length > 1
          ? el("button", { type: "button", class: "link", on: { click: () => search().transfer(number) } }, "List them")
          : null,
      ),
      members.length > 1 ? el("ul", { class: "stack", "aria-label": "Neighbours in the stack" }, ...items) : null,
      rest > 0 ? el("p", { class: "note" }, `and ${count(rest)} more`) : null,
    );
  }

  function destination(stop, tensor) {
    const [, moveIndex, base, route, landing, offset, reason] = stops[stop];
    const move = moves[moveIndex];
    const [dtype, shape, bytes] = move;
    const elements = shape.reduce((product, length) => product * length, 1);
    const all = tensors[tensor][2].reduce((product, length) => product * length, 1);
    const part = elements !== all;
    const fact = (label, ...content) => el("div", {}, el("dt", {}, label), el("dd", {}, ...content));
    const facts = [fact("route", el("span", { class: `swatch ${route}` }, route))];
    if (reason !== null) facts.push(fact("not direct", `${reasons[reason].text} `, el("code", {}, reasons[reason].code)));
    if (part || shape.join() !== tensors[tensor][2].join()) {
      facts.push(
        fact(
          "travels",
          part ? `elements ${count(base)} to ${count(base + elements)} of ${count(all)}, as ` : "whole, as ",
          `${shapeText(shape)} (${size(bytes)})`,
        ),
      );
    }
    if (landing !== null) {
      const [param, dims] = landings[landing];
      const [name, kind, local, stride] = params[param];
      facts.push(
        fact(
          "lands in", el("code", {}, name), ` (${kind} ${shapeText(local)}${stride ? `, strides ${stride.join(", ")}` : ""}), `,
          `${offsetText(offset, moveIndex)}, as ${dims.map(([length, step]) => `${count(length)} (stride ${count(step)})`).join(" × ") || "one element"}`,
        ),
      );
    } else facts.push(fact("lands in", "the model’s load_weights, with the whole tensor"));
    facts.push(fact("carried by", neighbours(stop)));
    const range = part
      ? el(
          "div",
          { class: `range ${route}`, role: "img", "aria-label": `elements ${base} to ${base + elements} of ${all} travel` },
          el("i", { style: { left: `${(100 * base) / all}%`, width: `${(100 * elements) / all}%` } }),
        )
      : null;
    return [range, ...drawMove(move), el("dl", { class: "about-list" }, ...facts)].filter(Boolean);
  }

  /** Draw a tensor; `at` is which of its destinations. */
  return function show(tensor, at = 0) {
    const [name, dtype, shape, bytes, source] = tensors[tensor];
    const ways = index.stops[tensor];
    const marks = changes?.marks[tensor];
    const move = (to) => {
      show(tensor, to);
      host.querySelector(`.pager [data-step="${Math.sign(to - at)}"]:enabled`)?.focus();
    };
    const step = (by, text) => {
      const button = el("button", { type: "button", "data-step": by, on: { click: () => move(at + by) } }, text);
      button.disabled = !(at + by in ways);
      return button;
    };
    const pager =
      ways.length > 1
        ? el("div", { class: "pager" }, step(-1, "‹ previous"), `destination ${count(at + 1)} of ${count(ways.length)}`, step(1, "next ›"))
        : null;
    host.setAttribute("aria-label", name);
    host.replaceChildren(
      ...[
        el("h3", {}, name),
        el("p", { class: "note" }, `${dtype} ${shapeText(shape)}, ${exact(bytes)}; on the trainer: ${source}`),
        marks ? el("p", { class: "mark" }, `Changed: ${marks.join(", ")}`) : null,
        pager,
        ...destination(ways[at], tensor),
      ].filter(Boolean),
    );
  };
}
