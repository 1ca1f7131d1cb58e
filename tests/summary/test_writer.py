import gc
import os
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2, graph_pb2, summary_pb2

from jstep import summary
from jstep.summary import _event_file, _worker
from jstep.summary.writer import SummaryWriter


def scalars(events, tag="loss"):
    return [(e.step, e.value) for e in events.Scalars(tag)]


def events_of(writer):
    return list(summary.summary_iterator(writer.path))


def wait_until(condition):
    """For what another thread does in its own time; a wait, not a measurement."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen within 20 s")


def test_the_file_begins_as_tensorboard_expects(tmp_path):
    with SummaryWriter(tmp_path / "a" / "b") as writer:
        pass
    (first,) = events_of(writer)
    assert first.file_version == "brain.Event:2"
    assert first.source_metadata.writer == "jstep.summary"
    assert abs(first.wall_time - time.time()) < 600
    assert os.path.dirname(writer.path) == writer.logdir == writer.get_logdir() == str(tmp_path / "a" / "b")
    assert os.path.basename(writer.path).startswith("events.out.tfevents.")


def test_pytrees_protos_and_bytes(tmp_path, accumulate):
    proto = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag="loss", simple_value=3.0)])
    with SummaryWriter(tmp_path) as writer:
        writer.add_summary(summary.scalar("loss", 1.0), 1)
        writer.add_summary(proto, 2)
        proto.value[0].simple_value = 4.0  # it was written as it was
        writer.add_summary(proto.SerializeToString(), 3)
        writer.add_summary(None, 4)
        writer.add_summary(summary.merge([]), 5)
    assert scalars(accumulate(tmp_path)) == [(1, 1.0), (2, 3.0), (3, 4.0)]


def test_events(tmp_path):
    event = event_pb2.Event(step=7, wall_time=12.5, file_version="mine")
    with SummaryWriter(tmp_path) as writer:
        writer.add_event(event)
        writer.add_event(event.SerializeToString())
    assert events_of(writer)[1:] == [event, event]


@pytest.mark.parametrize(
    ("method", "what", "message"),
    [
        ("add_summary", 3.0, "expected a Summary, not float"),
        ("add_summary", {"loss": 1.0}, r"expected a Summary, not dict; summary\.scalar"),
        ("add_summary", [summary.scalar("a", 1.0)], r"expected a Summary, not list; summary\.merge"),
        ("add_summary", event_pb2.Event(), "expected a Summary, not Event; add_event takes it"),
        ("add_event", summary_pb2.Summary(), "expected a Event, not Summary; add_summary takes it"),
        ("add_event", summary.scalar("a", 1.0), "add_summary takes it"),
        ("add_event", b"\xff\xff", "2 bytes that are no serialized Event"),
        ("add_summary", b"\xff\xff", "2 bytes that are no serialized Summary"),
        ("add_graph", 3, "expected a jax.stages.Traced"),
        (
            "add_hparams",
            {"a": None},
            r"hparams\['a'\] must be a bool, a number or a string, not NoneType None",
        ),
        ("add_hparams", {"a": {"b": [1]}}, r"hparams\['a/b'\] must be"),
        ("add_hparams", 3, "must be a mapping"),
        ("add_session_log", 3, "expected a SessionLog"),
    ],
)
def test_what_no_method_takes(tmp_path, method, what, message):
    with SummaryWriter(tmp_path) as writer, pytest.raises(TypeError, match=message):
        getattr(writer, method)(what)
    assert len(events_of(writer)) == 1


@pytest.mark.parametrize("step", [5, np.int64(5), np.array(5, np.int32), jnp.int32(5)])
def test_steps_of_any_integer_kind(tmp_path, accumulate, step):
    with SummaryWriter(tmp_path) as writer:
        writer.add_summary(summary.scalar("loss", 1.0), step)
        writer.add_summary(summary.scalar("loss", 2.0), global_step=step)
    assert scalars(accumulate(tmp_path)) == [(5, 1.0), (5, 2.0)]


def test_a_step_array_may_be_donated_after_the_call(tmp_path, accumulate):
    update = jax.jit(lambda state: {"n": state["n"] + 1}, donate_argnums=0)
    state = {"n": jnp.int32(0)}
    with SummaryWriter(tmp_path) as writer:
        for _ in range(5):
            state = update(state)
            writer.add_summary(summary.scalar("loss", 1.0), state["n"])
    assert [step for step, _ in scalars(accumulate(tmp_path))] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("step", [1.5, True, "3", jnp.float32(1.0), jnp.arange(3), np.float64(2)])
def test_what_is_no_step(tmp_path, step):
    with SummaryWriter(tmp_path) as writer, pytest.raises(TypeError, match="global_step must be an integer"):
        writer.add_summary(summary.scalar("loss", 1.0), step)


def test_no_step_is_step_0(tmp_path, accumulate):
    with SummaryWriter(tmp_path) as writer:
        writer.add_summary(summary.scalar("loss", 1.0))
        writer.add_summary(jax.vmap(lambda x: summary.scalar("many", x))(jnp.arange(3.0)))
    events = accumulate(tmp_path)
    assert scalars(events) == [(0, 1.0)]
    assert scalars(events, "many") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_stacked_summaries_are_steps_and_the_last_is_global_step(tmp_path, accumulate):
    def step(state, x):
        made = summary.merge([summary.scalar("loss", state), summary.scalar(["a", "b"], jnp.stack([x, -x]))])
        return state + 1, made

    _, stacked = jax.jit(lambda xs: jax.lax.scan(step, jnp.float32(0.0), xs))(jnp.arange(4.0))
    with SummaryWriter(tmp_path) as writer:
        # Of one summary, parts that are not stacked belong to the last step.
        writer.add_summary(summary.merge([stacked, summary.scalar("once", 9.0), summary.text("t", "x")]), 104)
    events = accumulate(tmp_path)
    assert scalars(events) == [(101, 0.0), (102, 1.0), (103, 2.0), (104, 3.0)]
    assert scalars(events, "b") == [(101, 0.0), (102, -1.0), (103, -2.0), (104, -3.0)]
    assert scalars(events, "once") == [(104, 9.0)]
    steps = [e.step for e in events_of(writer) if e.summary.value]
    assert steps == [101, 102, 103, 104]  # one event a step, in order


def test_scans_of_scans_are_steps_too(tmp_path, accumulate):
    def inner(c, x):
        return c, summary.scalar("loss", x)

    _, stacked = jax.lax.scan(lambda c, xs: jax.lax.scan(inner, c, xs), 0, jnp.arange(6.0).reshape(2, 3))
    with SummaryWriter(tmp_path) as writer:
        writer.add_summary(stacked, 6)
    assert scalars(accumulate(tmp_path)) == [(i + 1, float(i)) for i in range(6)]


def test_a_traced_summary_or_step_is_an_error_that_says_what_to_do(tmp_path):
    with SummaryWriter(tmp_path) as writer:

        @jax.jit
        def step(x):
            writer.add_summary(summary.scalar("loss", x))
            return x

        with pytest.raises(TypeError, match=r"summary 'loss' is traced: .*Return the summary from"):
            step(1.0)

        @jax.jit
        def other(n):
            writer.add_summary(summary.scalar("loss", 1.0), n)
            return n

        with pytest.raises(TypeError, match="global_step is traced"):
            other(1)


@jax.jit
def slow(x):
    """A second of work or so."""
    y = jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), jnp.full((700, 700), x))
    return summary.merge([summary.scalar("loss", y[0, 0] * 0 + x), summary.histogram("h", y)])


def test_the_caller_waits_for_no_array(tmp_path, accumulate):
    def add_eagerly(made):
        writer.add_summary(summary.scalar("eager", made.parts[0].values), made.parts[1].exponent)

    with SummaryWriter(tmp_path, max_queue=1) as writer:
        add_eagerly(slow(2.0))  # compiles what there is to compile
        writer.flush()
        made = slow(2.0)
        for step in range(1, 30):
            writer.add_summary(made, step)
        add_eagerly(made)
        assert not made.parts[0].values.is_ready()
    events = accumulate(tmp_path)
    assert scalars(events) == [(step, 2.0) for step in range(1, 30)]
    assert [value for _, value in scalars(events, "eager")] == [2.0, 2.0]


def test_the_caller_waits_for_no_event_to_be_written(tmp_path, accumulate):
    released = threading.Event()
    with SummaryWriter(tmp_path, max_queue=1) as writer:
        encode = writer._worker._encode
        writer._worker._encode = lambda *args: released.wait(60) and encode(*args)
        for step in range(50):
            writer.add_summary(summary.scalar("loss", 2.0), step)
        released.set()
    assert len(accumulate(tmp_path).Scalars("loss")) == 50


def test_the_buffer_is_written_at_max_queue_events_and_after_flush_secs(tmp_path):
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


def test_what_waits_in_memory_is_bounded(tmp_path, accumulate, monkeypatch):
    monkeypatch.setattr(_worker, "MAX_BYTES", 3000)
    monkeypatch.setattr(_worker, "MAX_JOBS", 4)
    picture = np.zeros((1, 32, 32, 1), np.uint8)
    with SummaryWriter(tmp_path) as writer:
        for step in range(20):
            writer.add_summary(summary.image("x", picture, max_images=1), step)
            writer.add_summary(summary.scalar("loss", 1.0), step)
            assert writer._worker._bytes <= 3000 + 1024
    events = accumulate(tmp_path)
    assert len(events.Images("x/image")) == len(events.Scalars("loss")) == 20


def test_two_writers_of_one_second_have_files_of_their_own_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(_event_file.time, "time", lambda: 1000.7)
    writers = [SummaryWriter(tmp_path) for _ in range(12)]
    for writer in writers:
        writer.close()
    names = [os.path.basename(writer.path) for writer in writers]
    assert names == sorted(os.listdir(tmp_path))
    assert len(set(names)) == 12
    assert f".{os.getpid()}." in names[0]


def test_a_file_sorts_after_those_of_a_host_whose_clock_is_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(_event_file.time, "time", lambda: 2000.0)
    SummaryWriter(tmp_path).close()
    monkeypatch.setattr(_event_file.time, "time", lambda: 1500.0)
    with SummaryWriter(tmp_path) as writer:
        pass
    assert sorted(os.listdir(tmp_path))[-1] == os.path.basename(writer.path)
    (tmp_path / "events.out.tfevents.zzz").touch()  # of another program's naming
    with SummaryWriter(tmp_path):
        pass


def test_process_0_alone_writes(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("method", ["add_summary", "add_event", "add_graph", "add_hparams", "add_session_log"])
def test_a_closed_writer_is_an_error_that_names_the_logdir(tmp_path, method):
    writer = SummaryWriter(tmp_path)
    writer.close()
    writer.close()
    writer.flush()  # all that was added is in the file
    assert repr(writer) == f"SummaryWriter({str(tmp_path)!r}, closed)"
    with pytest.raises(RuntimeError, match=f"the SummaryWriter of '{tmp_path}' is closed"):
        getattr(writer, method)(None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_queue": 0}, ValueError, "max_queue must be positive, not 0"),
        ({"max_queue": -3}, ValueError, "max_queue must be positive, not -3"),
        ({"max_queue": 1.5}, TypeError, "max_queue must be an int, not 1.5"),
        ({"max_queue": True}, TypeError, "max_queue must be an int, not True"),
        ({"flush_secs": 0}, ValueError, "flush_secs must be positive, not 0"),
        ({"flush_secs": float("nan")}, ValueError, "flush_secs must be positive, not nan"),
    ],
)
def test_arguments_out_of_range(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        SummaryWriter(tmp_path / "logs", **arguments)
    assert not (tmp_path / "logs").exists()


def test_a_logdir_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FileExistsError, match=f"cannot write to its logdir.*'{file}'"):
        SummaryWriter(file)
    with pytest.raises(NotADirectoryError, match=f"cannot write to its logdir.*'{file}/below'"):
        SummaryWriter(file / "below")
    with pytest.raises(TypeError, match="logdir must be a path, not int 3"):
        SummaryWriter(3)
    with pytest.raises(ValueError, match=r"logdir 'gs://bucket/logs' is no path"):
        SummaryWriter("gs://bucket/logs")


def test_a_step_beyond_64_bits_is_told(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        writer.add_summary(summary.scalar("loss", 1.0), 2**70)
        with pytest.raises(ValueError, match="global_step 1180591620717411303424 does not fit"):
            writer.flush()


def test_a_vector_that_lost_its_axis_is_told_by_its_tag(tmp_path):
    made = jax.vmap(lambda x: summary.scalar(["a", "b"], jnp.stack([x, x])))(jnp.ones(3))
    with SummaryWriter(tmp_path) as writer:
        writer.add_summary(jax.tree.map(jnp.sum, made), 1)
        with pytest.raises(ValueError, match="summary 'a': an array of shape"):
            writer.flush()


def test_a_graph_that_is_none_leaves_no_thread_behind(tmp_path):
    threads = threading.active_count()
    with pytest.raises(TypeError, match=r"expected a jax\.stages\.Traced"):
        SummaryWriter(tmp_path, graph=3)
    assert threading.active_count() == threads


class FullDisk:
    """A file that takes so many bytes more."""

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


def test_a_full_disk_is_told_at_the_next_call_and_leaves_no_half_record(tmp_path):
    writer = SummaryWriter(tmp_path, max_queue=1)
    writer.add_summary(summary.scalar("loss", 1.0), 1)
    writer.flush()
    size = os.path.getsize(writer.path)
    writer._worker._file = FullDisk(writer._worker._file, room=10)
    writer.add_summary(summary.scalar("loss", 2.0), 2)
    with pytest.raises(OSError, match=f"No space left on device: '{writer.path}'"):
        writer.flush()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="writing stopped after"):
            writer.add_summary(summary.scalar("loss", 3.0), 3)
    writer.close()  # has been told; does not wait for what will never be written
    assert os.path.getsize(writer.path) == size
    assert [e.step for e in events_of(writer)] == [0, 1]


def test_an_error_nobody_asked_for_is_told_at_close(tmp_path):
    writer = SummaryWriter(tmp_path, max_queue=1)
    writer._worker._file = FullDisk(writer._worker._file, room=0)
    writer.add_summary(summary.scalar("loss", 2.0), 2)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    writer.close()


def test_an_error_in_the_body_is_not_hidden_by_one_of_the_writer(tmp_path):
    def run():
        with SummaryWriter(tmp_path) as writer:
            writer._worker._file = FullDisk(writer._worker._file, room=0)
            writer.add_summary(summary.scalar("loss", 2.0), 2)
            raise KeyError("body")

    with pytest.raises(KeyError) as caught:
        run()
    assert any("No space left" in note for note in caught.value.__notes__)


def test_an_array_that_was_deleted_is_told_by_the_name_of_its_tag(tmp_path, accumulate):
    made = jax.jit(lambda x: summary.scalar(["loss", "b"], jnp.stack([x, x])))(1.0)
    jax.tree.leaves(made)[0].delete()
    writer = SummaryWriter(tmp_path)
    writer.add_summary(summary.merge([made, summary.scalar("kept", 1.0)]), 1)
    with pytest.raises(RuntimeError, match="summary 'loss': its array was deleted before it was written"):
        writer.close()
    assert scalars(accumulate(tmp_path), "kept") == [(1, 1.0)]


def test_a_writer_that_is_forgotten_ends_its_thread(tmp_path):
    writer = SummaryWriter(tmp_path)
    writer.add_summary(summary.scalar("loss", 1.0), 1)
    path, thread, forgotten = writer.path, writer._worker._thread, weakref.ref(writer)
    del writer
    gc.collect()
    assert forgotten() is None
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert len(list(summary.summary_iterator(path))) == 2


def test_nothing_is_lost_where_the_interpreter_exits_without_close(run_python, tmp_path):
    run_python(
        """
        import jax, jax.numpy as jnp
        from jstep import summary
        writer = summary.SummaryWriter("logs")
        writer.add_summary(jax.jit(lambda x: summary.scalar("loss", x))(2.0), 1)
        """
    )
    (file,) = (tmp_path / "logs").iterdir()
    assert [e.step for e in summary.summary_iterator(file)] == [0, 1]


def test_tensorflow_is_never_imported(run_python, tmp_path):
    trap = tmp_path / "trap" / "tensorflow"
    trap.mkdir(parents=True)
    (trap / "__init__.py").write_text("raise AssertionError('tensorflow was imported')")
    run_python(
        """
        import importlib.util, sys
        import jax.numpy as jnp
        from jstep import summary
        assert importlib.util.find_spec("tensorflow") is not None
        with summary.SummaryWriter("logs", graph=lambda: jnp.ones(3)) as writer:
            writer.add_summary(summary.merge([
                summary.scalar("loss", 1.0), summary.histogram("h", jnp.ones(3)), summary.text("t", "x"),
                summary.image("i", jnp.ones((1, 2, 2, 3)))]), 1)
            writer.add_hparams({"rate": 0.1}, {"accuracy": 1.0})
            writer.add_session_log("START", 0)
        assert len(list(summary.summary_iterator(writer.path))) == 5
        from jstep.cli.main import main
        assert main(["plot", "logs", "-o", "loss.png"]) == main(["events", "logs"]) == 0
        assert not [m for m in sys.modules if m.startswith(("tensorflow", "tensorboard.compat.tensorf"))]
        """,
        path=trap.parent,
    )


@pytest.mark.parametrize("missing", ["tensorboard", "google_crc32c"])
def test_a_missing_extra_is_an_error_that_says_how_to_install_it(run_python, missing):
    run_python(
        f"""
        import os, sys
        sys.modules[{missing!r}] = None
        from jstep import summary
        summary.scalar("a", 1.0)
        try:
            summary.SummaryWriter("logs")
        except ImportError as error:
            assert "needs {missing}" in str(error) and "pip install jstep[summaries]" in str(error), error
        else:
            raise AssertionError("no error")
        assert not os.path.exists("logs")
        """
    )


def test_a_session_log_makes_tensorboard_drop_what_is_run_again(tmp_path, accumulate):
    def run(start, steps, value):
        with SummaryWriter(tmp_path) as writer:
            writer.add_session_log("START", start)
            for step in steps:
                writer.add_summary(summary.scalar("loss", value), step)

    run(1, range(10, 90, 10), 1.0)
    run(51, range(60, 110, 10), 2.0)  # resumed with 50 updates: the point at 50 stays
    read = scalars(accumulate(tmp_path))
    assert read == [(s, 1.0) for s in range(10, 60, 10)] + [(s, 2.0) for s in range(60, 110, 10)]


def test_session_logs(tmp_path):
    log = event_pb2.SessionLog(status=event_pb2.SessionLog.CHECKPOINT, checkpoint_path="model-5")
    with SummaryWriter(tmp_path) as writer:
        writer.add_session_log(log, 5)
        writer.add_session_log("STOP", jnp.int32(6))
        with pytest.raises(ValueError, match="expected 'START', 'STOP' or 'CHECKPOINT', got 'start'"):
            writer.add_session_log("start", 5)
    _, checkpoint, stop = events_of(writer)
    assert (checkpoint.step, checkpoint.session_log) == (5, log)
    assert (stop.step, stop.session_log.status) == (6, event_pb2.SessionLog.STOP)


def test_hparams(tmp_path, accumulate):
    from tensorboard.plugins.hparams import metadata

    hparams = {
        "rate": jnp.float32(0.5),
        "layers": np.int64(3),
        "nesterov": True,
        "optimizer": {"name": "adam"},
    }
    with SummaryWriter(tmp_path) as writer:
        writer.add_hparams(hparams, metrics={"accuracy": 0.9})
        with pytest.raises(TypeError, match=r"metrics\['accuracy'\] must be a number, not 'good'"):
            writer.add_hparams(hparams, metrics={"accuracy": "good"})
    events = accumulate(tmp_path)
    content = events.PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert {k: getattr(v, v.WhichOneof("kind")) for k, v in start.hparams.items()} == {
        "rate": 0.5,
        "layers": 3.0,
        "nesterov": True,
        "optimizer/name": "adam",
    }
    assert metadata.SESSION_END_INFO_TAG in content
    assert scalars(events, "accuracy") == [(0, pytest.approx(0.9))]


def test_graphs_of_all_kinds(tmp_path, accumulate):
    graph = graph_pb2.GraphDef()
    graph.node.add(name="mine", op="Mine")
    jitted = jax.jit(lambda x: jnp.sin(x))
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    cases = {
        "function": (jitted, shape),
        "plain": (lambda x: jnp.sin(x), shape),
        "traced": (jitted.trace(shape),),
        "lowered": (jitted.lower(shape),),
        "graph_def": (graph,),
        "bytes": (graph.SerializeToString(),),
        "no_arguments": (lambda: jnp.sin(jnp.ones(3)),),
    }
    for name, arguments in cases.items():
        with SummaryWriter(tmp_path / name) as writer:
            writer.add_graph(*arguments, global_step=2)
        assert events_of(writer)[-1].step == 2
        ops = {node.op.rpartition(".")[2] for node in accumulate(tmp_path / name).Graph().node}
        assert ops & {"sin", "sine", "Mine"}, name
