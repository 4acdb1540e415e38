# SPDX-License-Identifier: Apache-2.0
"""Checkpoints through Orbax: asynchronous, complete or absent, restorable on another mesh.

A checkpoint of step s has four items:

* `params`: {name: array}, enough for inference;
* `training`: step, counters, optimizer and the model's other variables, flat by name;
* `data`: the data iterator's state after s batches;
* `facts`: the settings that must match to restore: layer stacking and seed; and 'untrained' where
  the parameters were imported, so that there is no optimizer's state.

Orbax writes into a temporary directory and renames it when everything is on disk, so a process
killed at any moment leaves the checkpoints before it intact.
"""

import base64
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Sharding
from orbax.checkpoint.checkpoint_managers import preservation_policy

from seqmix.training.state import TrainState

# Pieces of an array that a save with little memory writes one by one.
_CHUNK_BYTES = 8_000_000


class CheckpointError(RuntimeError):
    """A save that failed; the cause is the storage's own error."""


class CheckpointMismatchError(ValueError):
    """A checkpoint that does not fit the model or the config; the message names the setting."""


def flatten(state: TrainState) -> dict[str, jax.Array]:
    """The part of a state outside `params`, as {name: array}."""
    rest = state._replace(params={})
    leaves = jax.tree_util.tree_flatten_with_path(rest)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def unflatten(arrays: Mapping[str, Any], params: dict[str, Any], like: TrainState) -> TrainState:
    """Inverse of `flatten`: `like` gives the structure."""
    names = flatten(like)
    treedef = jax.tree.structure(like._replace(params={}))
    return jax.tree.unflatten(treedef, [arrays[name] for name in names])._replace(params=params)


