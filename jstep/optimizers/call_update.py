"""Calling the update of an optimizer, with or without a context."""

from collections.abc import Callable
from typing import Any

from jstep.core.types import Context, Optimizer, Params, Slots, Step, Updates
from jstep.optimizers.projected import moves

EMPTY_CONTEXT = Context()


def call_update(
    optimizer: Optimizer,
    updates: Updates,
    slots: Slots,
    params: Params,
    step: Step,
    context: Context,
    *,
    exact: bool = False,
) -> tuple[Updates, Slots]:
    """Call the update of an optimizer, with the context if it takes one.

    Args:
        optimizer: The optimizer.
        updates: Its gradients.
        slots: Its slots.
        params: The parameters.
        step: The step.
        context: The context.
        exact: Whether the caller passes updates on unchanged, or adds them with `apply_updates`: then they may contain
            `Projected` leaves.
    """
    further = (context,) if optimizer.takes_context else ()
    updates, slots = optimizer.update(updates, slots, params, step, *further)
    return updates if exact else moves(params, updates), slots


def inner_context(
    context: Context, outwards: Callable[[Params], Params], inwards: Callable[[Updates], Updates] = lambda tree: tree
) -> Context:
    """The context for an inner optimizer whose parameters differ from those of the outer one.

    Args:
        context: The context of the outer optimizer.
        outwards: Maps the parameters of the inner optimizer to those of the outer one.
        inwards: Maps the gradients of the outer optimizer to those of the inner one.
    """
    known = context.value_and_grad
    if known is None:
        return context

    def value_and_grad(params: Params) -> tuple[Any, Updates]:
        loss, gradients = known(outwards(params))
        return loss, inwards(gradients)

    return context._replace(value_and_grad=value_and_grad)
