# SPDX-License-Identifier: Apache-2.0
"""The mixers under test and the inputs they are tested on.

A mixer enters the shared suite by one `Mixer` entry here; every implementation it lists then runs
through `test_parity.py` and `test_contract.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from seqmix import mixers
from seqmix_kernels import compile_for
from tests.mixers import dense
from tests.mixers.cases_elementwise import mixers_elementwise
from tests.mixers.cases_scalar_decay import mixers_scalar_decay
from tests.mixers.cases_vector_decay import mixers_vector_decay
from tests.mixers.cases_vector_delta import mixers_vector_delta

Arrays = dict[str, np.ndarray]

# The quickest interpreter of each platform; a family's own tests use the others.
INTERPRETERS = {"tpu": "plain", "gpu": "chip"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one case; heads as (query, key, value)."""

    batch: int = 2
    time: int = 65
    heads: tuple[int, int, int] = (2, 2, 2)
    key: int = 8
    value: int = 12

    @property
    def states(self) -> int:
        return max(self.heads[1:])


@dataclasses.dataclass(frozen=True)
class Mixer:
    """One mixer of the suite.

    Attributes:
      name: its name in `seqmix.mixers`.
      inputs: draws its array arguments by name, in float64.
      state: shape of its state, or a pytree (such as a NamedTuple) of shapes.
      implementations: forms besides 'recurrent'.
      dense: an independent float64 derivation, (inputs, state, segment_ids) -> (out, state).
      float32: arguments that stay float32 when the others are bfloat16.
      groupings: (query, key, value) head counts it supports.
      gate: the argument that holds log-decays, if any.
      thin: it only parametrises a core that another mixer takes through the whole suite, so the
        tests of the core's own paths are skipped.
      options: options of every call, such as a feature map.
      function: the function in `seqmix.mixers`; default: `name`.
      empty: a state before the first token, from the shape; default: zeros.
      draw_state: a state that some tokens could have left; default: normal numbers.
      scales: whether it takes a `scale`.
      channels: its arrays are [B, T, D], without heads.
      parameters: arguments of three axes and more without batch and time.
      kernels: platforms whose kernels it has; each is the form 'pallas@<platform>'.
    """

    name: str
    inputs: Callable[[np.random.Generator, Shape], Arrays]
    state: Callable[[Shape], Any]
    implementations: tuple[str, ...]
    dense: Callable[..., tuple[np.ndarray, np.ndarray]]
    float32: frozenset[str] = frozenset()
    groupings: tuple[tuple[int, int, int], ...] = ((2, 2, 2), (2, 2, 4), (4, 2, 2))
    gate: str | None = "log_decay"
    thin: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    function: str = ""
    empty: Callable[[Shape], Any] | None = None
    draw_state: Callable[[np.random.Generator, Shape], Any] | None = None
    scales: bool = True
    channels: bool = False
    parameters: frozenset[str] = frozenset()
    kernels: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "function", self.function or self.name)

    def __call__(self, arrays: dict[str, Any], *, impl: str = "auto", **options):
        """Runs a form: an `impl`, or 'pallas@<platform>', the kernel in that chip's interpreter.

        'pallas@tpu:races' is another interpreter than the platform's quickest.
        """
        impl, _, target = impl.partition("@")
        function = functools.partial(
            getattr(mixers, self.function), **arrays, **dict(self.options), **options, impl=impl
        )
        if not target:
            return function()
        platform, _, interpreter = target.partition(":")
        # Around each call, inside what is traced: the recurrent form beside it stays as it is.
        with compile_for(platform, interpret=interpreter or INTERPRETERS[platform]):
            return function()

    def per_token(self, argument: str, x: Any) -> bool:
        """Whether an argument is [B, T, ...]; one or two axes belong to channels or heads."""
        return x.ndim > 2 and argument not in self.parameters

    def empty_state(self, shape: Shape) -> Any:
        """The state before the first token, float32."""
        if self.empty is not None:
            return self.empty(shape)
        return map_shapes(lambda s: np.zeros(s, np.float32), self.state(shape))


