// A tensor cut into shards, on both sides; focusing one shows its peers on the other.

/**
 * Which dims make rows and which columns, as [[dims], [dims]]. The dims that a side shards
 * come first in theirs, where the tensor allows it, so that a shard is one rectangle.
 */
function axesOf(shape, boxes) {
  const cut = shape.map((_, d) => boxes.some((box) => box[d][0] > 0 || box[d][1] < shape[d]));
  const dims = shape.map((_, d) => d);
  if (shape.length < 2) return [[], dims];
  const last = Math.max(1, cut.lastIndexOf(true));
  return [dims.slice(0, last), dims.slice(last)];
}

/** The dim of an axis that is drawn: the one that is cut, else the first. */
const drawn = (dims, shape, boxes) =>
  dims.find((d) => boxes.some((box) => box[d][0] > 0 || box[d][1] < shape[d])) ?? dims[0];

function axisText(dims, shape, shown, noun) {
  if (!dims.length) return null;
  const sizes = dims.map((d) => count(shape[d])).join(" × ");
  const others = dims.indexOf(shown) > 0 ? `, of which dim ${shown} is drawn` : "";
  return `${noun}: dim ${dims.join(", ")} (${sizes}${others})`;
}

const boxText = (box) => (box.length ? `[${box.map(([a, b]) => `${a}:${b}`).join(", ")}]` : "the scalar");
const verb = (ranks, word) => (ranks.length > 1 ? `each ${word}` : `${word}s`);
const common = (a, b) => a.map(([from, to], d) => [Math.max(from, b[d][0]), Math.min(to, b[d][1])]);

/** Both sides of a move and what is said of the shard in focus. */
function drawMove([, shape, , source, destination, trainers, workers, feeds]) {
  const boxes = [...trainers, ...workers].map(([box]) => box);
  const [rows, columns] = axesOf(shape, boxes);
  const [down, right] = [rows, columns].map((dims) => drawn(dims, shape, boxes));
  const place = (box, within) => {
    const part = (d) => {
      if (d === undefined || !shape[d]) return ["0%", "100%"];
      const [from, to] = within[d];
      const length = to - from || 1;
      return [`${(100 * (box[d][0] - from)) / length}%`, `${(100 * (box[d][1] - box[d][0])) / length}%`];
    };
    const [[top, height], [left, width]] = [part(down), part(right)];
    return { top, height, left, width };
  };
  const whole = shape.map((length) => [0, length]);
  const shade = (t) => `${trainers.length > 1 ? (100 * t) / (trainers.length - 1) : 0}%`;
  const readout = el("p", { class: "readout", "aria-hidden": "true" });
  const fed = trainers.map((_, t) => feeds.flatMap((from, w) => (from.includes(t) ? [w] : [])));

  const workerText = (w) => {
    const [box, ranks] = workers[w];
    const parts = feeds[w].map((t) => {
      const [held, holders] = trainers[t];
      return `${boxText(common(box, held))} from ${holders.length > 1 ? "any of " : ""}${side("trainer", holders)}`;
    });
    return `${side("worker", ranks)} ${verb(ranks, "receive")} ${boxText(box)}: ${parts.join("; ")}`;
  };
  const trainerText = (t) => {
    const [box, ranks] = trainers[t];
    const to = fed[t].flatMap((w) => workers[w][1]).sort((a, b) => a - b);
    return `${side("trainer", ranks)} ${verb(ranks, "hold")} ${boxText(box)}: for ${to.length ? side("worker", to) : "no worker"}`;
  };

  const sides = el("div", { class: "sides" });
  /** Outlines on the other side what the shard in focus holds. */
  const peer = el("div", { class: "peer" });
  const clear = () => {
    sides.classList.remove("focused");
    peer.remove();
    for (const node of sides.querySelectorAll(".at, .feeds")) node.classList.remove("at", "feeds");
  };
  const focus = (node, text, peers, box) => {
    clear();
    sides.classList.add("focused");
    node.classList.add("at");
    for (const one of peers) one.classList.add("feeds");
    if (peers.length) {
      for (const [name, set] of Object.entries(place(box, whole))) peer.style.setProperty(name, set);
      peers[0].parentElement.append(peer);
    }
    readout.textContent = `${text[0].toUpperCase()}${text.slice(1)}.`;
  };

  const nodes = { trainers: [], workers: [] };
  const shard = (kind, i, [box, ranks], text, peers, parts) => {
    const node = el(
      "div",
      {
        class: "shard", role: "option", "aria-selected": "false", tabindex: i ? "-1" : "0",
        "aria-label": text, "data-ranks": ranks.join(","), "data-box": JSON.stringify(box),
        style: { ...place(box, whole), "--shade": kind === "trainers" ? shade(i) : "0%" },
      },
      ...parts,
      el("b", { "aria-hidden": "true" }, side(kind.slice(0, -1), ranks)),
    );
    const show = () => focus(node, text, peers(), box);
    node.addEventListener("focus", show);
    node.addEventListener("pointerenter", show);
    nodes[kind].push(node);
    return node;
  };
  trainers.forEach((one, t) => shard("trainers", t, one, trainerText(t), () => fed[t].map((w) => nodes.workers[w]), []));
  workers.forEach((one, w) => {
    const parts = feeds[w].map((t) =>
      el("div", { class: "part", style: { ...place(common(one[0], trainers[t][0]), one[0]), "--shade": shade(t) } }),
    );
    shard("workers", w, one, workerText(w), () => feeds[w].map((t) => nodes.trainers[t]), parts);
  });

  const panel = (kind, title, words) => {
    const box = el(
      "div",
      {
        class: `whole ${kind}${rows.length ? "" : " flat"}${nodes[kind].length > 24 ? " many" : ""}`,
        role: "listbox", "aria-label": `Shards on the ${kind}`,
      },
      ...nodes[kind],
    );
    box.addEventListener("keydown", (event) => {
      const at = nodes[kind].indexOf(event.target);
      const to = at < 0 ? null : stepped(event.key, at, nodes[kind].length);
      if (to === null) return;
      event.preventDefault();
      nodes[kind][at].tabIndex = -1;
      nodes[kind][to].tabIndex = 0;
      nodes[kind][to].focus();
    });
    return el("figure", {}, el("figcaption", {}, title, " ", el("span", {}, words)), box);
  };
  sides.append(panel("trainers", "Trainer", source), panel("workers", "Workers", destination));
  sides.addEventListener("pointerleave", () => {
    clear();
    const at = sides.contains(document.activeElement) ? document.activeElement : null;
    at?.dispatchEvent(new Event("focus"));
  });
  sides.addEventListener("focusout", clear);
  const axes = [axisText(rows, shape, down, "down"), axisText(columns, shape, right, "across")].filter(Boolean);
  readout.textContent = "Point at a shard, or walk with the arrow keys, to see what feeds it.";
  const key = [...axes, trainers.length > 1 ? "one colour for each trainer shard" : null];
  return [sides, el("p", { class: "axes" }, key.filter(Boolean).join("; ")), readout];
}
