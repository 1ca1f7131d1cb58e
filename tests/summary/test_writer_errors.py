"""`SummaryWriter`: its errors, and which call raises them."""

import gc
import os
import weakref

import jax
import jax.numpy as jnp
import pytest
from doubles import raising
from event_reading import events_of, scalars

from jstep import summary
from jstep.summary.writer import SummaryWriter


@pytest.mark.parametrize("method", ["add_summary", "add_event", "add_graph", "add_hparams", "add_session_log"])
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


@pytest.mark.parametrize("call", ["flush", "settle"])
def test_any_error_of_a_flush_to_disk_is_raised_and_the_thread_goes_on(tmp_path, monkeypatch, call):
    with SummaryWriter(tmp_path) as writer:
        writer.add_summary(summary.scalar("loss", 1.0), 1)
        with monkeypatch.context() as broken:
            broken.setattr(writer._worker._sink, "sync", raising(ValueError("a handle of another kind")))
            if call == "settle":
                writer.settle()
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
    with pytest.raises(RuntimeError, match="summary 'loss': its array was deleted before it was written"):
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
