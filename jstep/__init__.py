"""jstep: a JIT-compiled functional training toolkit on JAX, around a single global step."""

import typing

from jstep import distributed
from jstep.checkpoint import CheckpointError, Saver, checkpoint_name, latest_checkpoint
from jstep.clipping import clip_by_average_norm, clip_by_global_norm, clip_by_norm, clip_by_value, global_norm
from jstep.core.indexed_slices import IndexedSlices
from jstep.core.public import publish as _publish
from jstep.core.types import Optimizer, Schedule
from jstep.data import Batches, PrefetchIterator, batches, prefetch_to_device
from jstep.differentiate import (
    GATE_GRAPH,
    GATE_NONE,
    GATE_OP,
    AggregationMethod,
    compute_gradients,
    gradients,
    stop_gradient,
)
from jstep.hooks import (
    CheckpointSaverHook,
    EvaluationHook,
    Hook,
    LoggingHook,
    NanLossDuringTrainingError,
    NanLossHook,
    ProfilerHook,
    ProgressHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    log_every_n,
)
from jstep.loop import Preempted, train
from jstep.optimizers import (
    ExponentialMovingAverage,
    adagrad,
    adam,
    apply_updates,
    averaged_params,
    chain,
    clip_gradients,
    ftrl,
    gradient_descent,
    momentum,
    partition,
    rmsprop,
    scope,
    skip_nonfinite,
    with_moving_average,
)
from jstep.queues import (
    CancelledError,
    Coordinator,
    FIFOQueue,
    OutOfRangeError,
    QueueRunner,
    RandomShuffleQueue,
    add_queue_runner,
    start_queue_runners,
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
from jstep.sharding import fsdp_specs, shard_batch
from jstep.state import (
    TrainState,
    create_global_step,
    get_global_step,
    get_or_create_global_step,
    get_slot,
    get_slot_names,
    global_step,
    increment_global_step,
    shard_state,
)
from jstep.tools import ResumeReport, verify_resume
from jstep.training import TrainStep, apply_gradients, minimize, scan_steps

if typing.TYPE_CHECKING:
    from jstep import summary

__version__ = "0.1.0"


def __getattr__(name: str) -> typing.Any:
    # Loaded when first asked for: what draws graphs imports parts of JAX that `import jax` does not.
    if name == "summary":
        import importlib

        return importlib.import_module("jstep.summary")
    raise AttributeError(f"module 'jstep' has no attribute {name!r}")


__all__ = [
    "GATE_GRAPH",
    "GATE_NONE",
    "GATE_OP",
    "AggregationMethod",
    "Batches",
    "CancelledError",
    "CheckpointError",
    "CheckpointSaverHook",
    "Coordinator",
    "EvaluationHook",
    "ExponentialMovingAverage",
    "FIFOQueue",
    "Hook",
    "IndexedSlices",
    "LoggingHook",
    "NanLossDuringTrainingError",
    "NanLossHook",
    "Optimizer",
    "OutOfRangeError",
    "Preempted",
    "PrefetchIterator",
    "ProfilerHook",
    "ProgressHook",
    "QueueRunner",
    "RandomShuffleQueue",
    "ResumeReport",
    "Saver",
    "Schedule",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "TrainState",
    "TrainStep",
    "adagrad",
    "adam",
    "add_queue_runner",
    "apply_gradients",
    "apply_updates",
    "averaged_params",
    "batches",
    "chain",
    "checkpoint_name",
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
    "latest_checkpoint",
    "linear_cosine_decay",
    "linear_warmup",
    "log_every_n",
    "minimize",
    "momentum",
    "natural_exp_decay",
    "partition",
    "piecewise_constant",
    "polynomial_decay",
    "prefetch_to_device",
    "rmsprop",
    "scan_steps",
    "scope",
    "shard_batch",
    "shard_state",
    "shift",
    "skip_nonfinite",
    "start_queue_runners",
    "stop_gradient",
    "summary",
    "train",
    "verify_resume",
    "with_moving_average",
]

_publish(globals())
