"""jstep: a JIT-compiled functional training toolkit on JAX, around a single global step."""

import typing

from jstep import distributed
from jstep._microbatches import AggregationMethod
from jstep._signals import Preempted
from jstep._typing import Optimizer, Schedule
from jstep.averages import ExponentialMovingAverage, averaged_params, with_moving_average
from jstep.checkpoint import Saver, checkpoint_name, latest_checkpoint
from jstep.checkpoint._manifest import CheckpointError
from jstep.clipping import clip_by_average_norm, clip_by_global_norm, clip_by_norm, clip_by_value, global_norm
from jstep.data import Batches, batches
from jstep.data.prefetch import PrefetchIterator, prefetch_to_device
from jstep.errors import CancelledError, OutOfRangeError
from jstep.gradients import GATE_GRAPH, GATE_NONE, GATE_OP, compute_gradients, gradients, stop_gradient
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
from jstep.indexed_slices import IndexedSlices
from jstep.loop import train
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
from jstep.queues import FIFOQueue, RandomShuffleQueue
from jstep.queues.coordinator import Coordinator
from jstep.queues.queue_runner import QueueRunner, add_queue_runner, start_queue_runners
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
from jstep.verify_resume import ResumeReport, verify_resume

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
