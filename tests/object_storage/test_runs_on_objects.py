"""Training runs on object stores: fingerprint logs, the best checkpoints, times and stalls."""

import datetime
import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.hooks.cards import read_starts
from jstep.hooks.stall_files import StallFiles, read_stalls
from jstep.state import fingerprints
from jstep.stores import timeline_writer as timelines
from jstep.stores.run_record import read_records, read_timeline
from jstep.stores.timeline import START, TIMES, VERSION
from jstep.stores.timeline_writer import Timeline
from jstep.tools.cli import main

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
        assert not [record for record in caplog.records if "was repeated with" in record.message]
        delete(store, "run/model-8/")
        run(store.run, 7, seed=1, hooks=[jstep.FingerprintHook(every_n_steps=1)])
    assert [record for record in caplog.records if "was repeated with" in record.message]
    assert sorted(fingerprints.read_log(f"{store.run}/logs/fingerprints.jsonl").entries) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_rows_and_scalars_of_a_run_on_objects(store, capsys):
    for last, seed in ((5, 0), (8, 1)):
        run(store.run, last, seed, save_summaries_steps=1)
    for step, seed in ((4, 0), (5, 1)):
        assert main(["rows", store.run, "--step", f"{step}", "--json"]) == 0
        rows = jstep.batches(data, 2, seed=seed).rows_of(step).tolist()
        assert json.loads(capsys.readouterr().out) == {"step": step, "rows": rows}
    assert main(["events", store.run, "--name", "loss", "--json"]) == 0
    assert [(one["run"], one["step"]) for one in json.loads(capsys.readouterr().out)] == [
        ("run", step) for step in range(1, 9)
    ]


def test_keep_best_on_objects(store):
    def loss(params, x):
        return {"loss": jnp.mean((params["w"][None] - x) ** 2)}

    evaluate = jstep.evaluator(loss, jstep.batches(data, 4, num_epochs=1, shuffle=False, drop_remainder=False))
    best = f"{store.run}/best"

    def hooks():
        return [jstep.EvaluationHook(evaluate, every_n_steps=2, callbacks=[jstep.KeepBest(best, "loss", keep=2)])]

    run(store.run, 6, hooks=hooks())
    run(store.run, 12, hooks=hooks())
    saver = jstep.Saver(best, prefix="best")
    kept = saver.all_steps()
    assert len(kept) == 2
    assert set(saver.extra(kept[0])) == {"loss"}
    assert jstep.latest_checkpoint(best).startswith(f"{best}/best-")


def test_a_store_that_refuses_is_reported_once(gcs, one_retry, caplog):
    gcs.fail = [("", "", 403, 10**6)]
    timeline = Timeline("gs://bkt/run", "model")
    timeline.write("start", step=0)
    for n in range(50):
        timeline.write(TIMES, step=n)
    timeline.flush()
    tried = len(gcs.seen)
    assert tried
    for n in range(50):
        timeline.write(TIMES, step=n)
    assert len(gcs.seen) == tried, "the next upload is due in ten seconds"
    timeline.close()
    messages = [record.getMessage() for record in caplog.records]
    assert [message.count("the data is kept") for message in messages] == [1, 0]
    assert "the last times of this run are lost" in messages[-1]


def fields():
    return {"processes": 1, "kind": "batch", "what": "waiting for batch 7", "line": "", "stall": True, "since": 1.0}


def test_an_object_is_written_read_and_removed(store, capsys):
    jstep.Saver(store.run).save(jstep.TrainState.create({"w": jnp.ones(2)}, jstep.adam()))
    files = StallFiles(store.run, 0, warn_secs=60.0)
    files.finish(fields)
    assert json.loads(store.data("run/stalls/model.0.json"))["what"] == "waiting for batch 7"
    assert [one["process"] for one in read_stalls(store.run)[0]] == [0]
    assert main(["stalls", store.run]) == 1
    assert "waiting for batch 7" in capsys.readouterr().out
    files.finish(None)
    assert not store.keys("run/stalls")
    assert main(["stalls", store.run]) == 2, "no run is there"


def write_start(where, number, clock, monkeypatch):
    """Write the lines of a start, on a host whose clock shows these seconds since 1970."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(clock, tz)

    monkeypatch.setattr(timelines, "datetime", Clock)
    timeline = Timeline(where, "model")
    times = {"seconds": {"starting": 1.0}, "time": clock}
    timeline.write(START, version=VERSION, step=[10 * number] * 2, **times)
    timeline.write("card", card=1, programs=[], number=number)
    timeline.write(TIMES, step=[10 * number, 10 * number + 10], **times)
    timeline.close()


@pytest.mark.parametrize("clocks", [(1e9, 1e9 - 600, 1e9 - 300, 1e9 - 300), (4e9, 1e9, 253402300799.9, 2e9)])
@pytest.mark.parametrize("in_bucket", [True, False])
def test_starts_are_in_the_order_in_which_they_were_written(clocks, in_bucket, gcs, tmp_path, monkeypatch):
    where = "gs://bkt/run" if in_bucket else str(tmp_path)
    for number, clock in enumerate(clocks):
        write_start(where, number, clock, monkeypatch)
    assert [start[-1]["step"] for start in read_timeline(where).values()] == [[0, 10], [10, 20], [20, 30], [30, 40]]
    assert [start.card["number"] for start in read_starts(where)] == [0, 1, 2, 3]
    state = read_records(where)["model"].totals()
    assert (state["step"], state["wall"]) == (40, 4.0)
    assert jstep.goodput(where).steps == 40


def test_names_of_objects_that_are_not_ours_do_not_matter(gcs, monkeypatch):
    for name in ("timeline.99999999T999999.9-x.jsonl", "timeline.zzz.jsonl", "timeline..jsonl"):
        gcs.put("bkt", f"run/{name}", b"")
    for number, clock in enumerate((1e9, 1e9 - 600)):
        write_start("gs://bkt/run", number, clock, monkeypatch)
    assert [start[-1]["step"][1] for start in read_timeline("gs://bkt/run").values()] == [10, 20]


def test_a_file_beside_objects_is_merged(tmp_path):
    """A run that began on a disk, was continued in a bucket, and then in a copy of it on a disk."""
    for number, (name, time) in enumerate(
        [
            ("timeline.jsonl", 100.0),
            ("timeline.20200101T000000.000000-b.jsonl", 300.0),
            ("timeline.20200101T000001.000000-c.jsonl", 200.0),
            ("timeline.jsonl", 400.0),
        ]
    ):
        line = {"kind": START, "start": f"{number}", "prefix": "model", "version": 1, "time": time, "seconds": {}}
        with open(tmp_path / name, "a") as file:
            file.write(json.dumps(line | {"step": [number, number + 1]}) + "\n")
    assert [start[-1]["step"][0] for start in read_timeline(tmp_path).values()] == [0, 1, 2, 3]
    assert read_records(str(tmp_path))["model"].starts[-1]["step"] == [3, 4]
