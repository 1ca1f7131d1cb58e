"""Projection of the parameters after each update: bounds, unit norms, manifolds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_function
from jstep.core.placement import on_devices
from jstep.core.trees import Optimizer, Params, Slots, Updates, require_optimizer
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.parts import call_update
from jstep.optimizers.projected import (
    Conditions,
    Projected,
    collecting_conditions,
    conditions_of,
    is_update,
    report_condition,
)
from jstep.optimizers.wrap_optimizer import StepInputs, wrap_optimizer


def with_projection(optimizer: Optimizer, fn: Callable[[Params], Params]) -> Optimizer:
    """Project the parameters after each update: p ← fn(p + u).

    The new parameters are `fn(p + u)` bit for bit, so the bounds of a clip hold exactly. The metric `update_norm` is
    that of the whole move, from p to the projected parameters.

    Args:
        optimizer: The optimizer that computes the updates u. Only guards (`skip_nonfinite`, `dynamic_loss_scale`),
            `with_moving_average`, `update_every`, `master_weights`, `partition` and `scope` belong around the
            projection: wrappers that change updates undo it.
        fn: `fn(params) -> params`, of the same structure, shapes and dtypes, a pure function that JAX can trace. Below
            a label of `partition`, the leaves of other parts are None. It sees integer leaves, too; what it returns for
            them is ignored.

    Returns:
        An `Optimizer` with the same slots and hyperparameters. A leaf without an update keeps its value: if it has no
        gradient, or a guard or `update_every`, around the projection or inside it, skipped its update. Averages around
        the projection average the projected parameters. Sparse updates are added to their tables before the projection,
        which reads whole tables.

    Raises:
        TypeError: `fn` is not a function of the params alone, or (in a step) returns a leaf that is not an array.
        ValueError: In a step, `fn` returns another structure, shape or dtype; names the leaf.

    Example:
        Weights that stay in [−0.25, 0.25]:

        >>> import jax, jax.numpy as jnp, jstep
        >>> def clip(params):
        ...     return jax.tree.map(lambda p: jnp.clip(p, -0.25, 0.25), params)
        >>> optimizer = jstep.with_projection(jstep.gradient_descent(0.125), clip)
        >>> state = jstep.TrainState.create({"w": jnp.array([0.0, 3.0])}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.array([-1.0, -1.0])}, optimizer)
        >>> print(state.params["w"])
        [0.125 0.25 ]

    Source: Bertsekas, "On the Goldstein-Levitin-Polyak gradient projection method" (1976).
    """
    require_optimizer("optimizer", optimizer)
    as_function(fn, "fn", "(params) -> params, such as a clip of each leaf", takes=1)

    def update(updates: Updates, inner: Slots, own: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        params, conditions = at.params, Conditions()
        with collecting_conditions(conditions):
            updates, inner = call_update(optimizer, updates, inner, params, at.step, at.context, exact=True)
        for one in conditions:
            report_condition(*one)
        found = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
        moved = apply_updates(params, updates)
        new = _checked(moved, fn(moved))
        before, after = jax.tree.leaves(params), jax.tree.leaves(moved)
        rows = zip(found, new, before, after, conditions_of(params, conditions), strict=True)
        projected = [None if trees.is_none(u) else _unless_skipped(*rest) for u, *rest in rows]
        return trees.structure(params).unflatten(projected), inner, {}

    return wrap_optimizer(optimizer, "with_projection", update)


def _unless_skipped(new: Any, before: Any, moved: Any, condition: Any) -> Projected:
    """The new value of a parameter, unless its update was skipped, by a guard or because it was not due."""
    if condition is None:
        return Projected(new)
    before = on_devices(before)
    # Behind a guard, another element of a chain may move the parameter.
    return Projected(jnp.where(condition | jnp.any(moved != before), new, before))


def _checked(params: Params, projected: Any) -> list[Any]:
    """Return the leaves of projected parameters; those that are not trainable are ignored later."""
    found = trees.flatten_like(params, projected, "the result of fn", may_leave_out=False)
    leaves = jax.tree.leaves(params)
    for (path, leaf), new in zip(trees.leaves_with_paths(params), found, strict=True):
        if not trees.is_trainable(leaf):
            continue
        if not (trees.is_array(new) or isinstance(new, bool | int | float | complex)):
            what = "nothing" if new is None else type(new).__name__
            raise TypeError(f"fn: must return an array at {trees.quoted(path)}, got {what}")
        kinds = [(np.shape(one), jnp.result_type(one)) for one in (leaf, new)]
        if kinds[0] != kinds[1]:
            shown = [f"{dtype}{list(shape)}" for shape, dtype in kinds]
            cast = f"; cast it with .astype({kinds[0][1]})" if kinds[0][0] == kinds[1][0] else ""
            raise ValueError(
                f"fn: must return params of the same shapes and dtypes: {trees.quoted(path)} is {shown[0]}, and the "
                f"result {shown[1]}{cast}"
            )
    return [jnp.asarray(new) if trees.is_trainable(leaf) else new for leaf, new in zip(leaves, found, strict=True)]
