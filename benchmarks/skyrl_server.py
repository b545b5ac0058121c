# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""SkyRL's Tinker server with its JAX backend, run by an interpreter with SkyRL.

    python -m benchmarks.skyrl_server MODEL FOLDER PORT BACKEND_CONFIG

`served.py` starts it, with this checkout on PYTHONPATH.
"""

from collections.abc import Sequence
import json
import pathlib
import sys


def main(argv: Sequence[str]) -> None:
  """Serves the model of a Hugging Face folder until the process ends."""
  from skyrl.tinker import api
  from skyrl.tinker import config
  import uvicorn

  model, folder, port, backend_config = argv
  # SkyRL starts its engine by `uv run`, from its checkout and with the flags of
  # a `uv run` parent; use this interpreter instead.
  api._build_uv_run_cmd_engine = lambda _, engine: [
      *(sys.executable, "-m", "skyrl.tinker.engine"),
      *config.config_to_argv(engine),
  ]
  api.app.state.engine_config = config.EngineConfig(
      base_model=model,
      backend="jax",
      backend_config=json.loads(backend_config),
      checkpoints_base=pathlib.Path(folder, "checkpoints"),
      database_url=f"sqlite:///{folder}/tinker.db",
  )
  uvicorn.run(api.app, host="127.0.0.1", port=int(port))


if __name__ == "__main__":
  main(sys.argv[1:])
