"""Slots by name and by parameter, and parameters stored in slots, such as averages."""

from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import meshes, placement, selection, trees
from jstep.core.checks import as_string, describe_type, format_value
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import P
from jstep.slots.compact_numbers import decode_leaf
from jstep.slots.roles import HALVES, NO_ROLES, Role, Roles, roles_in
from jstep.state.sharding import is_model_state
from jstep.state.train_state import TrainState, as_state

AVERAGE_SLOT = "ExponentialMovingAverage"


@overload
def get_slot(state: TrainState[P], name: str, path: None = None) -> P | None: ...


@overload
def get_slot(state: TrainState[P], name: str, path: str) -> trees.Array | None: ...


@shortens_tracebacks
def get_slot(state: TrainState[Any], name: str, path: str | None = None) -> Any:
    """Return a slot as a tree, or its leaf for the parameter at `path`; None if it does not exist.

    Args:
        state: The state. Slots stored by `compact` are returned in float32.
        name: The name of the slot, such as `"m"` or `"embed/accumulator"`.
        path: The path of a parameter, such as `"dense/kernel"`. A trailing `/value` may be omitted.

    Raises:
        ValueError: Several leaves share the path, or `name` and `path` are in TF's order.

    Example:
        >>> import jstep
        >>> state = jstep.TrainState.create({"dense": {"kernel": 1.0}}, jstep.adagrad(0.1))
        >>> print(jstep.get_slot(state, "accumulator", "dense/kernel"))
        0.1
    """
    if as_string(name, "name") not in as_state(state).slots:
        paths = () if path is None else trees.leaf_paths(state.params)
        if name in paths and (path in state.slots or path not in paths):
            raise ValueError(
                f"name={name!r}, path={path!r}: must be the name of a slot "
                "and the path of a parameter, the reverse of TF's order; "
                f"use jstep.get_slot(state, {path!r}, {name!r})"
            )
        return None
    tree = slot_values(state, name)
    if path is None:
        return tree
    if path != "":  # which is the path of params that are a single leaf
        path = as_string(path, "path")
    index = selection.find_leaf(tree, path, "get_slot")
    if index is None:
        return None
    return jax.tree.leaves(tree)[index]


@shortens_tracebacks
def get_slot_names(state: TrainState) -> list[str]:
    """Return the sorted names of the per-parameter slots, without those that `compact` adds.

    Example:
        >>> import jstep
        >>> jstep.get_slot_names(jstep.TrainState.create({"w": 1.0}, jstep.adam()))
        ['m', 'v']
    """
    roles = roles_in(as_state(state))
    names: list[str] = []
    for name, tree in state.slots.items():
        if is_model_state(name) or roles.get(name) in HALVES:
            continue
        if not has_one_value(name, tree, state.params, roles):
            names.append(name)
    return sorted(names)


def slot_values(state: TrainState, name: str) -> Any:
    """Return the values of a slot, in float32 if `compact` stores it."""
    half = state.slots.get(roles_in(state).halves.get(name, ""))
    if half is None:
        return state.slots[name]

    def decode(tree: trees.Tree, half: object) -> Any:
        stored = trees.flatten_like(state.params, tree, name)
        halves = trees.flatten_like(state.params, half, name)
        return trees.structure(state.params).unflatten(list(map(_decode_leaf, stored, halves)))

    with meshes.internal_transfers():
        both = placement.move_to_devices((state.slots[name], half))
        return meshes.call_on_auto_axes(
            decode, *both, specs_of=meshes.shard_like(state.slots[name])
        )


def master_params(state: TrainState) -> trees.Params:
    """Return the parameters in full precision, from masters or the remainders of `compact`."""
    roles = roles_in(state)
    treedef = trees.structure(state.params)
    leaves = placement.move_to_devices(jax.tree.leaves(state.params))
    for name in roles.names_with(Role.MASTER, Role.REMAINDER):
        is_remainder_of_slot = name in roles.halves.values()
        if is_remainder_of_slot or name not in state.slots:
            continue
        values = treedef.flatten_up_to(placement.move_to_devices(state.slots[name]))
        for i, value in enumerate(values):
            if value is None:
                continue
            if roles[name] is Role.MASTER:
                leaves[i] = value
            else:
                leaves[i] = _decode_leaf(leaves[i], value)
    return treedef.unflatten(leaves)


def _decode_leaf(stored: object, half: object) -> Any:
    if placement.is_shape(stored):
        return jax.eval_shape(decode_leaf, stored, half)
    return decode_leaf(stored, half)


def has_one_value(
    name: str, tree: trees.Tree, params: trees.Params, roles: Roles = NO_ROLES
) -> bool:
    """Whether a slot is one value for all parameters, such as `embed/start_step`.

    Without a role the shape decides, or the dtype if it is ambiguous.
    """
    if name in roles:
        return roles.has_one_value(name)
    if not jax.tree_util.all_leaves([tree]):
        return False
    if not jax.tree_util.all_leaves([params]):
        return True
    # If params is a single leaf, per-parameter slots are single leaves, too; only steps are
    # integers.
    return not np.ndim(tree) and bool(np.issubdtype(getattr(tree, "dtype", np.float32), np.integer))


