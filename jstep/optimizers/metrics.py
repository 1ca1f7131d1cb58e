"""What a step's metrics show of its slots."""

from typing import Any

import jax.numpy as jnp

from jstep.core.types import Slots, Step
from jstep.optimizers.held import held_values
from jstep.optimizers.wrappers.skip_nonfinite import LAST_FINITE_STEP, LOSS_SCALE

SKIPPED = "skipped"


def metrics_of_slots(before: Slots, after: Slots, step: Step) -> dict[str, Any]:
    """What the update `step` → step + 1 used and did, by name, with the prefixes of scopes and labels.

    Args:
        before: The slots before the update.
        after: The slots after it.
        step: The global step before it.

    Returns:
        Each held hyperparameter as it was in force; `loss_scale` likewise; `skipped`, 1.0 where a guard left the
        update out, else 0.0.
    """
    shown: dict[str, Any] = dict(held_values(before))
    for name in before:
        prefix, _, last = name.rpartition("/")
        if last == LOSS_SCALE:
            shown[name] = before[name]
        if last == LAST_FINITE_STEP:
            made = jnp.asarray(step).astype(after[name].dtype) + 1
            key = f"{prefix}/{SKIPPED}" if prefix else SKIPPED
            shown[key] = (after[name] != made).astype(jnp.float32)
    return shown
