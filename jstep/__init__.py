"""jstep: a JIT-compiled functional training toolkit on JAX, around a single global step."""

from jstep import distributed
from jstep._microbatches import AggregationMethod
from jstep._typing import Optimizer, Schedule
from jstep.averages import ExponentialMovingAverage, averaged_params, with_moving_average
from jstep.clipping import clip_by_average_norm, clip_by_global_norm, clip_by_norm, clip_by_value, global_norm
from jstep.gradients import GATE_GRAPH, GATE_NONE, GATE_OP, compute_gradients, gradients, stop_gradient
from jstep.indexed_slices import IndexedSlices
from jstep.optimizers import (
    adagrad,
    adam,
    apply_updates,
    chain,
    clip_gradients,
    ftrl,
    gradient_descent,
    momentum,
    partition,
    rmsprop,
    scope,
    skip_nonfinite,
)
from jstep.schedules import (
    constant,
    cosine_decay,
    cosine_decay_restarts,
    exponential_decay,
    inverse_time_decay,
    join,
    linear_cosine_decay,
    linear_warmup,
    natural_exp_decay,
    piecewise_constant,
    polynomial_decay,
    shift,
)
from jstep.sharding import fsdp_specs, shard_batch, shard_state
from jstep.state import (
    TrainState,
    create_global_step,
    get_global_step,
    get_or_create_global_step,
    get_slot,
    get_slot_names,
    global_step,
    increment_global_step,
)
from jstep.training import TrainStep, apply_gradients, minimize, scan_steps

__version__ = "0.1.0"

__all__ = [
    "GATE_GRAPH",
    "GATE_NONE",
    "GATE_OP",
    "AggregationMethod",
    "ExponentialMovingAverage",
    "IndexedSlices",
    "Optimizer",
    "Schedule",
    "TrainState",
    "TrainStep",
    "adagrad",
    "adam",
    "apply_gradients",
    "apply_updates",
    "averaged_params",
    "chain",
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "clip_gradients",
    "compute_gradients",
    "constant",
    "cosine_decay",
    "cosine_decay_restarts",
    "create_global_step",
    "distributed",
    "exponential_decay",
    "fsdp_specs",
    "ftrl",
    "get_global_step",
    "get_or_create_global_step",
    "get_slot",
    "get_slot_names",
    "global_norm",
    "global_step",
    "gradient_descent",
    "gradients",
    "increment_global_step",
    "inverse_time_decay",
    "join",
    "linear_cosine_decay",
    "linear_warmup",
    "minimize",
    "momentum",
    "natural_exp_decay",
    "partition",
    "piecewise_constant",
    "polynomial_decay",
    "rmsprop",
    "scan_steps",
    "scope",
    "shard_batch",
    "shard_state",
    "shift",
    "skip_nonfinite",
    "stop_gradient",
    "with_moving_average",
]
