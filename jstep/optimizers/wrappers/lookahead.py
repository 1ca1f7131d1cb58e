"""Lookahead: slow weights that follow the fast ones."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_int
from jstep.core.slot_roles import Role
from jstep.core.trees import Array, Optimizer, Params, ScalarOrSchedule, Slots, Updates, is_slices, require_optimizer
from jstep.optimizers.age import age_of
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Slot, fresh_slot
from jstep.optimizers.offloading import per_leaf
from jstep.optimizers.parts import call_update
from jstep.optimizers.wrap_optimizer import Own, StepInputs, trained, wrap_optimizer
from jstep.optimizers.wrappers.exponential_moving_average import params_from_slot
from jstep.state.train_state import TrainState

SLOW = "slow"


def lookahead(optimizer: Optimizer, sync_period: int = 6, slow_step_size: ScalarOrSchedule = 0.5) -> Optimizer:
    """Lookahead: every k-th update slow += α·(p − slow); p = slow.

    Args:
        optimizer: The inner optimizer, which updates the fast weights; these are the parameters.
        sync_period: The number k ≥ 1 of updates between synchronizations, counted by the age of the slots: all updates
            of the optimizer, or if it is a `partition`, for each label those that have a gradient of its leaves.
        slow_step_size: The step size α, in [0, 1], of the slow weights towards the fast ones.

    Returns:
        An `Optimizer` with one more slot, `slow`, initially a copy of the parameters (at least float32), and the
        hyperparameter `slow_step_size`. The age comes from `start_step`, which is added if missing, or around a
        `partition` from `lookahead/label/start_step`. A leaf without a gradient at a synchronizing update is not
        synchronized; leaves that the partition freezes have no slow weights.

    Raises:
        ValueError: A number is out of its range, or the optimizer already has such a slot or hyperparameter.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.lookahead(jstep.gradient_descent(1.0), sync_period=2)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> for _ in range(2):
        ...     state = jstep.apply_gradients(state, {"w": jnp.float32(-1.0)}, optimizer)
        >>> print(state.params["w"], jstep.slow_params(state)["w"])
        1.0 1.0

    Source: Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back" (2019).
    """
    require_optimizer("optimizer", optimizer)
    period = as_int(sync_period, "sync_period", at_least=1)

    def update(updates: Updates, inner: Slots, own: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        params = at.params
        updates, inner = call_update(optimizer, updates, inner, params, at.step, at.context)
        treedef = trees.structure(params)
        found = trees.flatten_like(params, updates, "updates", is_leaf=is_slices)
        slows = trees.flatten_like(params, own[SLOW], f"slot {SLOW!r}")
        rate = jnp.asarray(at.h["slow_step_size"], trees.default_float())

        def rule(own: Slots, u: Any, p: Array, rate: Array, due: Array) -> tuple[Array, Slots]:
            return _synchronised(u.to_dense() if is_slices(u) else u, p, own[SLOW], rate, due)

        for i, ((path, p), u) in enumerate(zip(trees.leaves_with_paths(params), found, strict=True)):
            start = at.starts[i]
            if u is not None and start is not None:
                due = age_of(at.step, start) % period == 0
                found[i], new = per_leaf(rule, path, {SLOW: slows[i]}, u, p, rate, due)
                slows[i] = new[SLOW]
        return treedef.unflatten(found), inner, {SLOW: treedef.unflatten(slows)}

    return wrap_optimizer(
        optimizer,
        "lookahead",
        update,
        Own(
            {SLOW: lambda params, step: fresh_slot(SLOW, Slot("copy"), trained(optimizer, params), step)},
            {SLOW: Role.COPY},
            {SLOW: "weight"},
            hyper={"slow_step_size": checked("slow_step_size", slow_step_size, low=0, high=1)},
            aged=True,
        ),
    )


def _synchronised(u: Array, p: Array, slow: Array, rate: Array, due: Array) -> tuple[Array, Slots]:
    """The update to slow + α·(p + u − slow) if it is due, else u; and the new slow weights."""
    dtype = slow.dtype
    # u appears once: if it were read twice, XLA would store it in memory.
    back = jnp.where(due, 1 - rate, 0.0).astype(dtype)
    update = back * (slow - p.astype(dtype)) + jnp.where(due, rate, 1.0).astype(dtype) * u.astype(dtype)
    nearer = apply_updates(p, update) if p.dtype == dtype else p.astype(dtype) + update
    return update, {SLOW: jnp.where(due, nearer, slow)}


def slow_params(state: TrainState, name: str = SLOW) -> Params:
    """The slow weights of `lookahead`, in the dtypes of the parameters, for evaluation.

    Args:
        state: A state whose optimizer is `lookahead`.
        name: The slot of the slow weights: its name with the prefixes of scopes and labels, or only the last part if
            there is one such slot.

    Raises:
        ValueError: The state has no such slot, or several; the error lists their names.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.lookahead(jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(-1.0)}, optimizer)
        >>> print(state.params["w"], jstep.slow_params(state)["w"])
        1.0 0.0
    """
    return params_from_slot(state, name, "Slow weights are kept by jstep.lookahead(optimizer).")
