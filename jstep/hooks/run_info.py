"""A run, as its built-in hooks see it."""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jstep.checkpoint.retention import Listener
from jstep.checkpoint.saver import Saver
from jstep.core.stopwatch import Stopwatch
from jstep.hooks.course import Course, HookCall, LoopState
from jstep.hooks.origin import Origin
from jstep.hooks.timetable import Timetable
from jstep.metering.in_flight import InFlight
from jstep.metering.metric_sums import MetricSums
from jstep.metering.numbers import TransferQueue
from jstep.state.global_step import check_step
from jstep.state.nonfinite import StateContents
from jstep.stores.files import check_no_links

Poll = Callable[..., bool | None]
"""`poll()` is called after each call while it returns True, and `poll(wait=True)` after the last
step."""


class OpenComponents(Protocol):
    """What hooks use of an open run; implemented by `loop.run_context.RunComponents`."""

    @property
    def initial_contents(self) -> StateContents:
        """The contents of the state when the run began; empty if no hook checks or saves it."""

    def constant_metrics(self) -> Mapping[str, Any]:
        """Return the metrics that never change; known after the first step."""

    def poll_stop_signal(self) -> bool:
        """Return whether a signal stops the run; to be called equally often on all processes."""

    def prevents_save(self, step: int) -> bool:
        """Call `before_save` of each hook, before each save.

        If it returns True, nothing must be saved.
        """

    def require_finite(self, step: int, saver: Saver) -> bool:
        """Return whether the parameters are finite; raise if not, unless the `Saver` allows it."""

    def freeze_batch_position(self) -> None:
        """Called before work that is done only because the run ends here.

        Its feedback to the data source is not saved.
        """


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class RunInfo:
    """The part of a run that built-in hooks see: what they share with each other and with the loop.

    Attributes:
        last_step: None if the batches, a hook or a signal end the run.
        config: The program's own options.
        directories: Those that the run writes to.
        evaluations: The `EvaluationHook`s.
        watch: Where the wall time of the run goes.
        sums: The metrics, summed on the device from one reader's row to the next.
        transfers: The numbers in transfer from the device.
        background: Receives the checkpoints that are complete.
        timetable: When something is due.
        course: Where the run is.
        saver: The Saver of the run, once it is open; None without checkpoints.
        origin: What the run begins from, once it is found.
        components: What the run has opened; hooks have a run only then.
        failures: Errors of logs, and of best checkpoints.
        best_failure: The error of a best checkpoint, after which nothing is saved.
        in_flight: The calls that the device has not finished, and the step that it has.
        pending: The functions given to `poll` that are still called, each with its hook.
        steps_by_rows: The number of steps by the size of their batches; None if it is not known.
        shared: What attached rooms keep for each other, by its class. The kernel reads none of it.
        checked_step: The latest step that the state was found to be at, as the loop was; None
            before the first call.
    """

    last_step: int | None
    config: dict[str, Any] | None
    directories: Sequence[str]
    evaluations: Sequence[Any]
    watch: Stopwatch
    sums: MetricSums
    transfers: TransferQueue
    background: Listener
    timetable: Timetable
    course: Course
    saver: Saver | None = dataclasses.field(default=None, init=False)
    origin: Origin = dataclasses.field(default_factory=Origin, init=False)
    components: OpenComponents = dataclasses.field(init=False)
    failures: deque[tuple[Exception, HookCall]] = dataclasses.field(
        default_factory=deque, init=False
    )
    best_failure: Exception | None = dataclasses.field(default=None, init=False)
    in_flight: InFlight = dataclasses.field(default_factory=InFlight, init=False)
    pending: deque[tuple[Any, Poll]] = dataclasses.field(default_factory=deque, init=False)
    steps_by_rows: Counter[int | None] = dataclasses.field(default_factory=Counter, init=False)
    shared: dict[type, Any] = dataclasses.field(default_factory=dict, init=False)
    checked_step: int | None = dataclasses.field(default=None, init=False)

    @property
    def position(self) -> LoopState:
        return self.course.position

    @property
    def step(self) -> int:
        return self.course.position.step

    @property
    def state(self) -> Any:
        return self.course.position.state

    @property
    def metrics(self) -> Any:
        """The metrics of the last call; None before the first step."""
        return self.course.position.metrics

    @property
    def examples(self) -> tuple[int, int]:
        """The number of examples, and of the steps whose batch size is not known."""
        examples = 0
        # Over a copy: the loop may add a size meanwhile.
        for rows, steps in list(self.steps_by_rows.items()):
            examples += steps * (rows or 0)
        return examples, self.steps_by_rows[None]

    def check_no_links(self, path: str) -> None:
        """Reject a path of a hook that leads through a link below a directory of the run."""
        check_no_links(path, *self.directories)

    def check_step(self, first: int | None = None) -> None:
        """Reject a state that is not at the step of the loop, which counts on the host.

        This waits for the device.
        """
        check_step(self.step, self.state, first, self.checked_step)
        self.checked_step = self.step

    def poll(self, hook: Any, check: Poll) -> None:
        """Call `check` after each call while it returns True.

        After the last step, call `check(wait=True)`.
        """
        self.pending.append((hook, check))

    def stop(self, by: str) -> None:
        """End the run after this step; `by` is the name of the hook that wants it."""
        if not self.course.is_over:
            self.course.stop(by)

    def log_failed(self, log: Any, error: Exception, method: str = "flush") -> None:
        """End the run with this error between two iterations, once the due checkpoint is saved."""
        self.failures.append((error, HookCall(log, method)))

    def best_failed(self, callback: Any, error: Exception) -> None:
        """End the run with this error at the end of the iteration, with nothing saved.

        Any thread may call it. The next start resumes from before the evaluation whose checkpoint
        is missing, and makes it again.
        """
        self.best_failure = error
        self.failures.append((error, HookCall(callback, "save")))