def map_shapes(function: Callable[..., Any], shapes: Any) -> Any:
    """Maps over a pytree whose leaves are shapes."""
    return jax.tree.map(function, shapes, is_leaf=_is_shape)


def _is_shape(tree: Any) -> bool:
    return type(tree) is tuple and all(isinstance(size, int) for size in tree)


def _qkv(rng, s: Shape) -> Arrays:
    hq, hk, hv = s.heads
    k = rng.normal(size=(s.batch, s.time, hk, s.key))
    return {
        "q": rng.normal(size=(s.batch, s.time, hq, s.key)),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.normal(size=(s.batch, s.time, hv, s.value)),
    }


def _log_decay(rng, s: Shape):
    return -np.exp(rng.normal(size=(s.batch, s.time, s.states)) * 1.5 - 2)


def _beta(rng, s: Shape):
    return 1 / (1 + np.exp(-rng.normal(size=(s.batch, s.time, s.states))))


def _simple_gla(rng, s):
    return _qkv(rng, s) | {"log_decay": _log_decay(rng, s)}


def _gated_delta_rule(rng, s):
    return _qkv(rng, s) | {"log_decay": _log_decay(rng, s), "beta": _beta(rng, s)}


def _delta_rule(rng, s):
    return _qkv(rng, s) | {"beta": _beta(rng, s)}


def _ssd(rng, s):
    _, groups, heads = s.heads
    rows = (s.batch, s.time)
    return {
        "x": rng.normal(size=(*rows, heads, s.value)),
        "dt": np.logaddexp(0, rng.normal(size=(*rows, heads)) - 1),
        "A": -np.exp(rng.uniform(-3, 2, size=heads)),
        "B": rng.normal(size=(*rows, groups, s.key)),
        "C": rng.normal(size=(*rows, groups, s.key)),
        "D": rng.normal(size=heads),
    }


def _matrix_state(s: Shape):
    return (s.batch, s.states, s.key, s.value)


MIXERS = {
    m.name: m
    for m in (
        Mixer(
            "simple_gla",
            _simple_gla,
            _matrix_state,
            ("associative", "chunked"),
            dense.simple_gla,
            frozenset({"log_decay"}),
            kernels=("tpu",),
        ),
        Mixer(
            "ssd",
            _ssd,
            _matrix_state,
            ("associative", "chunked"),
            dense.ssd,
            frozenset({"dt", "A", "D"}),
            groupings=((2, 2, 2), (1, 1, 3), (2, 2, 4)),
            gate=None,
            kernels=("tpu",),
        ),
        Mixer(
            "gated_delta_rule",
            _gated_delta_rule,
            _matrix_state,
            ("chunked",),
            dense.gated_delta_rule,
            frozenset({"log_decay", "beta"}),
            kernels=("tpu",),
        ),
        Mixer(
            "delta_rule",
            _delta_rule,
            _matrix_state,
            ("chunked",),
            dense.delta_rule,
            frozenset({"beta"}),
            gate=None,
            kernels=("tpu",),
        ),
        *mixers_scalar_decay(Mixer, _qkv, _log_decay, _matrix_state),
        *mixers_vector_decay(Mixer, _qkv, _matrix_state),
        *mixers_vector_delta(Mixer, _qkv, _matrix_state),
        *mixers_elementwise(Mixer),
    )
}

