"""Checks of arguments that many optimizers share."""

from typing import Any

import jax.numpy as jnp

from jstep.core.checks import kind, shown
from jstep.core.types import Array, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper
from jstep.optimizers.masks import Flag, mask

DECAYED = "decayed"
"""The flag for whether weight decay applies to a leaf."""


def rate(learning_rate: ScalarOrSchedule) -> Any:
    """A learning rate ≥ 0."""
    return checked("learning_rate", learning_rate, low=0)


def beta(name: str, value: ScalarOrSchedule) -> Any:
    """The decay of a bias-corrected average, in [0, 1)."""
    return checked(name, value, low=0, high=1, below=True)


def adam_hyper(
    learning_rate: ScalarOrSchedule,
    beta1: ScalarOrSchedule,
    beta2: ScalarOrSchedule,
    epsilon: ScalarOrSchedule,
) -> dict[str, Any]:
    """The four hyperparameters of Adam and its variants."""
    return {"learning_rate": rate(learning_rate)} | moments_hyper(beta1, beta2, epsilon)


def moments_hyper(beta1: ScalarOrSchedule, beta2: ScalarOrSchedule, epsilon: ScalarOrSchedule) -> dict[str, Any]:
    """The three hyperparameters of Adam's moments."""
    return {
        "beta1": beta("beta1", beta1),
        "beta2": beta("beta2", beta2),
        "epsilon": checked("epsilon", epsilon, low=0),
    }


def decay_hyper(weight_decay: ScalarOrSchedule) -> dict[str, Any]:
    """A weight decay ≥ 0."""
    return {"weight_decay": checked("weight_decay", weight_decay, low=0)}


def decay_flags(weight_decay_mask: VarList) -> dict[str, Flag]:
    """The flag for the leaves that decay."""
    return {DECAYED: mask("weight_decay_mask", weight_decay_mask)}


def decays(h: Hyper) -> bool:
    """Whether this leaf decays; False only if it is known while tracing that it does not."""
    wd = h["weight_decay"]
    return bool(h[DECAYED]) and not (isinstance(wd, float) and wd == 0.0)


def with_decay(u: Array, p: Array, h: Hyper) -> Array:
    """The direction u + weight_decay · p if this leaf decays, else u."""
    return u + h["weight_decay"] * p if decays(h) else u


def low_dtype(argument: str, dtype: Any) -> Any:
    """A floating dtype for a slot, or None."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{argument}={shown(dtype)}: must be a floating dtype such as jnp.bfloat16, got {kind(dtype)}")
    return found
