// The search: a list that holds only the rows in sight.

const ROW = 40;

/** A test of names: a glob over the whole name where it has * or ?, else a part of it. */
function matcher(query) {
  if (!/[*?]/.test(query)) {
    const part = query.toLowerCase();
    return (name) => name.toLowerCase().includes(part);
  }
  const pattern = query.replace(/[.+^${}()|[\]\\]/g, "\\$&").replaceAll("*", ".*").replaceAll("?", ".");
  const glob = new RegExp(`^${pattern}$`, "is");
  return (name) => glob.test(name);
}

function makeSearch(report, index, open) {
  const { tensors, transfers, changes } = report;
  const marks = changes?.marks ?? {};
  const [input, filter, list, output] = ["query", "filter", "list", "count"].map(byId);
  const sheet = list.firstElementChild;
  let found = [];
  let at = 0;
  let shown = null;

  const option = (value, text) => el("option", { value }, text);
  const used = report.summary.routes.map((one) => one.route);
  filter.append(option("", "all tensors"));
  if (changes) filter.append(option("changed", `changed (${count(Object.keys(marks).length)})`));
  filter.append(...used.map((route) => option(route, route)));
  filter.append(...report.reasons.map(({ code, text }, i) => option(`reason ${i}`, `${code}: ${text}`.slice(0, 72))));

  const wanted = (value) => {
    if (!value) return () => true;
    if (value === "changed") return (i) => i in marks;
    if (ROUTES.includes(value)) return (i) => index.routes[i].includes(value);
    const reason = Number(value.split(" ")[1]);
    return (i) => index.stops[i].some((stop) => report.stops[stop][6] === reason);
  };

  function update() {
    const query = input.value.trim();
    const kept = wanted(filter.value);
    const number = /^#(\d+)$/.exec(query);
    if (number) {
      const stops = transfers[number[1] - 1]?.[2] ?? [];
      found = [...new Set(stops.map((stop) => report.stops[stop][0]))].filter(kept);
    } else {
      const matches = matcher(query);
      found = [];
      for (let i = 0; i < tensors.length; i += 1) if (matches(tensors[i][0]) && kept(i)) found.push(i);
    }
    at = 0;
    list.scrollTop = 0;
    sheet.style.height = `${found.length * ROW}px`;
    output.textContent = `${count(found.length)} of ${count(tensors.length)}`;
    draw();
  }

  function row(place) {
    const i = found[place];
    const [name, dtype, shape, bytes] = tensors[i];
    return el(
      "div",
      {
        class: `row ${index.routes[i][0] ?? ""}${place === at ? " at" : ""}`, role: "option", id: `row-${place}`,
        "aria-selected": i === shown, "aria-posinset": place + 1, "aria-setsize": found.length,
        style: { top: `${place * ROW}px` }, "data-tensor": i, title: name,
      },
      el("span", { class: "name" }, el("bdi", {}, name)),
      el(
        "span",
        { class: "about" },
        el("span", {}, index.routes[i].join(" + ")),
        el("span", {}, `${dtype} ${shapeText(shape)}`),
        marks[i] ? el("span", { class: "mark" }, `changed: ${marks[i].join(", ")}`) : null,
        el("span", {}, size(bytes)),
      ),
    );
  }

  function draw() {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
    const last = Math.min(found.length, first + Math.ceil(list.clientHeight / ROW) + 10);
    const rows = [];
    for (let place = first; place < last; place += 1) rows.push(row(place));
    sheet.replaceChildren(...rows);
    if (found.length) list.setAttribute("aria-activedescendant", `row-${at}`);
    else list.removeAttribute("aria-activedescendant");
  }

  function walk(place) {
    at = place;
    const top = at * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
    draw();
  }

  input.addEventListener("input", update);
  filter.addEventListener("change", update);
  list.addEventListener("scroll", draw, { passive: true });
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "Enter") {
      event.preventDefault();
      list.focus();
      if (event.key === "Enter" && found.length) open(found[at], true);
    } else if (event.key === "Escape" && input.value) {
      event.preventDefault();
      input.value = "";
      update();
    }
  });
  list.addEventListener("keydown", (event) => {
    const to = found.length ? stepped(event.key, at, found.length, Math.floor(list.clientHeight / ROW)) : null;
    if (event.key === "ArrowUp" && at === 0) input.focus();
    else if (event.key === "Escape") input.focus();
    else if (to !== null) walk(to);
    else if (event.key === "Enter" && found.length) open(found[at], true);
    else return;
    event.preventDefault();
  });
  list.addEventListener("click", (event) => {
    const target = event.target.closest(".row");
    if (!target) return;
    at = found.indexOf(Number(target.dataset.tensor));
    open(found[at], false);
  });
  addEventListener("resize", draw);
  update();

  return {
    /** Mark a tensor as the one that is open. */
    mark(tensor) {
      shown = tensor;
      const place = found.indexOf(tensor);
      if (place >= 0) walk(place);
      else draw();
    },
    /** List the tensors of a transfer. */
    transfer(number) {
      filter.value = "";
      input.value = `#${number + 1}`;
      update();
      list.focus();
    },
  };
}
