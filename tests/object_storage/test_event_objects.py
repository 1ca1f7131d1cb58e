"""Event files in object stores: growing objects, their segments, and readers."""

import contextlib
import re

import jax.numpy as jnp
import pytest
from scalar_points import read_scalars

import jstep
from jstep.stores import growing_files, objects
from jstep.stores.event_files import event_files, find_runs
from jstep.stores.objects import Objects
from jstep.summary import SummaryWriter, scalar, summary_iterator


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch):
    monkeypatch.setattr(
        objects, "RETRIES", {"max_retries": 2, "initial_delay": "1ms", "max_delay": "2ms"}
    )


def points(path):
    return {step: value for step, _, value in read_scalars(path).get("loss", [])}


def uploads(store):
    return [line for line in store.seen if line.startswith(("PUT", "POST")) and "tfevents" in line]


def test_points_are_read_as_written(store):
    logdir = f"{store.run}/logs"
    with SummaryWriter(logdir + "/") as writer:
        assert writer.logdir == logdir
        assert writer.path.startswith(f"{logdir}/events.out.tfevents.")
        for step in range(50):
            writer.add_summary(scalar("loss", step / 2), step)
    assert len(uploads(store)) == 2, "one upload when the file is opened, one at close"
    assert points(logdir) == {step: step / 2 for step in range(50)}
    assert [event.step for event in summary_iterator(writer.path)][1:] == list(range(50))
    assert find_runs(store.run) == [logdir]
    assert event_files(logdir) == [writer.path]
    with pytest.raises(FileNotFoundError, match="no such object"):
        summary_iterator(logdir)
    with pytest.raises(FileNotFoundError, match="no such object"):
        summary_iterator(logdir + "/none")


def test_flush_uploads_new_points(store):
    with SummaryWriter(store.run) as writer:
        writer.add_summary(scalar("loss", 1.0), 1)
        writer.flush()
        assert points(writer.path) == {1: 1.0}
        writer.flush()
        assert len(uploads(store)) == 2, "a flush without new points does not upload"


def test_uploads_are_rate_limited(store, monkeypatch):
    monkeypatch.setattr(growing_files, "PERIOD", 10_000.0)
    with SummaryWriter(store.run, max_queue=1, flush_secs=0.01) as writer:
        for step in range(100):
            writer.add_summary(scalar("loss", 1.0), step)
        writer.flush()
        assert len(uploads(store)) == 2, "one upload when the file is opened, one by the flush"
    assert len(points(writer.path)) == 100


def test_points_are_uploaded_periodically(store, monkeypatch):
    monkeypatch.setattr(growing_files, "PERIOD", 0.05)
    with SummaryWriter(store.run, flush_secs=0.01) as writer:
        writer.add_summary(scalar("loss", 1.0), 1)
        directory = objects.Objects(store.run)
        for _ in range(200):
            if points(writer.path):
                break
            writer._worker._thread.join(0.05)
        assert points(writer.path) == {1: 1.0}
        assert directory.list("events")


def test_a_full_segment_starts_another_file(store, monkeypatch):
    monkeypatch.setattr(growing_files, "SEGMENT", 2000)
    with SummaryWriter(store.run) as writer:
        for step in range(200):
            writer.add_summary(scalar("loss", float(step)), step)
            if step % 50 == 0:
                writer.flush()
    files = event_files(store.run)
    assert len(files) > 3
    assert files[0] == writer.path
    assert points(store.run) == {step: float(step) for step in range(200)}
    for file in files:
        assert next(iter(summary_iterator(file))).file_version == "brain.Event:2"
        assert len(store.data(file.removeprefix(f"{store.run.split('bkt')[0]}bkt/"))) < 2200


def test_close_raises_if_the_upload_still_fails(store):
    writer = SummaryWriter(store.run)
    writer.add_summary(scalar("loss", 1.0), 1)
    store.fail = [("PUT|POST", "", 403, 99)]
    with pytest.raises(PermissionError, match="cannot write"):
        writer.close()
    writer.close()


def test_an_unwritable_location_is_refused_at_creation(store):
    store.fail = [("PUT|POST", "", 403, 99)]
    with pytest.raises(PermissionError, match="cannot write"):
        SummaryWriter(store.run)
    store.fail = []
    with pytest.raises(FileNotFoundError, match="no bucket 'nope'"):
        SummaryWriter(store.run.replace("bkt", "nope"))
    with pytest.raises(ValueError, match="gs://… or s3://…"):
        SummaryWriter("az://bkt/run")


class SavedByCadence(jstep.Saver):
    """A Saver that saves nothing after an error, as if the process had been killed."""

    def save(self, state, *args, **kwargs):
        if int(state.global_step) % 4:
            raise OSError("killed")
        return super().save(state, *args, **kwargs)


def test_a_start_that_died_before_its_first_checkpoint(store, caplog):
    """It has no checkpoint that tells its name; and a page of the run has all of its points."""
    optimizer = jstep.sgd(0.1)
    step = jstep.minimize(lambda p: p["w"] ** 2, optimizer)
    for stop in (3, None):

        def hook(n, state, metrics, stop=stop):
            if n == stop:
                raise KeyError("killed")

        with contextlib.suppress(KeyError), SavedByCadence(f"{store.run}/a") as saver:
            state = jstep.TrainState.create({"w": 1.0}, optimizer)
            jstep.train(
                step, state, lambda n: (), 8, checkpoint_dir=saver, hooks=[jstep.every(1, hook)],
                progress=False, save_checkpoint_steps=8, save_summaries_steps=1,
                logdir=f"{store.run}/logs",
            )  # fmt: skip
    _, second = event_files(f"{store.run}/logs")
    starts = [event.step for event in summary_iterator(second) if event.HasField("session_log")]
    assert (starts, caplog.text.count("of others")) == ([0, 0], 0)
    page = jstep.report(f"{store.run}/a").html
    figure = re.search(r"<figcaption>loss</figcaption>.*?</figure>", page, re.DOTALL)[0]
    (curve,) = re.findall(r'class="line s\d d\d" data-i="\d+" d="([^"]*)"', figure)
    assert curve.count(",") == 8


def test_a_bucket_out_of_reach_is_waited_for_once(monkeypatch):
    """The record and the event files would each try for half a minute."""

    def cannot(_: object, *names: object) -> None:
        raise ConnectionError(f"s3://bucket/run: cannot list {names}: Could not resolve hostname")

    monkeypatch.setattr(Objects, "list", cannot)
    monkeypatch.setattr(
        "jstep.watching.recorder.StartFile", lambda *_: pytest.fail("waits for the bucket again")
    )
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    with pytest.raises(ConnectionError, match=r"cannot list .*starts"):
        jstep.train(step, state, [jnp.ones(())] * 2, 2, logdir="s3://bucket/run", progress=False)
