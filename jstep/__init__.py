"""jstep: a JIT-compiled functional training toolkit on JAX, around a single global step.

    import jax, jax.numpy as jnp, jstep
    optimizer = jstep.adam(jstep.linear_warmup(jstep.cosine_decay(1e-3, 10_000), 500))
    state = jstep.TrainState.create(params, optimizer)
    train_step = jstep.minimize(loss_fn, optimizer)             # loss_fn(params, *batch) -> loss
    state = jstep.train(train_step, state, jstep.batches((x, y), 128), 10_000, checkpoint_dir="run", logdir="run")

The training state is an immutable pytree. Its global step counts the steps completed; schedules, bias corrections,
checkpoints, logs and the stop condition all read it. Training steps and optimizers are pure functions.

Overview by topic; see `help(jstep.<name>)` for details.

Training state
    TrainState: parameters, optimizer state (called *slots* as in TensorFlow) and the global step; get_slot,
    get_slot_names. Global step: create_global_step, get_global_step, get_or_create_global_step, global_step,
    increment_global_step.
Training steps
    minimize compiles a TrainStep from a loss; scan_steps runs several steps in one call; apply_gradients is for custom
    steps.
Gradients and clipping
    gradients, compute_gradients, stop_gradient, map_gradients; lookup of table rows, with sparse gradients
    (IndexedSlices); AggregationMethod, GATE_NONE, GATE_OP, GATE_GRAPH as in tf.train.
    clip_by_value, clip_by_norm, clip_by_average_norm, clip_by_global_norm, global_norm, layer_norms; in a chain:
    clip_gradients.
Optimizers
    As in tf.train: gradient_descent, momentum, adagrad, adam, rmsprop, ftrl.
    With decoupled weight decay: adamw, lion, lamb, lars, muon, nadam, radam, soap, adafactor, adan, ademamix, adopt.
    Others: sgd, signum, adabelief, adadelta, adamax, madgrad, novograd, rprop, yogi.
    Schedule-free: schedule_free_sgd, schedule_free_adamw; schedule_free_params for evaluation.
    Without a learning rate to tune: prodigy.
    Wrappers: chain, partition, scope, skip_nonfinite, master_weights, stochastic_rounding, lookahead (slow_params),
    dynamic_loss_scale, cautious, update_every, with_moving_average (ExponentialMovingAverage, averaged_params),
    with_noise_scale, with_projection, compact (7 bytes a parameter; repack converts states to and from it);
    carry moves slots to parameters of other shapes.
    Elements of a chain: scale, scale_by_adam, scale_by_lion, scale_by_rms, scale_by_trust_ratio,
    scale_by_learning_rate, scale_updates, add_weight_decay, decay_weights, add_noise, centralize_gradients,
    normalize_gradients, orthogonalize, normalize_neurons, on_hyperball, trace.
    Custom: Optimizer, Context, from_direction, leafwise, Slot, stateless, map_leaves, apply_updates, as_schedule,
    from_optax.
    Mutable hyperparameters, stored in the state: held, get_hyperparameter, set_hyperparameter.
Schedules
    A Schedule is any function of the step: constant, linear, piecewise_constant, polynomial_decay, exponential_decay,
    natural_exp_decay, inverse_time_decay, inverse_sqrt_decay, cosine_decay, cosine_decay_restarts,
    linear_cosine_decay, warmup_cosine_decay, warmup_stable_decay, one_cycle, cyclical, ademamix_alpha, ademamix_beta3.
    Composition: join, shift, times, linear_warmup.
Input data
    batches (Batches, indexed by step), mixture (a weighted Mixture of sources), from_state, replayed,
    prefetch_to_device (PrefetchIterator).
    Queues: FIFOQueue, RandomShuffleQueue, QueueRunner, add_queue_runner, start_queue_runners, Coordinator,
    OutOfRangeError, CancelledError.
Training loop and hooks
    train; it raises Preempted after a SIGTERM. In a notebook: interrupted_state.
    StepCounterHook, LoggingHook, ProgressHook, SummarySaverHook, MetricsHook, History, CheckpointSaverHook,
    EvaluationHook, FingerprintHook (DivergenceError), ProfilerHook, StopAtStepHook, NanLossHook
    (NanLossDuringTrainingError), AuditHook (AuditError), StallHook.
    Custom hooks: Hook, ReportingHook, every, log_every_n.
Evaluation
    evaluator, with metrics such as metrics.auc; callbacks of EvaluationHook: EarlyStopping, KeepBest, ReduceOnPlateau.
Checkpoints and weights
    Saver, latest_checkpoint, checkpoints_iterator, checkpoint_name, CheckpointError, merge_checkpoints;
    load_weights and save_weights for safetensors files.
Distributed training
    shard_state, shard_batch, fsdp_specs; distributed.initialize for several processes; topology for a mesh of
    compile-only devices.
Debugging and planning
    verify_resume (ResumeReport), replay (Replay), fingerprint, find_nonfinite (NonFinite); before a run: plan (Plan),
    cost (Cost, with Collective entries); after a run: goodput (Goodput); of many: runs (RunList of RunSummary),
    and report (Report).
Hyperparameter transfer to wider models
    mup (MupFactors), coord_check (CoordCheck).
TensorBoard summaries
    summary.scalar, summary.SummaryWriter and others.
Command line
    python -m jstep --help
"""

__version__ = "0.3.0"


def _exports() -> dict[str, str]:
    """Map each public name to its module, as listed in the stub file."""
    stub = __spec__.loader.get_data(__file__.removesuffix("c") + "i").decode()  # type: ignore
    # Lines of the form `from module import name as name`.
    words = [line.split() for line in stub.splitlines() if line.startswith("from ")]
    return {name: module for _, module, _, name, *_ in words}


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
