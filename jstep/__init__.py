"""jstep: a JIT-compiled functional training toolkit on JAX, around a single global step.

    import jax, jax.numpy as jnp, jstep
    optimizer = jstep.adam(jstep.linear_warmup(jstep.cosine_decay(1e-3, 10_000), 500))
    state = jstep.TrainState.create(params, optimizer)
    train_step = jstep.minimize(loss_fn, optimizer)             # loss_fn(params, *batch) -> loss
    state = jstep.train(train_step, state, jstep.batches((x, y), 128), 10_000, checkpoint_dir="run", logdir="run")

The training state is an immutable pytree. Its global step counts the steps completed; schedules, bias corrections,
checkpoints, logs and the stop condition all read it. Training steps and optimizers are pure functions.

The command line is `python -m jstep --help`. The public names by topic and module follow; `help(jstep.<name>)` has the
details. `jstep.metrics`, `jstep.summary` and `jstep.distributed` are packages of names.
"""

__version__ = "0.3.0"

_NAMES = """
Training state
    state.train_state: TrainState
    state.slots: get_slot get_slot_names
    state.global_step: create_global_step get_global_step get_or_create_global_step global_step increment_global_step
Training steps
    training.minimize: minimize
    training.step: TrainStep
    training.looped: scan_steps
    training.apply_gradients: apply_gradients
Gradients
    differentiate.gradients: gradients stop_gradient map_gradients
    differentiate.loss_gradients: compute_gradients GATE_NONE GATE_OP GATE_GRAPH
    differentiate.lookup: lookup
    slots.indexed_slices: IndexedSlices
    differentiate.microbatches: AggregationMethod
Clipping
    differentiate.clipping: clip_by_value clip_by_norm clip_by_average_norm clip_by_global_norm global_norm
    differentiate.clipping: layer_norms
Optimizers, common
    optimizers.classic: gradient_descent momentum sgd
    optimizers.adam: adam adamw
    optimizers.sign: lion
Optimizers, for matrices or to save memory
    optimizers.muon: muon
    optimizers.soap: soap
    optimizers.adam: adafactor
Optimizers, without a schedule
    optimizers.parameter_free: schedule_free_adamw schedule_free_sgd schedule_free_params prodigy
Optimizers, variants of Adam
    optimizers.adam: nadam radam ademamix adabelief adamax adan adopt yogi
    optimizers.layerwise: lamb novograd
Optimizers, others
    optimizers.classic: adagrad adadelta rmsprop ftrl madgrad
    optimizers.layerwise: lars
    optimizers.sign: rprop signum
Wrappers of optimizers
    optimizers.compose: chain partition scope
    optimizers.guards: skip_nonfinite dynamic_loss_scale update_every with_noise_scale
    optimizers.low_precision: master_weights stochastic_rounding
    optimizers.averages: lookahead slow_params with_moving_average ExponentialMovingAverage averaged_params
    optimizers.constraints: cautious with_projection
    optimizers.compact: compact repack
Elements of a chain
    optimizers.gradient_transformations: scale scale_by_learning_rate scale_updates add_weight_decay decay_weights
    optimizers.gradient_transformations: add_noise centralize_gradients normalize_gradients clip_gradients
    optimizers.adam: scale_by_adam
    optimizers.sign: scale_by_lion
    optimizers.classic: scale_by_rms trace
    optimizers.layerwise: scale_by_trust_ratio
    optimizers.muon: orthogonalize normalize_neurons on_hyperball
Custom optimizers
    core.trees: Optimizer Context
    optimizers.rules: from_direction leafwise Slot
    optimizers.compose: stateless
    optimizers.updates: map_leaves apply_updates
    optimizers.hyperparameters: as_schedule
    optimizers.from_optax: from_optax
Hyperparameters that the state holds
    optimizers.hyperparameters: held get_hyperparameter set_hyperparameter
Schedules
    core.trees: Schedule
    schedules.compose: constant piecewise_constant join shift times linear_warmup
    schedules.curves: linear polynomial_decay exponential_decay natural_exp_decay inverse_time_decay
    schedules.curves: inverse_sqrt_decay cosine_decay cosine_decay_restarts linear_cosine_decay warmup_cosine_decay
    schedules.curves: warmup_stable_decay one_cycle cyclical ademamix_alpha ademamix_beta3
Input data
    data.batches: batches Batches mixture Mixture
    data.loaders: from_state replayed
    data.prefetch: prefetch_to_device PrefetchIterator
Queues
    queues.queues: FIFOQueue RandomShuffleQueue OutOfRangeError CancelledError
    queues.queue_runner: QueueRunner add_queue_runner start_queue_runners
    queues.coordinator: Coordinator
Training loop and hooks
    loop.train: train
    loop.signals: Preempted
    state.interrupted: interrupted_state
    hooks.hook: Hook
    hooks.report: ReportingHook LoggingHook SummarySaverHook MetricsHook
    hooks.at_steps: every ProfilerHook StopAtStepHook
    core.logs: log_every_n
    hooks.speed: StepCounterHook
    loop.progress: ProgressHook
    hooks.history: History
    hooks.checkpoint_saver: CheckpointSaverHook
    hooks.bits: FingerprintHook DivergenceError AuditHook AuditError
    hooks.nan_loss: NanLossHook
    state.contents: NanLossDuringTrainingError
    loop.stalls: StallHook
Evaluation
    evaluating.evaluator: evaluator
    evaluating.evaluation_hook: EvaluationHook
    evaluating.callbacks: EarlyStopping KeepBest ReduceOnPlateau
Checkpoints and weights
    checkpoint.saver: Saver
    checkpoint.names: latest_checkpoint checkpoints_iterator checkpoint_name
    checkpoint.manifest: CheckpointError
    weights.load: load_weights
    weights.save: save_weights
Distributed training
    state.train_state: shard_state
    data.placement: shard_batch
    state.sharding: fsdp_specs
    tools.topologies: topology
Debugging and planning
    tools.replay: verify_resume ResumeReport replay Replay
    state.fingerprints: fingerprint
    tools.find_nonfinite: find_nonfinite NonFinite
    tools.plan: plan Plan
    tools.cost: cost Cost
    tools.goodput: goodput Goodput
    tools.run_summary: RunSummary
    tools.runs: runs RunList
    tools.report: report Report
Hyperparameter transfer to wider models
    tools.transfer: mup MupFactors coord_check CoordCheck
Packages of names
    : distributed metrics summary
"""
"""The only list of public names, by topic and module: the stub and lists of the site are made from it."""
__doc__ = f"{__doc__ or ''}{_NAMES}"


