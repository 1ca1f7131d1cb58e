"""Checking what the update rule of a leaf returns."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jstep.core.types import Array


def check_rule_result(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a rule to check its result; without this, a wrong result raises an obscure error about tree structures."""
    named = getattr(rule, "__name__", "rule")

    @functools.wraps(rule)
    def checked_rule(g: Array, p: Array, slots: dict[str, Any], h: dict[str, Any]) -> Any:
        result = rule(g, p, slots, h)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            what = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise TypeError(f"rule={named}: must return two values, (update, {{slot: new value}}), got {what}")
        update, new = result
        unknown = sorted(set(new) - set(slots))
        if unknown:
            raise ValueError(
                f"rule={named}: returned a slot {unknown[0]!r} that leafwise does not have; it has {sorted(slots)}: "
                f"leafwise(…, slots={{{unknown[0]!r}: 0.0}}) adds one that is initially 0"
            )
        if jnp.shape(update) != jnp.shape(g):
            raise ValueError(
                f"rule={named}: the update must have the shape of the gradient, {jnp.shape(g)}, got {jnp.shape(update)}"
            )
        return result

    return checked_rule
