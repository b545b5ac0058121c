# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of every test: the CPU, strict ranks, short compilations."""

import gc
from importlib import metadata
import os
import pathlib

# Until all tests are collected, what is made are modules, which stay.
gc.disable()

# Before jax is imported anywhere; the processes that tests start inherit it.
os.environ["JAX_PLATFORMS"] = "cpu"

# Programs of tests take longer to compile than to run. Later versions of jaxlib
# compile fusions in one way, and abort on an unknown flag.
_XLA_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
if metadata.version("jaxlib").startswith("0.10."):
  _XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(
    [*_XLA_FLAGS, os.environ.get("XLA_FLAGS", "")]
)

# Programs that tests compile are kept between runs, apart from the cache of
# real runs.
_CACHE_HOME = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
_CACHE = pathlib.Path(_CACHE_HOME).expanduser() / "tba_jax" / "xla_tests"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("TBA_JAX_CACHE_DIR", str(_CACHE))
# Most programs of a tiny model take a tenth of a second.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")

# Files that take longest begin first, so that none is left alone at the end.
_LONGEST = frozenset(
    (
        "api_test.py",
        "bfloat16_test.py",
        "engine_test.py",
        "environments_test.py",
        "guides_test.py",
        "hf_parity_test.py",
        "in_flight_test.py",
        "objectives_test.py",
        "packed_gradients_test.py",
        "python_page_test.py",
        "real_model_test.py",
        "transformer_test.py",
    )
)

from absl import flags  # noqa: E402
import jax  # noqa: E402  the environment above must come first.
import pytest  # noqa: E402

from tests.support import deaths  # noqa: E402

# A silent broadcast of [B, 1] against [B] is the classic wrong loss.
jax.config.update("jax_numpy_rank_promotion", "raise")

# absltest's temporary folders read a flag, which nobody parses under pytest.
flags.FLAGS.mark_as_parsed()


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_file():
  """Frees the programs that a file compiled; a worker would keep them all."""
  yield
  jax.clear_caches()


def pytest_configure(config: pytest.Config) -> None:
  config.pluginmanager.register(deaths)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  items.sort(key=lambda item: item.path.name not in _LONGEST)


def pytest_collection_finish() -> None:
  gc.freeze()
  gc.enable()
