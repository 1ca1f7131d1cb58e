"""The step that names the checkpoint of a state."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jstep.checkpoint import arguments as checked
from jstep.core import trees


def step_of(state: Any, given: Any = None) -> int:
    """The global step of a state: its field, its key, or the one that all members of a population have.

    Args:
        state: A `TrainState`, or any pytree with a `global_step`.
        given: The step to take for a population whose members differ; None as a rule.

    Raises:
        TypeError: The step is no integer.
        ValueError: There is none, it is negative, members of a population differ and none is given, or the one
            given is not that of the state.
    """
    step = state.get("global_step") if isinstance(state, Mapping) else getattr(state, "global_step", None)
    if step is None:
        raise ValueError(
            "state: it has no global step, which names the checkpoint; "
            "give it one with state.replace(global_step=jstep.create_global_step())"
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
            f"state: global_step has the shape {np.shape(steps)} and the values {found[:5].tolist()}: members of a "
            "population that differ have no step in common; name it with save(state, step=…)"
        )
    return checked.step(found[0], "state: global_step")
