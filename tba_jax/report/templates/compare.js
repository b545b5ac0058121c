// Fills the page of several runs.
function legend(node) {
  DATA.runs.forEach((name, i) => {
    const button = el("button", { type: "button", "aria-pressed": "true", title: "Show or hide this run's curves" },
      el("i", { style: `background:${color(i)}` }), name);
    button.addEventListener("click", () => {
      if (!view.hidden.delete(i)) view.hidden.add(i);
      button.setAttribute("aria-pressed", String(!view.hidden.has(i)));
      redraws.forEach((draw) => draw());
    });
    node.append(button);
  });
}

startTheme();
legend(byId("legend"));
fillCharts("charts", DATA.charts);
fillCharts("other", DATA.other_charts, "other-box");
drawTime(byId("time-figure"), DATA.time);
curveControls();
document.body.dataset.ready = "yes";
