"""Constraints of updates: projections of the parameters, and agreement with the gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import array_type, as_function, describe_type
from jstep.core.exceptions import setting
from jstep.core.placement import on_devices
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.trees import Array, Optimizer, OptimizerLike, Params, Slots, Updates
from jstep.optimizers import nested
from jstep.optimizers.nested import CONDITIONS, Conditions, StepInputs, update_conditions, wrap_optimizer
from jstep.optimizers.updates import Replacement, apply_updates, map_updates
from jstep.slots.indexed_slices import is_slices, on_table
from jstep.slots.optax_transformations import require_optimizer

MIN_SHARE = 1e-3


@makes_optimizer(2)
def with_projection(optimizer: OptimizerLike, fn: Callable[[Params], Params]) -> Optimizer:
    """Project the parameters after each update: p ← fn(p + u).

    The new parameters are bitwise identical to `fn(p + u)`. The metric `update_norm` is the norm of the whole move.

    Args:
        optimizer: The optimizer. Around the projection belong only wrappers that do not change updates.
        fn: `fn(params) -> params`, a pure function that keeps structure, shapes and dtypes. Below a label of
            `partition`, the leaves of other labels are None. Results for integer leaves are ignored.

    Returns:
        An `Optimizer` with the same slots and hyperparameters. A leaf without an update keeps its value. Sparse updates
        are added to their tables before the projection.

    Raises:
        ValueError: In a step, `fn` returns another structure, shape or dtype.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.with_projection(
        ...     jstep.gradient_descent(0.125), lambda params: jstep.clip_by_value(params, -0.25, 0.25)
        ... )
        >>> state = jstep.TrainState.create({"w": jnp.array([0.0, 3.0])}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.array([-1.0, -1.0])}, optimizer)
        >>> print(state.params["w"])
        [0.125 0.25 ]

    Source: Bertsekas, "On the Goldstein-Levitin-Polyak gradient projection method" (1976).
    """
    optimizer = require_optimizer("optimizer", optimizer)
    as_function(fn, "fn", "(params) -> params, such as a clip of each leaf", takes=1)

    def update(updates: Updates, inner: Slots, outer: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        params, conditions = at.params, Conditions()
        with setting(CONDITIONS, (*CONDITIONS.get(), conditions)):
            updates, inner = nested.call_update(optimizer, updates, inner, at, exact=True)
        moved = apply_updates(params, updates)
        new = _projected_leaves(moved, fn(moved))

        def projected(_: object, new: Any, before: Any, after: Any, condition: Any) -> Replacement:
            if condition is None:
                return Replacement(new)
            before = on_devices(before)
            # Behind a guard, or if no update was due, another element of a chain may still move the parameter.
            return Replacement(jnp.where(condition | jnp.any(after != before), new, before))

        leaves = jax.tree.leaves(params), jax.tree.leaves(moved), update_conditions(params, conditions)
        return map_updates(projected, params, updates, new, *leaves, what="updates"), inner, {}

    return wrap_optimizer(optimizer, "with_projection", update)


def _projected_leaves(params: Params, projected: object) -> list[Any]:
    leaves = trees.flatten_like(params, projected, "the result of fn", may_leave_out=False)
    for i, ((path, leaf), new) in enumerate(zip(trees.leaves_with_paths(params), leaves, strict=True)):
        if not trees.is_trainable(leaf):
            continue
        if not trees.is_array_or_number(new):
            raise TypeError(f"fn: must return an array at {trees.quote_path(path)}, got {describe_type(new)}")
        old_type, new_type = (array_type(np.shape(x), jnp.result_type(x)) for x in (leaf, new))
        if old_type != new_type:
            raise ValueError(f"fn: must return {old_type} at {trees.quote_path(path)}, as in params, got {new_type}")
        leaves[i] = jnp.asarray(new)
    return leaves


@makes_optimizer(1)
def cautious(optimizer: OptimizerLike) -> Optimizer:
    """Cautious updates: u ← u·mask/max(mean(mask), 0.001), mask = (u·g < 0), for each leaf.

    Args:
        optimizer: The optimizer that turns gradients g into updates u, without `decay_weights`: apply it outside.

    Returns:
        An `Optimizer` with the same slots and hyperparameters.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.cautious(jstep.momentum(1.0, 0.9))
        >>> state = jstep.TrainState.create({"w": [0.0, 0.0]}, optimizer)
        >>> for g in ([1.0, 1.0], [1.0, -0.5]):
        ...     state = jstep.apply_gradients(state, {"w": [jnp.float32(x) for x in g]}, optimizer)
        >>> print(*state.params["w"])
        -2.9 -1.0

    Source: Liang et al., "Cautious Optimizers" (2024).
    """
    optimizer = require_optimizer("optimizer", optimizer)

    def masked(u: object, g: Any) -> Any:
        g = g.to_dense() if is_slices(g) else jnp.asarray(g)

        def of_table(u: Array) -> Array:
            agrees = (((u < 0) & (g > 0)) | ((u > 0) & (g < 0))).astype(u.dtype)
            return u * (agrees / jnp.maximum(jnp.mean(agrees), MIN_SHARE))

        return on_table(of_table, u)

    def update(updates: Updates, inner: Slots, outer: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        gradients = trees.flatten_like(at.params, updates, "gradients", is_leaf=is_slices)
        updates, inner = nested.call_update(optimizer, updates, inner, at)
        return map_updates(masked, at.params, updates, gradients, what="updates"), inner, {}

    return wrap_optimizer(optimizer, "cautious", update)
