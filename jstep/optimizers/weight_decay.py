"""Weight decay as an element of a chain: with the learning rate, or independent of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from jstep.core.calls import makes_optimizer
from jstep.core.checks import as_bool, as_number
from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, Params, ScalarOrSchedule
from jstep.optimizers.hyperparameters import checked
from jstep.optimizers.leaf_values import Flag, decay_mask, first_match
from jstep.optimizers.leafwise import Result, Values
from jstep.optimizers.rules import from_update, is_zero

Decay: TypeAlias = ScalarOrSchedule | Mapping[str, ScalarOrSchedule]
"""A decay, or path or glob → the decay of the leaves that match."""

DECAY = "decay"
"""The flag for the decay of a leaf: the name of the hyperparameter and a factor on it, or None."""


@makes_optimizer()
def add_weight_decay(weight_decay: Decay, mask: VarList | Mapping[str, float] = None) -> Optimizer:
    """Add weight decay: u + weight_decay·p, where u is the update from the previous element.

    After `scale_by_adam` the decay is decoupled as in AdamW; before a `trace` it is coupled as in SGD. For a decay
    that does not depend on the learning rate, put `decay_weights` after it.

    Args:
        weight_decay: The decay ≥ 0: a number, a schedule or `held`. Or a mapping from paths or globs to these: the
            first match applies, and leaves without a match do not decay.
        mask: The leaves that decay, in the grammar of `var_list`; None for all. Or path or glob → a factor ≥ 0 on the
            decay, such as `mup(...).decays`: the first match applies, and leaves without a match have the factor 1. A
            mask that selects nothing is logged as a warning, unless it is below a label of a `partition`.

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
    by_rows = all(map(is_zero, hyper.values()))
    return from_update("add_weight_decay", with_added_decay, {}, hyper, flags=flags, by_rows=by_rows)


def with_added_decay(u: Array, p: Array, s: Values, h: Values) -> Result:
    """The direction with weight decay."""
    decay = decay_of(h)
    return (u if decay is None else u + decay * p), {}


@makes_optimizer()
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
    is_cautious = as_bool(cautious, "cautious")

    def decayed(u: Array, p: Array, s: Values, h: Values) -> Result:
        decay = decay_of(h)
        if decay is None:
            return u, {}
        if is_cautious:  # only elements that the update moves towards zero
            decay = decay * (((u < 0) & (p > 0)) | ((u > 0) & (p < 0))).astype(p.dtype)
        return u - decay * p, {}

    hyper, flags = decay_arguments("decoupled_weight_decay", weight_decay, mask)
    return from_update("decay_weights", decayed, {}, hyper, flags=flags)


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
    if isinstance(weight_decay, Mapping):
        which: Flag | None = first_match("weight_decay", weight_decay)
        hyper = {f"{name}/{glob}": checked(f"weight_decay[{glob!r}]", x, low=0) for glob, x in weight_decay.items()}
    else:
        hyper, which = {name: checked("weight_decay", weight_decay, low=0)}, None
    factors = _factors(mask_given)
    scales = decay_mask("mask", mask_given) if factors is None else first_match("mask", factors)

    def of_leaf(glob: str | None, scale: Any) -> Any:
        factor = float(scale) if factors is None else 1.0 if scale is None else factors[scale]
        return None if glob is None or factor == 0 else (name if which is None else f"{name}/{glob}", factor)

    def decay(params: Params) -> list[Any]:
        names = scales(params)
        globs = [""] * len(names) if which is None else which(params)
        return list(map(of_leaf, globs, names))

    return hyper, {DECAY: decay}


def decay_of(h: Values) -> Any:
    """The decay of this leaf; None if it is known while tracing that the leaf does not decay."""
    if h.decay is None:
        return None
    name, factor = h.decay
    return None if is_zero(h[name]) else h[name] if factor == 1 else factor * h[name]


def _factors(given: VarList) -> dict[str, float] | None:
    """Path or glob → factor, or None if the mask is not such a mapping (a tree of bools has no numbers)."""
    if not isinstance(given, Mapping) or not given or not all(isinstance(glob, str) for glob in given):
        return None
    if not all(isinstance(one, int | float | np.number) and not isinstance(one, bool) for one in given.values()):
        return None
    return {glob: as_number(one, f"mask[{glob!r}]", low=0) for glob, one in given.items()}
