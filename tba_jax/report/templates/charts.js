// Line charts, histograms and stacked bars.
const view = { axis: "step", smoothing: 0.8, hidden: new Set() };
const crosshairs = [];  // Per chart, a function that shows the crosshair at x, or hides it for null.
const CHANGES = DATA.changes ?? [];
const RESTARTS = DATA.events.filter((e) => e.kind === "restart" && e.t !== null);

// Exponential moving average without initial bias; short series are unchanged.
function smooth(values) {
  if (values.length < 40 || view.smoothing === 0) return values;
  let total = 0, weight = 0;
  return values.map((v) => {
    total = view.smoothing * total + (1 - view.smoothing) * v;
    weight = view.smoothing * weight + (1 - view.smoothing);
    return total / weight;
  });
}

// The x values of a series on the chosen axis; null if its run lacks them.
function xOf(series) {
  if (view.axis === "step") return series.step;
  if (view.axis === "time") return series.time.map((t) => t - (series.origin ?? DATA.origin));
  const axes = DATA.axes[series.run ?? 0];
  if (!axes.step) return null;
  let i = 0;
  return series.step.map((step) => {
    while (i < axes.step.length - 2 && axes.step[i + 1] < step) i++;
    const j = Math.min(i + 1, axes.step.length - 1), known = axes[view.axis];
    const share = Math.max(0, Math.min(1, (step - axes.step[i]) / (axes.step[j] - axes.step[i] || 1)));
    return known[i] + share * (known[j] - known[i]);
  });
}

// The visible series, each with the index of its colour.
function shownSeries(chart) {
  return chart.series.map((s, i) => ({ s, i: s.run ?? i, xs: xOf(s) })).filter(({ s, xs }) => xs && !view.hidden.has(s.run));
}

// Converts wall-clock seconds to the chosen axis, by the times of a series.
function eventX({ s, xs: step }, t) {
  if (view.axis === "time") return t;
  const { time } = s;
  const at = t + DATA.origin;
  const i = time.findIndex((x) => x >= at);
  if (i < 0 || time.length < 2) return null;
  if (i === 0) return at < time[0] - 60 ? null : step[0];
  const share = (at - time[i - 1]) / (time[i] - time[i - 1] || 1);
  return step[i - 1] + share * (step[i] - step[i - 1]);
}

// Converts a step to the chosen axis, by the steps of a series.
function stepX({ s, xs }, step) {
  if (view.axis === "step") return step;
  const i = s.step.findIndex((x) => x >= step);
  if (i <= 0) return i < 0 ? null : xs[0];
  const share = (step - s.step[i - 1]) / (s.step[i] - s.step[i - 1]);
  return xs[i - 1] + share * (xs[i] - xs[i - 1]);
}

function yRange(chart, shown) {
  let low = Infinity, high = -Infinity;
  for (const { s } of shown) {
    // Outliers must not flatten the rest: the middle 99 %, with a margin.
    const all = s.band ? [...s.low, ...s.high] : [...s.mean];
    all.sort((a, b) => a - b);
    const cut = all.length > 200 ? Math.floor(all.length / 200) : 0;
    low = Math.min(low, all[cut]);
    high = Math.max(high, all[all.length - 1 - cut]);
  }
  if (chart.zero && low > 0) low = 0;
  if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= chart.zero || low === 0 ? 0 : pad; high += pad; }
  const room = 0.06 * (high - low);
  return [chart.zero && low === 0 ? 0 : low - room, high + room];
}

function path(xs, ys) {
  let d = "";
  for (let i = 0; i < xs.length; i++) d += `${i ? "L" : "M"}${xs[i].toFixed(1)} ${ys[i].toFixed(1)}`;
  return d;
}

