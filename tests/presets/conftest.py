# SPDX-License-Identifier: Apache-2.0
import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation():
    """Without most of XLA's optimisations: half the time to compile, slower steps."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """The token stores, apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEQMIX_CACHE", str(tmp_path_factory.getbasetemp() / "seqmix-cache"))
        yield
