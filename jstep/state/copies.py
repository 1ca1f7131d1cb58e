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

_FOLLOWING = (*LIKE_PARAMETERS, Role.REMAINDER)
"""The roles of slots that `with_params` sets."""
_MASTERS = (Role.MASTER, Role.MASTER_COPY)


def with_params(state: Tree, params: Params) -> tuple[Params, Slots]:
    """Return new parameters, placed like the old ones, and the slots, with their copies updated."""
    roles = roles_in(state)
    treedef = trees.structure(state.params)
    placement.check_no_shapes((state, params), "state and params")
    if not roles and state.slots.keys() - {MODEL_STATE}:
        raise ValueError(
            "with_params: the state must be made by TrainState.create, got one by hand, whose slots have no roles; "
            "give both: state.replace(params=…, slots=…)"
        )
    if trees.structure(params) != treedef:
        different = describe_difference(params, state.params) or "with the same paths, in other containers"
        raise ValueError(f"params: must have the structure of the state's parameters, got a tree {different}")
    if roles.computing:
        raise ValueError(
            f"with_params: the optimizer computes the parameters from its slots {sorted(roles.computing)}; make a new "
            "state: TrainState.create(params, optimizer, global_step=state.global_step)"
        )
    names = roles.names_with(*_FOLLOWING)
    set_slots = {name: treedef.flatten_up_to(tree) for name, tree in state.slots.items() if name in names}
    leaves = jax.tree.leaves(params)
    for i, (path, old) in enumerate(trees.leaves_with_paths(state.params)):
        if leaves[i] is old:
            continue
        slots = {name: values[i] for name, values in set_slots.items() if values[i] is not None}
        with meshes.internal_transfers():
            leaves[i], new = _set(leaves[i], old, path, slots, roles)
        for name, value in new.items():
            set_slots[name][i] = value
    return treedef.unflatten(leaves), state.slots | {n: treedef.unflatten(values) for n, values in set_slots.items()}


def _set(leaf: object, old: Any, path: str, slots: Slots, roles: Roles) -> tuple[Any, Slots]:
    """Return a new leaf of the parameters, and the new leaves of its slots."""
    remainders = [n for n in slots if roles[n] is Role.REMAINDER and n not in roles.halves.values()]
    precise = [slots[n].dtype for n in slots if roles[n] is Role.MASTER]
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
        for name in (n for n in slots if roles[n] is not Role.REMAINDER):
            value = whole if remainders or roles[name] in _MASTERS else stored
            half = roles.halves.get(name, "")
            if half in slots:
                new[name], new[half] = compact_numbers.split_halves(value.astype(jnp.float32))
            else:
                new[name] = value.astype(slots[name].dtype)
    return _placed(stored, old), {name: _placed(value, slots[name]) for name, value in new.items()}


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


def _placed(value: Any, old: Any) -> Any:
    """Return an unshared array, placed like the old one."""
    if trees.has_tracers((value, old)):
        return placement.place_like_old(jnp.copy(value), old)
    sharding = getattr(old, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return put_leaf(value, sharding)
    array = jnp.copy(value) if trees.is_key(value) else jnp.array(value, copy=True)
    return jax.device_put(array, sharding) if getattr(old, "committed", False) else array


def warn_of_copies(state: Tree, params: Params, slots: Slots, what: str, otherwise: str = "") -> None:
    roles = roles_in(state)
    treedef = trees.structure(state.params)
    copies = {*roles.names_with(*LIKE_PARAMETERS), *roles.computing}
    names = [name for name in roles if name in copies and name in state.slots and name in slots]
    of_run = warned_in_run()
    has_warned = _WARNED.get(id(roles)) is roles if of_run is None else _OLD_VALUES in of_run
    if not names or has_warned or trees.structure(params) != treedef:
        return
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True))
    if not all(trees.is_array(leaf) for pair in pairs for leaf in pair):
        return
    is_traced = any(map(trees.is_traced, jax.tree.leaves((params, state.params))))
    # Elsewhere, such as in an evaluation, other parameters may be meant for this function alone.
    if is_traced and not IN_STEP.get():
        return
    changed = [i for i, (new, old) in enumerate(pairs) if new is not old]
    pairs_of = {name: [treedef.flatten_up_to(tree[name]) for tree in (slots, state.slots)] for name in names}
    left = [n for n, (new, old) in pairs_of.items() if any(old[i] is not None and new[i] is old[i] for i in changed)]
    if left and (is_traced or not all(trees.has_same_bits(*pairs[i]) for i in changed)):
        if of_run is None:
            _WARNED[id(roles)] = roles
        else:
            of_run.add(_OLD_VALUES)
        projection = _AFTER_EACH_UPDATE if is_traced else ""
        logger.warning(_OLD_VALUES, what, ", ".join(map(repr, left)), projection + otherwise)


IN_STEP: contextvars.ContextVar[bool] = contextvars.ContextVar("jstep_in_step", default=False)
"""Whether a train step is being traced or run."""
_WARNED: "weakref.WeakValueDictionary[int, Roles]" = weakref.WeakValueDictionary()
"""The roles of states, by identity, for which it was logged outside of a run."""
_OLD_VALUES = (
    "%s: the slots %s still hold the old parameters, averages of them or their sums, and bring them back in later "
    "updates. Use state.with_params(params), which sets these slots, too%s"
)
_AFTER_EACH_UPDATE = "; a change after each update, such as a clip, belongs in jstep.with_projection(optimizer, fn)"
