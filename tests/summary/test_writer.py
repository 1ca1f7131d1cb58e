"""`SummaryWriter`: the inputs of its methods and the events that it writes."""

import gc
import os
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import raising
from event_reading import events_of, scalars
from tensorboard.compat.proto import event_pb2, summary_pb2
from waiting import interrupt, wait_until

from jstep import summary
from jstep.summary import new_event_files
from jstep.summary import writer as worker
from jstep.summary.writer import SummaryWriter, sync_to_disk


def test_the_first_event_is_that_of_tensorboard(tmp_path):
    with SummaryWriter(tmp_path / "a" / "b") as writer:
        pass
    (first,) = events_of(writer)
    assert first.file_version == "brain.Event:2"
    assert first.source_metadata.writer == "jstep.summary"
    assert abs(first.wall_time - time.time()) < 600
    assert (
        os.path.dirname(writer.path)
        == writer.logdir
        == writer.get_logdir()
        == str(tmp_path / "a" / "b")
    )
    assert os.path.basename(writer.path).startswith("events.out.tfevents.")


def test_add_summary_accepts_pytrees_protos_and_bytes(tmp_path, accumulate):
    proto = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag="loss", simple_value=3.0)])
    with SummaryWriter(tmp_path) as writer:
        writer.add_summary(summary.scalar("loss", 1.0), 1)
        writer.add_summary(proto, 2)
        proto.value[0].simple_value = 4.0  # add_summary has copied it
        writer.add_summary(proto.SerializeToString(), 3)
        writer.add_summary(None, 4)
        writer.add_summary(summary.merge([]), 5)
    assert scalars(accumulate(tmp_path)) == [(1, 1.0), (2, 3.0), (3, 4.0)]


@pytest.mark.parametrize(
    ("method", "argument", "message"),
    [
        ("add_summary", 3.0, "must be of type Summary, not a float"),
        ("add_summary", event_pb2.Event(), "must be of type Summary, not an Event"),
        ("add_event", summary_pb2.Summary(), "must be of type Event, not a Summary"),
        ("add_event", b"\xff\xff", "2 bytes that are not a serialized Event"),
        ("add_graph", 3, "must be a Traced, Lowered or GraphDef"),
        ("add_hparams", {"a": {"b": [1]}}, r"hparams\['a/b'\]=\[1\]: must be a number"),
    ],
)
def test_arguments_of_wrong_types(tmp_path, method, argument, message):
    with SummaryWriter(tmp_path) as writer, pytest.raises(TypeError, match=message):
        getattr(writer, method)(argument)
    assert len(events_of(writer)) == 1


def test_a_step_array_may_be_donated_after_the_call(tmp_path, accumulate):
    update = jax.jit(lambda state: {"n": state["n"] + 1}, donate_argnums=0)
    state = {"n": jnp.int32(0)}
    with SummaryWriter(tmp_path) as writer:
        for _ in range(5):
            state = update(state)
            writer.add_summary(summary.scalar("loss", 1.0), state["n"])
    assert [step for step, _ in scalars(accumulate(tmp_path))] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("step", [1.5, True, "3", jnp.float32(1.0), jnp.arange(3), np.float64(2)])
def test_a_step_must_be_an_integer(tmp_path, step):
    with (
        SummaryWriter(tmp_path) as writer,
        pytest.raises(
            TypeError,
            match=r"global_step=.*: must be an integer",
        ),
    ):
        writer.add_summary(summary.scalar("loss", 1.0), step)


def test_the_last_of_stacked_summaries_is_at_global_step(tmp_path, accumulate):
    def step(state, x):
        merged = summary.merge(
            [summary.scalar("loss", state), summary.scalar(["a", "b"], jnp.stack([x, -x]))]
        )
        return state + 1, merged

    _, stacked = jax.jit(lambda xs: jax.lax.scan(step, jnp.float32(0.0), xs))(jnp.arange(4.0))
    with SummaryWriter(tmp_path) as writer:
        # Parts of a summary that are not stacked belong to the last step.
        writer.add_summary(
            summary.merge([stacked, summary.scalar("once", 9.0), summary.text("t", "x")]), 104
        )
    events = accumulate(tmp_path)
    assert scalars(events) == [(101, 0.0), (102, 1.0), (103, 2.0), (104, 3.0)]
    assert scalars(events, "b") == [(101, 0.0), (102, -1.0), (103, -2.0), (104, -3.0)]
    assert scalars(events, "once") == [(104, 9.0)]
    steps = [e.step for e in events_of(writer) if e.summary.value]
    assert steps == [101, 102, 103, 104]  # one event per step, in order