function drawAxes(root, box, xTicks, yTicks, X, Y, chart) {
  for (const y of yTicks) {
    root.append(svg("line", { x1: box.left, x2: box.right, y1: Y(y), y2: Y(y), stroke: "var(--grid)" }));
    root.append(svg("text", { x: box.left - 6, y: Y(y) + 4, "text-anchor": "end" }, fmtTick(y, chart.percent)));
  }
  root.append(svg("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: "var(--line)" }));
  for (const x of xTicks) {
    const label = view.axis === "time" ? fmtTime(x) : fmtTick(x);
    root.append(svg("text", { x: X(x), y: box.bottom + 15, "text-anchor": "middle" }, label));
  }
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid; else high = mid; }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

function drawSeries(root, s, i, xs, Y, sparse) {
  const dashes = i >= 8 ? "5 3" : "none";
  const mean = s.mean.map(Y);
  const area = path(xs, s.high.map(Y)) + path([...xs].reverse(), [...s.low].reverse().map(Y)).replace("M", "L") + "Z";
  const bandShown = s.band || s.low.some((v, j) => v !== s.high[j]);
  if (bandShown) root.append(svg("path", { d: area, fill: color(i), opacity: s.band ? 0.17 : 0.13 }));
  const smoothed = s.band ? s.mean : smooth(s.mean);
  if (smoothed !== s.mean) root.append(svg("path", { d: path(xs, mean), fill: "none", stroke: color(i), opacity: 0.25 }));
  root.append(svg("path", { d: path(xs, smoothed.map(Y)), fill: "none", stroke: color(i), "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": dashes }));
  if (sparse) xs.forEach((x, j) => root.append(svg("circle", { cx: x, cy: mean[j], r: 3, fill: color(i) })));
}

function lineChart(chart) {
  const id = `clip${lineChart.count = (lineChart.count || 0) + 1}`;
  const last = chart.series.length === 1 ? fmt(chart.series[0].mean.at(-1), chart.percent) : "";
  const figure = el("div");
  const card = el("div", { class: "chart", "data-chart": chart.title },
    el("div", { class: "head" }, el("b", {}, chart.title), el("span", { class: "last" }, last)),
    el("div", { class: "unit" }, chart.unit), figure);
  // A comparison has one legend for all charts.
  if (chart.series.length > 1 && !DATA.runs) {
    const keys = chart.series.map((s, i) => el("span", { class: "key" }, el("i", { style: `background:${color(i)}` }), s.label));
    card.append(el("div", {}, ...keys));
  }
  let state = null;
  keepDrawn(figure, (width) => {
    state = null;
    const shown = shownSeries(chart);
    if (!shown.length) { empty(figure, "Not measured against this axis."); return; }
    const height = 168, box = { left: 48, right: width - 8, top: 6, bottom: height - 22 };
    let x0 = Infinity, x1 = -Infinity;
    for (const { xs } of shown) for (const x of xs) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); }
    if (x0 === x1) { x0 -= 1; x1 += 1; }
    const [y0, y1] = yRange(chart, shown);
    const X = (x) => box.left + (x - x0) / (x1 - x0) * (box.right - box.left);
    const Y = (y) => box.bottom - (y - y0) / (y1 - y0) * (box.bottom - box.top);
    const root = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
    const make = view.axis === "time" ? timeTicks : ticks;
    drawAxes(root, box, make(x0, x1, Math.max(3, Math.floor(width / 70))), ticks(y0, y1, 4), X, Y, chart);
    const clip = svg("clipPath", { id });
    clip.append(svg("rect", { x: box.left - 4, y: box.top - 4, width: box.right - box.left + 8, height: box.bottom - box.top + 5 }));
    const inside = svg("g", { "clip-path": `url(#${id})` });
    for (const e of RESTARTS) {
      const x = eventX(shown[0], e.t);
      if (x === null || x < x0 || x > x1) continue;
      inside.append(svg("line", { x1: X(x), x2: X(x), y1: box.top, y2: box.bottom, stroke: "var(--bad)", "stroke-dasharray": "3 3", opacity: 0.75 }));
    }
    for (const { step } of CHANGES) {
      const x = stepX(shown[0], step);
      if (x === null || x < x0 || x > x1) continue;
      inside.append(svg("line", { class: "changed", x1: X(x), x2: X(x), y1: box.top, y2: box.bottom, stroke: "var(--soft)", "stroke-width": 1.5 }));
    }
    for (const { s, i, xs } of shown) drawSeries(inside, s, i, xs.map(X), Y, s.step.length <= 40);
    const cross = svg("line", { y1: box.top, y2: box.bottom, stroke: "var(--soft)", visibility: "hidden" });
    const dots = shown.map(({ i }) => svg("circle", { r: 4, fill: color(i), stroke: "var(--card)", "stroke-width": 1.5, visibility: "hidden" }));
    root.append(clip, inside, cross, ...dots);
    figure.replaceChildren(root);
    state = { shown, X, Y, x0, x1, box, cross, dots };
  });
  const crosshair = (x) => {
    if (!state) return;
    const inside = x !== null && x >= state.x0 && x <= state.x1;
    const visibility = inside ? "visible" : "hidden";
    state.cross.setAttribute("visibility", visibility);
    state.dots.forEach((dot, n) => {
      dot.setAttribute("visibility", visibility);
      if (!inside) return;
      const { s, xs } = state.shown[n], j = nearest(xs, x);
      dot.setAttribute("cx", state.X(xs[j]));
      dot.setAttribute("cy", Math.max(state.box.top, Math.min(state.box.bottom, state.Y(s.mean[j]))));
      if (n === 0) { state.cross.setAttribute("x1", state.X(xs[j])); state.cross.setAttribute("x2", state.X(xs[j])); }
    });
  };
  crosshairs.push(crosshair);
  figure.addEventListener("pointermove", (event) => {
    if (!state) return;
    const px = event.clientX - figure.getBoundingClientRect().left;
    const { box, x0, x1, shown, X } = state;
    const x = Math.max(x0, Math.min(x1, x0 + (px - box.left) / (box.right - box.left) * (x1 - x0)));
    crosshairs.forEach((show) => show(x));
    const { s: first, xs } = shown[0], j = nearest(xs, x);
    const lines = [`step ${first.step[j].toLocaleString("en")} · ${fmtTime(first.time[j] - (first.origin ?? DATA.origin))}`];
    for (const { s, xs: own } of shown) {
      const k = nearest(own, x);
      const band = s.band ? ` (${fmt(s.low[k], chart.percent)} to ${fmt(s.high[k], chart.percent)})` : "";
      lines.push(`${s.label}: ${fmt(s.mean[k], chart.percent)}${band}`);
    }
    for (const { step, settings } of CHANGES) {
      const at = stepX(shown[0], step);
      if (at !== null && Math.abs(X(at) - px) < 6) lines.push(`from step ${step}:`, ...settings);
    }
    showTip(event, lines.join("\n"));
  });
  figure.addEventListener("pointerleave", () => { hideTip(); crosshairs.forEach((show) => show(null)); });
  return card;
}

