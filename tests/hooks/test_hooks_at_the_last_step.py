"""Hooks at the last step of a run that is not a multiple of their interval."""

import logging
import re

import jax.numpy as jnp
from hook_fakes import Writer

import jstep


def test_which_hooks_include_the_last_step(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jstep")
    found = {"metrics": [], "means": [], "evaluation": [], "every": []}
    writer, means_writer = Writer(), Writer()
    evaluation = jstep.EvaluationHook(
        lambda state: {"loss": 1.0},
        every_n_steps=4,
        callbacks=[lambda step, state, results: found["evaluation"].append(step)],
    )
    optimizer = jstep.gradient_descent(0.1)
    jstep.train(
        jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer),
        jstep.TrainState.create({"w": jnp.ones(2)}, optimizer),
        lambda step: jnp.ones(2),
        last_step=10,
        log_steps=4,
        hooks=[
            jstep.MetricsHook(lambda step, values: found["metrics"].append(step), every_n_steps=4),
            jstep.MetricsHook(lambda step, values: found["means"].append(step), every_n_steps=4, mean=True),
            jstep.SummarySaverHook(writer, save_steps=4),
            jstep.SummarySaverHook(means_writer, save_steps=4, mean=True),
            jstep.FingerprintHook(tmp_path / "log.jsonl", every_n_steps=4),
            jstep.every(4, lambda step, state, metrics: found["every"].append(step)),
            evaluation,
        ],
    )
    logged = [int(n) for n in re.findall(r"^step (\d+)  loss", "\n".join(caplog.messages), re.MULTILINE)]
    assert logged == found["metrics"] == found["means"] == found["evaluation"] == [4, 8, 10]
    fingerprints = re.findall(r'"step": (\d+)', (tmp_path / "log.jsonl").read_text())
    written, means = ([step for step, _ in one.points] for one in (writer, means_writer))
    assert written == means == found["every"] == [int(n) for n in fingerprints] == [4, 8]
