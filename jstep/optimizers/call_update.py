"""One call of an optimizer's update, whether or not it takes a context."""

from collections.abc import Callable
from typing import Any

from jstep.core.types import Context, Optimizer, Params, Slots, Step, Updates

EMPTY_CONTEXT = Context()


def call_update(
    optimizer: Optimizer, updates: Updates, slots: Slots, params: Params, step: Step, context: Context
) -> tuple[Updates, Slots]:
    """What the update of an optimizer returns."""
    if optimizer.takes_context:
        return optimizer.update(updates, slots, params, step, context)
    return optimizer.update(updates, slots, params, step)


def inner_context(
    context: Context, outwards: Callable[[Params], Params], inwards: Callable[[Updates], Updates] = lambda tree: tree
) -> Context:
    """The context of an optimizer that sees other parameters than the one around it.

    Args:
        context: That of the one around it.
        outwards: From the parameters that the inner one sees to those of the one around it.
        inwards: The same for gradients, the other way.
    """
    known = context.value_and_grad
    if known is None:
        return context

    def value_and_grad(params: Params) -> tuple[Any, Updates]:
        loss, gradients = known(outwards(params))
        return loss, inwards(gradients)

    return context._replace(value_and_grad=value_and_grad)
