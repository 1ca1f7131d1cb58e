"""Scales and weight decay as elements of a chain, some of them before and some after the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from jstep.core.checks import as_bool, as_number, kind, shown
from jstep.core.selection import VarList
from jstep.core.trees import Array, Held, Optimizer, Params, ScalarOrSchedule
from jstep.optimizers.directions import Result, Values, from_direction, from_update
from jstep.optimizers.hyper import checked, constant
from jstep.optimizers.masks import Flag, by_path, first_match, mask

SCALE = "scale"


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
    return from_update("scale", lambda g, p, s, h: (h.factor * g, {}), {}, {"factor": factor}, by_rows=True)


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

        return from_update("scale_updates", scaled_update, {}, {}, flags={"factor": by_path(factor)}, by_rows=True)
    if not isinstance(factors, Mapping):
        raise TypeError(
            f"factors={shown(factors)}: must map paths or globs to numbers, or be a function (path, leaf) -> number, "
            f"got {kind(factors)}"
        )
    for glob in factors:
        if not isinstance(glob, str):
            raise TypeError(f"factors: {shown(glob)} must be a path or a glob, got {kind(glob)}")
    hyper = {f"{SCALE}/{glob}": checked(f"factors[{glob!r}]", value, low=0) for glob, value in factors.items()}
    flags = {"factor": first_match("factors", factors)}
    return from_update("scale_updates", scaled_update, {}, hyper, flags=flags, by_rows=True)


def scaled_update(u: Array, p: Array, s: Values, h: Values) -> Result:
    """The update times the factor of the leaf: a number, or the name of the one that applies."""
    if h.factor is None:
        return u, {}
    return (h[f"{SCALE}/{h.factor}"] if isinstance(h.factor, str) else h.factor) * u, {}


def add_weight_decay(weight_decay: Decay, mask: VarList | Mapping[str, float] = None) -> Optimizer:
    """Add weight decay: u + weight_decay·p, where u is the update from the previous element.

    After `scale_by_adam` the decay is decoupled as in AdamW; before a `trace` it is coupled as in SGD. For a decay
    that does not depend on the learning rate, put `decay_weights` after it.

    Args:
        weight_decay: The decay ≥ 0: a number, a schedule or `held`. Or a mapping from paths or globs to these: the
            first match applies, and leaves without a match do not decay.
        mask: The leaves that decay, in the grammar of `var_list`; None for all. Or path or glob → a factor ≥ 0 on the
            decay, such as `mup(...).decays`: the first match applies, and leaves without a match have the factor 1.

    Returns:
        An element of a chain without slots. Its hyperparameter is `weight_decay`, or `weight_decay/glob` for each entry
        of a mapping.

    Raises:
        ValueError: A number is negative, or an entry matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.add_weight_decay(0.5), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        1.5

    Source: `optax.add_decayed_weights`.
    """
    hyper, flags = decay_arguments("weight_decay", weight_decay, mask)
    # Rows without a gradient decay, too.
    return from_update("add_weight_decay", with_added_decay, {}, hyper, flags=flags, by_rows=is_zero(hyper))


def with_added_decay(u: Array, p: Array, s: Values, h: Values) -> Result:
    """The direction with weight decay."""
    decay = decay_of(h)
    return (u if decay is None else u + decay * p), {}


def decay_weights(
    weight_decay: Decay, mask: VarList | Mapping[str, float] = None, *, cautious: bool = False
) -> Optimizer:
    """Weight decay independent of the learning rate: u −= wd·p, chained after an optimizer whose updates are u.

    Args:
        weight_decay: The fraction wd ≥ 0 of each weight that an update removes; use a schedule to make it follow the
            learning rate. Or a mapping from paths or globs to these: the first match applies, and leaves without a
            match do not decay.
        mask: The leaves that decay: a predicate `(path, leaf) -> bool`, paths or globs, a tree of bools; None for all.
            Or path or glob → a factor ≥ 0 on the decay: the first match applies, and leaves without a match have the
            factor 1.
        cautious: Whether to decay an element only if its update also moves it towards zero: u·p < 0.

    Returns:
        An `Optimizer` without slots. Its hyperparameter is `decoupled_weight_decay`, or `decoupled_weight_decay/glob`
        for each entry of a mapping. Leaves without a gradient do not decay; sparse updates become dense.

    Raises:
        ValueError: `weight_decay` is out of its range, or an entry of the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.gradient_descent(0.5), jstep.decay_weights(0.25))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        0.25

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2017), where decay follows the schedule's
    fraction and not the rate; "Cautious Weight Decay" (2025).
    """
    rule = cautiously_decayed if as_bool(cautious, "cautious") else decayed
    hyper, flags = decay_arguments("decoupled_weight_decay", weight_decay, mask)
    return from_update("decay_weights", rule, {}, hyper, flags=flags)


def decayed(u: Array, p: Array, s: Values, h: Values) -> Result:
    """The update with weight decay."""
    decay = decay_of(h)
    return (u if decay is None else u - decay * p), {}


def cautiously_decayed(u: Array, p: Array, s: Values, h: Values) -> Result:
    """The update with weight decay for the elements that it moves towards zero."""
    decay = decay_of(h)
    if decay is None:
        return u, {}
    towards_zero = ((u < 0) & (p > 0)) | ((u > 0) & (p < 0))
    return u - decay * towards_zero.astype(p.dtype) * p, {}


Decay: TypeAlias = ScalarOrSchedule | Mapping[str, ScalarOrSchedule]
"""A decay, or path or glob → the decay of the leaves that match."""
DECAY = "decay"
"""The flag for the decay of a leaf: the name of the hyperparameter and a factor on it, or None."""


def decay_arguments(name: str, weight_decay: Any, mask_given: Any) -> tuple[dict[str, Any], dict[str, Flag]]:
    """The hyperparameters and the flag of a weight decay.

    Args:
        name: The name of the hyperparameter.
        weight_decay: A number, an array, a schedule or `held`; or a mapping from paths or globs to these.
        mask_given: The leaves that decay, in the grammar of `var_list`; or path or glob → a factor ≥ 0 on the decay.

    Raises:
        TypeError: A value is not a number, or a key is not a string.
        ValueError: A value is out of its range.
    """
    given = _by_glob("weight_decay", weight_decay)
    if given is None:
        hyper = {name: checked("weight_decay", weight_decay, low=0)}
        which: Flag | None = None
    else:
        hyper = {f"{name}/{glob}": checked(f"weight_decay[{glob!r}]", one, low=0) for glob, one in given.items()}
        which = first_match("weight_decay", given)
    factors = _factors(mask_given)
    scales = mask("mask", mask_given) if factors is None else first_match("mask", factors)

    def decay(params: Params) -> list[Any]:
        names = scales(params)
        globs = [""] * len(names) if which is None else which(params)
        return [_of_leaf(name, which is not None, glob, one, factors) for glob, one in zip(globs, names, strict=True)]

    return hyper, {DECAY: decay}


def _of_leaf(name: str, is_split: bool, glob: str | None, scale: Any, factors: Mapping[str, float] | None) -> Any:
    if glob is None:
        return None
    factor = float(scale) if factors is None else 1.0 if scale is None else factors[scale]
    return None if factor == 0 else (f"{name}/{glob}" if is_split else name, factor)


def decay_of(h: Values) -> Any:
    """The decay of this leaf; None if it is known while tracing that the leaf does not decay."""
    if h.decay is None:
        return None
    name, factor = h.decay
    decay = h[name]
    if isinstance(decay, float) and decay == 0:
        return None
    return decay if factor == 1 else factor * decay


def is_zero(hyper: Mapping[str, Any]) -> bool:
    """Whether all decays are the constant 0."""
    return all(isinstance(value, float) and value == 0 for value in hyper.values())


def _by_glob(argument: str, given: Any) -> Mapping[str, Any] | None:
    if not isinstance(given, Mapping):
        return None
    for glob in given:
        if not isinstance(glob, str):
            raise TypeError(f"{argument}: {shown(glob)} must be a path or a glob, got {kind(glob)}")
    return given


def _factors(given: VarList) -> dict[str, float] | None:
    """Path or glob → factor, or None if the mask is not such a mapping (a tree of bools has no numbers)."""
    if not isinstance(given, Mapping) or not given or not all(isinstance(glob, str) for glob in given):
        return None
    if not all(isinstance(one, int | float | np.number) and not isinstance(one, bool) for one in given.values()):
        return None
    return {glob: as_number(one, f"mask[{glob!r}]", low=0) for glob, one in given.items()}