def _exports() -> dict[str, str]:
    """Map each public name to its module."""
    lines = [line.strip().partition(": ") for line in _NAMES.splitlines()]
    return {name: f"jstep.{module}".rstrip(".:") for module, _, names in lines for name in names.split()}


_EXPORTS = _exports()
__all__ = sorted(_EXPORTS)

# Names are loaded on first use: `import jstep` is fast, and unused modules cost nothing.


def __getattr__(name: str) -> object:
    import importlib
    import sys

    place = _EXPORTS.get(name)
    if place is None:
        others: object = importlib.import_module("jstep.core.public_names").explain(name)
        text = f"module 'jstep' has no attribute {name!r}{others}"
        # Python suggests a similar name of `obj`, which would contradict what is known.
        raise AttributeError(text, name=name, obj=None if others else sys.modules[__name__])
    if place == "jstep":  # a package of names
        return importlib.import_module(f"jstep.{name}")
    value: object = getattr(importlib.import_module(place), name)
    globals()[name] = value
    _set_public_modules()
    return value


def _set_public_modules() -> None:
    """Set `__module__` of loaded public functions and classes, so that errors and reprs show a name to type."""
    import sys
    import types

    for name, place in _EXPORTS.items():
        value = vars(sys.modules[place]).get(name) if place in sys.modules else None
        if isinstance(value, type | types.FunctionType):
            value.__module__ = "jstep"


def __dir__() -> list[str]:
    return list(__all__)
