"""A template with Hydra: data, model, training, a test of the best checkpoint, predictions.

    python train.py                                   # start it again to resume
    python train.py name=wide model.widths=[512,256]  # another run, in runs/wide
    python train.py debug=fast                        # fast_dev_run: a batch of each, no saves
    python train.py debug=overfit                     # two batches, again and again
    python train.py experiment=finetune               # new head first, then all layers
    python train.py train=false predict=true          # with the best checkpoint
    python train.py -m seed=0,1,2                     # multirun; start it again to resume
    sbatch ../launchers/slurm.sh name=large           # several processes, here with srun

docs/from/lightning.md compares it with Lightning's.
"""

import csv
import fnmatch
import pathlib

import hydra
import jax
import numpy as np
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from jax.sharding import NamedSharding, PartitionSpec

import jstep


def make_optimizer(cfg, steps_per_epoch, last_step):
    """AdamW in two parameter groups, after clipping; biases do not decay."""

    def group(factor):
        peak, warmup = factor * cfg.learning_rate, cfg.warmup_epochs * steps_per_epoch
        schedule = jstep.warmup_cosine_decay(peak, warmup, max(last_step, warmup + 1))
        return jstep.adamw(schedule, weight_decay=cfg.weight_decay, weight_decay_mask=["*kernel"])

    groups = {"body": group(1.0), "head": group(cfg.head_factor)}
    return jstep.chain(
        jstep.clip_gradients(by_global_norm=cfg.clip),
        jstep.partition(groups, labels=lambda path, leaf: path.split("/")[0]),
    )


def make_step(model, optimizer, cfg, steps_per_epoch):
    """The train step; with frozen parameters, two of them, by the step at which each begins."""

    def step(freeze=()):
        def is_trained(path, leaf):
            return not any(fnmatch.fnmatch(path, pattern) for pattern in freeze)

        return jstep.minimize(
            model.loss,
            optimizer,
            var_list=is_trained if freeze else None,
            rng=jax.random.key(cfg.seed + 1),
            num_microbatches=cfg.trainer.num_microbatches,
            metrics=["grad_norm"],
        )

    steps = {0: step(tuple(cfg.trainer.freeze))}
    if cfg.trainer.freeze and cfg.trainer.unfreeze_epoch:
        steps[cfg.trainer.unfreeze_epoch * steps_per_epoch] = step()
    return steps


def run(cfg, directory, callbacks=()):
    """Train, test and predict, as the config says.

    Args:
        cfg: The config.
        directory: The directory of the run.
        callbacks: More callbacks `(step, state, results)` of the evaluations.

    Returns:
        The results of the test with the best checkpoint, and the best validation loss; a dict.
    """
    trainer, directory = cfg.trainer, pathlib.Path(directory)
    data, model = instantiate(cfg.data), instantiate(cfg.model)
    fast, overfit = trainer.fast_dev_run, trainer.overfit_batches
    limits = {
        name: 1 if fast else trainer[f"limit_{name}_batches"] for name in ("train", "val", "test")
    }
    batches = data.train(overfit or limits["train"], shuffle=not overfit)
    per_epoch = batches.steps_per_epoch
    last_step = 1 if fast else trainer.max_epochs * per_epoch

    optimizer = make_optimizer(cfg.optimizer, per_epoch, last_step)
    if trainer.ema:
        optimizer = jstep.with_moving_average(
            optimizer, jstep.ExponentialMovingAverage(trainer.ema)
        )
    # DDP: parameters on each device, rows distributed.
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    state = jstep.TrainState.create(
        lambda: model.init(jax.random.key(cfg.seed)), optimizer, mesh=mesh
    )
    if trainer.weights:
        with jstep.Saver(trainer.weights, prefix="best") as other:
            state = state.with_params(other.restore_params(state.params, step=other.best_step()))
    steps = make_step(model, optimizer, cfg, per_epoch)
    print(state)
    if trainer.summary:
        print(jstep.cost(steps[0], state, *jstep.shard_batch(batches[0], mesh)))

    def evaluator(rows):
        return jstep.evaluator(
            model.metrics, rows, batch_sharding=by_rows, use_averages=bool(trainer.ema)
        )

    history = jstep.History(None if fast else directory / "metrics.jsonl", every_n_steps=per_epoch)
    keep = []
    if not fast:
        stop = jstep.EarlyStopping("loss", patience=trainer.patience)
        keep = [jstep.KeepBest(directory, "loss"), stop]
    validation = data.one_pass("train", overfit) if overfit else data.one_pass("val", limits["val"])
    hooks = [
        jstep.NanLossHook(),
        history,
        jstep.EvaluationHook(
            evaluator(validation),
            every_n_steps=trainer.check_val_every_n_epoch * per_epoch,
            prefix="val",
            callbacks=[*keep, *callbacks],
        ),
    ]
    if trainer.profile:
        first, last = trainer.profile[0], trainer.profile[1]
        hooks.append(jstep.ProfilerHook(directory, start_step=first, stop_step=last))

    if cfg.train:
        state = jstep.train(
            steps,
            state,
            batches,
            last_step,
            checkpoint_dir=None if fast else directory,
            logdir=None if fast else directory,
            log_steps=per_epoch,
            batch_sharding=by_rows,
            hooks=hooks,
            config=cfg,
        )
        write_csv(history, None if fast else directory / "metrics.csv")
    results = {}
    if not fast:  # ckpt_path="best"
        with jstep.Saver(directory, prefix="best") as best:
            step = best.best_step()
            state = best.restore(state, step=step)
            results["val/loss"] = best.extra(step)["loss"]
    if cfg.test:
        tested = evaluator(data.one_pass("test", limits["test"]))(state)
        results |= {f"test/{name}": value for name, value in tested.items()}
    if cfg.predict:  # in one process
        params = jstep.averaged_params(state) if trainer.ema else state.params
        predict = jax.jit(model.predict)
        rows = [predict(params, images) for images, _ in data.one_pass("test", limits["test"])]
        if not fast:
            np.save(directory / "predictions.npy", np.concatenate(rows))
    return results


def write_csv(history, path):
    if path is not None and jax.process_index() == 0:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, ["step", *history.names])
            table.writeheader()
            table.writerows(history.rows)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    jstep.distributed.initialize()  # SLURM and other launchers; a no-op in one process
    results = run(cfg, HydraConfig.get().runtime.output_dir)
    if jax.process_index() == 0:
        print(results)


if __name__ == "__main__":
    main()