def test_a_traced_summary_or_step_is_an_error(tmp_path):
    with SummaryWriter(tmp_path) as writer:

        @jax.jit
        def step(x):
            writer.add_summary(summary.scalar("loss", x))
            return x

        with pytest.raises(TypeError, match=r"summary 'loss' is traced; return it from"):
            step(1.0)

        @jax.jit
        def other(n):
            writer.add_summary(summary.scalar("loss", 1.0), n)
            return n

        with pytest.raises(TypeError, match="global_step is traced"):
            other(1)


def test_tensorboard_drops_points_before_a_restart(tmp_path, accumulate):
    def run(start, steps, value):
        with SummaryWriter(tmp_path) as writer:
            writer.add_session_log("START", start)
            for step in steps:
                writer.add_summary(summary.scalar("loss", value), step)

    run(1, range(10, 90, 10), 1.0)
    run(51, range(60, 110, 10), 2.0)  # resumed after 50 updates, so the point at 50 stays
    read = scalars(accumulate(tmp_path))
    assert read == [(s, 1.0) for s in range(10, 60, 10)] + [(s, 2.0) for s in range(60, 110, 10)]


def test_add_session_log(tmp_path):
    log = event_pb2.SessionLog(status=event_pb2.SessionLog.CHECKPOINT, checkpoint_path="model-5")
    with SummaryWriter(tmp_path) as writer:
        writer.add_session_log(log, 5)
        writer.add_session_log("STOP", jnp.int32(6))
        with pytest.raises(ValueError, match='unknown enum label "start"'):
            writer.add_session_log("start", 5)
    _, checkpoint, stop = events_of(writer)
    assert (checkpoint.step, checkpoint.session_log) == (5, log)
    assert (stop.step, stop.session_log.status) == (6, event_pb2.SessionLog.STOP)


def test_add_hparams(tmp_path, accumulate):
    from tensorboard.plugins.hparams import metadata

    hparams = {
        "rate": jnp.float32(0.5),
        "layers": np.int64(3),
        "nesterov": True,
        "optimizer": {"name": "adam"},
    }
    with SummaryWriter(tmp_path) as writer:
        writer.add_hparams(hparams)
    events = accumulate(tmp_path)
    content = events.PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert {k: getattr(v, v.WhichOneof("kind")) for k, v in start.hparams.items()} == {
        "rate": 0.5,
        "layers": 3.0,
        "nesterov": True,
        "optimizer/name": "adam",
    }


# `SummaryWriter`: its errors, and which call raises them.


@pytest.mark.parametrize(
    "method", ["add_summary", "add_event", "add_graph", "add_hparams", "add_session_log"]
)
def test_error_of_a_closed_writer_names_the_logdir(tmp_path, method):
    writer = SummaryWriter(tmp_path)
    writer.close()
    writer.close()
    writer.flush()  # does nothing, because close has flushed everything
    assert repr(writer) == f"SummaryWriter({str(tmp_path)!r}, closed)"
    with pytest.raises(RuntimeError, match=f"the SummaryWriter of '{tmp_path}' is closed"):
        getattr(writer, method)(None)


def test_a_writer_that_is_refused_creates_nothing(tmp_path):
    with pytest.raises(ValueError, match="max_queue=0"):
        SummaryWriter(tmp_path / "logs", max_queue=0)
    assert not (tmp_path / "logs").exists()


