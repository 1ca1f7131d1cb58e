// The values under the pointer, and curves that are switched off by their names; the page is whole without.
for (const figure of document.querySelectorAll("figure.curves")) {
  const plot = figure.querySelector("svg[data-x]"), output = document.createElement("output");
  const [first, last] = plot.dataset.x.split(" ").map(Number), [low, high] = plot.dataset.y.split(" ").map(Number);
  const ratio = Math.max(Math.abs(low), Math.abs(high)) / (high - low);
  const digits = 4 + Math.min(12, Math.max(0, Math.ceil(Math.log10(ratio)) || 0));
  const {width, height} = plot.viewBox.baseVal;
  const curves = [...plot.querySelectorAll("path.line:not(.pale)")].map((path) => ({
    path,
    points: [...path.getAttribute("d").matchAll(/(-?[\d.]+),(-?[\d.]+)/g)].map((match) => [+match[1], +match[2]]),
  }));
  figure.querySelector("figcaption").append(" ", output);
  output.style.fontWeight = "normal";
  figure.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * width;
    const value = (y) => low * (y / height) + high * (1 - y / height); // high - low may be infinite
    const shown = curves.filter(({path, points}) => points.length && path.style.display !== "none").map(({points}) => {
      const y = points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a))[1];
      return +(plot.dataset.log === "1" ? 10 ** value(y) : value(y)).toPrecision(digits);
    });
    const step = Math.round(first + (Math.min(width, Math.max(0, x)) / width) * (last - first));
    output.textContent = shown.length ? `${shown.join(", ")} at step ${step}` : "";
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
