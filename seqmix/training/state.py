# SPDX-License-Identifier: Apache-2.0
"""The trainer's flat view of an NNX model: split once, its arrays in {name: array} dicts.

A name is the path in the module joined by dots (`periods.0.mixer.query.kernel`). Flat dicts keep
the host cost of calling the jitted step low, and make checkpoints readable by name.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

type Arrays = dict[str, jax.Array]


class TrainState(NamedTuple):
    """Everything a step changes. Scalars are int32 arrays on the device."""

    step: jax.Array  # batches consumed, skipped ones included
    params: Arrays
    variables: Arrays  # the model's other state: random-number counters, statistics
    optimizer: Any
    skipped: jax.Array  # steps skipped because loss or gradient was not finite
    consecutive: jax.Array  # of these, the current run without a good step


@dataclasses.dataclass(frozen=True)
class _Group:
    names: tuple[str, ...]
    treedef: Any

    def pack(self, state: Any) -> dict[str, Any]:
        return dict(zip(self.names, jax.tree.leaves(state), strict=True))

    def unpack(self, arrays: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(self.treedef, [arrays[name] for name in self.names])


def _group(state: Any) -> _Group:
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    return _Group(tuple(_name(path) for path, _ in paths), treedef)


def _name(path: tuple[Any, ...]) -> str:
    # The last entry of a variable's path is its `value` attribute: not part of the module's own
    # path.
    return ".".join(
        str(entry.key if isinstance(entry, jax.tree_util.DictKey) else getattr(entry, "idx", entry))
        for entry in path
        if not isinstance(entry, jax.tree_util.GetAttrKey)
    )


class ModelDefinition:
    """The static half of a model and the way between modules and flat dicts.

    Attributes:
      params: {name: ShapeDtypeStruct} of the trained parameters.
      variables: {name: ShapeDtypeStruct} of everything else.
      decay: {name: bool}, whether a parameter gets weight decay.
      muon: {name: bool}, whether its last two axes are a hidden matrix for Muon.
      auxiliary: metrics that the model's layers report beside its loss.
    """

    def __init__(self, build: Callable[[], nnx.Module]):
        """Traces `build` without computing; `build()` returns a freshly initialised module."""
        # Inside, not above: layers are below training, and the masks are theirs to define.
        from seqmix.layers import parameters

        self._build = build
        model = nnx.eval_shape(build)
        self.auxiliary: tuple[str, ...] = getattr(model, "auxiliary_names", ())
        self._graph, params, variables = nnx.split(model, nnx.Param, ...)
        self._params, self._variables = _group(params), _group(variables)
        self.params = self._params.pack(params)
        self.variables = self._variables.pack(variables)
        self.decay = self._params.pack(parameters.decay_mask(params))
        self.muon = self._params.pack(parameters.muon_mask(params))

    def initialise(self) -> tuple[Arrays, Arrays]:
        """Builds the module and returns its (params, variables); meant to run under `jax.jit`."""
        return self.split(self._build())

    def merge(self, params: Mapping[str, jax.Array], variables: Mapping[str, jax.Array]):
        """Returns the module with these arrays."""
        return nnx.merge(
            self._graph, self._params.unpack(params), self._variables.unpack(variables)
        )

    def finish_step(self, params: Arrays, variables: Arrays) -> Arrays:
        """The variables after the model's `finish_step`, if it has one: what no gradient trains."""
        model = self.merge(params, variables)
        finish = getattr(model, "finish_step", None)
        if finish is None:
            return variables
        finish()
        return self.split(model)[1]

    def split(self, model: nnx.Module) -> tuple[Arrays, Arrays]:
        """Inverse of `merge`."""
        _, params, variables = nnx.split(model, nnx.Param, ...)
        return self._params.pack(params), self._variables.pack(variables)
