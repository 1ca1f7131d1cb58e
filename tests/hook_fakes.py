"""States, and fake clocks and writers, for tests of hooks."""

import jax.numpy as jnp
import numpy as np

import jstep


def state_at(step=0, value=1.0):
    return jstep.TrainState.create(
        {"w": jnp.full(3, value)}, jstep.momentum(0.1, 0.9), global_step=step
    )


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Marker:
    """A result of a step, which is ready when the device has finished the step."""

    def __init__(self, value=0.0):
        self.value, self.ready, self.deleted = value, False, False
        self.dtype, self.ndim = np.dtype("float32"), 0

    def is_deleted(self):
        return self.deleted

    def is_ready(self):
        assert not self.deleted, "a deleted array cannot be asked"
        return self.ready

    def block_until_ready(self):
        self.ready = True
        return self


class Writer:
    def __init__(self):
        self.points = []

    def add_summary(self, summary, global_step=None):
        self.points.append((global_step, tuple(tag for part in summary.parts for tag in part.tags)))


class SaverAndHook:
    def __init__(self, directory, **kwargs):
        self.saver = jstep.Saver(directory, max_to_keep=None, async_save=False)
        self.hook = jstep.CheckpointSaverHook(self.saver, **kwargs)

    def steps(self):
        return self.saver.all_steps()


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "jstep"]
