"""Slots of few of the parameters, stored without a None for each of the others.

A slot has the structure of the parameters, with None where it has no value. The slots of a
partition with many labels consist almost entirely of None, and JAX visits all labels × leaves of
them at each step, when it flattens the state. A `TrainState` therefore stores such a slot as nested
dicts of the leaves that it has. Their paths and order are those of the whole slot, so that
checkpoints and sharding rules do not differ. `TrainState.slots` has all slots with all their None.
"""

import collections
import dataclasses
import weakref
from typing import Any

import jax

from jstep.core.trees import Params, Slots, is_array, is_none

_PACKINGS: weakref.WeakValueDictionary[Any, "Packing"] = weakref.WeakValueDictionary()
MIN_ABSENT = 8
"""The number of None above which a slot is packed: a few cost less than the dicts."""


@dataclasses.dataclass(frozen=True)
class _SlotLeaves:
    """The nested dicts of a packed slot, and the indices of its leaves among the parameters."""

    treedef: Any
    indices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """How the slots of a state are packed, which depends on their structure alone.

    It is part of the structure of a state, and equal only to itself: JAX compares structures at
    each call of a compiled step, and a comparison of all its parts would take longer than the step.
    `pack` returns one object for all states that are packed alike.
    """

    params: Any
    slots: dict[str, _SlotLeaves]

    def unpack(self, stored: Slots) -> Slots:
        """Return the slots with the structure of the parameters."""
        slots = dict(stored)
        for name, leaves_of_slot in self.slots.items():
            slots[name] = self._unpack_slot(leaves_of_slot, stored[name])
        return slots

    def _unpack_slot(self, slot: _SlotLeaves, tree: Any) -> Any:
        leaves: list[Any] = [None] * self.params.num_leaves
        try:
            values = slot.treedef.flatten_up_to(tree)
        except (ValueError, TypeError):
            return tree  # a prefix, such as `in_axes` of vmap
        for index, value in zip(slot.indices, values, strict=True):
            leaves[index] = value
        return self.params.unflatten(leaves)

    def pack_prefix(self, slots: Any) -> Any:
        """Return slots as a state of this packing stores them, or None if they are not a prefix.

        In a prefix, a leaf stands for all leaves below it, such as one sharding for a whole slot,
        or for all slots.
        """
        if type(slots) is not dict:
            return slots
        if not self.slots.keys() <= slots.keys():
            return None
        stored = dict(slots)
        for name, leaves_of_slot in self.slots.items():
            tree = slots[name]
            if tree is None or jax.tree_util.all_leaves([tree]):
                continue
            try:
                values = self._broadcast(tree)
            except (ValueError, TypeError):  # of another structure
                return None
            slot_values = [values.pop(index) for index in leaves_of_slot.indices]
            if any(map(is_array, values.values())):
                return None  # a slot of other parameters
            stored[name] = leaves_of_slot.treedef.unflatten(slot_values)
        return stored

    def _broadcast(self, prefix: Any) -> dict[int, Any]:
        """Return the value of each parameter, by its index."""
        whole = self.params.unflatten(range(self.params.num_leaves))
        values = jax.tree.broadcast(prefix, whole, is_leaf=is_none)
        return dict(enumerate(self.params.flatten_up_to(values)))


def pack(params: Params, slots: Slots) -> tuple[Slots, Packing | None]:
    """Return slots as a state stores them; None if all are stored as they are."""
    treedef = jax.tree.structure(params)
    found: dict[str, _SlotLeaves] = {}
    stored = dict(slots)
    keys_of_leaves: list[Any] = []  # made once for all slots, and only if one is packed
    for name, tree in slots.items():
        values = _sparse_values(treedef, tree)
        if values is None:
            continue
        indices = tuple(index for index, value in enumerate(values) if value is not None)
        if not keys_of_leaves:
            keys_of_leaves = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(params)]
        nested = _nest(keys_of_leaves, indices)
        if nested is None:
            continue
        slot = _SlotLeaves(jax.tree.structure(nested), tuple(jax.tree.leaves(nested)))
        found[name] = slot
        stored[name] = slot.treedef.unflatten([values[index] for index in slot.indices])
    if not found:
        return stored, None
    key = (treedef, tuple((name, slot.indices) for name, slot in sorted(found.items())))
    packing = _PACKINGS.get(key)
    if packing is None:
        packing = _PACKINGS.setdefault(key, Packing(treedef, found))
    return stored, packing


def _sparse_values(params: Any, tree: Any) -> list[Any] | None:
    """Return a value or None for each parameter if nearly all are None."""
    structure: Any = jax.tree.structure(tree)
    absent = params.num_leaves - structure.num_leaves
    if absent < MIN_ABSENT or absent < structure.num_leaves:
        return None
    if jax.tree_util.treedef_is_leaf(structure):
        return None
    try:
        values: list[Any] = params.flatten_up_to(tree)
    except (ValueError, TypeError):  # of another structure
        return None
    return values


def _nest(keys_of_leaves: list[Any], indices: tuple[int, ...]) -> Any:
    """Return nested dicts of the indices at the paths of their leaves, in this order.

    Return None if that is impossible.
    """
    # JAX sorts the keys of a dict, which may not be the order of the fields of a class.
    for kind in (dict, collections.OrderedDict):
        root: Any = kind()
        for index in indices:
            *parents, last = map(_key_of, keys_of_leaves[index])
            node = root
            for key in parents:
                node = node.setdefault(key, kind())
            if not isinstance(node, kind) or last in node:
                return None  # a user's class that gives two children one key
            node[last] = index
        try:
            leaves = jax.tree.leaves(root)
        except ValueError:  # keys that cannot be sorted
            continue
        if leaves == list(indices):
            return root
    return None


def _key_of(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)
