// The header, routes, reasons, layers, staging, transfers.

function drawHeader(report) {
  const { summary } = report;
  const received = summary.wire_bytes_per_worker;
  const [least, most] = [Math.min(...received), Math.max(...received)];
  byId("model").textContent = report.model;
  byId("subtitle").textContent = report.architecture;
  const totals = [
    [count(summary.tensors), "tensors"],
    [size(summary.nbytes), "of weights"],
    [count(summary.collectives), "collectives a sync"],
    [least === most ? size(most) : `${size(least)} to ${size(most)}`, "received by each worker"],
  ];
  byId("totals").append(...totals.map(([value, noun]) => el("li", {}, el("b", {}, value), el("span", {}, noun))));
  const long = (text) => text.length > 48;
  byId("facts").append(
    ...report.facts.map(([label, text]) =>
      el("div", { class: long(text) ? "long" : null }, el("dt", {}, label), el("dd", { class: long(text) ? "mono" : null }, text)),
    ),
  );
}

function drawRoutes(host, { routes }) {
  const whole = sum(routes.map((route) => route.nbytes));
  host.append(
    el(
      "div",
      { class: "bar", "aria-hidden": "true" },
      ...routes.map((one) => el("i", { class: one.route, style: { flex: `${one.nbytes / whole} 0 0` } })),
    ),
    table(
      ["route", "tensors", "bytes", "share"],
      routes.map((one) => [
        el("span", { class: `swatch ${one.route}` }, one.route), count(one.tensors), size(one.nbytes), share(one.nbytes, whole),
      ]),
      [1, 2, 3],
    ),
  );
}

function drawReasons(host, report) {
  const { reasons } = report.summary;
  if (!reasons.length) {
    host.append(el("p", { class: "note" }, "Every tensor is written directly."));
    return;
  }
  const taken = report.reasons.map(() => new Set());
  for (const [, , , route, , , reason] of report.stops) if (reason !== null) taken[reason].add(route);
  const routesOf = (one) => [...taken[report.reasons.findIndex((r) => r.code === one.code && r.text === one.text)]];
  host.append(
    table(
      ["reason", "route", "tensors", "bytes"],
      reasons.map((one) => [
        el("span", {}, one.text, " ", el("code", {}, one.code)),
        el("span", {}, ...routesOf(one).map((route) => el("span", { class: `swatch ${route}` }, route))),
        count(one.tensors), size(one.nbytes),
      ]),
      [2, 3],
    ),
  );
}

function drawLayers(host, { layers }) {
  const name = (layer) => (layer.number === null ? "outside of layers" : `${layer.prefix}${layer.number}`);
  const parts = (layer) =>
    ROUTES.flatMap((route, i) => (layer.nbytes[i] ? [`${route} ${size(layer.nbytes[i])}`] : [])).join(", ");
  drawColumns(host, {
    label: "Bytes by layer",
    columns: layers.map((layer) => layer.nbytes),
    text: (i) => `${name(layers[i])}: ${parts(layers[i])}`,
    tick: (i) => layers[i].number ?? "–",
  });
  const details = el("details", {}, el("summary", {}, "As a table"));
  details.addEventListener(
    "toggle",
    () => {
      const rows = layers.map((layer) => [name(layer), ...layer.nbytes.map(size), size(sum(layer.nbytes))]);
      details.append(table(["layer", ...ROUTES, "all"], rows, [1, 2, 3, 4]));
    },
    { once: true },
  );
  host.append(details);
}

/** `ranks`: a label, and what it stages as [words, bytes]. */
function drawStaging(host, ranks) {
  const most = Math.max(1, ...ranks.flatMap(([, held]) => held.map(([, bytes]) => bytes)));
  host.append(
    table(
      ["ranks", "", "bytes"],
      ranks.flatMap(([label, held]) =>
        held.map(([words, bytes]) => [
          label,
          el("div", {}, words, el("div", { class: "meter", "aria-hidden": "true" }, el("i", { style: { width: `${(100 * bytes) / most}%` } }))),
          size(bytes),
        ]),
      ),
      [2],
    ),
  );
}

function transferText([bytes, route, stops, part], number, all) {
  const what = stops.length > 1 ? `a stack of ${count(stops.length)}` : "one tensor";
  const cut = part ? `${count(part[1])} to ${count(part[1] + part[2])} of dim ${part[0]} of ${what}` : what;
  return `transfer ${count(number + 1)} of ${count(all)}: ${size(bytes)}, ${route}, ${cut}`;
}

function drawTransfers(host, { transfers }, open) {
  drawColumns(host, {
    label: "Transfers in order, by size",
    columns: transfers.map(([bytes, route]) => ROUTES.map((one) => (one === route ? bytes : 0))),
    text: (i) => transferText(transfers[i], i, transfers.length),
    tick: (i) => i + 1,
    log: true,
    open,
  });
}
