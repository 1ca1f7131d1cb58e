"""NaN and infinity in the parameters and slots of a state, and the error that reports them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import meshes, placement, trees
from jstep.core.checks import format_list
from jstep.core.exceptions import WrongStateError
from jstep.state.leaves import PARAMS, SLOTS, StateLeaves, field_of
from jstep.state.train_state import MODEL_STATE

FINITE, INFINITE, NAN = range(3)
"""The contents of an array: only finite numbers; infinity but no NaN; NaN."""


class StateContents:
    """The contents of each parameter and slot of a state, computed on its devices without blocking.

    With `read_cpus`, arrays on a CPU are read immediately. The model_state is excluded: it may hold anything.
    """

    def __init__(self, state: trees.Tree | StateLeaves, *, params_only: bool = False, read_cpus: bool = True) -> None:
        if not isinstance(state, StateLeaves):
            names = (PARAMS,) if params_only else (PARAMS, SLOTS)
            state = StateLeaves({name: field_of(state, name) for name in names})
        indices = state.indices
        params = field_of(indices, PARAMS)
        slots = field_of(indices, SLOTS)
        if isinstance(slots, dict):
            slots = {name: tree for name, tree in slots.items() if name != MODEL_STATE}
        checked = jax.tree.leaves(params if params_only else (params, slots))
        with meshes.internal_transfers():
            found = [(state.paths[i], _found(state.values[i], read_cpus)) for i in checked]
        self._found = {path: contents for path, contents in found if contents is not None}

    def contents(self) -> dict[str, int]:
        with meshes.internal_transfers():
            return {path: int(value) for path, value in self._found.items()}

    def are_finite(self) -> bool:
        return not any(self.contents().values())

    def with_nan(self) -> list[str]:
        return [path for path, contents in self.contents().items() if contents == NAN]

    def worse_since(self, before: "StateContents | None") -> tuple[dict[str, int], list[str]]:
        """Return the leaves that became worse, or are not finite, and separately slots with infinity."""
        earlier = {} if before is None else before.contents()
        worse = {path: kind for path, kind in self.contents().items() if kind > earlier.get(path, FINITE)}
        infinite_slots = [path for path, kind in worse.items() if kind == INFINITE and path.startswith(f"{SLOTS}/")]
        return {path: kind for path, kind in worse.items() if path not in infinite_slots}, infinite_slots


def describe_contents(worse: Mapping[str, int]) -> str:
    """Format `params/w and 2 more contain NaN`; empty without leaves."""
    what = "NaN" if NAN in worse.values() else "infinity"
    return f"{format_list([*worse])} contain{'s' if len(worse) == 1 else ''} {what}" if worse else ""


def _found(leaf: Any, read_cpus: bool) -> Any:
    if not (trees.is_array(leaf) and jnp.issubdtype(leaf.dtype, np.inexact) and leaf.size):
        return None
    if not isinstance(leaf, jax.Array) or (read_cpus and leaf.is_fully_addressable and placement.is_on_cpus(leaf)):
        return _contents_on_host(leaf)
    # One program for all leaves of a shape. All processes that have a shard of a leaf know its contents.
    contents = placement.compute_on(meshes.mesh_of(leaf), _contents, leaf).addressable_data(0)
    contents.copy_to_host_async()
    return contents


def _contents_on_host(leaf: Any) -> int:
    shards = [leaf]
    if isinstance(leaf, jax.Array):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards if shard.replica_id == 0]
    nonfinite = [shard for shard in shards if not np.isfinite(shard).all()]
    if not nonfinite:
        return FINITE
    return NAN if any(np.isnan(shard).any() for shard in nonfinite) else INFINITE


def _contents(leaf: Any) -> jax.Array:
    leaf = placement.on_devices(leaf)
    worst = jnp.where(jnp.isnan(leaf), np.int8(NAN), jnp.where(jnp.isinf(leaf), np.int8(INFINITE), np.int8(FINITE)))
    return worst.max()


class NanLossDuringTrainingError(WrongStateError, RuntimeError):
    """The loss, a parameter or a slot was not finite, or too many consecutive updates were skipped.

    Attributes:
        step: The step N of the update N − 1 → N that has this loss or gradient, or reached the limit of skipped
            updates.
        may_save: Whether the last state may be saved: only if too many consecutive updates were skipped.
    """

    def __init__(self, message: str, step: int = 0, *, may_save: bool = False) -> None:
        super().__init__(message)  # pickle calls it with these
        self.step, self.may_save = step, may_save
