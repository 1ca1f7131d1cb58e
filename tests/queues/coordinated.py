"""Threads under a Coordinator."""

import threading
import traceback

LONG = 20  # seconds until a test that hangs fails


def started(target, name=None, daemon=True):
    thread = threading.Thread(target=target, name=name, daemon=daemon)
    thread.start()
    return thread


def fail_with(coord, exception):
    try:
        raise exception
    except Exception as ex:
        coord.request_stop(ex)


def names_in(traceback_):
    return [frame.name for frame in traceback.extract_tb(traceback_)]


def holds():
    """A fixture: an event that holds threads until the test sets it, or ends."""
    event = threading.Event()
    yield event
    event.set()
