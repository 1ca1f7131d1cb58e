"""`SummaryWriter`: the inputs of its methods and the events that it writes."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from event_reading import events_of, scalars
from tensorboard.compat.proto import event_pb2, summary_pb2

from jstep import summary
from jstep.summary.writer import SummaryWriter


def test_the_first_event_is_that_of_tensorboard(tmp_path):
    with SummaryWriter(tmp_path / "a" / "b") as writer:
        pass
    (first,) = events_of(writer)
    assert first.file_version == "brain.Event:2"
    assert first.source_metadata.writer == "jstep.summary"
    assert abs(first.wall_time - time.time()) < 600
    assert os.path.dirname(writer.path) == writer.logdir == writer.get_logdir() == str(tmp_path / "a" / "b")
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
        ("add_graph", 3, "must be a jax.stages.Traced"),
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
    with SummaryWriter(tmp_path) as writer, pytest.raises(TypeError, match=r"global_step=.*: must be an integer"):
        writer.add_summary(summary.scalar("loss", 1.0), step)


def test_the_last_of_stacked_summaries_is_at_global_step(tmp_path, accumulate):
    def step(state, x):
        merged = summary.merge([summary.scalar("loss", state), summary.scalar(["a", "b"], jnp.stack([x, -x]))])
        return state + 1, merged

    _, stacked = jax.jit(lambda xs: jax.lax.scan(step, jnp.float32(0.0), xs))(jnp.arange(4.0))
    with SummaryWriter(tmp_path) as writer:
        # Parts of a summary that are not stacked belong to the last step.
        writer.add_summary(summary.merge([stacked, summary.scalar("once", 9.0), summary.text("t", "x")]), 104)
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

        with pytest.raises(TypeError, match=r"summary 'loss' is traced and has no value; return it from"):
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
        writer.add_hparams(hparams, metrics={"accuracy": 0.9})
        with pytest.raises(TypeError, match=r"metrics\['accuracy'\]='good': must be a number"):
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