CORES = [name for name, m in MIXERS.items() if not m.thin]
"""The mixers that go through the whole suite."""
# One mixer for each kernel; others that reach it are taken through less.
KERNEL_CORES = (
    "simple_gla",
    "gated_delta_rule",
    "gla",
    "rwkv6",
    "kda",
    "selective_scan",
    "rg_lru",
)
KERNEL_FORMS = [(name, f"pallas@{p}") for name in KERNEL_CORES for p in MIXERS[name].kernels]
FORMS = [
    *((name, impl) for name in CORES for impl in MIXERS[name].implementations),
    *KERNEL_FORMS,
]
THIN_FORMS = [
    *((name, impl) for name, m in MIXERS.items() if m.thin for impl in m.implementations),
    *(
        (name, f"pallas@{p}")
        for name, m in MIXERS.items()
        if name not in KERNEL_CORES
        for p in m.kernels
    ),
]
ALL_FORMS = [*FORMS, *THIN_FORMS]


def draw(mixer: Mixer, shape: Shape, *, seed: int = 0, extreme: bool = False) -> Arrays:
    """Float64 inputs; `extreme` mixes decays of 0, tiny, -1e4 and exact resets in each chunk."""
    rng = np.random.default_rng(seed)
    arrays = mixer.inputs(rng, shape)
    if extreme:
        gate = arrays[mixer.gate]
        kind = rng.random(gate.shape)
        strong = -(10.0 ** rng.uniform(0, 4, gate.shape))
        gate = np.where(kind < 0.25, strong, gate)
        gate = np.where((kind >= 0.25) & (kind < 0.4), 0.0, gate)
        gate = np.where((kind >= 0.4) & (kind < 0.5), -1e-6, gate)
        gate = np.where((kind >= 0.5) & (kind < 0.55), -np.inf, gate)
        arrays[mixer.gate] = gate
    return representable(arrays)


def representable(arrays: Arrays) -> Arrays:
    """Rounds float64 inputs to float32 values, so that every form reads the same numbers."""
    with np.errstate(over="ignore"):
        return {n: a.astype(np.float32).astype(np.float64) for n, a in arrays.items()}


def draw_state(mixer: Mixer, shape: Shape, *, seed: int = 1) -> Any:
    """A random state in float64: an array, or the mixer's pytree of arrays."""
    rng = np.random.default_rng(seed)
    if mixer.draw_state is not None:
        return mixer.draw_state(rng, shape)
    return map_shapes(lambda s: rng.normal(size=s), mixer.state(shape))


def draw_segments(shape: Shape, *, seed: int = 2, padding: float = 0.1) -> np.ndarray:
    """Documents of about a dozen tokens, padding inside and between; the last row starts padded."""
    rng = np.random.default_rng(seed)
    ids = 1 + np.cumsum(rng.random((shape.batch, shape.time)) < 0.08, axis=1)
    ids = np.where(rng.random(ids.shape) < padding, 0, ids)
    ids[-1, : shape.time // 8] = 0
    return ids.astype(np.int32)


def slow(*values: Any) -> list[Any]:
    """Parameters of cases that `make test` leaves to the slow suite."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def sparing(forms: list[tuple[str, str]]) -> list[Any]:
    """The forms; slow, but for 'chunked', 'recurrent' and one form of each kernel."""
    return [
        form
        if form[1] in ("chunked", "recurrent") or form in KERNEL_FORMS
        else pytest.param(*form, marks=pytest.mark.slow)
        for form in forms
    ]


# One mixer for each core's code.
REPRESENTATIVES = ("ssd", "gla", "gated_delta_rule", "kda", "rwkv7", "selective_scan", "s4d")


def brief(cases: list[Any], *, kernels: bool = False) -> list[Any]:
    """Cases (mixer, form, ...) or mixers, all but `REPRESENTATIVES`' chunked forms slow.

    With `kernels`, one form of each kernel is not slow either.
    """

    def represents(case: Any) -> bool:
        name, impl = (case, "chunked") if isinstance(case, str) else case[:2]
        if impl == "chunked":
            return name in REPRESENTATIVES
        return kernels and (name, impl) in KERNEL_FORMS

    parameters = [(case,) if isinstance(case, str) else case for case in cases]
    return [
        pytest.param(*parameter, marks=() if represents(case) else pytest.mark.slow)
        for case, parameter in zip(cases, parameters, strict=True)
    ]
