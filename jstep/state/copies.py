"""Replacing parameters, with the slots that are copies of them, such as averages and masters."""

import contextvars
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jstep.core import device_values, meshes, placement, trees
from jstep.core.checks import array_type
from jstep.core.logs import logger, warned_in_run
from jstep.core.trees import Params, Slots, Tree
from jstep.slots import compact_numbers
from jstep.slots.matching import describe_difference
from jstep.slots.roles import LIKE_PARAMETERS, Role, Roles, roles_in
from jstep.state.sharding import MODEL_STATE, put_leaf

_SET_ROLES = (*LIKE_PARAMETERS, Role.REMAINDER)
"""The roles of slots that `with_params` sets."""
_MASTERS = (Role.MASTER, Role.MASTER_COPY)


def replace_params(state: Tree, params: Params) -> tuple[Params, Slots]:
    """Return new parameters, placed like the old ones, and the slots, with their copies updated."""
    roles = roles_in(state)
    treedef = trees.structure(state.params)
    placement.check_no_shapes((state, params), "state and params")
    if not roles and state.slots.keys() - {MODEL_STATE}:
        raise ValueError(
            "with_params: the state must be made by TrainState.create, got one by hand, "
            "whose slots have no roles; give both: state.replace(params=…, slots=…)"
        )
    if trees.structure(params) != treedef:
        different = describe_difference(params, state.params)
        if not different:
            different = "with the same paths, in other containers"
        raise ValueError(
            f"params: must have the structure of the state's parameters, got a tree {different}"
        )
    if roles.computing:
        raise ValueError(
            "with_params: the optimizer computes the parameters from its slots "
            f"{sorted(roles.computing)}; make a new state: "
            "TrainState.create(params, optimizer, global_step=state.global_step)"
        )
    names = roles.names_with(*_SET_ROLES)
    set_slots = {
        name: treedef.flatten_up_to(tree) for name, tree in state.slots.items() if name in names
    }
    leaves = jax.tree.leaves(params)
    for i, (path, old) in enumerate(trees.leaves_with_paths(state.params)):
        if leaves[i] is old:  # its slots stay, too
            continue
        slots = {name: values[i] for name, values in set_slots.items() if values[i] is not None}
        with meshes.internal_transfers():
            leaves[i], new = _set(leaves[i], old, path, slots, roles)
        for name, value in new.items():
            set_slots[name][i] = value
    new_slots = {name: treedef.unflatten(values) for name, values in set_slots.items()}
    return treedef.unflatten(leaves), state.slots | new_slots


def _set(leaf: object, old: Any, path: str, slots: Slots, roles: Roles) -> tuple[Any, Slots]:
    """Return a new leaf of the parameters, and the new leaves of its slots."""
    # The remainders of the parameter itself, not the halves of other slots.
    remainders = [
        name
        for name in slots
        if roles[name] is Role.REMAINDER and name not in roles.halves.values()
    ]
    precise = [slots[name].dtype for name in slots if roles[name] is Role.MASTER]
    if remainders:
        precise.append(np.dtype(np.float32))
    whole = _as_old_type(leaf, old, path, precise)
    with meshes.using_mesh(meshes.mesh_of(whole)):
        stored = whole.astype(old.dtype)
        new = Slots()
        if remainders:
            stored, low = compact_numbers.split_halves(whole.astype(jnp.float32))
            whole = compact_numbers.join_halves(stored, low)
            new = dict.fromkeys(remainders, low)
        for name in slots:
            if roles[name] is Role.REMAINDER:
                continue
            value = stored
            if remainders or roles[name] in _MASTERS:
                value = whole
            half = roles.halves.get(name, "")
            if half in slots:
                new[name], new[half] = compact_numbers.split_halves(value.astype(jnp.float32))
            else:
                new[name] = value.astype(slots[name].dtype)
    placed = _place_copy(stored, old)
    return placed, {name: _place_copy(value, slots[name]) for name, value in new.items()}


def _as_old_type(leaf: object, old: Any, path: str, precise: list[Any]) -> Any:
    value = device_values.host_leaf(leaf, path, "params")
    if trees.is_python_number(leaf) and trees.is_trainable(old):  # a weak type, as in create
        value = value.astype(old.dtype)
    if value.shape != old.shape or value.dtype not in (old.dtype, *precise):
        raise ValueError(
            f"params: {trees.leaf_at(path)} is {array_type(value.shape, value.dtype)}, must be "
            f"{array_type(old.shape, old.dtype)}, as in the state"
        )
    return value


def _place_copy(value: Any, old: Any) -> Any:
    """Return an unshared array, placed like the old one."""
    if trees.has_tracers((value, old)):
        return placement.place_like_old(jnp.copy(value), old)
    sharding = getattr(old, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return put_leaf(value, sharding)
    if trees.is_key(value):
        array = jnp.copy(value)
    else:
        array = jnp.array(value, copy=True)
    if getattr(old, "committed", False):
        return jax.device_put(array, sharding)
    return array


def warn_of_copies(
    state: Tree, params: Params, slots: Slots, what: str, otherwise: str = ""
) -> None:
    """Warn once if parameters are replaced, but not the slots that are copies of them."""
    roles = roles_in(state)
    treedef = trees.structure(state.params)
    copies = {*roles.names_with(*LIKE_PARAMETERS), *roles.computing}
    names = [name for name in roles if name in copies and name in state.slots and name in slots]
    if not names or _has_warned(roles) or trees.structure(params) != treedef:
        return
    new_leaves = jax.tree.leaves(params)
    old_leaves = jax.tree.leaves(state.params)
    if not all(map(trees.is_array, [*new_leaves, *old_leaves])):
        return
    is_traced = trees.has_tracers((params, state.params))
    # Elsewhere, such as in an evaluation, other parameters may be meant for this function alone.
    if is_traced and not IS_STEPPING.get():
        return
    changed = [
        i for i, (new, old) in enumerate(zip(new_leaves, old_leaves, strict=True)) if new is not old
    ]
    unchanged_slots: list[str] = []
    for name in names:
        new = treedef.flatten_up_to(slots[name])
        old = treedef.flatten_up_to(state.slots[name])
        if any(old[i] is not None and new[i] is old[i] for i in changed):
            unchanged_slots.append(name)
    if not unchanged_slots:
        return
    # Equal values in other arrays are not a change. The values of tracers are unknown.
    if not is_traced and all(trees.has_same_bits(new_leaves[i], old_leaves[i]) for i in changed):
        return
    _note_warning(roles)
    projection = _EACH_UPDATE if is_traced else ""
    logger.warning(_OLD_VALUES, what, ", ".join(map(repr, unchanged_slots)), projection + otherwise)


def _has_warned(roles: Roles) -> bool:
    logged = warned_in_run()
    if logged is None:
        return _WARNED.get(id(roles)) is roles
    return _OLD_VALUES in logged


def _note_warning(roles: Roles) -> None:
    logged = warned_in_run()
    if logged is None:
        _WARNED[id(roles)] = roles
    else:
        logged.add(_OLD_VALUES)


IS_STEPPING: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jstep_is_stepping", default=False
)
"""Whether a train step is being traced or run."""
_WARNED: "weakref.WeakValueDictionary[int, Roles]" = weakref.WeakValueDictionary()
"""The roles of states, by identity, for which the warning was logged outside of a run."""
_OLD_VALUES = (
    "%s: the slots %s still hold the old parameters, averages of them or their sums, and bring "
    "them back in later updates. Use state.with_params(params), which sets these slots, too%s"
)
_EACH_UPDATE = (
    "; a change after each update, such as a clip, belongs in jstep.with_projection(optimizer, fn)"
)
