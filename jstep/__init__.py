"""jstep: a JIT-compiled functional training toolkit on JAX, around a single global step.

    import jax, jax.numpy as jnp, jstep
    optimizer = jstep.adam(jstep.linear_warmup(jstep.cosine_decay(1e-3, 10_000), 500))
    state = jstep.TrainState.create(params, optimizer)
    train_step = jstep.minimize(loss_fn, optimizer)             # loss_fn(params, *batch) -> loss
    state = jstep.train(train_step, state, jstep.batches((x, y), 128), 10_000, checkpoint_dir="run", logdir="run")

What there is, by what it is for; `help(jstep.name)` says all of a name.

State and its clock: TrainState; create_global_step, get_global_step, get_or_create_global_step, global_step and
    increment_global_step for the step; get_slot, get_slot_names for what optimizers keep beside the parameters.
Steps: minimize makes a compiled TrainStep of a loss, scan_steps runs several in one call; apply_gradients for your own.
Gradients: gradients, compute_gradients, stop_gradient; lookup for rows of tables, whose gradients are IndexedSlices;
    map_gradients; AggregationMethod and GATE_NONE, GATE_OP, GATE_GRAPH as in tf.train.
Clipping: clip_by_value, clip_by_norm, clip_by_average_norm, clip_by_global_norm, global_norm; chained: clip_gradients.
Optimizers of tf.train: gradient_descent, momentum, adagrad, adam, rmsprop, ftrl.
    With decoupled decay: adamw, lion, lamb, lars, muon, nadam, radam, soap, adafactor, adan, ademamix, adopt.
    More: sgd, signum, adabelief, adadelta, adamax, madgrad, novograd, rprop, yogi; without a rate to tune: prodigy;
    schedule_free_sgd, schedule_free_adamw with schedule_free_params for evaluation.
    Around one: chain, partition, scope, skip_nonfinite, master_weights, stochastic_rounding, lookahead, slow_params,
    dynamic_loss_scale, cautious, update_every; with_moving_average, ExponentialMovingAverage, averaged_params;
    with_noise_scale.
    In a chain: scale, scale_by_adam, scale_by_lion, scale_by_rms, scale_by_trust_ratio, scale_by_learning_rate,
    scale_updates, add_weight_decay, decay_weights, add_noise, centralize_gradients, normalize_gradients, orthogonalize,
    normalize_neurons, on_hyperball, trace.
    Custom: Optimizer, Context, leafwise, Slot, stateless, map_leaves, apply_updates, as_schedule, from_optax.
    Hyperparameters that the state holds: held, get_hyperparameter, set_hyperparameter.
Schedules (a Schedule is any function of the step): constant, linear, piecewise_constant, polynomial_decay,
    exponential_decay, natural_exp_decay, inverse_time_decay, inverse_sqrt_decay; cosine_decay, cosine_decay_restarts,
    linear_cosine_decay, warmup_cosine_decay, warmup_stable_decay, one_cycle, cyclical; ademamix_alpha, ademamix_beta3;
    put together by join, shift, times, linear_warmup.
Input: batches gives Batches by step, mixture a Mixture of sources by weight; prefetch_to_device a PrefetchIterator;
    FIFOQueue, RandomShuffleQueue, QueueRunner, add_queue_runner, start_queue_runners and Coordinator feed from
    threads, until OutOfRangeError or CancelledError.
Running: train; it ends by Preempted at a SIGTERM. Hooks: Hook and every for your own; StepCounterHook, LoggingHook,
    ProgressHook, SummarySaverHook, MetricsHook, CheckpointSaverHook, EvaluationHook, FingerprintHook, ProfilerHook,
    StopAtStepHook, NanLossHook with NanLossDuringTrainingError, AuditHook with AuditError; log_every_n.
Evaluating: evaluator, with metrics.auc and others; EarlyStopping, KeepBest, ReduceOnPlateau act on what an
    EvaluationHook finds.
Checkpoints: Saver, latest_checkpoint, checkpoint_name, CheckpointError.
Weights in safetensors files, as on the Hugging Face Hub: load_weights, save_weights.
Many devices: shard_state, shard_batch, fsdp_specs; distributed.initialize for many processes; topology for a mesh of
    devices that only compile.
Tools: verify_resume (a ResumeReport), replay (a Replay), fingerprint and DivergenceError, find_nonfinite (a NonFinite);
    before a run: plan (a Plan), cost (a Cost with Collective entries); after it: goodput (a Goodput).
Wider models: mup for rates and initial values (MupFactors), coord_check whether they transfer (a CoordCheck).
Summaries for TensorBoard: summary.scalar and others, summary.SummaryWriter. `python -m jstep --help`: the command line.
"""

__version__ = "0.2.0"


def _places() -> dict[str, str]:
    """The public names, and the module that each comes from: what the stub beside this file says."""
    stub = __spec__.loader.get_data(__file__.removesuffix("c") + "i").decode()  # type: ignore
    places, module = {}, ""
    for line in stub.splitlines():
        words = line.replace(",", " ").split()
        module = words[1] if words[:1] == ["from"] else module
        places.update((words[i + 1], module) for i, word in enumerate(words) if word == "as")
    return places


_PLACES = _places()
__all__ = sorted(_PLACES)

# A name is loaded when it is asked for, so that `import jstep` is quick, and what a run does not use costs it nothing.


def __getattr__(name: str) -> object:
    import importlib
    import sys

    place = _PLACES.get(name)
    if place == "jstep" or (place is None and f"jstep.{name}" in _PLACES.values()):  # a package
        return importlib.import_module(f"jstep.{name}")
    if place is None:
        raise AttributeError(f"module 'jstep' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value: object = getattr(importlib.import_module(place), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
