"""From the rule for one leaf to an optimizer: all that optimizers share.

Here, once for all: walking the tree, None gradients, `IndexedSlices`, dtypes of slots and of arithmetic,
hyperparameters at a step, and the age of the slots.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.indexed_slices import IndexedSlices, check, combined, is_slices, within
from jstep.core.types import Array, Optimizer, Params, Slots, Step, Updates
from jstep.optimizers.hyper import report, value_at, values_at
from jstep.state import START_STEP

Hyper = dict[str, Any]
Rule = Callable[[Array, Array, dict[str, Array], Hyper], tuple[Array, dict[str, Array]]]
"""`rule(gradient, parameter, slots, hyper) -> (update, slots)`, elementwise, all of one floating dtype."""

NO_GRADIENTS = "No gradients provided for any variable"


def leafwise(
    rule: Rule,
    *,
    slots: Mapping[str, Any],
    hyper: Mapping[str, Any],
    prepare: Callable[[Hyper, Array], Hyper] | None = None,
    sparse: bool = True,
) -> Optimizer:
    """An optimizer that treats each leaf by the same rule.

    Args:
        rule: The update of one leaf.
        slots: Name of each slot → its initial value.
        hyper: Name of each hyperparameter → a checked number, array or schedule.
        prepare: `prepare(hyper, age) -> hyper` computes once what all leaves share. An optimizer with it
            keeps the scalar slot `start_step`, and age = step + 1 − start_step.
        sparse: Whether the rule, applied to some rows of a table, leaves the other rows as they are. Where
            it does not, sparse gradients are made dense.
    """

    def init(params: Params, global_step: Step = 0) -> Slots:
        leaves, treedef = trees.flatten(params)
        fresh: Slots = {}
        for name, initial in slots.items():
            value = value_at(f"the initial value of slot {name!r}", initial, global_step)
            fresh[name] = treedef.unflatten(
                # full_like keeps the sharding of the parameter where it has one.
                [
                    jnp.full_like(leaf, value, dtype=trees.compute_dtype(jnp.result_type(leaf)))
                    if trees.is_trainable(leaf)
                    else None
                    for leaf in leaves
                ]
            )
        if prepare is not None:
            fresh[START_STEP] = jnp.array(global_step, dtype=trees.default_int(), copy=True)
        return fresh

    on_leaf = _shared_by_leaves_of_a_shape(rule, hyper, sparse=sparse)

    def update(updates: Updates, held: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        gradients = matched_gradients(updates, params)
        treedef = trees.structure(params)
        mine = {name: _slot_leaves(held, name, params) for name in slots}
        values = values_at(hyper, step)
        if prepare is not None:
            if START_STEP not in held:
                raise _missing_slot(START_STEP, held)
            values |= prepare(values, _age(step, held[START_STEP]))
        # Behind a barrier the scalars are computed once; without, XLA fuses a schedule into the kernel of each leaf.
        traced = jax.lax.optimization_barrier({n: value for n, value in values.items() if not isinstance(value, float)})
        new_updates: list[Any] = []
        for i, (gradient, leaf) in enumerate(zip(gradients, jax.tree.leaves(params), strict=True)):
            if gradient is None:
                new_updates.append(None)
                continue
            new_update, new_slots = on_leaf(gradient, leaf, {name: tree[i] for name, tree in mine.items()}, traced)
            new_updates.append(new_update)
            for name, value in new_slots.items():
                mine[name][i] = value
        new = {name: treedef.unflatten(leaves) for name, leaves in mine.items()}
        if prepare is not None:
            new[START_STEP] = held[START_STEP]
        return treedef.unflatten(new_updates), new

    return Optimizer(init, update, report(hyper))


def _shared_by_leaves_of_a_shape(rule: Rule, hyper: Mapping[str, Any], *, sparse: bool) -> Callable[..., Any]:
    """The rule with dtypes and rows taken care of, traced and lowered once for all leaves of one shape.

    The jit compiles nothing inside a step: it becomes one shared function that XLA inlines. Without it
    1000 leaves take four times as long to trace and lower.
    """
    constants = {name: value for name, value in hyper.items() if isinstance(value, float)}

    def on_leaf(gradient: Any, leaf: Array, slots: dict[str, Array], traced: Hyper) -> Any:
        dtype = trees.compute_dtype(leaf.dtype)
        # Python floats stay such: 1 − 0.999 is exact in double precision and off by 5e-5 in float32.
        values = constants | {name: value.astype(dtype) for name, value in traced.items()}
        if not isinstance(gradient, IndexedSlices):
            return rule(gradient.astype(dtype), leaf.astype(dtype), slots, values)
        if not sparse:
            return rule(gradient.to_dense().astype(dtype), leaf.astype(dtype), slots, values)
        rows = combined(gradient)
        # Rows past the end are computed from the last one, and dropped.
        old = {name: slot.at[rows.indices].get(mode="clip") for name, slot in slots.items()}
        at_rows = leaf.at[rows.indices].get(mode="clip").astype(dtype)
        update, new = rule(rows.values.astype(dtype), at_rows, old, values)
        # Indices are unique but for those past the end, so setting them is well-defined.
        kept = {name: slots[name].at[rows.indices].set(value, mode="drop") for name, value in new.items()}
        return within(IndexedSlices(update, rows.indices, gradient.dense_shape)), kept

    on_leaf.__name__ = getattr(rule, "__name__", "rule")
    return jax.jit(on_leaf)


def _age(step: Step, start_step: Array) -> Array:
    # A state whose step was set back has slots from the future; they count as new.
    step = jnp.asarray(step).astype(start_step.dtype)
    return jnp.maximum(step - start_step + 1, 1)


def ordered_after(x: Array, first: Array) -> Array:
    """X itself, from a kernel that XLA has to run after the one that makes `first`.

    Where two kernels read a slot that one of them overwrites, XLA copies the slot unless the other is known to
    run earlier; only data says so. The condition is never true, which LLVM sees and XLA does not: nothing more
    is read from memory.
    """
    return jnp.where((first > 0) & (first < 0), first.astype(x.dtype), x)


def bias_correction(beta: Any, age: Array) -> Array:
    """1 − beta^age, without the cancellation that the formula has for beta near 1."""
    real = trees.default_float()
    if isinstance(beta, float):
        log = jnp.asarray(np.log(beta) if beta > 0 else -np.inf, real)
    else:
        log = jnp.log(beta).astype(real)
    return -jnp.expm1(age.astype(real) * log)


def matched_gradients(updates: Updates, params: Params) -> list[Any]:
    """The gradients of the leaves of params, in order: arrays, `IndexedSlices` or None.

    Raises:
        TypeError: A gradient is not floating point, or is given for a leaf that cannot be trained.
        ValueError: Structure or shape differ from params, or there is no gradient at all.
    """
    found = trees.flatten_like(params, updates, "gradients", is_leaf=is_slices)
    leaves = jax.tree.leaves(params)
    gradients = [
        None if trees.is_none(gradient) else _checked_gradient(gradient, leaf, functools.partial(_path_at, params, i))
        for i, (gradient, leaf) in enumerate(zip(found, leaves, strict=True))
    ]
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            f"{NO_GRADIENTS}: {trees.paths_of(params)[:20]}. "
            "All gradients are None; does the loss depend on params, and does var_list leave any?"
        )
    return gradients


def _path_at(params: Params, i: int) -> str:
    return trees.paths_of(params)[i]


def _checked_gradient(gradient: Any, leaf: Any, path: Callable[[], str]) -> Any:
    if not trees.is_trainable(leaf):
        raise TypeError(
            f"gradients: a gradient for {trees.quoted(path())}, whose dtype {jnp.result_type(leaf)} cannot be trained; "
            "put None in its place"
        )
    if isinstance(gradient, IndexedSlices):
        check(gradient, path(), np.shape(leaf))
        dtype = jnp.result_type(gradient.values)
    else:
        if not (trees.is_array(gradient) or isinstance(gradient, float | int)):
            raise TypeError(
                f"gradients: at {trees.quoted(path())} stands a {type(gradient).__name__}, which is no array"
            )
        if not trees.is_array(gradient):
            gradient = jnp.asarray(gradient, jnp.result_type(leaf))
        dtype = gradient.dtype
        if gradient.shape != np.shape(leaf):
            raise ValueError(
                f"gradients: the gradient at {trees.quoted(path())} has shape {gradient.shape}, its parameter has "
                f"shape {np.shape(leaf)}"
            )
    if not trees.is_floating(dtype):
        raise TypeError(
            f"gradients: the gradient at {trees.quoted(path())} has dtype {dtype}; it must be floating point"
        )
    return gradient


def _slot_leaves(held: Slots, name: str, params: Params) -> list[Any]:
    if name not in held:
        raise _missing_slot(name, held)
    leaves = trees.flatten_like(params, held[name], f"slot {name!r}")
    for i, (slot, leaf) in enumerate(zip(leaves, jax.tree.leaves(params), strict=True)):
        if (slot is None) == trees.is_trainable(leaf) or (slot is not None and np.shape(slot) != np.shape(leaf)):
            have = "nothing" if slot is None else f"shape {np.shape(slot)}"
            raise ValueError(
                f"slot {name!r} has {have} at {trees.quoted(trees.paths_of(params)[i])}, where the parameter has shape "
                f"{np.shape(leaf)} and dtype {jnp.result_type(leaf)}. Slots belong to the params they were created "
                "for: make them with TrainState.create(params, optimizer)."
            )
    return leaves


def _missing_slot(name: str, held: Slots) -> ValueError:
    return ValueError(
        f"the state has no slot {name!r}, it has {sorted(held)}. It was created with another optimizer: use that "
        "one, or make new slots with TrainState.create(params, optimizer, global_step=state.global_step)."
    )


def apply_updates(params: Params, updates: Updates) -> Params:
    """Params + updates, leaf by leaf.

    Args:
        params: Any tree.
        updates: A tree like it; a leaf is an array, an `IndexedSlices` whose rows are added, or None.

    Returns:
        New parameters. The sum is made in float32 at least and rounded to the parameter's dtype.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> jstep.apply_updates({"w": jnp.zeros(2), "b": jnp.ones(1)}, {"w": jnp.ones(2), "b": None})
        {'b': Array([1.], dtype=float32), 'w': Array([1., 1.], dtype=float32)}
    """
    leaves, treedef = trees.flatten(params)
    found = trees.flatten_like(params, updates, "updates", is_leaf=is_slices)
    return treedef.unflatten(
        [leaf if trees.is_none(update) else _add(leaf, update) for leaf, update in zip(leaves, found, strict=True)]
    )


@jax.jit
def _add(leaf: Array, update: Any) -> Array:
    dtype = trees.compute_dtype(leaf.dtype)
    if not isinstance(update, IndexedSlices):
        return (leaf.astype(dtype) + update.astype(dtype)).astype(leaf.dtype)
    if leaf.dtype == dtype:
        return leaf.at[update.indices].add(update.values.astype(dtype), mode="drop")
    rows = combined(update)
    old = leaf.at[rows.indices].get(mode="clip").astype(dtype)
    return leaf.at[rows.indices].set((old + rows.values).astype(leaf.dtype), mode="drop")
