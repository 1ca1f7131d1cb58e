"""Extra arguments of Optax transformations, from the context of a step."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.indexed_slices import IndexedSlices
from jstep.core.types import Array, Context, Params, Updates

EXTRA = ("value", "grad", "value_fn")
"""The extra arguments that Optax's own transformations take."""


def takes_extra(update: Callable[..., Any]) -> Callable[[str], bool]:
    """A predicate for whether an update takes an extra argument of a given name."""
    try:
        parameters = inspect.signature(update).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return lambda name: False
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return lambda name: takes_any or name in parameters


def extra_arguments(context: Context, grads: Updates, params: Params) -> dict[str, Any]:
    """The extra arguments of Optax transformations that the step can provide."""
    known: dict[str, Any] = {}
    if context.loss is not None:
        known |= {"value": _wide(context.loss), "grad": grads}
    if context.value_and_grad is not None:
        known["value_fn"] = _value_fn(context.value_and_grad, params)
    return known


def _value_fn(value_and_grad: Callable[[Params], tuple[Array, Updates]], params: Params) -> Callable[[Params], Array]:
    """The loss as a function of the parameters that Optax sees, with the derivative given by the step."""
    leaves, treedef = trees.flatten(params)

    def evaluated(seen: Params) -> tuple[Array, Params]:
        found = treedef.flatten_up_to(seen)
        own = [p if s is None else s.astype(p.dtype) for s, p in zip(found, leaves, strict=True)]
        loss, gradients = value_and_grad(treedef.unflatten(own))
        pairs = zip(treedef.flatten_up_to(gradients), leaves, found, strict=True)
        return _wide(loss), treedef.unflatten([None if s is None else dense(g, p) for g, p, s in pairs])

    @jax.custom_jvp
    def value_fn(seen: Params) -> Array:
        return evaluated(seen)[0]

    @value_fn.defjvp
    def _derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
        loss, gradients = evaluated(*primals)
        products = jax.tree.map(lambda g, t: jnp.sum(g * t), gradients, *tangents)
        return loss, sum(jax.tree.leaves(products), start=jnp.zeros_like(loss)).astype(loss.dtype)

    return value_fn


def _wide(loss: Array) -> Array:
    loss = jnp.asarray(loss)
    return loss.astype(trees.compute_dtype(loss.dtype))


def dense(gradient: Any, leaf: Any) -> Any:
    """A gradient as Optax sees it: an array, in at least float32."""
    dtype = trees.compute_dtype(leaf.dtype)
    if gradient is None:
        return jnp.zeros_like(leaf, dtype=dtype)
    return (gradient.to_dense() if isinstance(gradient, IndexedSlices) else jnp.asarray(gradient)).astype(dtype)
