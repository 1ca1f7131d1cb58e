"""Summaries: None for defaults, JAX contexts, file names, deleted log directories, and protos."""

import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from event_reading import events_of

from jstep import summary
from jstep.stores.event_files import proto


def all_kinds(number, integers):
    return summary.merge(
        [
            summary.scalar("device", number),
            summary.scalar("numpy", np.float32(2.0)),
            summary.scalar(["a", "b"], np.ones(2)),
            summary.histogram("h", np.arange(4.0)),
            summary.histogram("hd", integers),
            summary.image("i", np.zeros((1, 2, 2, 1), np.uint8), 1),
            summary.image("f", np.ones((1, 2, 2, 3), np.float32), 1),
            summary.scalar("z", summary.zero_fraction(np.array([0, 1]))),
            summary.text("t", "x"),
        ]
    )


@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_summaries_under_a_transfer_guard(tmp_path, level):
    x, number, step = jnp.arange(3), jnp.float32(2.0), jnp.int32(7)
    with jax.transfer_guard(level), summary.SummaryWriter(tmp_path) as writer:
        writer.add_summary(jax.jit(lambda x: summary.scalar("sum", x.sum()))(x), step)
        writer.add_summary(all_kinds(number, x), step)
        writer.add_graph(lambda x: x, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert [e.step for e in events_of(writer)][:2] == [0, 7]


def test_a_removed_logdir_is_logged_and_recreated(tmp_path, caplog):
    logdir = tmp_path / "logs" / "run"
    writer = summary.SummaryWriter(logdir, max_queue=1)
    writer.add_summary(summary.scalar("loss", 1.0), 1)
    writer.flush()
    first = writer.path
    shutil.rmtree(tmp_path / "logs")
    with caplog.at_level(logging.WARNING, "jstep"):
        writer.add_summary(summary.scalar("loss", 2.0), 2)
        writer.add_summary(summary.scalar("loss", 3.0), 3)
        writer.close()
    (record,) = caplog.records
    assert f"{first} was removed while a SummaryWriter wrote to it" in record.getMessage()
    assert os.listdir(logdir) == [os.path.basename(writer.path)]
    assert [e.step for e in events_of(writer)] == [0, 2, 3]


def test_to_proto():
    created = all_kinds(jnp.float32(2.0), jnp.arange(3))
    with jax.transfer_guard("disallow_explicit"):
        message = summary.to_proto(created)
    assert [value.tag for value in message.value] == list(created.tags)
    assert summary.to_proto(summary.merge([])) == proto("Summary")()
    stacked = jax.vmap(lambda x: summary.scalar("loss", x))(jnp.arange(3.0))
    with pytest.raises(ValueError, match="summary 'loss' holds 3 steps"):
        summary.to_proto(stacked)
    assert summary.to_proto(jax.tree.map(lambda x: x[2], stacked)).value[0].simple_value == 2.0
    with pytest.raises(TypeError, match="'loss' is traced"):
        jax.jit(lambda x: (x, summary.to_proto(summary.scalar("loss", x)))[0])(1.0)
    with pytest.raises(ValueError, match="NaN or infinite"):
        summary.to_proto(summary.histogram("h", jax.jit(lambda x: x / 0)(jnp.ones(2**17))))
