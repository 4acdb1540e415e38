# SPDX-License-Identifier: Apache-2.0
"""Splash attention, in its interpreter, against the dense form; what it declines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix import mixers
from seqmix.mixers import _splash
from seqmix.rows import rows_on
from tests.mixers.parity import BFLOAT16_BAR, FLOAT32_BAR, quick_jit, relative_error

TIME = 200


@pytest.fixture
def interpreted(monkeypatch):
    """impl='splash' runs on this backend, in blocks so small that rows have two."""
    monkeypatch.setattr(_splash, "refusal", _splash._unsupported)
    monkeypatch.setattr(_splash, "attend", functools.partial(_splash.attend, interpret=True))
    monkeypatch.setattr(_splash, "MAX_BLOCK", 128)


def draw(key_width=128, value_width=64, dtype=np.float32):
    rng = np.random.default_rng(0)
    sizes = ((4, key_width), (2, key_width), (2, value_width), (4, value_width))
    return [jnp.asarray(rng.normal(size=(2, TIME, *s)), dtype) for s in sizes]


def packed_rows():
    """Ids that come back, a document across the blocks, padding before, inside, between, after."""
    ids = np.zeros((2, TIME), np.int32)
    ids[0, :50], ids[0, 50:60], ids[0, 60:] = 1, 2, 1
    ids[0, 100:150:3] = 0
    ids[1, 5:90], ids[1, 97:190] = 3, 4
    ids[1, 110:140] = 0
    return ids


@functools.partial(quick_jit, static_argnames=("impl", "options"))
def evaluate(arrays, segment_ids, *, impl, options):
    """Output and gradients, with float32 cotangents that do not vanish at padding."""
    *qkv, d_out = arrays

    def run(*qkv):
        out, _ = mixers.attention(*qkv, segment_ids=segment_ids, impl=impl, **dict(options))
        return out

    out, pull = jax.vjp(run, *qkv)
    return out, *pull(d_out.astype(out.dtype))


CASES = {
    "causal": (False, {}),
    "window": (False, {"window": 70, "scale": 0.3}),
    "packed": (True, {"logit_softcap": 2.0}),
    "packed-window": (True, {"window": 70}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_dense_form(case, interpreted):
    packed, options = CASES[case]
    arrays, segment_ids = draw(), packed_rows() if packed else None
    options = tuple(options.items())
    want = evaluate(arrays, segment_ids, impl="dense", options=options)
    if packed:
        # What stands at padding reaches nothing.
        padding = (segment_ids == 0)[..., None, None]
        arrays = [jnp.where(padding, jnp.nan, x) for x in arrays[:3]] + arrays[3:]
    got = evaluate(arrays, segment_ids, impl="splash", options=options)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < FLOAT32_BAR


def test_bfloat16(interpreted):
    arrays = draw(dtype=jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in arrays]
    want = evaluate(wide, packed_rows(), impl="dense", options=(("window", 70),))
    got = evaluate(arrays, packed_rows(), impl="splash", options=(("window", 70),))
    assert all(g.dtype == jnp.bfloat16 for g in got)
    assert all(relative_error(g, w) < BFLOAT16_BAR for g, w in zip(got, want, strict=True))


def test_float32_products_are_exact_forwards_and_backwards():
    """No kernel multiplies float32 in the TPU's default precision."""
    q, k, v, d_out = (jnp.swapaxes(x[:, :128], 1, 2) for x in draw())
    static = _splash._Static(128, 128, 4, None, None, True)

    def both(q, k, v, d_out):
        out, pull = jax.vjp(lambda *qkv: _splash._kernels(static, *qkv, None), q, k, v)
        return out, pull(d_out)

    text = str(jax.make_jaxpr(both)(q, k, v, d_out))
    # At least two products forwards, three for dq, four for dk and dv.
    products = text.count("dot_general[")
    assert products >= 9
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products


@pytest.mark.parametrize(
    ("time", "grid"), [(1, (128, 128)), (200, (256, 256)), (513, (768, 384)), (4096, (4096, 512))]
)
def test_grid(time, grid):
    assert _splash._grid(time) == grid


def test_auto_takes_it_only_where_xla_does_not_partition(interpreted, monkeypatch):
    q, k, v, _ = (x[:, :8] for x in draw())

    def taken(check_vma=None):
        attend = lambda q: mixers.attention(q, k, v)[0]  # noqa: E731
        if check_vma is not None:
            mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
            rows = jax.sharding.PartitionSpec()
            attend = jax.shard_map(
                attend, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma
            )
        return "pallas_call" in str(jax.make_jaxpr(attend)(q))

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert taken()
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not taken()
    assert taken(check_vma=False)
    with rows_on(_own_rows()):
        assert taken()


def _own_rows():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), auto, devices=jax.devices()[:1])
    return jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


@pytest.mark.parametrize("window", [None, 70])
def test_on_each_devices_own_rows(interpreted, window):
    arrays, options = draw(), (("window", window),)
    want = evaluate(arrays, packed_rows(), impl="dense", options=options)
    with rows_on(_own_rows()):
        run = functools.partial(evaluate.__wrapped__, impl="splash", options=options)
        text = str(jax.make_jaxpr(run)(arrays, packed_rows()))
        got = quick_jit(run)(arrays, packed_rows())
    assert text.count("shard_map[") >= 2  # forwards and backwards
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < FLOAT32_BAR


def test_declines_with_a_reason():
    q, k, v, _ = draw()
    assert _splash._unsupported(q, k, v, True, None, None) is None
    low = q.astype(jnp.bfloat16)
    state = mixers.init_kv_cache(2, 4, 2, 128, 64, jnp.float32)
    wide = jnp.zeros((2, TIME, 2, 512))
    for arguments, reason in (
        ((low, k, v, True, None, None), "bfloat16 or all be float32"),
        ((q, k, v, False, None, None), "causal=False"),
        ((q, k, v, True, jnp.zeros(4), None), "sinks"),
        ((q, k, v, True, None, state), "initial_state"),
        ((q, k, v, True, None, None, 3), "prefix is set"),
        ((q, k, wide, True, None, None), "widths of k and v must be <= 256, got 128 and 512"),
    ):
        assert reason in _splash._unsupported(*arguments)
    with pytest.raises(ValueError, match="impl='splash' cannot run: the backend is"):
        mixers.attention(q, k, v, impl="splash")
