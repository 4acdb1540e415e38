# SPDX-License-Identifier: Apache-2.0
"""Feature maps against their formulas, and the attention that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix import mixers
from seqmix.mixers import feature_maps
from tests.mixers.parity import FLOAT32_BAR, relative_error

RNG = np.random.default_rng(0)


def test_elu_plus_one_does_not_vanish():
    x = jnp.asarray([-80.0, -10.0, -1.0, 0.0, 2.0])
    want = np.where(x > 0, x + 1, np.exp(np.asarray(x, np.float64)))
    np.testing.assert_allclose(feature_maps.elu_plus_one(x), want, rtol=1e-6)
    low = feature_maps.elu_plus_one(jnp.asarray([-20.0], jnp.bfloat16))
    assert low.dtype == jnp.float32 and low[0] > 0
    slope = jax.grad(lambda x: feature_maps.elu_plus_one(x).sum())
    assert np.isfinite(slope(x * 1e3)).all()
    np.testing.assert_allclose(slope(x), np.exp(np.minimum(x, 0)), rtol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_taylor_features_are_packed_and_multiply_to_the_series(width):
    q, k = RNG.normal(size=(2, 7, width))
    s = q @ k.T / np.sqrt(width)
    f, g = (np.asarray(feature_maps.taylor(jnp.asarray(x))) for x in (q, k))
    assert f.shape[-1] == 1 + width + width * (width + 1) // 2
    np.testing.assert_allclose(f @ g.T, 1 + s + s**2 / 2, rtol=1e-5, atol=1e-5)


def test_hedgehog_is_a_softmax_of_both_signs():
    x, weight = RNG.normal(size=(2, 3, 2, 4)), RNG.normal(size=(2, 4, 5))
    y = np.einsum("bthk,hkf->bthf", x, weight)
    y = np.exp(np.concatenate([y, -y], -1))
    got = feature_maps.hedgehog(jnp.asarray(x), jnp.asarray(weight))
    np.testing.assert_allclose(got, y / y.sum(-1, keepdims=True), rtol=1e-5)


def test_dpfp_is_its_formula():
    x = RNG.normal(size=(3, 4))
    r = np.maximum(np.concatenate([x, -x], -1), 0)
    want = [r[:, i] * r[:, (i - j) % 8] for j in (1, 2) for i in range(8)]
    np.testing.assert_allclose(feature_maps.dpfp(jnp.asarray(x), 2), np.stack(want, -1), rtol=1e-6)
    with pytest.raises(ValueError, match=r"dpfp: order must be in \[1, 7\], got 8"):
        feature_maps.dpfp(jnp.asarray(x), 8)


def test_random_directions_are_orthogonal_with_the_norms_asked_for():
    w = np.asarray(feature_maps.random_features(jax.random.key(0), 20, 8))
    gram = w[:8] @ w[:8].T
    np.testing.assert_allclose(gram - np.diag(np.diag(gram)), 0, atol=1e-4)
    assert w.shape == (20, 8) and np.std(np.linalg.norm(w, axis=1)) > 0.1
    constant = feature_maps.random_features(jax.random.key(0), 20, 8, constant_norm=True)
    np.testing.assert_allclose(np.linalg.norm(constant, axis=1), np.sqrt(8), rtol=1e-5)
    assert not np.allclose(w, feature_maps.random_features(jax.random.key(1), 20, 8))
    with pytest.raises(ValueError, match="must be >= 1, got 0, 8"):
        feature_maps.random_features(jax.random.key(0), 0, 8)


def test_performer_tends_to_softmax_attention():
    q, k, v = (jnp.asarray(RNG.normal(size=(1, 30, 1, 4)) * 0.7, jnp.float32) for _ in range(3))
    want, _ = mixers.attention(q, k, v)
    errors = []
    for count in (16, 4096):
        w = feature_maps.random_features(jax.random.key(2), count, 4)
        errors.append(relative_error(mixers.performer_attention(q, k, v, w)[0], want))
    # The error of a mean of random features falls as one over the root of their number.
    assert errors[1] < 0.1 and errors[1] < errors[0] / 4


def test_performer_with_keys_of_very_different_lengths():
    """The stabiliser grows along the row: nothing overflows, and the past is rescaled."""
    q = jnp.asarray(RNG.normal(size=(1, 100, 1, 8)), jnp.float32)
    k = q[:, ::-1] * jnp.linspace(0.1, 30, 100)[None, :, None, None]
    v = jnp.ones((1, 100, 1, 1))
    w = feature_maps.random_features(jax.random.key(3), 32, 8)
    out, state = mixers.performer_attention(q, k, v, w)
    np.testing.assert_allclose(out, 1, rtol=1e-5)
    assert np.isfinite(state.stabiliser).all()
    with pytest.raises(ValueError, match="performer_attention: eps must be > 0, got 0"):
        mixers.performer_attention(q, k, v, w, eps=0)


def test_performer_gradients_are_those_without_a_stabiliser():
    q, k, v = (jnp.asarray(RNG.normal(size=(1, 20, 1, 4)), jnp.float32) for _ in range(3))
    w = feature_maps.random_features(jax.random.key(4), 8, 4)

    def plain(q, k, v, w):
        f, g = (jnp.exp(feature_maps.favor_exponents(x[0, :, 0], w, 0.5)) for x in (q, k))
        weights = jnp.tril(f @ g.T)
        return jnp.sum(jnp.sin(weights @ v[0, :, 0] / weights.sum(-1, keepdims=True)))

    def stabilised(q, k, v, w):
        return jnp.sum(jnp.sin(mixers.performer_attention(q, k, v, w, eps=1e-12)[0]))

    got = jax.grad(stabilised, argnums=(0, 1, 2, 3))(q, k, v, w)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v, w)]
        want = jax.grad(plain, argnums=(0, 1, 2, 3))(*wide)
    for g, expected in zip(got, want, strict=True):
        assert relative_error(g, expected) < FLOAT32_BAR


def test_slopes_are_those_of_alibi():
    np.testing.assert_allclose(mixers.alibi_slopes(4), [2**-2, 2**-4, 2**-6, 2**-8])
    np.testing.assert_allclose(mixers.alibi_slopes(6)[4:], [2**-1, 2**-3])
    np.testing.assert_allclose(mixers.alibi_slopes(1), [2**-8])
    with pytest.raises(ValueError, match="alibi_slopes: heads must be >= 1, got 0"):
        mixers.alibi_slopes(0)


def test_linear_attention_options_raise():
    q = jnp.ones((1, 3, 1, 2))
    with pytest.raises(ValueError, match=r"feature_map must be one of .* got 'softmax'"):
        mixers.linear_attention(q, q, q, feature_map="softmax")
    with pytest.raises(ValueError, match="eps must be >= 0, got -1"):
        mixers.linear_attention(q, q, q, eps=-1)
