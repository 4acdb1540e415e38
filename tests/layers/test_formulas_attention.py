# SPDX-License-Identifier: Apache-2.0
"""Attention and MLA against their formulas, token by token and head by head, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import (
    AttentionConfig,
    LinearScaling,
    Llama3Scaling,
    MLAConfig,
    NTKScaling,
    YarnScaling,
)
from tests.layers.cases_attention import YARN
from tests.layers.modules import graph_and_shapes, quick_jit, random_parameters
from tests.layers.test_formulas import TIME, WIDTH, build, check, rms, sigmoid

BASE = 50.0


def turn(z, width, interleaved=False, frequencies=None, factor=1.0):
    """RoPE on the first channels of [T, H, K] as products of complex numbers."""
    if not width:
        return z
    pairs = width // 2
    if frequencies is None:
        frequencies = [BASE ** (-i / pairs) for i in range(pairs)]
    out = np.array(z)
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        spin = factor * np.exp(1j * np.arange(len(z)) * frequencies[i])[:, None]
        pair = (z[..., a] + 1j * z[..., b]) * spin
        out[..., a], out[..., b] = pair.real, pair.imag
    return out


def softmax_rows(q, k, v, scale, window=None, softcap=None, sinks=None, prefix=0):
    """[T, H, V]; key head j serves consecutive query heads."""
    time, heads, _ = q.shape
    out = np.zeros((time, heads, v.shape[-1]))
    for head in range(heads):
        kv = head // (heads // k.shape[1])
        for t in range(time):
            first = 0 if window is None else max(0, t - window + 1)
            seen = [*range(min(prefix, first)), *range(first, t + 1)]
            logits = k[seen, kv] @ q[t, head] * scale
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            weights = np.exp(logits)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
            out[t, head] = weights / total @ v[seen, kv]
    return out


# Frequencies of YARN at 4 channels and base 50, by hand: the pairs turn 50 / (2 pi) = 7.96 and
# 1.125 times in the trained length, so the ends of the ramp (4 turns and 1) lie at pairs 0.35 and
# 1.06, rounded outwards to 0 and 2: the first is kept, the second half interpolated.
YARN_FREQUENCIES = (1.0, 50.0**-0.5 * (0.5 + 0.5 / 4))
YARN_FACTOR = 0.1 * np.log(4.0) + 1

OPTIONS = {
    "plain": {},
    "grouped": {
        "kv_heads": 1,
        "rotary_fraction": 0.5,
        "window": 4,
        "qk_norm": True,
        "bias": True,
    },
    "softcap": {"kv_heads": 2, "rotary_fraction": 0.0, "logit_softcap": 0.5, "scale": 0.7},
    "qwen3_next": {
        "kv_heads": 2,
        "rotary_fraction": 0.5,
        "qk_norm": True,
        "zero_centred_norm": True,
        "output_gate": True,
    },
    "hymba": {
        "kv_heads": 2,
        "value_width": 5,
        "window": 3,
        "prefix": 2,
        "key_multiplier": 0.5,
        "output_gate": True,
    },
    "sinks": {
        "kv_heads": 2,
        "window": 3,
        "rotary_fraction": 0.5,
        "rotary_interleaved": True,
        "rotary_scaling": YARN,
        "qk_norm": "full",
        "sinks": True,
        "bias": True,
        "output_bias": True,
        "output_gate": True,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention(name):
    config = AttentionConfig(heads=4, head_width=8, rotary_base=BASE, **OPTIONS[name])
    module, p = build(config)
    x = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    q, k, v = (x @ p[f"{n}.kernel"] + p.get(f"{n}.bias", 0) for n in ("query", "key", "value"))
    scales = [p.get(f"{n}_norm.scale", 0) + config.zero_centred_norm for n in ("query", "key")]
    if config.qk_norm == "full":
        q, k = (rms(z, 1e-6) * s for z, s in zip((q, k), scales, strict=True))
    q, k = (z.reshape(TIME, -1, 8) for z in (q, k))
    v = v.reshape(TIME, -1, config.value_head_width)
    if config.qk_norm is True:
        q, k = (rms(z, 1e-6) * s for z, s in zip((q, k), scales, strict=True))
    rotation = {"width": int(8 * config.rotary_fraction), "interleaved": config.rotary_interleaved}
    if config.rotary_scaling is not None:
        rotation |= {"frequencies": YARN_FREQUENCIES, "factor": YARN_FACTOR}
    q, k = (turn(z, **rotation) for z in (q, k * config.key_multiplier))
    scale = config.scale or 8**-0.5
    limits = (config.window, config.logit_softcap, p.get("sinks"), config.prefix)
    out = softmax_rows(q, k, v, scale, *limits).reshape(TIME, -1)
    if config.output_gate:
        out = out * sigmoid(x @ p["gate.kernel"] + p.get("gate.bias", 0))
    check(module, out @ p["output.kernel"] + p.get("output.bias", 0), x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"query_rank": 9, "rotary": False, "bias": True},
        {
            "query_rank": 9,
            "rotary_scaling": YarnScaling(
                factor=4.0,
                original_max_position_embeddings=50,
                beta_fast=4.0,
                mscale=1.0,
                mscale_all_dim=0.5,
            ),
        },
    ],
)
def test_mla(options):
    n, shared, wide, rank = 5, 4, 3, 7
    config = MLAConfig(
        heads=4,
        head_width=n,
        rotary_width=shared,
        value_width=wide,
        kv_rank=rank,
        rotary_base=BASE,
        **options,
    )
    module, p = build(config)
    x = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    source = x
    if config.query_rank:
        source = x @ p["query_down.kernel"] + p.get("query_down.bias", 0)
        source = rms(source, 1e-6) * p["query_norm.scale"]
    q = (source @ p["query.kernel"]).reshape(TIME, 4, n + shared)
    down = x @ p["latent.kernel"] + p.get("latent.bias", 0)
    c = rms(down[:, :rank], 1e-6) * p["latent_norm.scale"]
    common = down[:, None, rank:]
    content, turned = q[..., :n], q[..., n:]
    scale = (n + shared) ** -0.5
    if config.rotary:
        rotation = {"width": shared, "interleaved": True}
        if config.rotary_scaling is not None:
            divisor = 0.05 * np.log(4.0) + 1
            scale *= divisor**2
            rotation |= {"frequencies": YARN_FREQUENCIES, "factor": YARN_FACTOR / divisor}
        turned, common = turn(turned, **rotation), turn(common, **rotation)
    keys = (c @ p["key.kernel"]).reshape(TIME, 4, n)
    keys = np.concatenate([keys, np.repeat(common, 4, axis=1)], -1)
    values = (c @ p["value.kernel"]).reshape(TIME, 4, wide)
    out = softmax_rows(np.concatenate([content, turned], -1), keys, values, scale)
    check(module, out.reshape(TIME, -1) @ p["output.kernel"] + p.get("output.bias", 0), x)


def test_a_reading_layer_is_the_sharing_one_with_queries_of_its_own():
    """With the same query and output parameters it gives the same numbers, from a cache too."""
    common = {"heads": 4, "head_width": 6, "window": 4, "qk_norm": True, "bias": True}
    graphs, parameters = [], []
    for options in ({"kv_heads": 2, "share_kv_as": "kv"}, {"kv_from": "kv"}):
        graph, shapes = graph_and_shapes(AttentionConfig(**common, **options), WIDTH)
        graphs.append(graph)
        parameters.append(shapes)
    source = random_parameters(parameters[0])
    flat = dict(nnx.to_flat_state(source))
    reader = nnx.from_flat_state({p: flat[p] for p, _ in nnx.to_flat_state(parameters[1])})
    assert {path[0] for path in flat} - {path[0] for path in dict(nnx.to_flat_state(reader))} == {
        "key",
        "value",
        "key_norm",
    }

    @quick_jit
    def run(x, segment_ids):
        layer, other = nnx.merge(graphs[0], source), nnx.merge(graphs[1], reader)
        given = layer.init_shared(*x.shape[:2], None)
        y, _, given = layer(x, segment_ids=segment_ids, shared=given)
        z, cache, passed = other(x, segment_ids=segment_ids, shared=given)
        assert cache is None and passed is given
        return y, z

    @quick_jit
    def decode(x, cache):
        layer, other = nnx.merge(graphs[0], source), nnx.merge(graphs[1], reader)
        y, cache, given = layer(x, cache=cache, shared=layer.init_shared(*x.shape[:2], cache))
        z, empty, _ = other(x, cache=other.init_cache(2, TIME), shared=given)
        assert empty == ()
        return y, z, cache

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, TIME, WIDTH)), jnp.float32)
    ids = jnp.broadcast_to(jnp.asarray([1, 1, 1, 0, 1, 1, 2, 2, 0, 2, 2]), (2, TIME))
    np.testing.assert_array_equal(*run(x, ids))
    cache = nnx.merge(graphs[0], source).init_cache(2, TIME)
    for t in range(TIME):
        y, z, cache = decode(x[:, t : t + 1], cache)
        np.testing.assert_array_equal(y, z)
    with pytest.raises(ValueError, match=r"Attention.kv_from = 'kv' needs `shared`"):
        nnx.merge(graphs[1], reader)(x)


def turns(frequency, length):
    return length * frequency / (2 * np.pi)


@pytest.mark.parametrize(
    ("scaling", "width", "base"),
    [
        (LinearScaling(4.0), 16, 1e4),
        (NTKScaling(4.0), 16, 1e4),
        (NTKScaling(2.0, original_max_position_embeddings=100, length=300), 16, 1e4),
        (YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0), 64, 1e4),  # DeepSeek-V3
        (YarnScaling(32.0, 4096, truncate=False), 64, 150_000.0),  # gpt-oss
        (Llama3Scaling(8.0, 8192), 128, 500_000.0),  # Llama 3.1
    ],
)
def test_scaled_frequencies(scaling, width, base):
    """Pair by pair, from what each paper asks of a pair."""
    got = scaling.frequencies(width, base)
    assert got.shape == (width // 2,) and got.dtype == np.float64
    kept, mixed, slowed = 0, 0, 0
    for i in range(width // 2):
        plain = base ** (-2 * i / width)
        if isinstance(scaling, LinearScaling):
            want = plain / 4
        elif isinstance(scaling, NTKScaling):
            # The slowest pair's wavelength grows by the factor; 2 * 300 / 100 - 1 = 5.
            factor = 4.0 if scaling.length is None else 5.0
            want = plain * factor ** (-2 * i / (width - 2))
        elif isinstance(scaling, YarnScaling):

            def pair(count, length=4096):
                """The real index at which a pair turns `count` times."""
                return width / 2 * np.log(turns(1.0, length) / count) / np.log(base)

            first, last = pair(32), pair(1)
            if scaling.truncate:
                first, last = np.floor(first), np.ceil(last)
            share = min(max((i - first) / (last - first), 0), 1)
            want = plain * (1 - share) + plain / scaling.factor * share
        else:
            share = min(max((turns(plain, 8192) - 1) / 3, 0), 1)
            want = plain * share + plain / 8 * (1 - share)
        np.testing.assert_allclose(got[i], want, rtol=1e-12)
        kept += np.isclose(got[i], plain)
        slowed += np.isclose(got[i] * scaling.factor, plain)
        mixed += plain / scaling.factor * 1.001 < got[i] < plain * 0.999
    if isinstance(scaling, YarnScaling | Llama3Scaling):
        assert min(kept, mixed, slowed) > 3


def test_attention_factors():
    assert LinearScaling(4.0).rotation_factor == NTKScaling(4.0).rotation_factor == 1
    assert Llama3Scaling().rotation_factor == 1
    plain = YarnScaling(40.0)
    assert plain.rotation_factor == pytest.approx(1.3688879454)  # 0.1 log(40) + 1
    assert plain.logit_factor == 1
    deepseek = YarnScaling(40.0, mscale=1.0, mscale_all_dim=1.0)
    assert deepseek.rotation_factor == 1
    assert deepseek.logit_factor == pytest.approx(1.3688879454**2)
    assert YarnScaling(40.0, attention_factor=0.5).rotation_factor == 0.5
    assert YarnScaling(0.5, mscale_all_dim=1.0).logit_factor == 1
    scaled = MLAConfig(rotary_scaling=deepseek)
    assert scaled.logit_scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    unturned = MLAConfig(rotary_scaling=deepseek, rotary=False)
    assert unturned.logit_scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearScaling(0.0), "LinearScaling.factor must be positive, got 0"),
        (lambda: NTKScaling(2.0, length=7), "go together, got 7 and None"),
        (
            lambda: NTKScaling(2.0, original_max_position_embeddings=9, length=7),
            "NTKScaling.length must be >= 9, got 7",
        ),
        (lambda: YarnScaling(beta_fast=1.0, beta_slow=2.0), "beta_fast must be >= beta_slow"),
        (
            lambda: MLAConfig(rotary_base=1.0, rotary_scaling=YarnScaling()),
            "MLA.rotary_scaling: YarnScaling needs a rotary_base > 1, got 1",
        ),
        (lambda: Llama3Scaling(low_freq_factor=4.0), "low_freq_factor must be < high_freq_factor"),
    ],
)
def test_bad_scalings(make, message):
    with pytest.raises(ValueError, match=message):
        make()
