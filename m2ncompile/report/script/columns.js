// A chart of many stacked columns: one path a route, however many columns there are.

const HEIGHT = 1000;

/** A round number of at least `value`, for the top of an axis. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return power * [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
}

/** 1, 2, 5, 10, 20, 50, ... of at least `value`. */
function stepOf(value) {
  const power = 10 ** Math.max(0, Math.floor(Math.log10(value || 1)));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}

function axis(values, log) {
  const top = values.reduce((most, v) => Math.max(most, v), 1);
  if (!log) {
    const max = round(top);
    return { height: (v) => v / max, marks: [0, max / 2, max] };
  }
  const smallest = values.reduce((least, v) => (v > 0 && v < least ? v : least), top);
  const low = Math.floor(Math.log10(smallest));
  const high = Math.max(low + 1, Math.ceil(Math.log10(top)));
  const marks = [];
  const step = Math.ceil((high - low) / 5);
  for (let power = low; power <= high; power += step) marks.push(10 ** power);
  const room = 0.06; // below the lowest mark, so that a column on it is still to be seen
  return {
    height: (v) => (v > 0 ? room + ((1 - room) * (Math.log10(v) - low)) / (high - low) : 0),
    marks,
  };
}

function tickText(bytes) {
  const power = unitOf(bytes);
  return `${+(bytes / 1000 ** power).toPrecision(3)} ${UNITS[power]}`;
}

/**
 * `columns` are triples of bytes by route; `text(i)` says one in words, `tick(i)` is its number
 * (of which some are shown) or a text for one that has none.
 * `open(i)`, where given, is what Enter and a click do.
 */
function drawColumns(host, { label, columns, text, tick, log = false, open = null }) {
  const n = columns.length;
  if (!n) return;
  const totals = columns.map((column) => column[0] + column[1] + column[2]);
  const { height, marks } = axis(totals, log);
  const paths = ["", "", ""];
  const gap = n > 300 ? 0 : 0.12;
  columns.forEach((column, x) => {
    let under = 0;
    column.forEach((bytes, route) => {
      if (!bytes) return;
      const [low, high] = [height(under), height(under + bytes)].map((h) => HEIGHT * (1 - h));
      under += bytes;
      paths[route] += `M${x + gap} ${low.toFixed(1)}V${high.toFixed(1)}H${x + 1 - gap}V${low.toFixed(1)}z`;
    });
  });
  const cursor = svg("rect", { y: 0, width: 1, height: HEIGHT, x: 0, visibility: "hidden" });
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${n} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    ...paths.map((d, route) => svg("path", { d, class: ROUTES[route] })),
    cursor,
  );
  const plot = el(
    "div",
    {
      class: "plot", tabindex: "0", role: "slider", "aria-label": label,
      "aria-valuemin": 1, "aria-valuemax": n,
    },
    ...marks.slice(log ? 0 : 1).map((mark) => el("hr", { style: { bottom: `${100 * height(mark)}%` } })),
    picture,
  );
  const readout = el("p", { class: "readout", "aria-hidden": "true" });
  let at = 0;
  const show = (index) => {
    at = index;
    cursor.setAttribute("x", at);
    cursor.setAttribute("visibility", "visible");
    plot.setAttribute("aria-valuenow", at + 1);
    plot.setAttribute("aria-valuetext", text(at));
    readout.textContent = text(at);
  };
  const under = (event) => {
    const box = plot.getBoundingClientRect();
    return Math.max(0, Math.min(n - 1, Math.floor(((event.clientX - box.left) / box.width) * n)));
  };
  plot.addEventListener("pointermove", (event) => show(under(event)));
  plot.addEventListener("click", (event) => {
    show(under(event));
    open?.(at);
  });
  plot.addEventListener("focus", () => show(at));
  plot.addEventListener("keydown", (event) => {
    const to = stepped(event.key, at, n, Math.max(2, Math.round(n / 20)));
    if (to !== null) show(to);
    else if (event.key === "Enter" && open) open(at);
    else return;
    event.preventDefault();
  });
  const every = stepOf(n / 12);
  const ticks = columns.flatMap((_, i) => {
    const mark = tick(i);
    if (typeof mark === "number" && mark % every) return [];
    return [el("span", { style: { left: `${(100 * (i + 0.5)) / n}%` } }, typeof mark === "number" ? count(mark) : mark)];
  });
  const used = ROUTES.filter((_, route) => columns.some((column) => column[route]));
  host.append(
    el(
      "div",
      { class: "columns" },
      el(
        "div",
        { class: "scale", "aria-hidden": "true" },
        ...marks.map((mark) => el("span", { style: { bottom: `${100 * height(mark)}%` } }, tickText(mark))),
      ),
      plot,
      el("div", { class: "ticks", "aria-hidden": "true" }, ...ticks),
      el(
        "div",
        { class: "foot" },
        readout,
        el("div", { class: "legend" }, ...used.map((route) => el("span", { class: `swatch ${route}` }, route))),
      ),
    ),
  );
  plot.setAttribute("aria-valuenow", 1);
  plot.setAttribute("aria-valuetext", text(0));
  readout.textContent = `Point at a column, or walk with the arrow keys${open ? "; Enter lists its tensors" : ""}.`;
}
