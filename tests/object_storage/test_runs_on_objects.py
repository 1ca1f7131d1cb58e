"""Training runs on object stores: fingerprint logs, the best checkpoints, paths of etils."""

import json
import logging
import os

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

import jstep
from jstep.state import fingerprints
from jstep.stores.objects import Objects

pytestmark = pytest.mark.usefixtures("fast_retries")


optimizer = jstep.momentum(0.1, 0.9)
train_step = jstep.minimize(lambda params, x: jnp.mean((params["w"][None] - x) ** 2), optimizer)
data = np.arange(24, dtype=np.float32).reshape(8, 3)


def run(url, last_step, seed=0, **options):
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    locations = {"checkpoint_dir": url, "logdir": f"{url}/logs", "save_checkpoint_steps": 5, "progress": False}
    return jstep.train(train_step, state, jstep.batches(data, 2, seed=seed), last_step, **locations | options)


def steps(store, key="run/logs/fingerprints.jsonl"):
    return [json.loads(line)["step"] for line in store.data(key).splitlines()]


def delete(store, prefix):
    with store.lock:
        for key in store.keys(prefix):
            del store.objects["bkt"][key]


def test_fingerprint_logs_across_restarts(store, caplog):
    run(store.run, 5, hooks=[jstep.FingerprintHook(every_n_steps=1)])
    assert steps(store) == [1, 2, 3, 4, 5]
    run(store.run, 8, hooks=[jstep.FingerprintHook(every_n_steps=1)])
    assert steps(store) == [1, 2, 3, 4, 5, 6, 7, 8]
    delete(store, "run/model-8/")
    with caplog.at_level(logging.WARNING, "jstep"):
        run(store.run, 8, hooks=[jstep.FingerprintHook(every_n_steps=1)])
        assert not [record for record in caplog.records if "run again" in record.message]
        delete(store, "run/model-8/")
        run(store.run, 7, seed=1, hooks=[jstep.FingerprintHook(every_n_steps=1)])
    assert [record for record in caplog.records if "run again" in record.message]
    assert sorted(fingerprints.read(f"{store.run}/logs/fingerprints.jsonl").entries) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_etils_paths_are_accepted_like_strings(store):
    url = epath.Path(store.run)
    run(
        url,
        6,
        logdir=url / "logs",
        hooks=[jstep.FingerprintHook(every_n_steps=2, path=url / "own.jsonl"), jstep.FingerprintHook(every_n_steps=3)],
    )
    assert steps(store, "run/own.jsonl") == [2, 4, 6]
    assert steps(store) == [3, 6]
    assert jstep.latest_checkpoint(url) == f"{store.run}/model-6"
    with jstep.Saver(url) as saver, jstep.summary.SummaryWriter(url / "more") as writer:
        assert saver.latest_step() == 6
        assert list(jstep.summary.summary_iterator(epath.Path(writer.path)))
    jstep.KeepBest(url / "best", "loss")
    assert not os.path.exists("gs:")
    assert not os.path.exists("s3:")


def test_a_truncated_log_is_repaired(store):
    path = f"{store.run}/own.jsonl"
    run(store.run, 3, hooks=[jstep.FingerprintHook(every_n_steps=1, path=path)])
    complete = store.data("run/own.jsonl")
    Objects(store.run).write("own.jsonl", complete + b'{"step": 4, "sta')
    run(store.run, 5, hooks=[jstep.FingerprintHook(every_n_steps=1, path=path)])
    assert steps(store, "run/own.jsonl") == [1, 2, 3, 4, 5]
    assert store.data("run/own.jsonl").startswith(complete)


def test_an_unwritable_log_fails_before_the_first_step(store):
    steps_run = []
    hooks = [
        jstep.FingerprintHook(every_n_steps=1),
        jstep.every(1, lambda step, state, metrics: steps_run.append(step)),
    ]
    store.fail = [("PUT|POST", "fingerprints" if store.run.startswith("s3") else "", 403, 99)]
    with pytest.raises(PermissionError, match="cannot write"):
        run(store.run, 3, hooks=hooks, checkpoint_dir=None)
    assert not steps_run


def test_invalid_locations_are_refused_at_once():
    for make in (jstep.Saver, jstep.latest_checkpoint, jstep.summary.SummaryWriter, jstep.summary.summary_iterator):
        with pytest.raises(ValueError, match="gs://bucket/… or s3://bucket/…"):
            make("az://bkt/run")
    for make in (lambda url: jstep.KeepBest(url, "loss"), lambda url: jstep.FingerprintHook(every_n_steps=1, path=url)):
        with pytest.raises(ValueError, match="must name a bucket"):
            make("gs://")
    with pytest.raises(ValueError, match="must be on a file system"):
        jstep.ProfilerHook("gs://bkt/run", start_step=1, stop_step=2)


def test_keep_best_on_objects(store):
    def loss(params, x):
        return {"loss": jnp.mean((params["w"][None] - x) ** 2)}

    evaluate = jstep.evaluator(loss, jstep.batches(data, 4, num_epochs=1, shuffle=False, drop_remainder=False))
    best = f"{store.run}/best"

    def hooks():
        return [jstep.EvaluationHook(evaluate, every_n_steps=2, then=[jstep.KeepBest(best, "loss", keep=2)])]

    run(store.run, 6, hooks=hooks())
    run(store.run, 12, hooks=hooks())
    saver = jstep.Saver(best, prefix="best")
    kept = saver.all_steps()
    assert len(kept) == 2
    assert set(saver.extra(kept[0])) == {"loss"}
    assert jstep.latest_checkpoint(best).startswith(f"{best}/best-")
    with pytest.raises(ValueError, match="own checkpoints"):
        run(
            store.run,
            14,
            hooks=[
                jstep.EvaluationHook(
                    evaluate, every_n_steps=2, then=[jstep.KeepBest(store.run + "/", "loss", prefix="model")]
                )
            ],
        )
