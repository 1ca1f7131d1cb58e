"""Chains of optimizers and of transformations of gradients, the scope of their names, and elements from functions."""

import dataclasses
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jstep.core.calls import makes_optimizer
from jstep.core.checks import as_function, as_text
from jstep.core.logs import log_warning
from jstep.core.matching import require_slots
from jstep.core.optax_transformations import require_optimizer
from jstep.core.placement import on_devices
from jstep.core.slot_roles import Init, Labels, Order, Roles, labels_of, order_of, roles_of
from jstep.core.trees import EMPTY_CONTEXT, Context, Optimizer, OptimizerLike, Params, Slots, Step, Updates
from jstep.optimizers import hyperparameters, nested
from jstep.optimizers.host_slots import loads_slots
from jstep.optimizers.hyperparameters import LEARNING_RATE, Hyper, check_prefix, held_roles, held_slots, values_at
from jstep.optimizers.nested import StepInputs
from jstep.optimizers.updates import wide_updates


@makes_optimizer()
def chain(*optimizers: OptimizerLike) -> Optimizer:
    """Apply optimizers in sequence: the updates of one are the gradients of the next.

    Args:
        *optimizers: At least one; usually elements that transform gradients, then one that turns them into updates,
            then perhaps elements that transform updates. If two elements make finished updates (which include
            −learning_rate), a warning is issued: the sign flips twice, which is gradient ascent. `minimize` logs a
            warning if a clip comes after a finished update, and if nothing finishes the updates.

    Returns:
        An `Optimizer` with the slots and hyperparameters of all.

    Raises:
        ValueError: No element is given, or two have a slot or a hyperparameter of the same name.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(1e-3))
        >>> sorted(optimizer.hyperparameters(0))
        ['beta1', 'beta2', 'clip_by_global_norm', 'epsilon', 'learning_rate']

    Source: `optax.chain`; the elements share the global step of the state instead of keeping separate counters.
    """
    if not optimizers:
        raise ValueError("chain() needs at least one optimizer")
    first: Any = optimizers[0]
    if len(optimizers) == 1 and type(first) in (list, tuple):  # an Optax transformation is a NamedTuple
        raise TypeError(
            f"chain: got one {type(first).__name__} of {len(first)} elements; pass them as separate "
            "arguments: chain(*[…]), or chain(first, second)"
        )
    elements = [require_optimizer(f"optimizers[{i}]", one) for i, one in enumerate(optimizers)]
    parts = {f"optimizers[{i}]": one for i, one in enumerate(elements)}
    finished = [part for part, one in parts.items() if nested.makes_finished_updates(one)]
    warning = len(finished) > 1 and (
        f"chain: {finished[0]} makes finished updates, which already include −learning_rate, and {finished[1]} takes "
        "them as gradients: the sign flips twice, so this is gradient ascent, and the loss climbs. Keep one of the "
        "two; replace the first by an element that transforms gradients, such as jstep.scale_by_adam() for "
        "jstep.adam(…); or train different leaves with each, using jstep.partition."
    )
    try:
        nested.check_names(parts)
    except ValueError as error:
        if warning:
            error.add_note(warning)
        raise
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=4)  # above both decorators

    @loads_slots
    def update(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        new: Slots = {}
        at = StepInputs(params, step, context)
        for i, optimizer in enumerate(elements):
            mine = nested.own_slots(optimizer, slots, params)
            is_last = i == len(elements) - 1
            updates, own = nested.call_update(optimizer, updates, mine, at, exact=is_last)
            new |= own
        return updates, new

    def labels(params: Params) -> Labels | None:
        known = [found for one in elements if (found := labels_of(one, params)) is not None]
        rows = list(zip(*known, strict=True))
        return ["/".join(map(str, row)) if None not in row else None for row in rows] if known else None

    init = Init(
        lambda params, step: nested.merge([(part, one.init(params, step)) for part, one in parts.items()], "slot"),
        lambda params: nested.merged_roles(parts, params),
        finished=bool(finished),
        guarded=nested.is_guarded(elements[0]),
        labels=labels,
        order=_order_of_chain(parts),
        rated=any(map(nested.is_rated, elements)),
    )
    return Optimizer(init, update, nested.merged_hyperparameters(parts), any(one.takes_context for one in elements))


def _order_of_chain(parts: Mapping[str, Optimizer]) -> Order:
    """The place of a chain in another one, by the names and elements of the chain."""
    together = order_of_parts(parts.values())  # what does not depend on the sequence
    orders = list(map(order_of, parts.values()))
    finished = list(map(nested.makes_finished_updates, parts.values()))
    # Without a learning rate it is the last factor that stands for it: those before only scale the gradients.
    factors = [i for i, order in enumerate(orders) if order.is_known and not order.raw]
    first = finished.index(True) if any(finished) else factors[-1] if factors else len(orders)
    names, late = list(parts), together.late_clip
    for i in range(first + 1, len(orders)):
        if together.is_known and orders[i].clips and not late:
            late = f"{names[i]} clips the finished updates of {names[first]}, not the gradients"
    partly_raw = any(
        order.partly_raw and all(other.raw for j, other in enumerate(orders) if i != j)
        for i, order in enumerate(orders)
    )
    return dataclasses.replace(together, partly_raw=partly_raw, late_clip=late)


def order_of_parts(parts: Collection[Optimizer]) -> Order:
    """The place of a partition in a chain."""
    orders = list(map(order_of, parts))
    return Order(
        all(order.is_known or nested.makes_finished_updates(one) for order, one in zip(orders, parts, strict=True)),
        raw=all(order.raw for order in orders),
        partly_raw=any(order.partly_raw for order in orders),
        clips=any(order.clips for order in orders),
        late_clip=next((order.late_clip for order in orders if order.late_clip), ""),
    )


_USUAL_ORDER = (
    "The usual order: jstep.chain(jstep.clip_gradients(…), jstep.adamw(rate)), or by blocks jstep.chain("
    "jstep.clip_gradients(…), jstep.scale_by_adam(), jstep.add_weight_decay(…), jstep.scale_by_learning_rate(rate))"
)


def warn_of_order(optimizer: Optimizer) -> None:
    """Log a warning if a clip comes after the learning rate, and one if there is no learning rate at all."""
    order = order_of(optimizer)
    if order.late_clip:
        log_warning("chain: %s. %s", order.late_clip, _USUAL_ORDER)
    if order.partly_raw:
        log_warning(
            "optimizer: nothing multiplies its updates by −learning_rate (scale_by_learning_rate, scale, "
            "on_hyperball), so that they are added as they are, uphill. %s",
            _USUAL_ORDER,
        )


@makes_optimizer(2)
def scope(name: str, optimizer: OptimizerLike) -> Optimizer:
    """Rename the slots and hyperparameters of an optimizer to `name/…`.

    Args:
        name: The prefix, without a trailing slash.
        optimizer: The optimizer.

    Returns:
        An `Optimizer`.

    Raises:
        ValueError: The name is empty, begins or ends with a slash, or has the part `held`.

    Example:
        >>> import jstep
        >>> jstep.get_slot_names(jstep.TrainState.create({"w": 1.0}, jstep.scope("fast", jstep.adam())))
        ['fast/m', 'fast/v']
    """
    optimizer = require_optimizer("optimizer", optimizer)
    check_prefix("name", as_text(name, "name"))

    @loads_slots
    def update(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        mine = nested.own_slots(optimizer, slots, params, f"{name}/")
        updates, own = nested.call_update(optimizer, updates, mine, StepInputs(params, step, context), exact=True)
        return updates, nested.prefixed(name, own)

    def labels(params: Params) -> Labels | None:
        inner = labels_of(optimizer, params)
        return None if inner is None else [None if label is None else f"{name}/{label}" for label in inner]

    def init(params: Params, global_step: Step) -> Slots:
        return nested.prefixed(name, optimizer.init(params, global_step))

    def roles(params: Params) -> Roles:
        return roles_of(optimizer, params).prefixed(name)

    def hyper(step: Step, /) -> dict[str, Any]:
        return nested.prefixed(name, optimizer.hyperparameters(step))

    made = nested.wrapped_init(optimizer, init, roles, labels=labels)
    return optimizer._replace(init=made, update=update, hyperparameters=hyper)


@makes_optimizer(1)
def stateless(fn: Callable[[Updates, Params, Step], Updates]) -> Optimizer:
    """A chain element from a pure function, without slots or hyperparameters.

    Args:
        fn: A pure function `fn(updates, params, step) -> updates`. Leaves of updates are arrays (in float32 at least),
            `IndexedSlices` or None, which stays None; the step is the number of updates applied so far.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> signs = jstep.stateless(lambda updates, params, step: jax.tree.map(jnp.sign, updates))
        >>> optimizer = jstep.chain(signs, jstep.gradient_descent(0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        0.5

    Source: `optax.stateless`.
    """
    as_function(fn, "fn", "(updates, params, step) -> updates")
    return element(lambda updates, params, step, h: fn(updates, params, step), {}, Order())


def element(fn: Callable[[Updates, Params, Step, Hyper], Updates], hyper: Mapping[str, Any], order: Order) -> Optimizer:
    """A chain element from `fn(updates, params, step, h) -> updates` and its hyperparameters.

    Args:
        fn: The transformation; it must handle None leaves and `IndexedSlices` itself. The leaves are float32 at least.
        hyper: Name → the value returned by `checked`.
        order: Its place in a chain.
    """
    held = held_roles(hyper)

    @loads_slots
    def update(updates: Updates, slots: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        kept = require_slots(held, slots)
        return fn(wide_updates(updates), on_devices(params), step, values_at(hyper, step, slots)), kept

    made = Init(lambda params, step: held_slots(hyper), lambda params: held, order=order, rated=LEARNING_RATE in hyper)
    return Optimizer(made, update, hyperparameters.report(hyper))
