"""Marks of the programs for `bench_whole_runs.py`; lines that contain `marks` are not counted.

`mark import SECONDS` after the imports, `mark data SECONDS` when the task is read, `mark init
SECONDS` when the network has its weights; `mark step STEP SECONDS` after the first step, half of
the steps, the step at which a run is killed and the last one; `mark compile SECONDS`, what JAX
traced, lowered and compiled between init and the first step; `mark parameters COUNT`; `mark test
LOSS SECONDS`. Seconds are those of `time.time`, except for `compile`.
"""

import sys
import time


class Marks:
    """Prints the marks of a run; created after the imports."""

    def __init__(self):
        self._say("import", time.time())
        self._compiled = []
        if "jax" in sys.modules:
            import jax

            jax.monitoring.register_event_duration_secs_listener(self._listen)

    def data(self, task):
        """The task was read."""
        self._steps = (task.steps // 2, task.killed, task.steps)
        self._is_first = True
        self._say("data", time.time())

    def init(self, parameters):
        """The network has that many parameters, and its weights."""
        self._say("parameters", parameters)
        self._initialized = time.time()
        self._say("init", self._initialized)

    def step(self, step, result=None):
        """Print a mark if one is due after this step; `result` is an array to wait for, or None."""
        if self._is_first or step in self._steps:
            if result is not None:
                result.block_until_ready()
            self._say("step", step, time.time())
            if self._is_first:
                self._say("compile", self._seconds_compiling())
            self._is_first = False

    def test(self, loss):
        """Print the loss on the test set, with all digits."""
        self._say("test", repr(float(loss)), time.time())

    def _say(self, *words):
        print("mark", *words, flush=True)

    def _listen(self, event, seconds, **kwargs):
        if event.startswith("/jax/core/compile/"):
            now = time.time()
            self._compiled.append((now - seconds, now))

    def _seconds_compiling(self):
        """The seconds since `init` in which something was compiled: threads compile at the same
        time."""
        total, until = 0.0, self._initialized
        for start, end in sorted(self._compiled):
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total

    def for_jstep(self):
        """A hook that is called only when a mark is due."""
        import jstep

        marks = self

        class Marking(jstep.Hook):
            def begin(self, state):
                self.due = {jstep.global_step(state) + 1, *marks._steps}

            def after_step(self, step, state, metrics):
                if step in self.due:
                    marks.step(step, metrics["loss"])

            def next_due(self, step):
                return min((due for due in self.due if due > step), default=step + 10**9)

        return Marking()

    def for_keras(self, every):
        """A callback; an epoch has `every` steps. A call of several steps is marked as its last
        one."""
        import keras

        marks = self

        class Marking(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.before = epoch * every + 1

            def on_train_batch_end(self, batch, logs=None):
                marks.step(self.before + batch)

        return Marking()

    def for_lightning(self):
        """A callback."""
        import lightning

        marks = self

        class Marking(lightning.Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                marks.step(trainer.global_step)

        return Marking()

    def for_hf(self):
        """A callback."""
        import transformers

        marks = self

        class Marking(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                marks.step(state.global_step)

        return Marking()
