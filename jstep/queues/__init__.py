"""Input from threads: queues, QueueRunners that fill them, and a Coordinator that stops them together."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.queues.coordinator import Coordinator
from jstep.queues.errors import CancelledError, OutOfRangeError
from jstep.queues.queue_runner import QueueRunner, add_queue_runner, start_queue_runners
from jstep.queues.queues import FIFOQueue, RandomShuffleQueue

__all__ = [
    "CancelledError",
    "Coordinator",
    "FIFOQueue",
    "OutOfRangeError",
    "QueueRunner",
    "RandomShuffleQueue",
    "add_queue_runner",
    "start_queue_runners",
]

_set_public_module(globals())
