"""Applying updates: matching gradients and slots to parameters, writing in place, slots in host memory."""

import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import kind
from jstep.core.exceptions import setting
from jstep.core.indexed_slices import IndexedSlices, RowsInOrder, combined
from jstep.core.jaxprs import Subprogram, body_of, evaluate, is_elementwise, on_slices
from jstep.core.matching import require_slots
from jstep.core.meshes import on_any_mesh, parts_along
from jstep.core.on_cpus import in_order
from jstep.core.placement import is_on_host, layout_of, on_devices, shardings_of, to_host
from jstep.core.trees import Array, Params, Slots, Updates
from jstep.optimizers.leaf_values import own_leaves
from jstep.state.train_state import TrainState

# Adding updates to parameters.


@on_any_mesh("params")
def apply_updates(params: Params, updates: Updates) -> Params:
    """Add updates to parameters, leaf by leaf.

    Args:
        params: Any tree.
        updates: A tree of the same structure; a leaf is an array, an `IndexedSlices` whose rows are added, or None.

    Returns:
        New parameters. Sums are computed in at least float32 and rounded to the parameter's dtype.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> jstep.apply_updates({"w": jnp.zeros(2), "b": jnp.ones(1)}, {"w": jnp.ones(2), "b": None})
        {'b': Array([1.], dtype=float32), 'w': Array([1., 1.], dtype=float32)}
    """
    leaves, treedef = trees.flatten(params)
    found = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
    pairs = zip(on_devices(leaves), found, strict=True)
    return treedef.unflatten([leaf if trees.is_none(update) else add(leaf, update) for leaf, update in pairs])


def apply_in_order(params: Params, updates: Updates, slots: Slots, names: Collection[str]) -> tuple[Params, Slots]:
    """Add updates to parameters, and fix the order in which XLA overwrites the parameter and the slots of a leaf.

    A slot that other arrays are computed from must not be overwritten before them, and XLA's CPU backend copies it
    unless a data dependency fixes the order: the parameter first, then the slots in the order of the dict. So rules
    need no order of their own: an optimizer declares a slot after those that are computed from its old value, and that
    more than its new value is (`Slot(in_order=True)`). Other leaves need no order.

    Args:
        params: The parameters.
        updates: A tree of the same structure, as for `apply_updates`.
        slots: The new slots. Only leaves with the shape of their parameter are ordered.
        names: The slots that need an order, and with them all others of their leaves.
    """
    leaves, treedef = trees.flatten(params)
    found = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
    ordered = {name: treedef.flatten_up_to(tree) for name, tree in slots.items() if trees.is_like(params, tree)}
    if not any(map(trees.is_traced, leaves)):  # outside of a program the order is fixed
        return apply_updates(params, updates), slots
    new = list(leaves)
    for i, (leaf, update) in enumerate(zip(leaves, found, strict=True)):
        if trees.is_none(update):
            continue
        new[i] = jax.lax.add(leaf, update) if _is_sum(leaf, update) else add(leaf, update)
        own = {} if is_update(update) else {name: tree for name, tree in ordered.items() if _is_alike(tree[i], leaf)}
        if any(name in names for name in own):
            for tree, value in zip(own.values(), in_order(new[i], *(tree[i] for tree in own.values())), strict=True):
                tree[i] = value
    return treedef.unflatten(new), slots | {name: treedef.unflatten(tree) for name, tree in ordered.items()}


def _is_alike(slot: Any, leaf: Any) -> bool:
    fits = trees.is_array(slot) and slot.shape == np.shape(leaf)
    return fits and trees.is_floating(slot.dtype) and not is_on_host(slot)


def _is_sum(leaf: Any, update: Any) -> bool:
    """Whether `add` is one operation, which is traced, lowered and compiled faster than a call of a function."""
    if not (trees.is_array(leaf) and trees.is_array(update)):
        return False
    of_leaf, of_update = jax.typeof(leaf), jax.typeof(update)
    same = (of_leaf.shape, of_leaf.dtype, of_leaf.weak_type) == (of_update.shape, of_update.dtype, False)
    return same and of_leaf.dtype == trees.compute_dtype(of_leaf.dtype)


