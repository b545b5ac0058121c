// The roles' spans on one time axis, with zoom and scroll.
const TRACK = 26, GAP = 8, AXIS = 24, LABEL = 138;

function timelineFigure(bar, node, data) {
  if (!data.lanes) { empty(node, "No spans yet."); return; }
  const tps = data.ticks_per_s, stop = Math.max(1, data.stop);
  const names = kindColors(data.kinds, data.waits);
  let range = [0, stop];
  const canvas = el("canvas", { role: "img", "aria-label": "Timeline of the roles", tabindex: "0" });
  node.replaceChildren(canvas);
  const height = data.lanes.length * (TRACK + GAP) + AXIS;

  const X = (t, width) => LABEL + (t - range[0]) / (range[1] - range[0]) * (width - LABEL);
  const label = (lane) => `${lane.role}-${lane.index}${lane.lane ? ` · ${lane.lane}` : ""}`;
  const inDetail = (lane, t) => !lane.bins || t <= lane.detail_until || t >= lane.detail_from;

  // A pixel column shows the shares of its kinds, waits on top, since many spans
  // may share a pixel.
  function drawSpans(ctx, lane, y, width, colors) {
    const columns = Math.floor(width - LABEL), per = (range[1] - range[0]) / columns;
    const shares = new Map(), wide = [];
    for (const [kind, start, length] of lane.spans) {
      const x0 = Math.max(0, (start - range[0]) / per), x1 = Math.min(columns, (start + length - range[0]) / per);
      if (x1 < 0 || x0 >= columns || x1 < x0) continue;
      if (!shares.has(kind)) shares.set(kind, new Float32Array(columns));
      const row = shares.get(kind);
      if (x1 - x0 > 7) wide.push(x1);
      for (let c = Math.floor(x0); c < Math.min(columns, Math.ceil(x1)); c++) row[c] += Math.min(x1, c + 1) - Math.max(x0, c);
    }
    const kinds = [...shares.keys()].sort((a, b) => data.waits[a] - data.waits[b] || a - b);
    for (let c = 0; c < columns; c++) {
      let bottom = y + TRACK;
      for (const kind of kinds) {
        const h = Math.min(bottom - y, shares.get(kind)[c] * TRACK);
        if (h <= 0) continue;
        ctx.fillStyle = colors[kind];
        ctx.fillRect(LABEL + c, bottom - h, 1, h);
        bottom -= h;
      }
    }
    ctx.fillStyle = cssColor("--card");
    for (const x of wide) ctx.fillRect(LABEL + x - 0.4, y, 0.8, TRACK);
  }

  function drawBins(ctx, lane, y, width, colors) {
    const [present, shares] = lane.bins, count = shares[0].length;
    for (let b = 0; b < count; b++) {
      const t0 = b / count * stop, t1 = (b + 1) / count * stop;
      if (t1 < range[0] || t0 > range[1]) continue;
      const x0 = Math.max(LABEL, X(t0, width)), x1 = Math.min(width, X(t1, width));
      let top = y + TRACK;
      const order = present.map((_, i) => i).sort((a, b) => data.waits[present[a]] - data.waits[present[b]] || present[a] - present[b]);
      order.forEach((i) => {
        const kind = present[i], h = shares[i][b] / 100 * TRACK;
        top -= h;
        ctx.fillStyle = colors[kind];
        ctx.fillRect(x0, Math.max(y, top), Math.max(0.7, x1 - x0), Math.min(h, TRACK));
      });
    }
  }

  function drawFrame(ctx, width) {
    const ink = cssColor("--soft"), bad = cssColor("--bad");
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    for (const t of timeTicks(range[0] / tps, range[1] / tps, Math.floor((width - LABEL) / 90))) {
      const x = X(t * tps, width);
      ctx.fillStyle = cssColor("--grid");
      ctx.fillRect(x, 0, 1, height - AXIS);
      ctx.fillStyle = ink;
      ctx.textAlign = x > width - 24 ? "right" : x < LABEL + 16 ? "left" : "center";
      const step = (range[1] - range[0]) / tps;
      ctx.fillText(step < 2 ? `${t.toFixed(3)} s` : fmtTime(t), x, height - AXIS / 2);
    }
    ctx.textAlign = "left";
    ctx.fillStyle = cssColor("--ink");
    data.lanes.forEach((lane, i) => ctx.fillText(label(lane), 0, i * (TRACK + GAP) + TRACK / 2, LABEL - 8));
    return { ink, bad };
  }

  function drawEvents(ctx, width, bad) {
    for (const e of RESTARTS) {
      const x = X(e.t * tps, width);
      if (x < LABEL || x > width) continue;
      ctx.fillStyle = bad;
      ctx.fillRect(x - 1, 0, 2, height - AXIS);
      ctx.beginPath();
      ctx.moveTo(x - 5, height - AXIS + 7); ctx.lineTo(x + 5, height - AXIS + 7); ctx.lineTo(x, height - AXIS);
      ctx.fill();
    }
  }

  function draw() {
    const width = node.clientWidth, scale = devicePixelRatio || 1;
    if (width <= LABEL) return;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    const ctx = canvas.getContext("2d");
    ctx.scale(scale, scale);
    const { bad } = drawFrame(ctx, width);
    const colors = names.map(cssColor);
    const zoomed = (range[1] - range[0]) < stop / 4;
    data.lanes.forEach((lane, i) => {
      const y = i * (TRACK + GAP);
      const whole = !lane.bins || zoomed && inDetail(lane, range[0]) && inDetail(lane, range[1]) &&
        (range[1] <= lane.detail_until || range[0] >= lane.detail_from);
      (whole ? drawSpans : drawBins)(ctx, lane, y, width, colors);
    });
    drawEvents(ctx, width, bad);
  }

  function setRange(low, high) {
    const length = Math.min(stop, Math.max(5, high - low));
    low = Math.max(0, Math.min(stop - length, low));
    range = [low, low + length];
    canvas.dataset.from = (range[0] / tps).toFixed(3);
    canvas.dataset.to = (range[1] / tps).toFixed(3);
    draw();
  }

  function zoom(factor, share = 0.5) {
    const middle = range[0] + share * (range[1] - range[0]);
    setRange(middle - (middle - range[0]) * factor, middle + (range[1] - middle) * factor);
  }

  const shareAt = (event) => {
    const box = canvas.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left - LABEL) / (box.width - LABEL)));
  };

  function tipText(event) {
    const t = range[0] + shareAt(event) * (range[1] - range[0]);
    const lane = data.lanes[Math.floor((event.clientY - canvas.getBoundingClientRect().top) / (TRACK + GAP))];
    const slack = (range[1] - range[0]) / (canvas.clientWidth - LABEL) * 3;
    const restart = RESTARTS.find((e) => Math.abs(e.t * tps - t) < slack);
    const lines = [fmtTime(t / tps, true)];
    if (restart) lines.push(`restart of ${restart.role}: ${restart.message}`);
    const span = lane && lane.spans.find(([, s, n]) => s <= t && t <= s + n);
    if (lane) lines.push(label(lane));
    if (span) lines.push(`${data.kinds[span[0]]}: ${fmtTime(span[2] / tps, true)}`);
    return lines.join("\n");
  }

  // A plain wheel scrolls the page; with ctrl, meta or shift, or if the figure has
  // the focus, it zooms.
  canvas.addEventListener("wheel", (event) => {
    if (!(event.ctrlKey || event.metaKey || event.shiftKey || document.activeElement === canvas)) return;
    event.preventDefault();
    zoom(Math.exp((event.deltaY || event.deltaX) / 400), shareAt(event));
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, range: [...range] };
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragging");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) { showTip(event, tipText(event)); return; }
    const move = (drag.x - event.clientX) / (canvas.clientWidth - LABEL) * (drag.range[1] - drag.range[0]);
    setRange(drag.range[0] + move, drag.range[1] + move);
  });
  const release = () => { drag = null; canvas.classList.remove("dragging"); };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("dblclick", () => setRange(0, stop));
  canvas.addEventListener("keydown", (event) => {
    const length = range[1] - range[0];
    const actions = { "+": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => setRange(range[0] - length / 5, range[1] - length / 5),
      ArrowRight: () => setRange(range[0] + length / 5, range[1] + length / 5), "0": () => setRange(0, stop) };
    if (event.key in actions) { event.preventDefault(); actions[event.key](); }
  });

  const button = (words, title, action) => {
    const out = el("button", { type: "button", title }, words);
    out.addEventListener("click", action);
    return out;
  };
  const last = (s) => setRange(stop - s * tps, stop);
  bar.append(el("span", { class: "choice" }, button("all", "The whole run", () => setRange(0, stop)),
    button("first 30 s", "The start of the run", () => setRange(0, 30 * tps)), button("last 60 s", "The end of the run", () => last(60)),
    button("last 10 s", "The end of the run", () => last(10)), button("+", "Zoom in", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2))));
  const keys = data.kinds.map((kind, i) => el("span", { class: "key" }, el("i", { style: `background:var(${names[i]})` }), kind));
  bar.append(el("span", {}, ...keys, el("span", { class: "key" }, el("i", { class: "mark" }), "restart")));
  const thinned = data.thinned ? ` ${data.total.toLocaleString("en")} spans: single ones are held for the first and last part only.` : "";
  node.after(el("p", { class: "note" }, `Drag moves; the wheel zooms after a click, or with Ctrl or Shift; double click shows all.${thinned}`));
  keepDrawn(node, draw);
  setRange(0, stop);
}
