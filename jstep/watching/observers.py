"""The list of observers: objects that record and show a run, and do not change it."""

from jstep.loop.observer import Observer
from jstep.watching.batch_watch import BatchWatch
from jstep.watching.ended_rates import EndedRates
from jstep.watching.event_file import EventFile
from jstep.watching.log_lines import LogLines, Rates
from jstep.watching.process_recorder import ProcessRecorder
from jstep.watching.progress import Progress
from jstep.watching.recorder import Recorder
from jstep.watching.rounded_updates import RoundedUpdates
from jstep.watching.stall_watch import StallWatch
from jstep.watching.utilization import Meters

OBSERVERS: tuple[type[Observer], ...] = (
    Rates,
    Progress,
    LogLines,
    EventFile,
    Recorder,
    ProcessRecorder,
    BatchWatch,
    StallWatch,
    Meters,
    EndedRates,
    RoundedUpdates,
)
"""The observers of a run, in the order in which they are called; they exit in reverse order."""
