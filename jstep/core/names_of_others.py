"""Names of other libraries that jstep has by another name, or does otherwise, for the error of `jstep.X`."""

from collections.abc import Mapping

# Library → (its page, {what to use in jstep: the library's names}).
LIBRARIES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "tf.train": (
        "docs/from/tf-train.md",
        {
            "jstep.adadelta": "AdadeltaOptimizer",
            "jstep.adagrad": "AdagradOptimizer",
            "jstep.adam": "AdamOptimizer",
            "jstep.ftrl": "FtrlOptimizer AdagradDAOptimizer ProximalAdagradOptimizer ProximalGradientDescentOptimizer",
            "jstep.gradient_descent": "GradientDescentOptimizer",
            "jstep.momentum": "MomentumOptimizer",
            "jstep.rmsprop": "RMSPropOptimizer",
            "jstep.minimize(…, num_microbatches=…) on a mesh": "SyncReplicasOptimizer",
            "jstep.piecewise_constant": "piecewise_constant_decay",
            "a function of the step, such as jstep.linear_cosine_decay": "noisy_linear_cosine_decay",
            "jstep.get_global_step": "assert_global_step",
            "jstep.Saver": "Checkpoint CheckpointManager CheckpointOptions SaverDef Int64SaverDef",
            "jstep.Saver(…).restore(None)": "list_variables load_checkpoint load_variable NewCheckpointReader",
            "jstep.Saver(…).restore(state, partial=True)": "init_from_checkpoint warm_start VocabInfo",
            "jstep.Saver(…).all_steps()": "get_checkpoint_state update_checkpoint_state checkpoint_exists "
            "generate_checkpoint_state_proto get_checkpoint_mtimes remove_checkpoint",
            "jstep.summary.write_graph": "write_graph export_meta_graph import_meta_graph",
            "jstep.train": "MonitoredTrainingSession MonitoredSession SingularMonitoredSession Supervisor "
            "SessionManager Scaffold basic_train_loop SessionCreator ChiefSessionCreator WorkerSessionCreator",
            "jstep.Hook": "SessionRunHook SessionRunArgs SessionRunContext SessionRunValues FinalOpsHook",
            "jstep.LoggingHook": "LoggingTensorHook",
            "jstep.NanLossHook": "NanTensorHook",
            "jstep.CheckpointSaverHook(saver, before_save=(fn,))": "CheckpointSaverListener",
            "every_n_steps and every_n_secs of each hook, or jstep.every": "SecondOrStepTimer",
            "jstep.batches": "batch batch_join shuffle_batch shuffle_batch_join maybe_batch maybe_batch_join "
            "maybe_shuffle_batch maybe_shuffle_batch_join limit_epochs input_producer range_input_producer "
            "slice_input_producer string_input_producer match_filenames_once FeedFnHook",
            "a loader of records, for jstep.train": "Example SequenceExample Feature Features FeatureList FeatureLists "
            "BytesList FloatList Int64List",
            "a thread that calls jstep.Coordinator.should_stop": "LooperThread",
            "jstep.distributed.initialize and a mesh": "Server ClusterSpec ClusterDef JobDef ServerDef "
            "replica_device_setter GlobalStepWaiterHook",
        },
    ),
    "tf.summary": (
        "docs/reference/summaries.md",
        {
            "jstep.summary.SummaryWriter": "SummaryWriter FileWriter FileWriterCache create_file_writer",
            "jstep.summary.scalar": "scalar",
            "jstep.summary.histogram": "histogram",
            "jstep.summary.image": "image",
            "jstep.summary.text": "text tensor_summary",
            "jstep.summary.merge": "merge",
            "jstep.summary.merge_all": "merge_all",
            "jstep.summary.write_graph": "graph",
            "jstep.summary.Summary": "Summary SummaryDescription Event",
            "jstep.summary.summary_iterator": "summary_iterator",
            "jstep.summary.zero_fraction": "zero_fraction",
            "jstep.ProfilerHook": "trace_on trace_off trace_export",
        },
    ),
    "Optax": (
        "docs/from/optax.md",
        {
            "jstep.Optimizer": "GradientTransformation GradientTransformationExtraArgs",
            "jstep.held": "inject_hyperparams inject_stateful_hyperparams InjectHyperparamsState",
            "jstep.partition": "multi_transform masked selective_transform freeze set_to_zero MaskedNode",
            "jstep.scope": "named_chain",
            "jstep.minimize(…, num_microbatches=…) or jstep.update_every": "MultiSteps MultiStepsState apply_every "
            "microbatch",
            "jstep.skip_nonfinite": "apply_if_finite ApplyIfFinite skip_not_finite zero_nans skip_large_updates",
            "jstep.update_every": "conditionally_mask conditionally_transform",
            "jstep.clip_gradients": "clip adaptive_grad_clip clip_by_block_rms per_example_global_norm_clip "
            "per_example_layer_norm_clip",
            "jstep.add_weight_decay": "add_decayed_weights",
            "jstep.centralize_gradients": "centralize",
            "jstep.normalize_gradients": "normalize normalize_by_update_norm scale_gradient",
            "jstep.scale_by_learning_rate": "scale_by_schedule",
            "jstep.with_moving_average": "ema incremental_update periodic_update measure_with_ema",
            "jstep.with_projection": "keep_params_nonnegative",
            "jstep.lookahead": "LookaheadParams",
            "jstep.stateless": "stateless_with_tree_map",
            "jstep.schedule_free_adamw": "schedule_free",
            "jstep.schedule_free_params": "schedule_free_eval_params",
            "jstep.minimize(…, sharpness=…)": "sam",
            "jstep.ReduceOnPlateau": "reduce_on_plateau",
            "jstep.signum": "sign_sgd",
            "jstep.nadam": "nadamw",
            "jstep.adamax": "adamaxw",
            "jstep.adamw(…, amsgrad=True)": "amsgrad",
            "jstep.add_noise": "noisy_sgd",
            "jstep.scale_by_trust_ratio": "scale_by_param_block_norm scale_by_param_block_rms",
            "jstep.linear": "linear_schedule",
            "jstep.constant": "constant_schedule",
            "jstep.join": "join_schedules",
            "jstep.cosine_decay": "cosine_decay_schedule",
            "jstep.cosine_decay_restarts": "sgdr_schedule",
            "jstep.polynomial_decay": "polynomial_schedule",
            "jstep.piecewise_constant": "piecewise_constant_schedule piecewise_interpolate_schedule",
            "jstep.one_cycle": "cosine_onecycle_schedule linear_onecycle_schedule",
            "jstep.warmup_cosine_decay": "warmup_cosine_decay_schedule",
            "jstep.linear_warmup": "warmup_constant_schedule warmup_exponential_decay_schedule",
            "jstep.exponential_decay": "exponential_decay_schedule",
            "jstep.get_slot": "tree_map_params tree_get",
            "jstep.global_norm": "tree_l2_norm",
            "jstep.from_optax": "lbfgs polyak_sgd fromage sm3 optimistic_gradient_descent optimistic_adam "
            "optimistic_adam_v2 acprop cocob dadapt_adamw dog dowg dpsgd galore mechanize momo momo_adam sophia "
            "simplified_ademamix scale_by_adadelta scale_by_adamax scale_by_adan scale_by_ademamix scale_by_adopt "
            "scale_by_amsgrad scale_by_belief scale_by_factored_rms scale_by_lbfgs scale_by_madgrad scale_by_muon "
            "scale_by_novograd scale_by_polyak scale_by_radam scale_by_rprop scale_by_rss scale_by_sign scale_by_sm3 "
            "scale_by_stddev scale_by_yogi scale_by_optimistic_gradient scale_by_distance_over_gradients "
            "scale_by_backtracking_linesearch scale_by_zoom_linesearch differentially_private_aggregate",
        },
    ),
    "Keras": (
        "docs/from/keras.md",
        {
            "jstep.train": "fit Model Sequential train_on_batch BackupAndRestore CallbackList",
            "jstep.minimize": "compile GradientTape",
            "jstep.evaluator": "evaluate test_on_batch",
            "jstep.adam": "Adam",
            "jstep.adamw": "AdamW",
            "jstep.adadelta": "Adadelta",
            "jstep.adafactor": "Adafactor",
            "jstep.adagrad": "Adagrad",
            "jstep.adamax": "Adamax",
            "jstep.ftrl": "Ftrl",
            "jstep.lamb": "Lamb",
            "jstep.lion": "Lion",
            "jstep.muon": "Muon",
            "jstep.nadam": "Nadam",
            "jstep.rmsprop": "RMSprop",
            "jstep.sgd": "SGD",
            "jstep.dynamic_loss_scale": "LossScaleOptimizer",
            "jstep.exponential_decay": "ExponentialDecay",
            "jstep.cosine_decay": "CosineDecay",
            "jstep.cosine_decay_restarts": "CosineDecayRestarts",
            "jstep.inverse_time_decay": "InverseTimeDecay",
            "jstep.piecewise_constant": "PiecewiseConstantDecay",
            "jstep.polynomial_decay": "PolynomialDecay",
            "jstep.Schedule, any function of the step": "LearningRateSchedule LearningRateScheduler",
            "jstep.Hook": "Callback",
            "jstep.every": "LambdaCallback",
            "jstep.KeepBest": "ModelCheckpoint",
            "jstep.ReduceOnPlateau": "ReduceLROnPlateau",
            "jstep.NanLossHook": "TerminateOnNaN",
            "jstep.MetricsHook": "CSVLogger History RemoteMonitor",
            "jstep.ProgressHook": "ProgbarLogger",
            "jstep.train(…, logdir=…)": "TensorBoard",
            "jstep.with_moving_average": "SwapEMAWeights",
            "jstep.metrics.auc": "AUC",
            "jstep.metrics.accuracy": "Accuracy BinaryAccuracy CategoricalAccuracy SparseCategoricalAccuracy",
            "jstep.metrics.f1": "F1Score FBetaScore",
            "jstep.save_weights": "save_model",
            "jstep.load_weights": "load_model",
            "a key for jstep.minimize(…, rng=key) and jstep.batches(…, seed=…)": "set_random_seed",
            "a mesh and jstep.shard_state": "DataParallel ModelParallel DeviceMesh",
            "jstep.batches with a function of the step": "PyDataset",
        },
    ),
    "Lightning": (
        "docs/from/lightning.md",
        {
            "jstep.train": "Trainer Fabric",
            "jstep.minimize": "LightningModule training_step configure_optimizers",
            "jstep.evaluator": "validation_step test_step validate",
            "jstep.batches": "LightningDataModule",
            "jstep.Hook": "Callback LambdaCallback",
            "jstep.KeepBest": "ModelCheckpoint",
            "jstep.train(…, checkpoint_dir=…)": "OnExceptionCheckpoint",
            "jstep.minimize(…, num_microbatches=…)": "GradientAccumulationScheduler",
            "jstep.with_moving_average": "StochasticWeightAveraging WeightAveraging EMAWeightAveraging",
            "jstep.MetricsHook": "WandbLogger CSVLogger MLFlowLogger CometLogger NeptuneLogger LearningRateMonitor",
            "jstep.train(…, logdir=…)": "TensorBoardLogger",
            "jstep.ProgressHook": "TQDMProgressBar RichProgressBar",
            "jstep.train(…, stop_secs=…)": "Timer",
            "jstep.find_nonfinite": "detect_anomaly",
            "jstep.fsdp_specs and a mesh": "FSDPStrategy DDPStrategy DeepSpeedStrategy ModelParallelStrategy",
            "a key for jstep.minimize(…, rng=key) and jstep.batches(…, seed=…)": "seed_everything",
        },
    ),
    "the HF Trainer": (
        "docs/from/hf-trainer.md",
        {
            "jstep.train": "Trainer Seq2SeqTrainer TrainingArguments Seq2SeqTrainingArguments",
            "jstep.Hook": "TrainerCallback DefaultFlowCallback",
            "jstep.EarlyStopping": "EarlyStoppingCallback",
            "jstep.ProgressHook": "ProgressCallback PrinterCallback",
            "jstep.MetricsHook": "WandbCallback TensorBoardCallback MLflowCallback",
            "jstep.load_weights": "from_pretrained",
            "jstep.save_weights": "save_pretrained",
            "jstep.constant": "get_constant_schedule",
            "jstep.linear_warmup": "get_constant_schedule_with_warmup get_scheduler",
            "jstep.join and jstep.linear": "get_linear_schedule_with_warmup",
            "jstep.warmup_cosine_decay": "get_cosine_schedule_with_warmup",
            "jstep.linear_warmup(jstep.cosine_decay_restarts(…), …)": "get_cosine_with_hard_restarts_schedule_with_"
            "warmup",
            "jstep.linear_warmup(jstep.polynomial_decay(…), …)": "get_polynomial_decay_schedule_with_warmup",
            "jstep.inverse_sqrt_decay": "get_inverse_sqrt_schedule",
            "jstep.warmup_stable_decay": "get_wsd_schedule",
            "a key for jstep.minimize(…, rng=key) and jstep.batches(…, seed=…)": "set_seed enable_full_determinism",
            "jstep.train and a mesh": "Accelerator",
        },
    ),
    "PyTorch": (
        "docs/from/pytorch.md",
        {
            "jstep.adamw(…, weight_decay=0.0)": "Adam",
            "jstep.adamw": "AdamW",
            "jstep.sgd": "SGD",
            "jstep.clip_gradients(by_global_norm=…)": "clip_grad_norm_ clip_grad_norm",
            "jstep.clip_gradients(by_value=…)": "clip_grad_value_",
            "jstep.Schedule, any function of the step": "LambdaLR LRScheduler MultiplicativeLR",
            "jstep.linear": "LinearLR",
            "jstep.cosine_decay": "CosineAnnealingLR",
            "jstep.cosine_decay_restarts": "CosineAnnealingWarmRestarts",
            "jstep.join": "SequentialLR",
            "jstep.times": "ChainedScheduler",
            "jstep.one_cycle": "OneCycleLR",
            "jstep.cyclical": "CyclicLR",
            "jstep.exponential_decay": "ExponentialLR",
            "jstep.exponential_decay(…, staircase=True)": "StepLR",
            "jstep.piecewise_constant": "MultiStepLR ConstantLR",
            "jstep.polynomial_decay": "PolynomialLR",
            "jstep.ReduceOnPlateau": "ReduceLROnPlateau",
            "jstep.dynamic_loss_scale": "GradScaler",
            "jstep.with_moving_average": "AveragedModel",
            "jstep.batches": "DataLoader",
            "jstep.minimize": "backward zero_grad",
            "a key for jstep.minimize(…, rng=key)": "manual_seed",
            "jstep.find_nonfinite": "set_detect_anomaly",
            "jstep.fsdp_specs and a mesh": "FullyShardedDataParallel fully_shard DistributedDataParallel DataParallel",
        },
    ),
    "Flax": (
        "docs/from/flax.md",
        {
            "jstep.Optimizer": "ModelAndOptimizer",
            "jstep.TrainState.create": "create_train_state",
            "jstep.Saver": "save_checkpoint save_checkpoint_multiprocess restore_checkpoint",
            "jstep.dynamic_loss_scale": "DynamicScale",
            "a dictionary of metrics, or jstep.metrics": "MultiMetric Metric Average Welford",
            "jstep.metrics.accuracy": "Accuracy",
            "jstep.minimize": "value_and_grad",
            "jstep.shard_state": "replicate unreplicate",
            "jstep.shard_batch": "shard pad_shard_unpad",
            "jstep.SummarySaverHook": "TensorBoardHub",
        },
    ),
    "Orbax": (
        "docs/from/orbax.md",
        {
            "jstep.Saver": "CheckpointManager CheckpointManagerOptions Checkpointer AsyncCheckpointer "
            "StandardCheckpointer PyTreeCheckpointer CheckpointHandler StandardCheckpointHandler "
            "PyTreeCheckpointHandler CompositeCheckpointHandler AsyncOptions",
            "jstep.Saver(…).save": "StandardSave PyTreeSave SaveArgs Composite save_pytree save_pytree_async "
            "save_checkpointables",
            "jstep.Saver(…).restore": "StandardRestore PyTreeRestore RestoreArgs ArrayRestoreArgs load_pytree "
            "load_checkpointables RestoreTransform Transform apply_transformations",
            "jstep.Saver(…).save(state, extra=…)": "JsonSave JsonRestore JsonCheckpointHandler",
            "jstep.Saver(…).wait": "wait_until_finished",
            "jstep.Saver(…).all_steps": "all_steps",
            "jstep.latest_checkpoint": "latest_step",
            "jstep.KeepBest": "best_fn best_step",
        },
    ),
}


def explain(name: str) -> str:
    """Explain what jstep has for a name of other libraries; the empty string if nothing is known."""
    found: dict[str, list[str]] = {}
    for page, names in LIBRARIES.values():
        for ours, theirs in names.items():
            if name in theirs.split():
                found.setdefault(ours, []).append(page)
    parts = [f"{ours} (see {' and '.join(pages)})" for ours, pages in found.items()]
    return f"; use {', or '.join(parts)}" if parts else ""
