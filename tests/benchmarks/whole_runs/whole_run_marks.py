"""Marks that the programs print and `bench_whole_runs.py` reads; lines that contain `marks` are not counted.

`mark step STEP SECONDS` after the first step, half of the steps, the step at which a run is killed and the last one;
`mark parameters COUNT`; `mark test LOSS SECONDS`. Seconds are those of `time.time`.
"""

import time


class Marks:
    """Prints the marks of a run.

    Args:
        task: The task.
        parameters: The number of parameters of the network.
    """

    def __init__(self, task, parameters):
        self._steps = (task.steps // 2, task.killed, task.steps)
        self._is_first = True
        print("mark parameters", parameters, flush=True)

    def step(self, step, result=None):
        """Print a mark if one is due after this step; `result` is an array to wait for, or None."""
        if self._is_first or step in self._steps:
            self._is_first = False
            if result is not None:
                result.block_until_ready()
            print("mark step", step, time.time(), flush=True)

    def test(self, loss):
        """Print the loss on the test set, with all digits."""
        print("mark test", repr(float(loss)), time.time(), flush=True)

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
        """A callback; an epoch has `every` steps."""
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
