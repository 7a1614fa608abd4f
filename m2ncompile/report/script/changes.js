// What changed since another plan.

function drawChanges(changes) {
  if (!changes) return;
  const section = byId("changes");
  section.hidden = false;
  const host = section.querySelector("div");
  const digest = (text) => text.slice(0, 12);
  host.append(
    el("p", { class: "verdict" }, `${changes.headline[0].toUpperCase()}${changes.headline.slice(1)}.`),
    el(
      "p",
      { class: "note" },
      "Plan ", el("code", {}, digest(changes.plans[0])), " to ", el("code", {}, digest(changes.plans[1])),
      ", program ", el("code", {}, digest(changes.programs[0])), " to ", el("code", {}, digest(changes.programs[1])), ".",
    ),
  );
  const part = (title, head, rows, numeric) => {
    if (rows.length) host.append(el("h3", {}, title), table(head, rows, numeric));
  };
  part("Inputs", ["input", "before", "after"], changes.inputs);
  part("Amounts", ["", "before", "after", "change"], changes.amounts.filter((row) => row[3]), [1, 2, 3]);
  if (changes.notes.length) host.append(el("h3", {}, "Sequence"), ...changes.notes.map((note) => el("p", { class: "plain" }, note)));
  for (const { title, groups } of changes.sections) {
    part(
      `${title[0].toUpperCase()}${title.slice(1)}`,
      ["tensors", "count", "bytes", "before", "after"],
      groups.map(([name, tensors, bytes, before, after]) => [el("code", {}, name), count(tensors), size(bytes), before, after]),
      [1, 2],
    );
  }
  part("Reasons", ["code", "meaning"], changes.reasons.map(({ code, text }) => [el("code", {}, code), text]));
}
