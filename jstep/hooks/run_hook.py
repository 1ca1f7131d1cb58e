"""What the hooks of jstep are told of a run beyond the public `Hook`: internal."""

from jstep.hooks.hook import Hook, Metrics, RunInfo


class RunHook(Hook):
    """A hook that takes part in the work of `train`: reporting, saving, measuring. `train` calls these on no other.

    Attributes:
        run: What is known of the run it serves; None outside of `train`, where somebody else calls its methods.
    """

    run: RunInfo | None = None

    def use_run(self, run: RunInfo) -> None:
        """Called before `begin`."""
        self.run = run

    def started(self, steps: range, metrics: Metrics, rows: int | None) -> None:
        """Called once, when the first call has returned (compilation is over), with the number of rows of a batch."""

    def batch_size_changed(self, step: int, rows: int | None) -> None:
        """Called after a call that began at `step`, if its batches have another number of rows than those before."""

    def after_last(self, step: int, metrics: Metrics) -> None:
        """Called once when no step follows, whatever ended the run, with the last step and its metrics."""

    def before_save(self, step: int) -> bool | None:
        """Called before each checkpoint of `train`; a true result prevents it, an exception also stops the run."""

    def close(self) -> None:
        """Called at the very end, whatever happened: nothing of the run is kept."""
        self.run = None

    def next_multiple(self, step: int) -> int | None:
        """The first step after `step` at which it is due whatever a clock says, or None."""
        return None
