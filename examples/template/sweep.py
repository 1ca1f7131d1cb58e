"""A study of Optuna: each trial is a run of train.py, in the directory of its number.

    python sweep.py trials=20  # start it again after any end: it resumes the trial, then the study
    kill -USR1 PID             # ends the current trial, not the study
    jstep runs runs/study      # the trials as a table

docs/recipes/hydra-optuna.md explains it.
"""

import copy
import pathlib
import signal

import hydra
import optuna
import train
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from optuna.trial import TrialState

import jstep


def suggest(trial):
    """The options of a trial, by their names in the config."""
    return {
        "optimizer.learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "model.dropout": trial.suggest_float("dropout", 0.0, 0.5),
    }


def requeue_unfinished(study):
    """Queue each trial that a killed process left behind: same options, same directory."""
    for trial in study.get_trials(states=[TrialState.RUNNING]):
        run = trial.user_attrs.get("run", trial.number)
        study.enqueue_trial(trial.params, user_attrs={"run": run})
        study.tell(trial.number, state=TrialState.FAIL)


def objective(trial, cfg, directory):
    cfg = copy.deepcopy(cfg)
    for name, value in suggest(trial).items():
        OmegaConf.update(cfg, name, value)
    is_pruned = False

    def report(step, state, results):
        nonlocal is_pruned
        trial.report(results["loss"], step)
        is_pruned = trial.should_prune()
        return is_pruned  # True stops the run

    number = trial.user_attrs.get("run", trial.number)
    try:
        results = train.run(cfg, directory / f"trial-{number:04d}", [report])
    except jstep.Preempted as stopped:
        if stopped.code != 128 + signal.SIGUSR1:
            raise  # the study ends, too; a restart resumes the trial
        raise optuna.TrialPruned from None
    if is_pruned:
        raise optuna.TrialPruned
    return results["val/loss"]


@hydra.main(version_base=None, config_path="conf", config_name="sweep")
def main(cfg):
    directory = pathlib.Path(HydraConfig.get().runtime.output_dir)
    study = optuna.create_study(
        study_name=cfg.name,
        storage=f"sqlite:///{directory}/study.db",
        load_if_exists=True,
        direction="minimize",
    )
    requeue_unfinished(study)
    # The same seed after a restart would suggest the first trials again.
    study.sampler = optuna.samplers.TPESampler(seed=cfg.seed + len(study.trials))
    done = len(study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED]))
    study.optimize(
        lambda trial: objective(trial, cfg, directory), n_trials=max(0, cfg.trials - done)
    )
    print(f"best trial: {study.best_params}, {study.best_value:.4f}")


if __name__ == "__main__":
    main()
