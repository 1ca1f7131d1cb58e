"""Leaves that `Saver(leave_out=…)` does not save, and their fingerprints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep.checkpoint.manifest import LeftOut, Recorded
from jstep.checkpoint.slots import PARAMS, SLOTS, numbers_of_leaves
from jstep.core.selection import VarList, resolve
from jstep.core.slot_roles import roles_in
from jstep.state.fingerprints import as_text, leaf_key, stacked, words_of
from jstep.state.slots import owners


def left_out_indices(state: Any, leave_out: VarList) -> set[int]:
    """Return the indices, among the leaves of a state, of the parameters that are left out and of their slots.

    Raises:
        TypeError: `leave_out` has none of the forms of `var_list`.
        ValueError: An entry matches no parameter, or the state has no params.
    """
    if leave_out is None:
        return set()
    params, slots = _field(state, PARAMS), _field(state, SLOTS)
    if params is None:
        raise ValueError(
            f"leave_out: selects among the params of a state, but this {type(state).__name__} has none; save a "
            "TrainState, or a dict with 'params'"
        )
    chosen = resolve(params, leave_out, "leave_out")
    roles, numbers = roles_in(state), numbers_of_leaves(state)
    left_out = {i for i, is_chosen in zip(jax.tree.leaves(_field(numbers, PARAMS)), chosen, strict=True) if is_chosen}
    for name, tree in slots.items() if isinstance(slots, Mapping) else ():
        places = owners(str(name), tree, params, roles)
        of_slot = zip(jax.tree.leaves(_field(numbers, SLOTS)[name]), places, strict=True)
        left_out |= {i for i, place in of_slot if place is not None and chosen[place]}
    return left_out


def _field(state: Any, name: str) -> Any:
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def started_slots(named: Sequence[tuple[Recorded, Any]]) -> Callable[[], tuple[LeftOut, ...]]:
    """Start computing the fingerprints of leaves on their devices; the returned function waits for them."""
    keys = [leaf_key(leaf.path, leaf.dtype, leaf.shape) for leaf, _ in named]
    begun = stacked([value for _, value in named], np.stack(keys)) if keys else []

    def records() -> tuple[LeftOut, ...]:
        return tuple(
            LeftOut(leaf.path, leaf.keys, leaf.shape, leaf.dtype, as_text(words))
            for (leaf, _), words in zip(named, words_of(begun), strict=True)
        )

    return records


def changed_leaves(pairs: Sequence[tuple[LeftOut, Any]]) -> list[LeftOut]:
    """Return those left-out leaves whose values in a target differ from the fingerprint."""
    return [leaf for (leaf, _), now in zip(pairs, started_slots(pairs)(), strict=True) if now != leaf]
