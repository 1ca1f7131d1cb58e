"""Parameters that a slot holds, such as averages: finding the slot by its name, and its leaves in their dtypes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import kind
from jstep.core.placement import on_devices
from jstep.core.trees import Params
from jstep.state.slots import values_of
from jstep.state.train_state import TrainState


def params_from_slot(state: TrainState, name: str | Sequence[str], hint: str) -> Params:
    """The leaves of a slot in the dtypes of the parameters; parameters where the slot has None.

    Args:
        state: The state.
        name: The name of the slot, with or without its prefix, or names of slots with different leaves.
        hint: How such a slot is created, for the error.
    """
    names = (name,) if isinstance(name, str) or not isinstance(name, Sequence) else name
    slots = dict.fromkeys(find_slot(state, one, hint) for one in names)
    found = {slot: trees.flatten_like(state.params, values_of(state, slot), f"slot {slot!r}") for slot in slots}
    leaves, treedef = trees.flatten(state.params)
    new: list[Any] = []
    for i, p in enumerate(leaves):
        having = [slot for slot, values in found.items() if values[i] is not None]
        if len(having) > 1:
            path = trees.quoted(trees.paths_of(state.params)[i])
            raise ValueError(f"name={list(names)!r}: the slots {having} all have the leaf {path}; give one of them")
        new.append(on_devices(found[having[0]][i]).astype(jnp.result_type(p)) if having else p)
    return treedef.unflatten(new)


def find_slot(state: TrainState, name: str, hint: str, belongs: Callable[[str], bool] = lambda slot: True) -> str:
    """The full name of the only slot with a given name, under any scopes and labels.

    Args:
        state: The state.
        name: The name, with or without its prefixes.
        hint: How such a slot is created, for the error.
        belongs: A predicate on the slot's full name; slots that fail it are ignored.

    Raises:
        TypeError: The state is not a TrainState.
        ValueError: There is no such slot, or several.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state={state!r:.100}: must be a TrainState, got {kind(state)}")
    slots = state.slots if isinstance(state.slots, dict) else {}
    found = [slot for slot in slots if slot == name or slot.endswith(f"/{name}")]
    found = [slot for slot in found if trees.is_like(state.params, slots[slot]) and belongs(slot)]
    if name in found:
        return name
    if len(found) > 1:
        raise ValueError(f"name={name!r}: the state has several such slots, {sorted(found)}; give the full name of one")
    if not found:
        raise ValueError(
            f"name={name!r}: the state has no such slot{trees.nearest(str(name), slots)}; it has {sorted(slots)}. "
            f"{hint}"
        )
    return found[0]
