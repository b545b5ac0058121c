# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the pictures of the README, in `docs/pictures/`.

    python docs/make_pictures.py roles
    python docs/make_pictures.py panel RUN    # while RUN trains: its panel
    python docs/make_pictures.py report RUN   # the head of its report
    python docs/make_pictures.py rewards RUN  # what it was trained on, judged

They need `tba_jax[plots]`; `report` Debian's `chromium` and `chromium-driver`,
and selenium.
"""

import io
import pathlib
import re
import shutil
import sys
import tempfile
import time

import rich.console

_PICTURES = pathlib.Path(__file__).parent / "pictures"
_WAIT_S = 600.0
_FONTS = r"@font-face \{.*?\}"
_INK, _SOFT, _PAPER = "#1b2130", "#5a6478", "#ffffff"
_COLORS = {"trainer": "#2f63d6", "searcher": "#16855a", "store": "#d9731a"}


def _box(axes, x, y, width, height, color, title, lines):
  from matplotlib import patches

  style = "round,pad=0.02,rounding_size=0.12"
  axes.add_patch(
      patches.FancyBboxPatch(
          (x, y),
          width,
          height,
          boxstyle=style,
          facecolor=color + "14",
          edgecolor=color,
          linewidth=1.6,
      )
  )
  top = y + height - 0.28
  axes.text(x + 0.2, top, title, color=color, weight="bold", size=11, va="top")
  for i, line in enumerate(lines):
    axes.text(x + 0.2, top - 0.42 - 0.32 * i, line, color=_INK, size=8.6,
              va="top")  # fmt: skip


def _arrow(axes, start, end, words, at, color, align="left"):
  axes.annotate(
      "",
      xy=end,
      xytext=start,
      arrowprops=dict(arrowstyle="-|>", color=color, lw=1.8),
  )
  axes.text(*at, words, color=_SOFT, size=8.6, ha=align, va="center")


def roles() -> None:
  """Draws who does what, and what goes from whom to whom."""
  import matplotlib

  matplotlib.use("svg")
  matplotlib.rcParams["svg.hashsalt"] = "tba_jax"
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(9.6, 4.6), facecolor=_PAPER)
  axes.set(xlim=(0, 10), ylim=(0, 5.1))
  axes.axis("off")
  blue, green, orange = (
      _COLORS[role] for role in ("trainer", "searcher", "store")
  )
  _box(axes, 0.2, 3.5, 9.6, 1.4, orange, "store",
       ["JAX's key-value service in a process of its own: a queue of groups,"
        " the newest version,", "leases, live state. It may be lost at any"
        " moment without losing the run."])  # fmt: skip
  _box(axes, 0.2, 0.25, 4.3, 2.3, green, "searcher × N",
       ["prompts that were granted to it", "→ prefill once, K completions,"
        " jitted", "→ reward → group",
        "samples all the time, with slightly old weights"])  # fmt: skip
  _box(axes, 5.5, 0.25, 4.3, 2.3, blue, "trainer",
       ["journal → replay buffer → batch [B, K]", "→ reference log-probs →"
        " loss → step", "→ checkpoint, evaluation, metrics",
        "learns from what the buffer holds"])  # fmt: skip
  _arrow(axes, (1.1, 2.62), (1.1, 3.44), "groups", (1.25, 3.02), green)
  _arrow(axes, (4.2, 3.44), (4.2, 2.62), "params, grants", (4.05, 3.02), orange,
         "right")  # fmt: skip
  _arrow(axes, (5.9, 3.44), (5.9, 2.62), "groups", (6.05, 3.02), orange)
  _arrow(axes, (9.4, 2.62), (9.4, 3.44), "params, grants", (9.25, 3.02), blue,
         "right")  # fmt: skip
  figure.savefig(
      _PICTURES / "roles.svg",
      bbox_inches="tight",
      pad_inches=0.05,
      metadata={"Date": None},
  )


def panel(workdir: str) -> None:
  """Writes the terminal's panel of a run that trains, halfway through."""
  from tba_jax.report import panel as panel_lib
  from tba_jax.report import run_state

  follower = run_state.Follower(workdir)
  deadline = time.monotonic() + _WAIT_S
  while True:
    state = follower.read()
    state.phase = str(state.status.get("phase", "setup"))
    step = state.status.get("step") or 0
    if (
        state.phase == "train"
        and state.status.get("searchers")
        and step >= state.status["num_steps"] // 2
    ):
      break
    if time.monotonic() > deadline:
      raise SystemExit(f"{workdir} did not train within {_WAIT_S:.0f} s")
    time.sleep(0.2)
  console = rich.console.Console(record=True, width=104, file=io.StringIO())
  console.print(panel_lib.render_view(state))
  # The fonts would be asked of the network; any monospaced one does.
  svg = console.export_svg(title="--program=train")
  svg = re.sub(_FONTS, "", svg, flags=re.S)
  (_PICTURES / "panel.svg").write_text(svg, "utf-8")


def report(workdir: str) -> None:
  """Writes the head of a run's report as a browser shows it."""
  from selenium import webdriver
  from selenium.webdriver.chrome import service

  from tba_jax.report import page as report_lib

  page = pathlib.Path(str(report_lib.write_report(workdir))).resolve()
  options = webdriver.ChromeOptions()
  options.binary_location = shutil.which("chromium")
  with tempfile.TemporaryDirectory() as profile:
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--hide-scrollbars",
        "--window-size=1180,1400",
        f"--user-data-dir={profile}",
    ):
      options.add_argument(flag)
    driver = webdriver.Chrome(
        options=options, service=service.Service(shutil.which("chromedriver"))
    )
    try:
      driver.get(f"file://{page}")
      driver.execute_script("setTheme('light')")
      driver.get_screenshot_as_file(str(_PICTURES / "report.png"))
    finally:
      driver.quit()


def rewards(workdir: str) -> None:
  """Draws the held-out reward of a run, and its judge's, against steps."""
  import matplotlib

  matplotlib.use("svg")
  matplotlib.rcParams["svg.hashsalt"] = "tba_jax"
  from matplotlib import pyplot

  from tba_jax.system import jsonl

  records = jsonl.iter_jsonl(pathlib.Path(workdir) / "metrics.jsonl")
  rows = [r for r in records if "eval/gold_reward" in r]
  steps = [r["step"] for r in rows]
  figure, axes = pyplot.subplots(figsize=(6.4, 3.4), facecolor=_PAPER)
  for key, words, role in (
      ("mean_reward", "reward model, trained on", "trainer"),
      ("gold_reward", "gold reward, never seen", "store"),
  ):
    mean = [r[f"eval/{key}"] for r in rows]
    error = [2 * r[f"eval/{key}_stderr"] for r in rows]
    axes.errorbar(steps, mean, error, label=words, color=_COLORS[role])
  axes.set(xlabel="step", ylabel="mean, held-out prompts")
  axes.legend(frameon=False)
  axes.spines[["top", "right"]].set_visible(False)
  figure.savefig(
      _PICTURES / "rewards.svg", bbox_inches="tight", metadata={"Date": None}
  )


def main(argv: list[str]) -> None:
  commands = {
      "roles": roles,
      "panel": panel,
      "report": report,
      "rewards": rewards,
  }
  if len(argv) < 2 or argv[1] not in commands:
    raise SystemExit(__doc__)
  _PICTURES.mkdir(exist_ok=True)
  commands[argv[1]](*argv[2:])


if __name__ == "__main__":
  main(sys.argv)