@jax.jit
def add(leaf: Array, update: Any) -> Array:
    """Add an update, of any kind, to a parameter."""
    if isinstance(update, Projected):
        return update.value
    dtype = trees.compute_dtype(leaf.dtype)
    if not isinstance(update, IndexedSlices):
        return (leaf.astype(dtype) + update.astype(dtype)).astype(leaf.dtype)
    if isinstance(update, RowsInOrder):
        return jnp.where(update.named, add(leaf, update.values), leaf)
    if leaf.dtype == dtype:
        return leaf.at[update.indices].add(update.values.astype(dtype), mode="drop")
    rows = combined(update)
    old = leaf.at[rows.indices].get(mode="clip").astype(dtype)
    return leaf.at[rows.indices].set((old + rows.values).astype(leaf.dtype), mode="drop")


# Optimizer updates with slots in host memory: loops, one for each leaf, transfer the slots.
#
# XLA would load all slots at once otherwise: it moves transfers across barriers, but not out of loops. Small leaves are
# loaded together before the update, large ones slice by slice if their rule is elementwise.
#
# Slots in host memory are arrays of another type, with which JAX computes nothing. The updates of this package read
# them by `per_leaf` or pass them on, and are marked with `loads_slots`. Any other update, such as that of a custom
# optimizer, gets its slots in device memory: correct, but all at once.

PARTS = 16
"""At most 1/PARTS of the offloaded bytes should be on the devices at once, loaded or to be sent back."""
ROWS = {1: 4096, 2: 32}
"""Number of dimensions → the row multiple of a slice: whole tiles of a TPU's memory, for every dtype."""

