"""Leaves that `Saver(leave_out=…)` does not save, and their fingerprints."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep.checkpoint.format.manifest import Leaf, LeftOut
from jstep.core import trees
from jstep.core.meshes import internal_transfers
from jstep.core.selection import VarList, resolve
from jstep.core.slot_roles import roles_in
from jstep.state.fingerprint_log import leaf_key
from jstep.state.fingerprints import as_text, stacked
from jstep.state.train_state import owners

ARGUMENT = "leave_out"
_PARAMS, _SLOTS = "params", "slots"


def left_out_indices(state: Any, leave_out: VarList) -> set[int]:
    """Return the indices, among the leaves of a state, of the parameters that are left out and of their slots.

    Raises:
        TypeError: `leave_out` has none of the forms of `var_list`.
        ValueError: An entry matches no parameter, or the state has no params.
    """
    if leave_out is None:
        return set()
    params, slots = _field(state, _PARAMS), _field(state, _SLOTS)
    if params is None:
        raise ValueError(
            f"{ARGUMENT}: selects among the params of a state, but this {type(state).__name__} has none; save a "
            "TrainState, or a dict with 'params'"
        )
    chosen = resolve(params, leave_out, ARGUMENT)
    roles = roles_in(state)
    of_slots = {
        str(name): iter([place is not None and chosen[place] for place in owners(str(name), tree, params, roles)])
        for name, tree in (slots.items() if isinstance(slots, Mapping) else ())
    }
    of_params = iter(chosen)

    def is_left_out(keys: Sequence[Any]) -> bool:
        first, *rest = (trees.path_str((key,)) for key in keys)
        if first == _PARAMS:
            return next(of_params)
        return bool(first == _SLOTS and rest and rest[0] in of_slots and next(of_slots[rest[0]]))

    # The leaves of a subtree come in the same order as in the whole tree.
    return {i for i, (keys, _) in enumerate(jax.tree_util.tree_leaves_with_path(state)) if is_left_out(keys)}


def _field(state: Any, name: str) -> Any:
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def started(named: Sequence[tuple[Leaf, Any]]) -> Callable[[], tuple[LeftOut, ...]]:
    """Start computing the fingerprints of leaves on their devices; the returned function waits for them."""
    begun = _started([(leaf.path, leaf.dtype, leaf.shape) for leaf, _ in named], [value for _, value in named])

    def records() -> tuple[LeftOut, ...]:
        texts = _texts(begun, len(named))
        return tuple(
            LeftOut(leaf.path, leaf.keys, leaf.shape, leaf.dtype, text)
            for (leaf, _), text in zip(named, texts, strict=True)
        )

    return records


def changed(pairs: Iterable[tuple[LeftOut, Any]]) -> list[LeftOut]:
    """Return those left-out leaves whose values in a target differ from the fingerprint."""
    found = list(pairs)
    begun = _started([(leaf.path, leaf.dtype, leaf.shape) for leaf, _ in found], [value for _, value in found])
    texts = _texts(begun, len(found))
    return [leaf for (leaf, _), text in zip(found, texts, strict=True) if text != leaf.fingerprint]


def _started(kinds: Sequence[tuple[str, str, tuple[int, ...]]], values: Sequence[Any]) -> list[tuple[list[int], Any]]:
    return stacked(values, np.stack([leaf_key(*one) for one in kinds])) if kinds else []


def _texts(begun: Sequence[tuple[list[int], Any]], count: int) -> list[str]:
    texts = [""] * count
    with internal_transfers():
        for numbers, pairs in begun:
            for number, pair in zip(numbers, np.asarray(pairs), strict=True):
                texts[number] = as_text(pair)
    return texts
