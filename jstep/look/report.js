// The values under the pointer, and curves that are switched off by their names; the page is whole without.
const rowsOfRuns = [...document.querySelectorAll("#runs [data-r]")];
const names = new Map(rowsOfRuns.map((row) => [row.dataset.r, row.cells[0].textContent.trim()]));
for (const figure of document.querySelectorAll("figure.curves")) {
  const plot = figure.querySelector("svg[data-x]"), output = document.createElement("output");
  if (!plot) continue;
  const [low, high] = plot.dataset.y.split(" ").map(Number);
  const ratio = Math.max(Math.abs(low), Math.abs(high)) / (high - low);
  const digits = 4 + Math.min(12, Math.max(0, Math.ceil(Math.log10(ratio)) || 0));
  const {width, height} = plot.viewBox.baseVal;
  const paths = [...plot.querySelectorAll(names.size ? "path.line" : "path.line:not(.pale)")];
  figure.querySelector("figcaption").append(" ", output);
  output.style.fontWeight = "normal";
  figure.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * width;
    const under = ((event.clientY - box.top) / box.height) * height;
    const value = (y) => low * (y / height) + high * (1 - y / height); // high - low may be infinite
    let shown = paths.filter((path) => path.style.display !== "none").flatMap((path) => {
      const points = [...path.getAttribute("d").matchAll(/(-?[\d.]+),(-?[\d.]+)/g)].map(([, a, b]) => [+a, +b]);
      if (!points.length) return [];
      const y = points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a))[1];
      const number = +(plot.dataset.log === "1" ? 10 ** value(y) : value(y)).toPrecision(digits);
      return [{off: Math.abs(y - under), text: names.size ? `${names.get(path.dataset.i)} ${number}` : number}];
    });
    if (names.size) shown = shown.sort((a, b) => a.off - b.off).slice(0, 1); // of many runs, the nearest
    const [first, last] = plot.dataset.x.split(" ").map(Number);
    const at = first + (Math.min(width, Math.max(0, x)) / width) * (last - first);
    const texts = shown.map(({text}) => text).join(", ");
    output.textContent = shown.length ? `${texts} at step ${Math.round(at)}` : "";
  });
  figure.addEventListener("pointerleave", () => (output.textContent = ""));
  for (const key of figure.querySelectorAll(".key[data-i]")) {
    key.tabIndex = 0;
    key.setAttribute("role", "button");
    key.style.cursor = "pointer";
    const turn = () => {
      const isOff = key.classList.toggle("off");
      key.setAttribute("aria-pressed", String(!isOff));
      for (const path of plot.querySelectorAll(`[data-i="${key.dataset.i}"]`)) path.style.display = isOff ? "none" : "";
    };
    key.addEventListener("click", turn);
    key.addEventListener("keydown", (event) => event.key === "Enter" && turn());
  }
}
// Sorting, filtering, hiding and smoothing for pages of several runs.
if (document.getElementById("runs")) {
  const table = document.getElementById("runs"), body = table.tBodies[0], rows = [...body.rows];
  const hidden = new Set(), drawn = new Map();
  for (const path of document.querySelectorAll("figure [data-i]")) {
    if (!drawn.has(path.dataset.i)) drawn.set(path.dataset.i, []);
    drawn.get(path.dataset.i).push(path);
  }
  const make = (kind, fields, ...inside) => {
    const made = Object.assign(document.createElement(kind), fields);
    made.append(...inside);
    return made;
  };

  // Hiding: a tick in each row, and buttons for all rows that the filter shows.
  const ticks = new Map(), keys = [...document.querySelectorAll("#legend .key[data-i]")];
  const show = (some, isOn) => {
    for (const run of some) {
      isOn ? hidden.delete(run) : hidden.add(run);
      for (const path of drawn.get(run) ?? []) path.style.display = isOn ? "" : "none";
    }
    for (const [row, tick] of ticks) tick.checked = !hidden.has(row.dataset.r);
    for (const key of keys) {
      key.classList.toggle("off", hidden.has(key.dataset.i));
      key.setAttribute("aria-pressed", String(!hidden.has(key.dataset.i)));
    }
  };
  for (const row of rows) {
    const tick = make("input", {type: "checkbox", checked: true, ariaLabel: `show ${row.cells[0].textContent}`});
    tick.addEventListener("change", () => show([row.dataset.r], tick.checked));
    ticks.set(row, tick);
    row.cells[0].prepend(tick, " ");
  }
  for (const key of keys) {
    Object.assign(key, {tabIndex: 0, role: "button"});
    const turn = () => show([key.dataset.i], hidden.has(key.dataset.i));
    key.addEventListener("click", turn);
    key.addEventListener("keydown", (event) => event.key === "Enter" && turn());
  }

  // Sorting: by a click on a head, again for the other direction, and once more for the first order.
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
  const compare = (column, sign) => {
    const isNumeric = rows.every((row) => !Number.isNaN(Number(value(row, column))));
    return (a, b) => {
      const [one, other] = [value(a, column), value(b, column)];
      if (!one || !other) return !one - !other;
      return sign * (isNumeric ? one - other : one.localeCompare(other, undefined, {numeric: true}));
    };
  };
  const sort = (column) => {
    const now = heads[column].getAttribute("aria-sort"), next = {ascending: "descending", descending: null}[now];
    const order = next === undefined ? "ascending" : next;
    for (const head of heads) head.removeAttribute("aria-sort");
    table.classList.toggle("sorted", order !== null);
    if (order === null) return body.append(...rows);
    heads[column].setAttribute("aria-sort", order);
    body.append(...[...rows].sort(compare(column, order === "ascending" ? 1 : -1)));
  };
  heads.forEach((head, column) => {
    Object.assign(head, {tabIndex: 0});
    head.addEventListener("click", () => sort(column));
    head.addEventListener("keydown", (event) => event.key === "Enter" && sort(column));
  });

  // The filter: rows with all of its words.
  const filter = make("input", {type: "search", placeholder: "filter", ariaLabel: "filter the rows"});
  const count = make("output", {});
  const texts = new Map(rows.map((row) => {
    const titles = [...row.cells].map((cell) => `${cell.textContent} ${cell.title}`);
    return [row, titles.join(" ").toLowerCase()];
  }));
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => texts.get(row).includes(word));
    count.textContent = ` ${rows.filter((row) => !row.hidden).length} of ${rows.length} runs `;
  });
  const button = (text, isOn) => {
    const made = make("button", {type: "button"}, text);
    made.addEventListener("click", () => show(rows.filter((row) => !row.hidden).map((row) => row.dataset.r), isOn));
    return made;
  };
  document.getElementById("controls").append(filter, count, button("show these", true), button("hide these", false));

  // Smoothing: paths are drawn anew from what the page had.
  const drawing = document.getElementById("drawing");
  if (drawing) {
    const smooth = make("input", {type: "range", min: 0, max: 0.99, step: 0.01, value: 0, ariaLabel: "smoothing"});
    drawing.append(make("label", {}, "smoothing ", smooth));
    const lines = [...document.querySelectorAll("svg[data-x] path.line")].map((path) => [path, path.getAttribute("d")]);
    const draw = () => {
      const share = +smooth.value;
      for (const [path, d] of lines) {
        let before = null, weight = 0;
        const smoothed = (y) => {
          [before, weight] = [share * (before ?? 0) + (1 - share) * y, share * weight + 1 - share];
          return before / weight;
        };
        const point = (_, x, y) => `${x},${smoothed(+y).toFixed(1)}`;
        path.setAttribute("d", share ? d.replace(/(-?[\d.]+),(-?[\d.]+)/g, point) : d);
      }
    };
    let waiting = 0;
    smooth.addEventListener("input", () => {
      cancelAnimationFrame(waiting);
      waiting = requestAnimationFrame(draw);
    });
  }
}