_Update = TypeVar("_Update", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Transfers:
    """The transfers of an update.

    Attributes:
        limit: The number of bytes that should be on the devices at once.
        turns: 1, or 0 if the update is skipped. XLA must not know it: it inlines loops of one iteration.
        is_certain: Whether no condition can skip the update.
    """

    limit: int
    turns: Array
    is_certain: bool = True


TRANSFERS: contextvars.ContextVar[Transfers | None] = contextvars.ContextVar("jstep_transfers", default=None)
"""How slots in host memory are loaded, leaf by leaf; None if all are loaded at once."""


def only_if(condition: Array) -> AbstractContextManager[Transfers | None]:
    """Update slots in host memory, in a context, only if a condition is true; otherwise nothing is transferred."""
    known = TRANSFERS.get()
    if known is not None:
        known = Transfers(known.limit, jnp.where(condition, known.turns, 0), is_certain=False)
    return setting(TRANSFERS, known)


def is_worth_loops(state: Any) -> bool:
    """Whether a traced state has arrays in host memory, and its compiler is known to support loops of transfers.

    On a CPU, device memory is host memory. The GPU compiler is untested.
    """
    leaves = jax.tree.leaves(state)
    if not (any(map(trees.is_traced, leaves)) and any(map(is_on_host, leaves))):
        return False
    known = shardings_of(state)
    platform = jax.default_backend() if known is None else next(iter(known[0].device_set)).platform
    return bool(platform == "tpu")


def with_small_ones_loaded(state: TrainState) -> tuple[Slots, int | None]:
    """Load the slots that need no loop, and return all slots and the limit in bytes for the others, None without loops.

    These are the slots that are not trees like params, and those of the smallest parameters.
    """
    params, slots = state.params, state.slots
    if not is_worth_loops(state):
        return on_devices(slots), None
    treedef = trees.structure(params)
    leaves = {name: treedef.flatten_up_to(tree) for name, tree in slots.items() if trees.is_like(params, tree)}
    sizes = [sum(map(_host_bytes, ones)) for ones in zip(*leaves.values(), strict=True)]
    limit = sum(sizes) // PARTS
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    totals = itertools.accumulate(sizes[i] for i in order)
    small = {i for i, total in zip(order, totals, strict=True) if total <= limit}

    def loaded(name: str, tree: Any) -> Any:
        if name not in leaves:
            return on_devices(tree)
        return treedef.unflatten([on_devices(leaf) if i in small else leaf for i, leaf in enumerate(leaves[name])])

    return {name: loaded(name, tree) for name, tree in slots.items()}, limit


def loads_slots(update: _Update) -> _Update:
    """Decorator of the `update` of an optimizer that accepts slots and parameters in host memory."""
    update.loads_slots = True  # type: ignore[attr-defined]
    return update


def with_slots_loaded(update: Callable[[Slots, Any], tuple[Any, Slots]], slots: Slots, params: Any) -> Any:
    """Call `update(slots, params) -> (result, new slots)` with all slots on the devices, and send the new ones back."""
    if not any(map(is_on_host, jax.tree.leaves((slots, params)))):
        return update(slots, params)
    loaded = on_devices(slots)
    result, new = update(loaded, on_devices(params))
    known = TRANSFERS.get()

    def back(before: Any, old: Any, after: Any) -> Any:
        if not is_on_host(before):
            return after
        return to_host(after if known is None or known.is_certain else jnp.where(known.turns > 0, after, old))

    def of_slot(name: str, tree: Any) -> Any:
        fits = name in slots and trees.structure(tree) == trees.structure(slots[name])
        return jax.tree.map(back, slots[name], loaded[name], tree) if fits else tree

    return result, {name: of_slot(name, tree) for name, tree in new.items()}


def per_leaf(rule: Callable[..., tuple[Any, Slots]], path: str, slots: Slots, *args: Any) -> tuple[Any, Slots]:
    """Compute `rule(slots, *args) -> (result, new slots)` for one leaf, in a loop if some arrays are in host memory.

    Args:
        rule: A function of arrays on the devices. It may return fewer slots; these keep shape and dtype.
        path: The path of the leaf.
        slots: Name → the leaf of the slot, or None.
        *args: Other trees of arrays.

    Returns:
        The result, on the devices, and the new slots, in the memory of the old ones. If the update is skipped, slots in
        host memory keep their values, and the result is unspecified.
    """
    known = TRANSFERS.get()
    if known is None or not any(map(is_on_host, jax.tree.leaves((slots, args)))):
        return with_slots_loaded(lambda slots, args: rule(slots, *args), slots, args)
    closed, made = jax.make_jaxpr(rule, return_shape=True)(*jax.eval_shape(on_devices, (slots, *args)))
    body, given = body_of(closed), jax.tree.leaves((slots, *args))
    places = _replaced(made, slots, args)
    pairs = zip(closed.out_avals, places, strict=True)
    start = [jnp.zeros(x.shape, x.dtype) if i is None else given[i] for x, i in pairs]
    count = _number_of_slices(body, path, -(-sum(map(_host_bytes, given)) // max(known.limit, 1)))
    rows = start[0].shape[0] // count if count > 1 else 0

    def turn(i: Array, carry: list[Any]) -> list[Any]:
        # The barriers hide from XLA that values are the same in all iterations: otherwise it would load a parameter in
        # host memory, which the loop only reads, before the loop.
        if rows and any(is_on_host(x) for k, x in enumerate(given) if k not in places):
            first, i = jax.lax.optimization_barrier((carry[0], i))
            carry = [first, *carry[1:]]
        current = dict(zip(places, carry, strict=True))
        values = [current.get(k, x) for k, x in enumerate(given)]
        if rows:
            parts = [jax.lax.dynamic_slice_in_dim(x, i * rows, rows, 0) if jnp.ndim(x) else x for x in values]
            new = on_slices(body, on_devices(parts), (rows, *start[0].shape[1:]))
        else:
            new = evaluate(body, on_devices(jax.lax.optimization_barrier((values, i))[0]))
        new = [to_host(x) if is_on_host(old) else x for old, x in zip(start, new, strict=True)]
        if rows:
            pairs = zip(carry, new, strict=True)
            new = [jax.lax.dynamic_update_slice_in_dim(x, part, i * rows, 0) for x, part in pairs]
        return new

    turns = known.turns if not rows else count if known.is_certain else count * known.turns
    values = jax.lax.fori_loop(0, turns, turn, start)
    found: tuple[Any, Slots] = jax.tree.unflatten(jax.tree.structure(made), values)
    return found


def on_leaves(params: Params, slots: Mapping[str, list[Any]], calls: Iterable[tuple[Any, ...] | None]) -> list[Any]:
    """Compute rules leaf by leaf, each as `per_leaf` does, and put the new slots in the place of the old ones.

    Args:
        params: The parameters.
        slots: Name → the leaves of the slot, in order; they are replaced.
        calls: For each leaf, in order: `(rule, *args)`, or None for a leaf that stays as it is.

    Returns:
        The result of each leaf; None for a leaf that stays as it is.
    """
    results: list[Any] = [None] * len(jax.tree.leaves(params))
    for i, (path, call) in enumerate(zip(trees.paths_of(params), calls, strict=True)):
        if call is not None:
            rule, *args = call
            results[i], new = per_leaf(rule, path, {name: leaves[i] for name, leaves in slots.items()}, *args)
            for name, leaf in new.items():
                slots[name][i] = leaf
    return results


def _replaced(made: tuple[Any, Slots], slots: Slots, args: Any) -> list[int | None]:
    """Return the index of the array, among all in slots and args, that each array made by a rule replaces, or None.

    A slot replaces the old one. A result replaces an argument, such as the gradient, whose memory the loop then reuses.
    """
    own, others = jax.tree.unflatten(jax.tree.structure((slots, args)), range(len(jax.tree.leaves((slots, args)))))
    free = dict(zip(jax.tree.leaves(others), jax.tree.leaves(args), strict=True))
    places: list[int | None] = []
    for result in jax.tree.leaves(made[0]):
        alike = [i for i, x in free.items() if not is_on_host(x) and (x.shape, x.dtype) == (result.shape, result.dtype)]
        places.append(alike[0] if alike else None)
        free.pop(places[-1], None)
    return [*places, *jax.tree.leaves({name: own[name] for name, leaf in made[1].items() if leaf is not None})]


def _number_of_slices(body: Subprogram, path: str, at_least: int) -> int:
    """Return the number of slices along the first axis for a program; 1 if it cannot be computed in slices."""
    shapes = {atom.aval.shape for atom in body.jaxpr.outvars}
    layout = layout_of(path)
    if len(shapes) != 1 or shapes == {()} or layout is None:
        return 1
    shape: tuple[int, ...] = shapes.pop()
    is_split = len(layout.spec) > 0 and parts_along(layout.mesh, layout.spec[0]) > 1
    if is_split or not is_elementwise(body, shape):
        return 1
    multiple = ROWS.get(len(shape), 1)
    counts = [n for n in range(1, shape[0] + 1) if shape[0] % n == 0 and shape[0] // n % multiple == 0]
    return min((n for n in counts if n >= at_least), default=max(counts, default=1))


def _host_bytes(leaf: Any) -> int:
    return int(leaf.size) * int(leaf.dtype.itemsize) if is_on_host(leaf) else 0


# Match slots to their parameters.


def slot_leaves(held: Slots, name: str, params: Params, shape: Callable[[str, Any], Any] | None = None) -> list[Any]:
    """The leaves of a slot in the order of the leaves of params; None for a parameter without one.

    Args:
        held: The slots.
        name: The slot's name.
        params: The parameters.
        shape: `shape(path, leaf)`, the shape of the slot's leaf, or None if it has none; by default the parameter's.

    Raises:
        ValueError: There is no such slot, or it belongs to other parameters.
    """
    leaves = trees.flatten_like(params, require_slots([name], held)[name], f"slot {name!r}")
    seen = own_leaves(params) if shape else [("", None)] * len(leaves)
    for i, (slot, leaf) in enumerate(zip(leaves, jax.tree.leaves(params), strict=True)):
        want = (np.shape(leaf) if shape is None else shape(*seen[i])) if trees.is_trainable(leaf) else None
        have = None if slot is None else np.shape(slot)
        if have != (None if want is None else tuple(want)):
            raise ValueError(
                f"slot {name!r} has {'nothing' if have is None else f'shape {have}'} at "
                f"{trees.quoted(trees.paths_of(params)[i])}, where the parameter has shape {np.shape(leaf)} and dtype "
                f"{jnp.result_type(leaf)}{'' if shape is None else f' and the slot should have {want}'}. Slots belong "
                "to the params they were created for: create them with TrainState.create(params, optimizer)."
            )
    return leaves


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Projected:
    """A leaf of updates that replaces the parameter by `value`, whose difference from the parameter may be rounded.

    Only wrappers that pass updates on see it, by `call_update(…, exact=True)`; others see the difference.

    Attributes:
        value: The new value of the parameter, with its dtype.
    """

    value: Any


def is_update(x: Any) -> bool:
    """Whether a node of a tree of updates is an `IndexedSlices` or a `Projected`, for `is_leaf`."""
    return isinstance(x, IndexedSlices | Projected)


def moves(params: Params, updates: Updates) -> Updates:
    """Return the updates with the difference from the parameter for each `Projected`."""
    if not any(isinstance(u, Projected) for u in jax.tree.leaves(updates, is_leaf=is_update)):
        return updates
    found = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
    leaves, treedef = trees.flatten(on_devices(params))

    def move(p: Any, u: Any) -> Any:
        if not isinstance(u, Projected):
            return u
        dtype = trees.compute_dtype(jnp.result_type(p))
        return u.value.astype(dtype) - jnp.asarray(p).astype(dtype)

    return treedef.unflatten(map(move, leaves, found))
