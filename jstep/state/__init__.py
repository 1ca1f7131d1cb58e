"""The training state: parameters, slots and the global step, and how to shard them."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.state.global_step import (
    create_global_step,
    get_global_step,
    get_or_create_global_step,
    global_step,
    increment_global_step,
)
from jstep.state.shard_state import shard_state
from jstep.state.slots import get_slot, get_slot_names
from jstep.state.train_state import (
    MODEL_STATE,
    START_STEP,
    TrainState,
    keep_roles,
    require_alive,
    require_state,
    step_of,
)

__all__ = [
    "MODEL_STATE",
    "START_STEP",
    "TrainState",
    "create_global_step",
    "get_global_step",
    "get_or_create_global_step",
    "get_slot",
    "get_slot_names",
    "global_step",
    "increment_global_step",
    "keep_roles",
    "require_alive",
    "require_state",
    "shard_state",
    "step_of",
]

_set_public_module(globals())
