"""Factors on the updates of some leaves, for layer-wise learning rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jstep.core.checks import kind, shown
from jstep.core.types import Array, Held, Optimizer, ScalarOrSchedule
from jstep.optimizers.hyper import Hyper, checked, constant
from jstep.optimizers.leafwise import LeafSlots, leafwise
from jstep.optimizers.masks import by_path, first_match

SCALE = "scale"


def scale_updates(factors: Mapping[str, ScalarOrSchedule] | Callable[[str, Any], float]) -> Optimizer:
    """Scaling: u ← factor·u, chained after an optimizer whose updates are u; weight decay in u is scaled, too.

    Args:
        factors: Path or glob → a number ≥ 0, an array, a schedule or `held`; the first match applies, and updates of
            leaves without a match are unchanged. Or a function `(path, leaf) -> number`, which may depend on shape and
            dtype.

    Returns:
        An `Optimizer` without slots, whose hyperparameters are `scale/glob`. Sparse updates stay sparse.

    Raises:
        TypeError: A factor is not a number, an array or a schedule, or `factors` is neither a mapping nor a function.
        ValueError: A factor is out of its range, or a glob matches nothing; the error lists the nearest paths.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.gradient_descent(1.0), jstep.scale_updates({"embed*": 0.5}))
        >>> state = jstep.TrainState.create({"embed": 1.0, "head": 1.0}, optimizer)
        >>> grads = {"embed": jnp.float32(1.0), "head": jnp.float32(1.0)}
        >>> params = jstep.apply_gradients(state, grads, optimizer).params
        >>> print(params["embed"], params["head"])
        0.5 0.0

    Source: layer-wise rates as in Bao et al., "BEiT" (2021); groups of parameters in other frameworks.
    """
    if callable(factors) and not isinstance(factors, Mapping | Held):
        given = factors

        def factor(path: str, leaf: Any) -> float:
            return constant(f"factors({path!r}, …)", given(path, leaf), low=0)

        return leafwise(scale_rule, hyper={}, flags={"factor": by_path(factor)})
    if not isinstance(factors, Mapping):
        raise TypeError(
            f"factors={shown(factors)}: must map paths or globs to numbers, or be a function (path, leaf) -> number, "
            f"got {kind(factors)}"
        )
    for glob in factors:
        if not isinstance(glob, str):
            raise TypeError(f"factors: {shown(glob)} must be a path or a glob, got {kind(glob)}")
    hyper = {f"{SCALE}/{glob}": checked(f"factors[{glob!r}]", value, low=0) for glob, value in factors.items()}
    return leafwise(scale_rule, hyper=hyper, flags={"factor": first_match("factors", factors)})


def scale_rule(u: Array, p: Array, slots: LeafSlots, h: Hyper) -> tuple[Array, LeafSlots]:
    """A leaf's update, scaled."""
    factor = h["factor"]
    return (u if factor is None else (h[f"{SCALE}/{factor}"] if isinstance(factor, str) else factor) * u), {}
