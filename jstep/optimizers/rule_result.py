"""What a rule for one leaf must answer."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jstep.core.types import Array


def check_rule_result(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule, with an error that says what a wrong answer should have been: else it would be one about a tree."""
    named = getattr(rule, "__name__", "rule")

    @functools.wraps(rule)
    def checked_rule(g: Array, p: Array, slots: dict[str, Any], h: dict[str, Any]) -> Any:
        answer = rule(g, p, slots, h)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            what = f"{len(answer)} of them" if isinstance(answer, tuple) else type(answer).__name__
            raise TypeError(f"rule={named}: must return two things, (update, {{slot: new value}}), got {what}")
        update, new = answer
        unknown = sorted(set(new) - set(slots))
        if unknown:
            raise ValueError(
                f"rule={named}: returned a slot {unknown[0]!r} that leafwise was not told of; it has {sorted(slots)}: "
                f"leafwise(…, slots={{{unknown[0]!r}: 0.0}}) makes one that starts from 0"
            )
        if jnp.shape(update) != jnp.shape(g):
            raise ValueError(
                f"rule={named}: the update must have the shape of the gradient, {jnp.shape(g)}, got {jnp.shape(update)}"
            )
        return answer

    return checked_rule
