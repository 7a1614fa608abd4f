// Decodes the data, draws the page, and answers the keys that work everywhere.

async function decode(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

/** By tensor: its stops and routes; by stop: its transfers, several where it goes in parts. */
function indexOf({ tensors, stops, transfers }) {
  const index = { stops: tensors.map(() => []), routes: tensors.map(() => []), transfers: stops.map(() => []) };
  stops.forEach(([tensor, , , route], stop) => {
    index.stops[tensor].push(stop);
    if (!index.routes[tensor].includes(route)) index.routes[tensor].push(route);
  });
  transfers.forEach(([, , members], number) => {
    for (const stop of members) index.transfers[stop].push(number);
  });
  return index;
}

function themeButton() {
  const themes = ["auto", "light", "dark"];
  const button = byId("theme");
  let at = 0;
  const show = () => {
    document.documentElement.style.colorScheme = at ? themes[at] : "";
    button.textContent = `Theme: ${themes[at]}`;
  };
  button.addEventListener("click", () => {
    at = (at + 1) % themes.length;
    show();
  });
  show();
}

const report = await decode(byId("data").textContent);
byId("data").remove();
const index = indexOf(report);
let search = null;

/** The address names the open tensor, so that a link to it works. */
const addressOf = (tensor) => `#tensor=${encodeURIComponent(report.tensors[tensor][0])}`;

function open(tensor, move) {
  show(tensor);
  search.mark(tensor);
  location.hash = addressOf(tensor);
  if (move) byId("tensor").focus();
}

const show = makeTensor(report, index, () => search, open);

function follow() {
  if (!location.hash.startsWith("#tensor=")) return;
  const tensor = report.tensors.findIndex((_, i) => addressOf(i) === location.hash);
  if (tensor < 0 || byId("tensor").getAttribute("aria-label") === report.tensors[tensor][0]) return;
  show(tensor);
  search.mark(tensor);
}

themeButton();
drawHeader(report);
drawChanges(report.changes);
drawRoutes(byId("routes"), report.summary);
drawReasons(byId("reasons"), report);
drawLayers(byId("layers"), report);
drawMatrix(byId("traffic"), report.traffic);
drawStaging(byId("staging"), report.staging);
search = makeSearch(report, index, open);
drawTransfers(byId("transfers"), report, (number) => search.transfer(number));
follow();
addEventListener("hashchange", follow);
addEventListener("scroll", placeTip, { capture: true, passive: true });

addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    byId("query").focus();
  } else if (event.key === "Escape") {
    hideTip();
    if (byId("tensor").contains(event.target)) byId("list").focus();
  }
});
document.documentElement.dataset.ready = "yes";