// The buttons and the slider above the charts.
function curveControls() {
  const known = DATA.axes.some((axes) => axes.step);
  for (const button of document.querySelectorAll("[data-axis]")) {
    const axis = button.dataset.axis;
    button.disabled = !known && (axis === "completions" || axis === "tokens");
    button.addEventListener("click", () => {
      view.axis = axis;
      document.querySelectorAll("[data-axis]").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
      redraws.forEach((draw) => draw());
    });
  }
  byId("smoothing").addEventListener("input", (event) => {
    view.smoothing = Number(event.target.value);
    redraws.forEach((draw) => draw());
  });
}

function fillCharts(id, charts, boxId) {
  if (boxId) byId(boxId).hidden = !charts.length;
  if (charts.length) byId(id).append(...charts.map(lineChart));
  else if (!boxId) empty(byId(id), "No metrics yet.");
}

function startTheme() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}

function drawHistogram(node, pairs, xLabel, words) {
  if (!pairs.length) return empty(node, words);
  const total = pairs.reduce((sum, [, n]) => sum + n, 0);
  const mean = pairs.reduce((sum, [v, n]) => sum + v * n, 0) / total;
  // The last bar has all values that do not fit.
  const shown = pairs.length <= 40 ? pairs : [...pairs.slice(0, 39), [pairs[39][0], pairs.slice(39).reduce((s, [, n]) => s + n, 0)]];
  const more = pairs.length > 40 ? "+" : "";
  keepDrawn(node, (width) => {
    const height = 190, box = { left: 48, right: width - 8, top: 6, bottom: height - 38 };
    const most = Math.max(...shown.map(([, n]) => n / total));
    const Y = (y) => box.bottom - y / (1.05 * most) * (box.bottom - box.top);
    const slot = (box.right - box.left) / shown.length;
    const X = (i) => box.left + (i + 0.5) * slot;
    const root = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": xLabel });
    drawAxes(root, box, [], ticks(0, most, 4), X, Y, { percent: true });
    const every = Math.max(1, Math.ceil(34 / slot));
    shown.forEach(([value, n], i) => {
      const w = Math.min(44, slot * 0.78);
      const bar = svg("rect", { x: X(i) - w / 2, width: w, y: Y(n / total), height: box.bottom - Y(n / total), rx: 2, fill: color(0) });
      const name = `${fmt(value)}${i === shown.length - 1 ? more : ""}`;
      bar.addEventListener("pointermove", (event) => showTip(event, `${name}: ${n.toLocaleString("en")} (${fmt(n / total, true)})`));
      bar.addEventListener("pointerleave", hideTip);
      root.append(bar);
      if (i % every === 0) root.append(svg("text", { x: X(i), y: box.bottom + 15, "text-anchor": "middle" }, name));
    });
    root.append(svg("text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" },
      `${xLabel} · mean ${fmt(mean)} · ${total.toLocaleString("en")} completions`));
    node.replaceChildren(root);
  });
}

