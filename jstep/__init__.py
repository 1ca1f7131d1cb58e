"""jstep: a functional training toolkit for JAX, around a single global step.

    import jax, jax.numpy as jnp, jstep
    optimizer = jstep.adam(jstep.linear_warmup(jstep.cosine_decay(1e-3, 10_000), 500))
    state = jstep.TrainState.create(params, optimizer)
    train_step = jstep.minimize(loss_fn, optimizer)    # loss_fn(params, *batch) -> loss
    state, metrics = train_step(state, x, y)
    # Or a whole run, with checkpoints and logs:
    batches = jstep.batches((x, y), 128)
    state = jstep.train(train_step, state, batches, 10_000, checkpoint_dir="run", logdir="run")

The state of a run is one immutable pytree, (params, slots, global_step). Optimizers and train steps
are pure functions under jit, vmap and scan. The global step counts the steps completed; schedules,
bias corrections, batches, random keys, checkpoints, logs and the stop condition are functions of
it, so that the loop resumes bit for bit.

The command line is `jstep --help`. The public names by topic and module follow;
`help(jstep.<name>)` has the details. `jstep.metrics`, `jstep.summary` and `jstep.distributed` are
packages of names.
"""

__version__ = "0.5.0.dev0"

_NAMES = """
Training state
    state.train_state: TrainState
    state.slots: get_slot get_slot_names
    state.global_step: create_global_step get_global_step get_or_create_global_step global_step
    training.apply_gradients: increment_global_step
Train steps
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
    differentiate.clipping: clip_by_value clip_by_norm clip_by_average_norm clip_by_global_norm
    differentiate.clipping: global_norm layer_norms
Optimizers, common
    optimizers.classic: gradient_descent momentum sgd
    optimizers.adam: adam adamw adafactor
    optimizers.sign: lion
    optimizers.muon: muon
    optimizers.soap: soap
Optimizers, without a schedule
    optimizers.parameter_free: schedule_free_adamw schedule_free_sgd schedule_free_params prodigy
Optimizers, others
    optimizers.adam: nadam radam ademamix adabelief adamax adan adopt yogi
    optimizers.classic: adagrad adadelta rmsprop ftrl madgrad
    optimizers.layerwise: lamb lars novograd
    optimizers.sign: rprop signum
Wrappers of optimizers
    optimizers.chains: chain partition scope
    optimizers.guards: skip_nonfinite dynamic_loss_scale loss_scale update_every with_noise_scale
    optimizers.guards: cautious with_projection
    optimizers.low_precision: master_weights stochastic_rounding
    optimizers.averages: lookahead slow_params with_moving_average ExponentialMovingAverage
    optimizers.averages: averaged_params averaged_model_state
    optimizers.compact: compact repack
Elements of a chain
    optimizers.gradient_transformations: scale scale_by_learning_rate scale_updates add_weight_decay
    optimizers.gradient_transformations: decay_weights add_noise centralize_gradients
    optimizers.gradient_transformations: normalize_gradients clip_gradients
    optimizers.adam: scale_by_adam
    optimizers.sign: scale_by_lion
    optimizers.classic: scale_by_rms trace
    optimizers.layerwise: scale_by_trust_ratio
    optimizers.muon: orthogonalize normalize_neurons on_hyperball
Custom optimizers, and hyperparameters that the state holds
    core.trees: Optimizer Context
    optimizers.rules: from_direction leafwise Slot
    optimizers.chains: stateless
    optimizers.updates: apply_updates
    optimizers.hyperparameters: held get_hyperparameter set_hyperparameter
    optimizers.from_optax: from_optax
Schedules
    core.trees: Schedule
    schedules.compose: constant piecewise_constant join shift times linear_warmup
    schedules.curves: linear polynomial_decay exponential_decay natural_exp_decay inverse_time_decay
    schedules.curves: inverse_sqrt_decay cosine_decay cosine_decay_restarts linear_cosine_decay
    schedules.curves: warmup_cosine_decay warmup_stable_decay one_cycle cyclical
    schedules.curves: ademamix_alpha ademamix_beta3
Input data
    data.batches: batches Batches mixture Mixture
    data.loaders: from_state replayed
    data.loop_batches: from_loop
    data.prefetch: prefetch_to_device PrefetchIterator
Queues
    queues.queues: FIFOQueue RandomShuffleQueue CancelledError
    core.exceptions: QueueError OutOfRangeError
    queues.queue_runner: QueueRunner add_queue_runner start_queue_runners
    queues.coordinator: Coordinator
Training loop and hooks
    running.run: Run
    running.train: train
    core.signals: Preempted
    loop.stopping: interrupted_state
    hooks.hook: Hook
    logs.reporting: ReportingHook LoggingHook SummarySaverHook MetricsHook
    hooks.at_steps: every ProfilerHook StopAtStepHook
    core.logs: log_every_n
    logs.speed: StepCounterHook
    watching.progress: ProgressHook
    logs.history: History
    hooks.checkpoint_saver: CheckpointSaverHook
    logs.fingerprint_log: FingerprintHook DivergenceError
    hooks.nan_loss: NanLossHook
    state.nonfinite: NanLossDuringTrainingError
    watching.stall_watch: StallHook
Evaluation
    evaluating.evaluator: evaluator
    evaluating.evaluation_hook: EvaluationHook
    evaluating.callbacks: EarlyStopping ReduceOnPlateau
    evaluating.keep_best: KeepBest
Checkpoints and weights
    checkpoint.saver: Saver
    checkpoint.names: latest_checkpoint checkpoints_iterator checkpoint_name
    array_store.manifest: CheckpointError CorruptedCheckpointError UnsupportedFormatError
    weights.load: load_weights
    weights.save: save_weights
Distributed training
    state.train_state: shard_state
    data.batch_placement: shard_batch
    state.sharding: fsdp_specs
    planning.topologies: topology
Debugging, planning, and transfer to wider models
    debug.replay: replay Replay
    debug.verify_resume: verify_resume ResumeReport
    state.fingerprints: fingerprint
    debug.find_nonfinite: find_nonfinite NonFinite
    debug.explain_nonfinite: explain_nonfinite NonFiniteUpdate
    planning.plan: plan Plan
    planning.cost: cost Cost
    look.goodput: goodput Goodput
    look.run_summary: RunSummary
    look.runs: runs RunList
    look.report: report Report
    planning.transfer: mup MupFactors coord_check CoordCheck
Packages of names
    : distributed metrics summary
"""
"""The only list of public names, by topic and module: the source of the stub and site."""
__doc__ = f"{__doc__ or ''}{_NAMES}"


_LINES = [line.strip().partition(": ") for line in _NAMES.splitlines()]
_EXPORTS = {
    name: f"jstep.{module}".rstrip(".:") for module, _, names in _LINES for name in names.split()
}
"""Public name → its module."""
__all__ = sorted(_EXPORTS)

# Names are loaded on first use: `import jstep` is fast, and unused modules cost nothing.


def __getattr__(name: str) -> object:
    import importlib
    import sys

    place, public_names = _EXPORTS.get(name), importlib.import_module("jstep.core.public_names")
    if name in public_names.MOVED:
        return getattr(sys.modules[__name__], public_names.new_name("jstep", name))
    if place is None:
        raise public_names.attribute_error("module 'jstep'", name, sys.modules[__name__])
    if place == "jstep":  # a package of names
        return importlib.import_module(f"jstep.{name}")
    found: object = getattr(importlib.import_module(place), name)
    globals()[name] = found
    # What is loaded now belongs to `jstep`, so that errors and reprs show a name to type.
    for public, module in _EXPORTS.items():
        if module in sys.modules:
            public_names.show_in("jstep", vars(sys.modules[module]).get(public))
    return found


def __dir__() -> list[str]:
    return list(__all__)
