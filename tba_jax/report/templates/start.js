// Puts the page together.
function fillCharts(id, charts, boxId) {
  if (boxId) byId(boxId).hidden = !charts.length;
  if (charts.length) byId(id).append(...charts.map(lineChart));
  else if (!boxId) empty(byId(id), "No metrics yet.");
}

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
fillCharts("charts", DATA.charts);
fillCharts("other", DATA.other_charts, "other-box");
fillCharts("sft", DATA.sft_charts, "sft-box");
timelineFigure(byId("timeline-bar"), byId("timeline-figure"), DATA.timeline);
drawTime(byId("time-figure"), DATA.time);
drawHistogram(byId("staleness-figure"), DATA.staleness, "staleness, steps", "No staleness measured yet.");
drawHistogram(byId("uses-figure"), DATA.uses, "uses", "No use counts yet.");
eventTable(byId("events-table"), DATA.events);
sampleBrowser(byId("samples-bar"), byId("samples-table"), DATA.samples, DATA.num_samples);
for (const button of document.querySelectorAll("[data-axis]")) {
  button.addEventListener("click", () => {
    view.axis = button.dataset.axis;
    document.querySelectorAll("[data-axis]").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
    redraws.forEach((draw) => draw());
  });
}
byId("smoothing").addEventListener("input", (event) => {
  view.smoothing = Number(event.target.value);
  redraws.forEach((draw) => draw());
});
document.body.dataset.ready = "yes";
