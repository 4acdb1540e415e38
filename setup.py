# SPDX-License-Identifier: Apache-2.0
"""Describes the package; tool settings are in pyproject.toml, pinned versions in constraints."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "seqmix/__init__.py").read_text(), re.M)[1]
README = HERE / "README.md"
TOKENIZERS = "tokenizers>=0.22"

setup(
    name="seqmix",
    version=VERSION,
    description="Hybrid sequence models in JAX: one contract for every mixer",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    # The kernels are a package of their own: a top-level `kernels` would collide with a known one.
    packages=[
        *find_packages(include=["seqmix", "seqmix.*"]),
        "seqmix_kernels",
        *(f"seqmix_kernels.{name}" for name in find_packages("kernels")),
    ],
    package_dir={"seqmix_kernels": "kernels"},
    install_requires=[
        "absl-py>=2.1",
        "array-record>=0.8.6",
        "chex>=0.1.92",
        "flax>=0.12.12",
        "gin-config>=0.5.0",
        "grain>=0.2.18",
        "jax>=0.11.2,<0.13",
        "jaxtyping>=0.3.3",
        "matplotlib>=3.9",
        "numpy>=2.1",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "pyarrow>=18",
        "rich>=13.7",
        "tensorboard>=2.19",
        TOKENIZERS,
        "typeguard>=4.4",
    ],
    extras_require={
        "cuda13": ["jax[cuda13]"],
        "tpu": ["jax[tpu]"],
        "hf": ["datasets>=4", "safetensors>=0.6", TOKENIZERS, "transformers>=4.57"],
        "eval": ["lm-eval>=0.4.9"],
        "dev": [
            "beartype>=0.22",
            "datasets>=4",
            # Compiles TPU kernels ahead of time, without a TPU.
            'libtpu; sys_platform == "linux" and platform_machine == "x86_64"',
            "pytest>=8.4",
            "pytest-timeout>=2.4",
            "pytest-xdist>=3.8",
            "ruff>=0.14",
        ],
    },
    entry_points={"console_scripts": ["seqmix = seqmix.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