// A histogram over the run as a heat map.
function drawOverTime(node, data, label) {
  if (!data.step) return;
  const { step, value, share, more } = data;
  const box = el("div");
  node.append(el("h4", {}, `${label} over the run`), box);
  keepDrawn(box, (width) => {
    const rowHeight = Math.max(9, Math.min(18, 150 / value.length));
    const left = 48, right = width - 8, bottom = 4 + rowHeight * value.length, height = bottom + 20;
    const cell = (right - left) / step.length;
    const root = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${label} over the run` });
    value.forEach((v, r) => {
      const y = bottom - (r + 1) * rowHeight;
      const name = `${fmt(v)}${more && r === value.length - 1 ? "+" : ""}`;
      root.append(svg("text", { x: left - 6, y: y + rowHeight / 2 + 4, "text-anchor": "end" }, name));
      share[r].forEach((x, c) => {
        if (!x) return;
        const rect = svg("rect", { x: left + c * cell, y, width: cell + 0.4, height: rowHeight - 1, fill: color(0), opacity: 0.12 + 0.88 * x });
        rect.addEventListener("pointermove", (event) => showTip(event, `to step ${fmt(step[c])}\n${label} ${name}: ${fmt(x, true)}`));
        rect.addEventListener("pointerleave", hideTip);
        root.append(rect);
      });
    });
    const first = step[0], last = step.at(-1);
    for (const x of ticks(first, last, Math.max(3, Math.floor(width / 90)))) {
      const at = last > first ? left + (x - first) / (last - first) * (right - left) : left;
      root.append(svg("text", { x: at, y: bottom + 15, "text-anchor": "middle" }, fmtTick(x)));
    }
    box.replaceChildren(root);
  });
}

// Colours of span kinds: waits are grey, common kinds are fixed, others take the
// rest of the palette.
const KIND_COLORS = { step: 0, evaluate: 1, decode: 2, compile: 3, checkpoint: 4, publish: 5, reference: 6, reward: 4, pull: 5, draw: 5 };
function kindColors(kinds, waits) {
  const left = [0, 1, 2, 3, 4, 5, 6].filter((c) => !kinds.some((kind) => KIND_COLORS[kind] === c));
  let next = 0;
  return kinds.map((kind, i) => {
    if (waits[i]) return "--wait";
    if (Object.hasOwn(KIND_COLORS, kind)) return `--c${KIND_COLORS[kind]}`;
    return `--c${left.length ? left[next++ % left.length] : next++ % 7}`;
  });
}

function drawTime(node, rows) {
  if (!rows.length) return empty(node, "No spans yet.");
  const { kinds, waits } = DATA.timeline;
  const colors = Object.fromEntries(kinds.map((k, i) => [k, kindColors(kinds, waits)[i]]));
  node.replaceChildren(...rows.map((row) => {
    const bar = el("div", { class: "spans" });
    const parts = Object.entries(row.seconds).sort((a, b) => b[1] - a[1]);
    for (const [kind, s] of [...parts, ["unmeasured", row.unmeasured_s]]) {
      const share = s / row.elapsed_s;
      const part = el("div", { style: `width:${100 * share}%;background:${kind in colors ? `var(${colors[kind]})` : "transparent"}` });
      part.addEventListener("pointermove", (event) => showTip(event, `${kind}: ${fmtTime(s)} (${fmt(share, true)})`));
      part.addEventListener("pointerleave", hideTip);
      bar.append(part);
    }
    const name = `${row.run ? `${row.run} · ` : ""}${row.role}-${row.index}${row.lane ? ` · ${row.lane}` : ""}`;
    const top = parts.slice(0, 3).map(([kind, s]) => `${kind} ${fmt(s / row.elapsed_s, true)}`).join(", ");
    return el("div", { class: "lane" }, el("b", {}, name), bar, el("span", { class: "note" }, `busy ${fmt(row.busy_share, true)}: ${top}`));
  }));
}