class Checkpointer:
    """Saves and restores the checkpoints under `directory`.

    Args:
      directory: created when missing, unless `read_only`.
      keep_last: number of newest checkpoints kept.
      keep_every: checkpoints whose step is a multiple are kept for good; None for none.
      read_only: for reading alone: nothing is created or removed.
      save_memory: bytes that a save may take beside the state, at least those of its largest array
        (with less, Orbax waits for ever); saves then return when they are complete. None for no
        limit, and saves in the background.

    Raises:
      FileNotFoundError: `read_only`, and there is no such directory.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        read_only: bool = False,
        save_memory: int | None = None,
    ):
        self.directory = Path(directory).absolute()
        if read_only and not self.directory.is_dir():
            raise FileNotFoundError(f"no checkpoints: {self.directory} does not exist")
        policies = [preservation_policy.LatestN(keep_last)]
        if keep_every is not None:
            policies.append(preservation_policy.EveryNSteps(keep_every))
        options = ocp.CheckpointManagerOptions(
            create=not read_only,
            # A reader must not remove what a running trainer is writing.
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=not read_only and save_memory is None,
            # Made in the caller, a directory that cannot be made is an error at once.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
        )
        handlers = None
        if save_memory is not None:
            handlers = {
                "params": ocp.StandardCheckpointHandler(save_concurrent_gb=save_memory / 1e9),
                "training": ocp.StandardCheckpointHandler(),
                "data": ocp.JsonCheckpointHandler(),
                "facts": ocp.JsonCheckpointHandler(),
            }
        self._manager = ocp.CheckpointManager(
            self.directory, options=options, item_handlers=handlers
        )
        self._save_memory = save_memory
        self._pending = False

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, None when there is none."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, data: Any, facts: Mapping[str, Any]) -> bool:
        """Starts a save; returns once the arrays are copied off the devices. False if it exists.

        Args:
          step: number of batches consumed.
          state: the state; its buffers may be donated as soon as this returns.
          data: the data iterator's state: JSON-able, or bytes.
          facts: JSON-able facts about the run, checked by `check_facts` when restoring.

        Raises:
          CheckpointError: this save, or the one before it, failed.
        """
        self._raise_failures(wait=True)
        if step in self._manager.all_steps():
            return False
        chunks = None
        if self._save_memory is not None:
            chunk = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)
            chunks = dict.fromkeys(state.params, chunk)
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params, save_args=chunks),
            training=ocp.args.StandardSave(flatten(state)),
            data=ocp.args.JsonSave(_encode(data)),
            facts=ocp.args.JsonSave(dict(facts)),
        )
        try:
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._failure(step, error) from error
        self._pending = True
        return True

    def poll(self) -> None:
        """Raises CheckpointError if a save failed meanwhile; costs next to nothing."""
        self._raise_failures(wait=False)

    def wait(self) -> None:
        """Waits until the last save is complete on disk; raises CheckpointError if it failed."""
        self._raise_failures(wait=True)

    def close(self) -> None:
        """Waits for a save under way and ends the manager's threads; a failure is logged.

        For leaving on any path: `wait` first, where the save's success matters.
        """
        try:
            self._manager.close()
        except Exception:
            logging.getLogger(__name__).exception("closing %s", self.directory)

    def restore(self, step: int, like: TrainState, shardings: TrainState) -> tuple[TrainState, Any]:
        """Reads a state onto the devices, on whatever mesh `shardings` are of.

        Args:
          step: a complete checkpoint's step.
          like: arrays or ShapeDtypeStructs of the state's structure.
          shardings: the same structure of shardings.

        Returns:
          (state, data iterator's state).

        Raises:
          CheckpointMismatchError: parameters of other names or shapes; names the first.
        """
        flat = flatten(like)
        self._check_arrays(step, "params", like.params)
        self._check_arrays(step, "training", flat)
        restored = self._read(
            step,
            ocp.args.Composite(
                params=ocp.args.StandardRestore(_abstract(like.params, shardings.params)),
                training=ocp.args.StandardRestore(_abstract(flat, flatten(shardings))),
                data=ocp.args.JsonRestore(),
            ),
        )
        self._check_finite(step, restored["params"])
        state = unflatten(restored["training"], dict(restored["params"]), like)
        return state, _decode(restored["data"])

    def restore_params(
        self, step: int, like: Mapping[str, Any], shardings: Mapping[str, Sharding]
    ) -> dict[str, jax.Array]:
        """Reads the parameters alone; arguments and errors as `restore`."""
        self._check_arrays(step, "params", like)
        args = ocp.args.StandardRestore(_abstract(like, shardings))
        restored = self._read(step, ocp.args.Composite(params=args))
        self._check_finite(step, restored["params"])
        return dict(restored["params"])

    def restore_variables(
        self, step: int, like: Mapping[str, Any], shardings: Mapping[str, Sharding]
    ) -> dict[str, jax.Array]:
        """Reads the model's other variables (`TrainState.variables`), as many as `like` names.

        Raises:
          CheckpointMismatchError: a variable is missing or has another shape.
        """
        if not like:
            return {}
        prefix = "variables/"
        wanted = {prefix + name: value for name, value in like.items()}
        saved = self.shapes(step, "training")
        self._compare(step, {name: saved[name] for name in wanted if name in saved}, wanted)
        places = {prefix + name: sharding for name, sharding in shardings.items()}
        tree = _abstract(wanted, places)
        args = ocp.args.PyTreeRestore(
            item=tree,
            restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
            partial_restore=True,
        )
        try:
            path = self.directory / str(step) / "training"
            found = ocp.PyTreeCheckpointHandler().restore(path, args=args)
        except Exception as error:
            raise self._damaged(step, error) from error
        return {name: found[prefix + name] for name in like}

    def shapes(self, step: int, item: str) -> dict[str, tuple[int, ...]]:
        """Shapes by name of the arrays of an item ('params', 'training')."""
        try:
            saved = ocp.StandardCheckpointHandler().metadata(self.directory / str(step) / item)
        except Exception as error:
            raise self._damaged(step, error) from error
        tree = dict(getattr(saved, "tree", saved))
        return {name: tuple(value.shape) for name, value in tree.items()}

    def facts(self, step: int) -> dict[str, Any]:
        """The facts saved with a checkpoint."""
        args = ocp.args.Composite(facts=ocp.args.JsonRestore())
        return self._read(step, args)["facts"]

    def _read(self, step: int, args: ocp.args.Composite) -> Any:
        try:
            return self._manager.restore(step, args=args)
        except Exception as error:
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return CheckpointError(
            f"checkpoint {step} in {self.directory} cannot be read ({reason}); "
            "remove that folder to go on from the one before"
        )

    def _check_finite(self, step: int, params: Mapping[str, jax.Array]):
        bad = [n for n, x in params.items() if not bool(jnp.all(jnp.isfinite(x)))]
        if bad:
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} is damaged: {bad[0]!r} is not finite; "
                "remove that folder to go on from the one before"
            )

    def _check_arrays(self, step: int, item: str, wanted: Mapping[str, Any]):
        self._compare(step, self.shapes(step, item), wanted)

    def _compare(self, step: int, saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Any]):
        where = f"checkpoint {step} in {self.directory}"
        for name in sorted(set(saved) ^ set(wanted)):
            side = "is missing" if name in wanted else "is not in the model"
            raise CheckpointMismatchError(f"{where}: {name!r} {side}; check the model's config")
        for name, value in wanted.items():
            if saved[name] != tuple(value.shape):
                raise CheckpointMismatchError(
                    f"{where}: {name!r} has shape {saved[name]}, the model's is "
                    f"{tuple(value.shape)}; check the model's config"
                )

    def _raise_failures(self, *, wait: bool):
        if not self._pending or (not wait and self._manager.is_saving_in_progress()):
            return
        self._pending = False
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._failure(None, error) from error

    def _failure(self, step: int | None, error: Exception) -> CheckpointError:
        what = "the last checkpoint" if step is None else f"checkpoint {step}"
        reason = f"{type(error).__name__}: {error}"
        return CheckpointError(f"saving {what} under {self.directory} failed: {reason}")


def has_checkpoint(directory: Path | str) -> bool:
    """Whether a directory holds a complete checkpoint; unlike a `Checkpointer`, creates nothing."""
    path = Path(directory)
    return path.is_dir() and any(entry.name.isdigit() for entry in path.iterdir())


def check_facts(saved: Mapping[str, Any], current: Mapping[str, Any], where: str) -> None:
    """Compares facts that must match, keyed by the setting's name (`HybridLM.scan`).

    Raises:
      CheckpointMismatchError: names every setting that differs, with both values.
    """
    differing = [name for name in current if name in saved and saved[name] != current[name]]
    if differing:
        lines = [
            f"{name} is {current[name]!r}, the checkpoint was written with {saved[name]!r}"
            for name in differing
        ]
        raise CheckpointMismatchError(f"{where}: " + "; ".join(lines))


def _abstract(arrays: Mapping[str, Any], shardings: Mapping[str, Sharding]) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=shardings[name])
        for name, value in arrays.items()
    }


def _encode(data: Any) -> dict[str, Any]:
    if isinstance(data, bytes):
        return {"base64": base64.b64encode(data).decode("ascii")}
    return {"json": data}


def _decode(stored: Mapping[str, Any]) -> Any:
    return base64.b64decode(stored["base64"]) if "base64" in stored else stored["json"]
