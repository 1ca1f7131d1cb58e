"""`SummaryWriter`: its background thread, its buffer, and the names of its files."""

import os
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from event_reading import events_of, scalars
from tensorboard.compat.proto import event_pb2
from waiting import interrupt, wait_until

from jstep import summary
from jstep.summary import new_event_files
from jstep.summary import writer as worker
from jstep.summary.writer import SummaryWriter


@jax.jit
def slow(x, iterations):
    y = jax.lax.fori_loop(0, iterations, lambda _, y: jnp.tanh(y @ y), jnp.full((700, 700), x))
    return summary.merge([summary.scalar("loss", y[0, 0] * 0 + x), summary.histogram("h", y)])


def add_while_computing(logdir, iterations):
    """Write summaries of arrays that are being computed; return whether the computation outlasted the calls."""

    def add_eagerly(created):
        writer.add_summary(summary.scalar("eager", created.parts[0].values), created.parts[1].exponent)

    with SummaryWriter(logdir, max_queue=1) as writer:
        add_eagerly(slow(2.0, 1))  # compiles everything
        writer.flush()
        created = slow(2.0, iterations)
        for step in range(1, 30):
            writer.add_summary(created, step)
        add_eagerly(created)
        return not created.parts[0].values.is_ready()


def test_add_summary_does_not_wait_for_arrays(tmp_path, accumulate):
    for iterations in (20, 200, 1000):  # a longer one if the host was stalled during the calls
        logdir = tmp_path / str(iterations)
        if add_while_computing(logdir, iterations):
            break
    else:
        pytest.fail("every computation had finished when add_summary returned")
    events = accumulate(logdir)
    assert scalars(events) == [(step, 2.0) for step in range(1, 30)]
    assert [value for _, value in scalars(events, "eager")] == [2.0, 2.0]


def test_flushes_after_max_queue_events_or_flush_secs(tmp_path):
    with SummaryWriter(tmp_path / "queue", max_queue=3, flush_secs=10_000) as writer:
        for step in range(3):
            writer.add_summary(summary.scalar("loss", 1.0), step)
        wait_until(lambda: len(events_of(writer)) == 4)
    with SummaryWriter(tmp_path / "secs", max_queue=1000, flush_secs=0.05) as writer:
        writer.add_summary(summary.scalar("loss", 1.0), 1)
        wait_until(lambda: len(events_of(writer)) == 2)
    with SummaryWriter(tmp_path / "never", max_queue=1000, flush_secs=float("inf")) as writer:
        writer.add_summary(summary.scalar("loss", 1.0), 1)
        writer.flush()
        assert len(events_of(writer)) == 2


def test_many_threads_write_to_one_writer(tmp_path, accumulate):
    with SummaryWriter(tmp_path) as writer:

        def write(name):
            for step in range(200):
                writer.add_summary(summary.scalar(name, float(step), collections=()), step)

        threads = [threading.Thread(target=write, args=(f"t{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = accumulate(tmp_path)
    assert all(scalars(events, f"t{i}") == [(s, float(s)) for s in range(200)] for i in range(4))


@pytest.fixture
def patient(monkeypatch):
    """The thread works only when somebody waits for it."""
    monkeypatch.setattr(worker, "NAP", 3600)
    monkeypatch.setattr(worker, "MAX_JOBS", 4)


def test_number_of_pending_events_is_bounded(tmp_path, accumulate, patient):
    with SummaryWriter(tmp_path) as writer:
        for step in range(20):
            writer.add_summary(summary.scalar("loss", 1.0), step)
            assert len(writer._worker._jobs) <= 5
    assert len(accumulate(tmp_path).Scalars("loss")) == 20


def test_memory_of_pending_events_is_bounded(tmp_path, accumulate, monkeypatch, patient):
    monkeypatch.setattr(worker, "MAX_BYTES", 3000)
    picture = np.zeros((1, 32, 32, 1), np.uint8)
    with SummaryWriter(tmp_path) as writer:
        for step in range(20):
            writer.add_summary(summary.image("x", picture, max_images=1), step)
            writer.add_summary(summary.scalar("loss", 1.0), step)
            assert writer._worker._bytes <= 3000 + 1024
    events = accumulate(tmp_path)
    assert len(events.Images("x/image")) == len(events.Scalars("loss")) == 20


def test_files_sort_in_order_despite_a_clock_that_is_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(new_event_files.time, "time", lambda: 2000.0)
    SummaryWriter(tmp_path).close()
    monkeypatch.setattr(new_event_files.time, "time", lambda: 1500.0)
    with SummaryWriter(tmp_path) as writer:
        pass
    assert sorted(os.listdir(tmp_path))[-1] == os.path.basename(writer.path)
    (tmp_path / "events.out.tfevents.zzz").touch()  # a name of another program
    with SummaryWriter(tmp_path):
        pass


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with SummaryWriter(tmp_path / "logs", graph=lambda: jnp.ones(3)) as writer:
        writer.add_summary(summary.scalar("loss", 1.0), 1)
        writer.add_event(event_pb2.Event())
        writer.add_graph(lambda x: x, 1.0)
        writer.add_session_log("START", 1)
        writer.add_hparams({"a": 1})
        writer.flush()
    assert writer.path is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="closed"):
        writer.add_summary(summary.scalar("loss", 1.0), 1)


@pytest.mark.parametrize("at_exit", [False, True])
def test_what_follows_an_interrupted_close_waits_for_the_events(tmp_path, accumulate, at_exit):
    released = threading.Event()
    writer = SummaryWriter(tmp_path)
    encode = writer._worker._encode
    writer._worker._encode = lambda *args: released.wait(60) and encode(*args)
    writer.add_summary(summary.scalar("loss", 2.0), 1)
    interrupt(writer.close)
    threading.Timer(0.2, released.set).start()
    worker._close_all() if at_exit else writer.close()
    assert scalars(accumulate(tmp_path)) == [(1, 2.0)]


def test_the_thread_keeps_nothing_of_what_it_has_written(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        written = summary.histogram("h", jnp.arange(1000.0), ())
        leaves = [weakref.ref(leaf) for leaf in jax.tree.leaves(written) if isinstance(leaf, jax.Array)]
        assert leaves
        writer.add_summary(written, 1)
        del written
        wait_until(lambda: not [leaf for leaf in leaves if leaf() is not None])
