# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix.training.loss import chunked_cross_entropy

WIDTH, VOCABULARY = 8, 37


def inputs(batch=3, time=13, dtype=jnp.float32, ignore=0.3):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (batch, time, WIDTH), dtype)
    kernel = jax.random.normal(keys[1], (WIDTH, VOCABULARY))
    labels = jax.random.randint(keys[2], (batch, time), 0, VOCABULARY)
    weights = jax.random.uniform(keys[3], (batch, time)) >= ignore
    return hidden, kernel, jnp.where(weights, labels, -100), weights


def plain(hidden, kernel, labels, weights, z_loss):
    """The definition, with all logits, in float64."""
    logits = jnp.einsum("btd,dv->btv", hidden.astype(jnp.float64), kernel.astype(jnp.float64))
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(weights, lse - chosen + z_loss * lse**2, 0.0))


reference = jax.jit(jax.value_and_grad(plain, (0, 1)))


# 13 steps of 3 rows: pieces of 1, 4 (the last one padded), 13 and 13.
@pytest.mark.parametrize(
    ("chunk_tokens", "z_loss"), [(1, 0.01), (12, 0.01), (12, 0.0), (39, 0.01), (1000, 0.01)]
)
def test_equals_the_plain_loss(chunk_tokens, z_loss):
    hidden, kernel, labels, weights = inputs()

    def chunked(hidden, kernel):
        return chunked_cross_entropy(
            hidden, kernel, labels, weights, z_loss=z_loss, chunk_tokens=chunk_tokens
        )

    differentiate = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True))
    (value, sums), grads = differentiate(hidden, kernel)
    with jax.enable_x64(True):
        expected, expected_grads = reference(
            hidden.astype(jnp.float64), kernel.astype(jnp.float64), labels, weights, z_loss
        )
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-6)
    logits = hidden @ kernel
    assert sums.tokens == weights.sum()
    assert sums.correct == (weights & (logits.argmax(-1) == labels)).sum()
    np.testing.assert_allclose(sums.loss + z_loss * sums.z_loss, value, rtol=1e-6)


def test_all_labels_ignored():
    hidden, kernel, labels, weights = inputs(ignore=1.1)

    def chunked(hidden, kernel):
        return chunked_cross_entropy(hidden, kernel, labels, weights, z_loss=0.01, chunk_tokens=12)

    differentiate = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True))
    (value, sums), grads = differentiate(hidden, kernel)
    assert value == 0 and sums.tokens == 0
    assert np.array_equal(grads[0], np.zeros_like(hidden))
    assert np.array_equal(grads[1], np.zeros_like(kernel))


def test_bfloat16_hidden_states_accumulate_in_float32():
    hidden, kernel, labels, weights = inputs(4, 64, jnp.bfloat16)

    def chunked(hidden, kernel):
        return chunked_cross_entropy(hidden, kernel, labels, weights, chunk_tokens=16)[0]

    value, grads = jax.jit(jax.value_and_grad(chunked, (0, 1)))(hidden, kernel)
    # The kernel as the matrix product sees it, so that what is compared is the arithmetic.
    rounded = kernel.astype(jnp.bfloat16)
    with jax.enable_x64(True):
        expected, expected_grads = reference(
            hidden.astype(jnp.float64), rounded.astype(jnp.float64), labels, weights, 0.0
        )
    assert (grads[0].dtype, grads[1].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        wanted = np.asarray(wanted)
        error = np.sqrt(np.mean((np.asarray(grad, np.float64) - wanted) ** 2))
        assert error < 5e-3 * np.sqrt(np.mean(np.square(wanted)))


def test_no_array_of_all_logits_is_compiled():
    batch, time, vocabulary, chunk = 4, 64, 997, 32
    shapes = (
        jax.ShapeDtypeStruct((batch, time, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((WIDTH, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((batch, time), jnp.int32),
        jax.ShapeDtypeStruct((batch, time), jnp.float32),
    )

    def compiled(chunk_tokens):
        def loss(*arrays):
            return chunked_cross_entropy(*arrays, z_loss=1e-4, chunk_tokens=chunk_tokens)[0]

        return jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()

    full = batch * time * vocabulary * 4
    assert compiled(batch * time).memory_analysis().temp_size_in_bytes > full
    assert compiled(chunk).memory_analysis().temp_size_in_bytes < full / 2
    text = compiled(chunk).as_text()
    assert f"[{batch},{chunk // batch},{vocabulary}]" in text
    for shape in (f"[{batch},{time},{vocabulary}]", f"[{batch * time},{vocabulary}]"):
        assert shape not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": jnp.zeros((13, WIDTH))}, r"hidden: expected \[B, T, D\]"),
        ({"kernel": jnp.zeros((VOCABULARY, WIDTH))}, r"kernel: expected \[D=8, V\]"),
        ({"labels": jnp.zeros((3, 12), jnp.int32)}, r"labels: expected .*\(3, 13\)"),
        ({"labels": jnp.zeros((3, 13))}, "labels: expected an integer dtype, got float32"),
        ({"weights": jnp.zeros((3,))}, "weights: expected"),
        ({"chunk_tokens": 0}, "chunk_tokens: expected >= 1, got 0"),
    ],
)
def test_bad_arguments(change, message):
    names = ("hidden", "kernel", "labels", "weights")
    arguments = {**dict(zip(names, inputs(), strict=True)), **change}
    arrays = [arguments.pop(name) for name in names]
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(*arrays, **arguments)