def owners(name: str, tree: trees.Tree, params: trees.Params, roles: Roles) -> list[int | None]:
    """Return, for each leaf of a slot, the index of its parameter, or None."""
    unowned: list[int | None] = [None] * len(jax.tree.leaves(tree))
    # Variables of the model_state may have the structure of the parameters by accident.
    if is_model_state(name) or has_one_value(name, tree, params, roles):
        return unowned
    try:
        subtrees: list[Any] = trees.structure(params).flatten_up_to(tree)
    except (ValueError, TypeError):
        return unowned
    parameters: list[int | None] = []
    for index, subtree in enumerate(subtrees):
        parameters += [index] * len(jax.tree.leaves(subtree))
    return parameters


def as_average_names(use_averages: object) -> tuple[str, ...] | None:
    if isinstance(use_averages, bool | np.bool_):
        return (AVERAGE_SLOT,) if use_averages else None
    names = tuple(use_averages) if isinstance(use_averages, list | tuple) else (use_averages,)
    if not names or not all(isinstance(entry, str) and entry for entry in names):
        raise TypeError(
            f"use_averages={format_value(use_averages)}: must be True or False, "
            f"the name of a slot of averages, or a list of names, got {describe_type(use_averages)}"
        )
    return names


def params_from_slots(state: TrainState, slots: Sequence[str]) -> trees.Params:
    """Return the leaves of slots in the parameters' dtypes, or parameters where these have None."""
    values_of: dict[str, list[Any]] = {}
    for slot in slots:
        values_of[slot] = trees.flatten_like(
            state.params, slot_values(state, slot), f"slot {slot!r}"
        )
    leaves, treedef = trees.flatten(state.params)
    for i, p in enumerate(leaves):
        with_leaf = [slot for slot, values in values_of.items() if values[i] is not None]
        if len(with_leaf) > 1:
            path = trees.quote_path(trees.leaf_paths(state.params)[i])
            raise ValueError(
                f"name={list(slots)}: the slots {with_leaf} all have the leaf {path}; "
                "give one of them"
            )
        if with_leaf:
            value = placement.move_to_devices(values_of[with_leaf[0]][i])
            leaves[i] = value.astype(jnp.result_type(p))
    return treedef.unflatten(leaves)


def find_averages(state: TrainState, name: str | Sequence[str]) -> list[str]:
    """Return the full names of the averages that one or several names refer to.

    Raises:
        ValueError: A name does not refer to exactly one average.
    """
    names = (name,) if isinstance(name, str) or not isinstance(name, Sequence) else name
    slots: dict[str, None] = {}
    for entry in names:
        slots[choose_average(entry, averages_in(state, entry), "name", "the state")] = None
    return list(slots)


def averages_in(state: TrainState, name: str) -> list[str]:
    """Return the slots that are averages of the parameters.

    In a state made by hand, whose slots have no roles, these are the slots of this name. A slot
    that only begins as a copy of the parameters, such as the initial parameters that Prodigy keeps,
    is not an average.
    """
    roles = roles_in(as_state(state))
    slots = state.slots if isinstance(state.slots, dict) else {}
    if roles:
        averages = [slot for slot in roles.averages if slot in slots]
    else:
        averages = [slot for slot in slots if has_name(slot, name)]
    return sorted(slot for slot in averages if trees.is_like(state.params, slots[slot]))


def has_name(slot: str, name: str) -> bool:
    """Whether a slot has a name, in full or without scopes and labels."""
    return slot == name or slot.endswith(f"/{name}")


_KEEP_AVERAGES = (
    "jstep.with_moving_average(optimizer, ema) keeps averages, "
    "and a custom optimizer declares its own by init.averages. The weights of schedule-free "
    "optimizers are jstep.schedule_free_params(state), those of lookahead jstep.slow_params(state)"
)


def choose_average(name: str, averages: Sequence[str], argument: str, owner: str) -> str:
    """Return the full name of the average that a name refers to, under any scopes and labels.

    The default name refers to the only average, whatever its name.

    Args:
        averages: The averages of the owner, such as "the state".
        argument: The name of the argument that the name was given for.
    """
    if name in averages:
        return name
    matches = [slot for slot in averages if has_name(slot, name)]
    if not matches and name == AVERAGE_SLOT and len(averages) == 1:
        return averages[0]
    if not averages:
        raise ValueError(
            f"{argument}={name!r}: {owner} has no averages of the parameters. {_KEEP_AVERAGES}"
        )
    if not matches:
        raise ValueError(
            f"{argument}={name!r}: must be the name of an average; {owner} has {sorted(averages)}. "
            f"{_KEEP_AVERAGES}"
        )
    if len(matches) > 1:
        raise ValueError(
            f"{argument}={name!r}: {owner} has several such slots, {sorted(matches)}; "
            "give a full name"
        )
    return matches[0]


def find_slot(state: TrainState, name: str, hint: str, belongs: Callable[[str], bool]) -> str:
    """Return the full name of the only matching slot that belongs, under any scopes and labels."""
    as_state(state)
    slots = state.slots if isinstance(state.slots, dict) else {}
    belonging = [
        slot for slot in slots if belongs(slot) and trees.is_like(state.params, slots[slot])
    ]
    matches = [slot for slot in belonging if has_name(slot, name)]
    if name in matches:
        return name
    if len(matches) > 1:
        raise ValueError(
            f"name={name!r}: the state has several such slots, {sorted(matches)}; give a full name"
        )
    if not matches:
        problem = f"the state has no such slot{trees.suggest_names(str(name), belonging)}"
        if belonging:
            problem = f"{problem}; it has {sorted(belonging)}"
        raise ValueError(f"name={name!r}: {problem}. {hint}")
    return matches[0]
