// Fills the page of one run.
startTheme();
fillCharts("charts", DATA.charts);
fillCharts("other", DATA.other_charts, "other-box");
fillCharts("sft", DATA.sft_charts, "sft-box");
timelineFigure(byId("timeline-bar"), byId("timeline-figure"), DATA.timeline);
drawTime(byId("time-figure"), DATA.time);
drawHistogram(byId("staleness-figure"), DATA.staleness, "staleness, steps", "No staleness measured yet.");
drawOverTime(byId("staleness-over-time"), DATA.staleness_over_time, "staleness");
drawHistogram(byId("uses-figure"), DATA.uses, "uses", "No use counts yet.");
drawOverTime(byId("uses-over-time"), DATA.uses_over_time, "uses");
eventTable(byId("events-table"), DATA.events);
sampleBrowser(byId("samples-bar"), byId("samples-table"), DATA.samples, DATA.num_samples);
sideBySide(byId("held-out-bar"), byId("held-out-table"), DATA.held_out);
curveControls();
document.body.dataset.ready = "yes";
