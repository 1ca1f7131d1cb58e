"""Moving averages of the parameters as an argument of the loss."""

from typing import Any

import jax

from jstep.core import trees
from jstep.core.checks import as_text, kind, shown
from jstep.core.types import Params
from jstep.optimizers.wrappers.exponential_moving_average import NAME, averaged_params
from jstep.state import TrainState


def checked_averages(use_averages: Any) -> str | None:
    """Return the name of the slot of the averages, or None if the loss does not take averages.

    Raises:
        TypeError: `use_averages` is neither a bool nor a string.
        ValueError: `use_averages` is an empty string.
    """
    if isinstance(use_averages, bool):
        return NAME if use_averages else None
    if not isinstance(use_averages, str):
        raise TypeError(
            f"use_averages={shown(use_averages)}: must be True, False or the name of a slot, got {kind(use_averages)}"
        )
    return as_text(use_averages, "use_averages")


def averages_for(state: TrainState, name: str) -> Params:
    """Return `averaged_params` of a state, with gradients stopped.

    Raises:
        ValueError: The state has no averages. The message explains how to keep them.
    """
    try:
        averages = averaged_params(state, name)
    except ValueError as error:
        raise ValueError(
            "use_averages: the loss takes the moving averages of the parameters: "
            f"{str(error).rstrip('.')}. State and step need the same optimizer."
        ) from None
    return jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf) if trees.is_trainable(leaf) else leaf, averages)
