"""Scales as elements of a chain: a factor, the learning rate, or factors by path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jstep.core.calls import makes_optimizer
from jstep.core.checks import kind, shown
from jstep.core.slot_roles import SCALE
from jstep.core.trees import Array, Held, Optimizer, ScalarOrSchedule
from jstep.optimizers.hyperparameters import checked, constant
from jstep.optimizers.leaf_values import by_path, first_match
from jstep.optimizers.leafwise import Result, Values
from jstep.optimizers.nested import with_init
from jstep.optimizers.rules import from_direction, from_update

PREFIX = "scale"


@makes_optimizer(1)
def scale(factor: ScalarOrSchedule) -> Optimizer:
    """Scale: factor·u, where u is the update from the previous element.

    Args:
        factor: Any finite number. The sign is not changed: use a negative factor for updates to be added to parameters.

    Returns:
        An element of a chain without slots.

    Raises:
        ValueError: It is not finite.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.scale_by_lion(), jstep.scale(-0.5))
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        1.5

    Source: `optax.scale`, and `optax.scale_by_schedule`.
    """
    made = from_update("scale", lambda g, p, s, h: (h.factor * g, {}), {}, {"factor": factor}, by_rows=True)
    return with_init(made, order=SCALE)


@makes_optimizer()
def scale_by_learning_rate(learning_rate: ScalarOrSchedule) -> Optimizer:
    """Scale by the negative learning rate: −lr·u, where u is the update from the previous element.

    Args:
        learning_rate: The step size lr ≥ 0.

    Returns:
        An element of a chain without slots.

    Raises:
        ValueError: It is negative.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.clip_gradients(by_value=1.0), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        1.75

    Source: `optax.scale_by_learning_rate`.
    """
    hyper = {"learning_rate": learning_rate}
    return from_direction("scale_by_learning_rate", lambda g, p, s, h: (g, {}), {}, hyper, by_rows=True)


@makes_optimizer(1)
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
        hyper: dict[str, Any] = {}
        factor = by_path(lambda path, leaf: constant(f"factors({path!r}, …)", given(path, leaf), low=0))
    elif isinstance(factors, Mapping):
        factor = first_match("factors", factors)
        hyper = {f"{PREFIX}/{glob}": checked(f"factors[{glob!r}]", value, low=0) for glob, value in factors.items()}
    else:
        raise TypeError(
            f"factors={shown(factors)}: must map paths or globs to numbers, or be a function (path, leaf) -> number, "
            f"got {kind(factors)}"
        )
    return from_update("scale_updates", scaled_update, {}, hyper, flags={"factor": factor}, by_rows=True)


def scaled_update(u: Array, p: Array, s: Values, h: Values) -> Result:
    """The update times the factor of the leaf: a number, or the name of the one that applies."""
    if h.factor is None:
        return u, {}
    return (h[f"{PREFIX}/{h.factor}"] if isinstance(h.factor, str) else h.factor) * u, {}
