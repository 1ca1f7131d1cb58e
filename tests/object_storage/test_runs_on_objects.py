"""Training runs on object stores: fingerprint logs, the best checkpoints, times and stalls."""

import json
import logging
import re

import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.logs import fingerprint_log
from jstep.look.cli import main
from jstep.record.stall_files import StallFiles, read_stalls
from jstep.record.starts import StartFile, load_setup, read_starts
from jstep.stores.owners import this_process

pytestmark = pytest.mark.usefixtures("fast_retries")


optimizer = jstep.momentum(0.1, 0.9)
train_step = jstep.minimize(lambda params, x: jnp.mean((params["w"][None] - x) ** 2), optimizer)
data = np.arange(24, dtype=np.float32).reshape(8, 3)


def run(url, last_step, seed=0, **options):
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    locations = {
        "checkpoint_dir": url,
        "logdir": f"{url}/logs",
        "save_checkpoint_steps": 5,
        "progress": False,
    }
    return jstep.train(
        train_step, state, jstep.batches(data, 2, seed=seed), last_step, **locations | options
    )


def steps(store, key="run/logs/fingerprints.jsonl"):
    return [json.loads(line)["step"] for line in store.data(key).splitlines()]


def delete(store, prefix):
    with store.lock:
        for key in store.keys(prefix):
            del store.objects["bkt"][key]


class RequestsBeforeTheFirstStep(jstep.Hook):
    def __init__(self, store):
        self._store = store
        self.paths = None

    def before_step(self, step, state):
        if self.paths is None:
            self.paths = list(self._store.seen)


def test_a_restart_sends_at_most_23_requests_for_its_checkpoint(store):
    """Each takes tens of milliseconds, and the first step waits for all of them, however many saves
    there were."""
    store.page = 1000
    counts = []
    for last_step in range(5, 35, 5):
        store.seen.clear()
        requests = RequestsBeforeTheFirstStep(store)
        run(store.run, last_step, hooks=[requests])
        # The record of starts and the event file are written beside the start, in threads of their
        # own.
        own = [path for path in requests.paths if not re.search("starts|logs", path)]
        counts.append(len(own))
    assert max(counts) <= 23


@pytest.mark.thorough
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
    assert sorted(fingerprint_log.read_log(f"{store.run}/logs/fingerprints.jsonl").entries) == [
        1, 2, 3, 4, 5, 6, 7, 8,
    ]  # fmt: skip


@pytest.mark.thorough
def test_keep_best_on_objects(store):
    def loss(params, x):
        return {"loss": jnp.mean((params["w"][None] - x) ** 2)}

    evaluate = jstep.evaluator(
        loss, jstep.batches(data, 4, num_epochs=1, shuffle=False, drop_remainder=False)
    )
    best = f"{store.run}/best"

    def hooks():
        return [
            jstep.EvaluationHook(
                evaluate, every_n_steps=2, callbacks=[jstep.KeepBest(best, "loss", max_to_keep=2)]
            )
        ]

    run(store.run, 6, hooks=hooks())
    run(store.run, 12, hooks=hooks())
    saver = jstep.Saver(best, prefix="best")
    kept = saver.all_steps()
    assert len(kept) == 2
    assert set(saver.extra(kept[0])) == {"loss"}
    assert jstep.latest_checkpoint(best).startswith(f"{best}/best-")


GIVEN = {
    "run": "0a1b2c3d", "process": this_process(), "began": 1e9, "now": 1e9,
    "seconds": {"stepping": 1.0}, "config": {"x": "y" * 5000},
}  # fmt: skip


def start_file(where, **fields):
    earlier = read_starts(where).get("model", [])
    return StartFile(where, "model", earlier, {**GIVEN, **fields})


def test_a_store_that_refuses_is_reported_once(gcs, one_retry, caplog):
    gcs.fail = [("", "", 403, 10**6)]
    file = StartFile("gs://bkt/run", "model", [], GIVEN)
    for n in range(5):
        file.write({"step": [0, n]})
    assert len(caplog.records) == 1
    assert "the record of this run cannot be written" in caplog.text
    gcs.fail = []
    file.write()
    assert read_starts("gs://bkt/run")["model"][0]["step"] == [0, 4]


def test_a_start_is_an_object_that_is_made_once(store):
    first, second = start_file(store.run), start_file(store.run)
    together = StartFile(store.run, "model", [], {**GIVEN, "now": 2e9})
    assert [file.fields["number"] for file in (first, second, together)] == [1, 2, 3]
    first.write({"step": [0, 5]})
    first.write_setup({"step": 0})
    second.end_earlier(1, ["killed", ""])
    (one, *_) = read_starts(store.run)["model"]
    assert (one["step"], one["end"], one["config"]) == ([0, 5], ["killed", ""], GIVEN["config"])
    assert load_setup(store.run, one)["setup"] == {"step": 0}
    assert store.keys("run/starts/") == [
        f"run/starts/model.00000{n}.{end}" for n in (1, 2, 3) for end in ("card.json", "json")
    ]


def test_the_record_of_a_run_is_below_its_url(store):
    for last_step in (5, 10):
        run(store.run, last_step)
    first, second = read_starts(store.run)["model"]
    assert (first["step"], second["step"], first["run"]) == ([0, 5], [5, 10], second["run"])
    assert first["end"] == ["finished", ""]
    assert load_setup(store.run, second)["setup"]["programs"]
    assert jstep.Saver(store.run).extra(10)["past"]["start"] == [2, second["began"]]


def fields():
    return {
        "processes": 1,
        "kind": "batch",
        "what": "waiting for batch 7",
        "line": "",
        "stall": True,
        "since": 1.0,
    }


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


@pytest.mark.parametrize(
    "clocks", [(1e9, 1e9 - 600, 1e9 - 300, 1e9 - 300), (4e9, 1e9, 2.9e10, 2e9)]
)
@pytest.mark.parametrize("in_bucket", [True, False])
def test_starts_are_in_the_order_in_which_they_were_made(clocks, in_bucket, gcs, tmp_path):
    where = "gs://bkt/run" if in_bucket else str(tmp_path)
    for number, clock in enumerate(clocks):
        start_file(where, began=clock, now=clock, step=[10 * number, 10 * number + 10])
    found = read_starts(where)["model"]
    assert [start["step"] for start in found] == [[0, 10], [10, 20], [20, 30], [30, 40]]


def test_names_of_objects_that_are_not_ours_do_not_matter(gcs):
    for name in (
        "model.json",
        "model.00001.json",
        ".000001.json",
        "model.000001.json.tmp",
        "a/model.000001.json",
    ):
        gcs.put("bkt", f"run/starts/{name}", b"")
    start_file("gs://bkt/run")
    assert [start["number"] for start in read_starts("gs://bkt/run")["model"]] == [1]


def test_a_finished_run_that_is_started_again_leaves_nothing_but_the_object_of_its_start(store):
    def everything():
        with store.lock:
            return {
                key: found for key, found in store.objects["bkt"].items() if "starts" not in key
            }

    run(store.run, 5)
    # A file of another run in the log directory, after which a start writes its marks into a file
    # of their own.
    later = f"run/logs/events.out.tfevents.{2**32}.elsewhere.1.0.01234567.89abcdef"
    with store.lock:
        store.objects["bkt"][later] = next(iter(store.objects["bkt"].values()))
    before = everything()
    for _ in range(2):
        run(store.run, 5)
        assert everything() == before
    assert [start["end"][0] for start in read_starts(store.run)["model"]] == ["finished"] * 3
    run(store.run, 10)
    assert len([key for key in everything() if "tfevents" in key]) > 2