def test_a_step_beyond_64_bits_is_an_error(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        writer.add_summary(summary.scalar("loss", 1.0), 2**70)
        with pytest.raises(ValueError, match="global_step 1180591620717411303424 does not fit"):
            writer.flush()


class FullDisk:
    """A file that raises ENOSPC after `room` more bytes."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def write(self, data):
        if self._room <= 0:
            raise OSError(28, "No space left on device")
        written = self._file.write(bytes(data[: self._room]))
        self._room -= written
        return written

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_a_full_disk_leaves_no_partial_record(tmp_path):
    writer = SummaryWriter(tmp_path, max_queue=1)
    writer.add_summary(summary.scalar("loss", 1.0), 1)
    writer.flush()
    size = os.path.getsize(writer.path)
    writer._worker._sink._file = FullDisk(writer._worker._sink._file, room=10)
    writer.add_summary(summary.scalar("loss", 2.0), 2)
    with pytest.raises(OSError, match=f"No space left on device: '{writer.path}'"):
        writer.flush()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="writing stopped after"):
            writer.add_summary(summary.scalar("loss", 3.0), 3)
    writer.close()  # the error was already raised; does not wait for the discarded events
    assert os.path.getsize(writer.path) == size
    assert [e.step for e in events_of(writer)] == [0, 1]


@pytest.mark.parametrize("call", ["flush", "sync_to_disk"])
def test_any_error_of_a_flush_to_disk_is_raised_and_the_thread_goes_on(tmp_path, monkeypatch, call):
    with SummaryWriter(tmp_path) as writer:
        writer.add_summary(summary.scalar("loss", 1.0), 1)
        with monkeypatch.context() as broken:
            broken.setattr(
                writer._worker._sink, "sync", raising(ValueError("a handle of another kind"))
            )
            if call == "sync_to_disk":
                sync_to_disk(writer)
            with pytest.raises(ValueError, match="a handle of another kind") as caught:
                writer.flush()
        assert caught.value.__notes__ == [f"raised on the writer's thread of {writer.path}"]
        writer.add_summary(summary.scalar("loss", 2.0), 2)
        writer.flush()
    assert [event.step for event in events_of(writer)] == [0, 1, 2]


def test_close_raises_a_pending_error_once(tmp_path):
    writer = SummaryWriter(tmp_path, max_queue=1)
    writer._worker._sink._file = FullDisk(writer._worker._sink._file, room=0)
    writer.add_summary(summary.scalar("loss", 2.0), 2)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    writer.close()


def test_close_does_not_mask_the_error_of_the_block(tmp_path):
    def run():
        with SummaryWriter(tmp_path) as writer:
            writer._worker._sink._file = FullDisk(writer._worker._sink._file, room=0)
            writer.add_summary(summary.scalar("loss", 2.0), 2)
            raise KeyError("body")

    with pytest.raises(KeyError) as caught:
        run()
    assert any("No space left" in note for note in caught.value.__notes__)


def test_error_for_a_deleted_array_names_the_tag(tmp_path, accumulate):
    created = jax.jit(lambda x: summary.scalar(["loss", "b"], jnp.stack([x, x])))(1.0)
    jax.tree.leaves(created)[0].delete()
    writer = SummaryWriter(tmp_path)
    writer.add_summary(summary.merge([created, summary.scalar("kept", 1.0)]), 1)
    with pytest.raises(
        RuntimeError, match="summary 'loss': its array was deleted before it was written"
    ):
        writer.close()
    assert scalars(accumulate(tmp_path), "kept") == [(1, 1.0)]


def test_an_unreferenced_writer_ends_its_thread(tmp_path):
    writer = SummaryWriter(tmp_path)
    writer.add_summary(summary.scalar("loss", 1.0), 1)
    path, thread, reference = writer.path, writer._worker._thread, weakref.ref(writer)
    del writer
    gc.collect()
    assert reference() is None
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert len(list(summary.summary_iterator(path))) == 2


# `SummaryWriter`: its background thread, its buffer, and the names of its files.


@jax.jit
def slow(x, iterations):
    y = jax.lax.fori_loop(0, iterations, lambda _, y: jnp.tanh(y @ y), jnp.full((700, 700), x))
    return summary.merge([summary.scalar("loss", y[0, 0] * 0 + x), summary.histogram("h", y)])


def add_while_computing(logdir, iterations):
    """Write summaries of arrays that are being computed; return whether the computation outlasted
    the calls."""

    def add_eagerly(created):
        writer.add_summary(
            summary.scalar("eager", created.parts[0].values), created.parts[1].exponent
        )

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
        leaves = [
            weakref.ref(leaf) for leaf in jax.tree.leaves(written) if isinstance(leaf, jax.Array)
        ]
        assert leaves
        writer.add_summary(written, 1)
        del written
        wait_until(lambda: not [leaf for leaf in leaves if leaf() is not None])
