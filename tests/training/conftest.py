# SPDX-License-Identifier: Apache-2.0
import os

import jax
import pytest

from seqmix.training import enable_compilation_cache, train
from tests.training import runs


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "text"
    runs.write_corpus(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """One folder for token stores and compiled programs, subprocesses included."""
    base = tmp_path_factory.getbasetemp()
    # The workers of pytest-xdist share their folders' parent.
    folder = str((base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "seqmix-cache")
    before = os.environ.get("SEQMIX_CACHE"), jax.config.jax_compilation_cache_dir
    os.environ["SEQMIX_CACHE"] = folder
    enable_compilation_cache()
    yield folder
    if before[0] is None:
        del os.environ["SEQMIX_CACHE"]
    else:
        os.environ["SEQMIX_CACHE"] = before[0]
    jax.config.update("jax_compilation_cache_dir", before[1])


@pytest.fixture(scope="session")
def straight(corpus, tmp_path_factory):
    """A run of 50 steps without a break: its folder and result."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    return run_dir, train(runs.tiny_experiment(corpus), run_dir, progress=False)
