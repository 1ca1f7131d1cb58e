"""Internal methods of stock hooks, beyond the public `Hook`."""

from jstep.hooks.hook import Hook, Metrics, RunInfo


class RunHook(Hook):
    """Base class of stock hooks for reporting, saving and measuring. `train` calls these methods on no other hooks.

    Attributes:
        run: Information about the run; None outside of `train`, if other code calls the hook.
    """

    run: RunInfo | None = None

    def use_run(self, run: RunInfo) -> None:
        """Called before `begin`."""
        self.run = run

    def started(self, steps: range, metrics: Metrics, rows: int | None) -> None:
        """Called once, when the first call has returned (compilation is done), with the number of rows of a batch."""

    def batch_size_changed(self, step: int, rows: int | None) -> None:
        """Called after a call that began at `step`, if the number of rows of its batches has changed."""

    def after_last(self, step: int, metrics: Metrics) -> None:
        """Called once after the last step, whatever ended the run, with that step and its metrics."""

    def before_save(self, step: int) -> bool | None:
        """Called before each checkpoint; if it returns True, nothing is saved, and an exception also stops the run."""

    def close(self) -> None:
        """Called at the very end of each run, also after an error, to release the run."""
        self.run = None

    def next_multiple(self, step: int) -> int | None:
        """The first step after `step` at which the hook is due, whatever the clock, or None."""
        return None
