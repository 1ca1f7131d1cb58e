"""The parts of a training step in lanes."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.meshes import sharded_like
from jstep.core.placement import back
from jstep.differentiate.lanes import Lanes, on_lanes
from jstep.state.train_state import TrainState, require_state
from jstep.training.apply import layouts_of
from jstep.training.step import Parts

_logger = logging.getLogger("jstep")


def parts_in_lanes(number: int, pure: Callable[..., Any]) -> Parts:
    """Return the parts of a training step in lanes.

    Args:
        number: L.
        pure: `pure(state, args, None, lanes) -> (state, computed, constants)`.
    """
    has_warned = False

    def run(lanes: Lanes, state: TrainState, args: tuple[Any, ...]) -> Any:
        nonlocal has_warned
        if lanes.others and not has_warned and jax.process_index() == 0:
            has_warned = True
            _logger.warning(
                "lanes=%d: arrays are also split over %s, and the rows of the batch are not (tensor parallelism): the "
                "bits of this run are not promised to be the same on another number of devices",
                number,
                ", ".join(map(repr, lanes.others)),
            )
        return pure(state, args, None, lanes)

    def parts(state: TrainState, args: tuple[Any, ...], batch_specs: Any) -> Any:
        layouts = layouts_of(require_state(state))
        leaves = trees.leaves_with_paths(state.params)
        places = {np.shape(leaf): layouts[path].spec for path, leaf in leaves if path in layouts}
        new, *others = on_lanes(number, run, state, args, batch_specs, places, sharded_like((state,)))
        return jax.tree.map(back, new, state), *others

    return parts
