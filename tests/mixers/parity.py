# SPDX-License-Identifier: Apache-2.0
"""Runs one form of a mixer forward and backward, in one dtype, and measures its error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.mixers.cases import MIXERS, Mixer, map_shapes

FLOAT32_BAR = 1e-5
EXTREME_BAR = 1e-4
BFLOAT16_BAR = 5e-3


def relative_error(got, want) -> float:
    """||got - want|| / ||want|| in float64; NaN never passes a bar."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    size = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (size if size > 0 else 1))


def cast(mixer: Mixer, arrays, dtype):
    """Inputs in `dtype`, decays and step sizes in at least float32."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return {n: jnp.asarray(a, wide if n in mixer.float32 else dtype) for n, a in arrays.items()}


# Compile time is most of the suite's time; these passes change speed, not what is computed.
_QUICK_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


quick_jit = functools.partial(jax.jit, compiler_options=_QUICK_COMPILE)


@functools.partial(quick_jit, static_argnames=("name", "impl", "options"))
def _value_and_gradients(arrays, state, segment_ids, cotangents, *, name, impl, options):
    def run(arrays, state):
        return MIXERS[name](
            arrays,
            initial_state=state,
            segment_ids=segment_ids,
            impl=impl,
            **dict(options),
        )

    outputs, pull = jax.vjp(run, arrays, state)
    cotangents = jax.tree.map(lambda c, o: c.astype(o.dtype), cotangents, outputs)
    return outputs, pull(cotangents)


def evaluate(mixer, impl, arrays, state, segment_ids, cotangents, dtype, **options):
    """{'out', 'state', 'd_<argument>', 'd_state'} of one form, as float64 NumPy arrays.

    `state` None runs without an initial state (and has no 'd_state'). A state that is a pytree
    gives one entry per leaf: 'state.<path>'.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    (out, final), (grads, d_state) = _value_and_gradients(
        cast(mixer, arrays, dtype),
        _floats(state, wide),
        None if segment_ids is None else jnp.asarray(segment_ids),
        _floats(cotangents, wide),
        name=mixer.name,
        impl=impl,
        options=tuple(sorted(options.items())),
    )
    result = {"out": out} | leaves("state", final) | {f"d_{n}": g for n, g in grads.items()}
    if state is not None:
        result |= leaves("d_state", d_state)
    return {n: np.asarray(x, np.float64) for n, x in result.items()}


def leaves(name, tree):
    """{name: array} of an array, {'name.path': array} of a pytree."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in flat}


def tree_error(got, want) -> float:
    """The greatest `relative_error` of the leaves of two states."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    return max(jax.tree.leaves(jax.tree.map(relative_error, got, want)))


def _floats(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def reference(mixer, arrays, state, segment_ids, cotangents, **options):
    """The recurrent form in float64."""
    with jax.enable_x64(True):
        return evaluate(
            mixer, "recurrent", arrays, state, segment_ids, cotangents, jnp.float64, **options
        )


def draw_cotangents(mixer, arrays, state_shape, seed=3):
    """Random cotangents of (out, state)."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda a: mixer(a, impl="recurrent")[0], cast(mixer, arrays, "float32"))
    out = rng.normal(size=shapes.shape)
    return out, map_shapes(lambda s: rng.normal(size=s), state_shape)


def assert_within(got, want, bar):
    errors = {n: relative_error(got[n], want[n]) for n in want}
    assert all(e <= bar for e in errors.values()), {
        n: f"{e:.1e}" for n, e in errors.items() if not e <= bar
    }
