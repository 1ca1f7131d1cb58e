"""The step that names the checkpoint of a state."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jstep.checkpoint import arguments as checked
from jstep.core import trees


def step_of(state: Any, given: Any = None) -> int:
    """Return the global step of a state: a field, a key, or the common step of the members of a population.

    Args:
        state: A `TrainState`, or any pytree with a `global_step`.
        given: The step to use for a population whose members differ; usually None.

    Raises:
        TypeError: The step is not an integer.
        ValueError: The state has no step, the step is negative, members of a population differ and `given` is None,
            or `given` differs from the step of the state.
    """
    step = state.get("global_step") if isinstance(state, Mapping) else getattr(state, "global_step", None)
    if step is None:
        raise ValueError(
            "state: it has no global step, which names the checkpoint; "
            "add one with state.replace(global_step=jstep.create_global_step())"
        )
    if trees.is_array(step) and np.ndim(step) and not trees.is_traced(step):
        return _of_population(step, given)
    number = checked.step(step, "state: global_step")
    if given is not None and checked.step(given) != number:
        raise ValueError(f"step={given}: must be the state's global_step, {number}, which names its checkpoint")
    return number


def _of_population(steps: Any, given: Any) -> int:
    if given is not None:
        return checked.step(given)
    found = np.unique(np.asarray(steps))
    if len(found) != 1:
        raise ValueError(
            f"state: global_step has the shape {np.shape(steps)} and the values {found[:5].tolist()}: the members of "
            "this population have no step in common; name the checkpoint with save(state, step=…)"
        )
    return checked.step(found[0], "state: global_step")
