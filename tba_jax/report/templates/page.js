// The page's data, and functions that all figures use.
const DATA = JSON.parse(document.getElementById("page-data").textContent);
const SVG = "http://www.w3.org/2000/svg";

// Text is set as text only: nothing here parses markup.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null) continue;
    node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

function svg(tag, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  return node;
}

function byId(id) { return document.getElementById(id); }
function color(i) { return `var(--c${i % 8})`; }
function cssColor(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function fmt(x, percent = false) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  if (percent) return `${(100 * x).toFixed(1)} %`;
  const size = Math.abs(x);
  if (x === 0) return "0";
  if (Number.isInteger(x) && size < 1e6) return x.toLocaleString("en");
  if (size >= 1e5 || size < 1e-3) return x.toExponential(1).replace("e+", "e");
  return size >= 100 ? x.toFixed(0) : size >= 1 ? x.toFixed(2) : x.toPrecision(3);
}

// A tick label, with as few digits as possible.
function fmtTick(x, percent) {
  if (percent) return `${+(100 * x).toFixed(2)} %`;
  const size = Math.abs(x);
  if (size >= 1e5 && size < 1e13) {
    const [unit, name] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([u]) => size >= u);
    return `${+(x / unit).toPrecision(4)}${name}`;
  }
  if (x !== 0 && (size >= 1e5 || size < 1e-3)) return x.toExponential(1).replace(".0e", "e").replace("e+", "e");
  return (+x.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 6 });
}

function fmtTime(s, precise = false) {
  if (!Number.isFinite(s)) return "–";
  const sign = s < 0 ? "−" : "";
  s = Math.abs(s);
  if (s < 120) return `${sign}${s.toFixed(precise ? 3 : s < 10 && s % 1 ? 1 : 0)} s`;
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60, r = Math.floor(s % 60);
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${sign}${h}:${two(m)}${r ? `:${two(r)}` : ""} h` : `${sign}${m}:${two(r)} min`;
}

// About `count` round numbers in [low, high].
function ticks(low, high, count, steps = [1, 2, 5, 10]) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const unit = 10 ** Math.floor(Math.log10(span / count));
  const step = unit * (steps.find((m) => span / (unit * m) <= count) || 10);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) out.push(+(i * step).toPrecision(12));
  return out;
}

function timeTicks(low, high, count) {
  const steps = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900,
    1800, 3600, 7200, 14400, 43200, 86400];
  const step = steps.find((s) => (high - low) / s <= count) || 86400 * Math.ceil((high - low) / 86400 / count);
  const out = [];
  for (let t = Math.ceil(low / step) * step; t <= high; t += step) out.push(+t.toFixed(6));
  return out;
}

function showTip(event, text) {
  const tip = byId("tip");
  tip.textContent = text;
  tip.hidden = false;
  const { offsetWidth: w, offsetHeight: h } = tip;
  const x = event.clientX + 14 + w > innerWidth ? event.clientX - w - 14 : event.clientX + 14;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, Math.min(innerHeight - h - 4, event.clientY + 14))}px`;
}

function hideTip() { byId("tip").hidden = true; }

function empty(node, words) { node.replaceChildren(el("p", { class: "empty" }, words)); }

const redraws = [];  // Called after a change of theme or axis.

// Draws now, and again when the node's width changes.
function keepDrawn(node, draw) {
  let width = 0;
  const again = () => { width = node.clientWidth; if (width) draw(width); };
  new ResizeObserver(() => { if (node.clientWidth !== width) again(); }).observe(node);
  redraws.push(again);
  again();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  redraws.forEach((draw) => draw());
}
