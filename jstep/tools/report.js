// The values under the pointer, and curves that are switched off by their names; the page is whole without.
const duration = (seconds) => {
  const [size, unit] = seconds < 60 ? [1, "s"] : seconds < 3600 ? [60, "min"] : [3600, "h"];
  return `${+(seconds / size).toPrecision(2)} ${unit}`;
};
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
    const where = plot.dataset.unit === "time" ? duration(at) : `step ${Math.round(at)}`;
    output.textContent = shown.length ? `${shown.map(({text}) => text).join(", ")} at ${where}` : "";
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
