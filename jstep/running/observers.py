"""The list of observers: objects that record and show a run, and do not change it."""

from collections.abc import Callable

from jstep.loop.run_context import Observer, RunContext
from jstep.watching.batch_watch import BatchWatch
from jstep.watching.process_recorder import ProcessRecorder
from jstep.watching.progress import Progress
from jstep.watching.recorder import Recorder
from jstep.watching.stall_watch import StallWatch
from jstep.watching.utilization import Meters

OBSERVERS: tuple[Callable[[RunContext], Observer], ...] = (
    Progress,
    Recorder,
    ProcessRecorder,
    BatchWatch,
    StallWatch,
    Meters,
)
"""The observers of a run, in the order in which they are called; they exit in reverse order, `Progress` last."""
