"""jstep: a JIT-compiled functional training toolkit on JAX, around a single global step."""

__version__ = "0.1.0"

# A name is written down here and in __init__.pyi.
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
    "DivergenceError",
    "EvaluationHook",
    "ExponentialMovingAverage",
    "FIFOQueue",
    "FingerprintHook",
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
    "ademamix_alpha",
    "ademamix_beta3",
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
    "cyclical",
    "distributed",
    "exponential_decay",
    "fingerprint",
    "fsdp_specs",
    "ftrl",
    "get_global_step",
    "get_hyperparameter",
    "get_or_create_global_step",
    "get_slot",
    "get_slot_names",
    "global_norm",
    "global_step",
    "gradient_descent",
    "gradients",
    "held",
    "increment_global_step",
    "inverse_sqrt_decay",
    "inverse_time_decay",
    "join",
    "latest_checkpoint",
    "linear",
    "linear_cosine_decay",
    "linear_warmup",
    "log_every_n",
    "minimize",
    "momentum",
    "natural_exp_decay",
    "one_cycle",
    "partition",
    "piecewise_constant",
    "polynomial_decay",
    "prefetch_to_device",
    "rmsprop",
    "scan_steps",
    "scope",
    "set_hyperparameter",
    "shard_batch",
    "shard_state",
    "shift",
    "skip_nonfinite",
    "start_queue_runners",
    "stop_gradient",
    "summary",
    "times",
    "train",
    "verify_resume",
    "warmup_cosine_decay",
    "warmup_stable_decay",
    "with_moving_average",
]

# From the bottom up: asked for a name, jstep loads the packages up to the one that exports it. So `import jstep` is
# quick, and what a run does not use costs it nothing.
_PACKAGES = (
    "core",
    "sharding",
    "schedules",
    "clipping",
    "state",
    "optimizers",
    "differentiate",
    "training",
    "distributed",
    "data",
    "queues",
    "checkpoint",
    "fingerprints",
    "hooks",
    "loop",
    "tools",
    "summary",
)


def __getattr__(name: str) -> object:
    import importlib
    import sys

    if name in _PACKAGES:
        return importlib.import_module(f"jstep.{name}")
    if name in __all__:
        for package in _PACKAGES:
            module = importlib.import_module(f"jstep.{package}")
            if name in module.__all__:
                value: object = getattr(module, name)
                globals()[name] = value
                return value
    raise AttributeError(f"module 'jstep' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted(__all__)
