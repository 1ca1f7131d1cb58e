"""Thread helpers for the tests of `Coordinator`."""

import threading
import traceback


def start_thread(target, name=None, daemon=True):
    thread = threading.Thread(target=target, name=name, daemon=daemon)
    thread.start()
    return thread


def fail_with(coord, exception):
    try:
        raise exception
    except Exception as ex:
        coord.request_stop(ex)


def function_names(traceback_):
    return [frame.name for frame in traceback.extract_tb(traceback_)]


def blocking_event():
    """A fixture: an event that blocks threads until the test sets it or ends."""
    event = threading.Event()
    yield event
    event.set()
