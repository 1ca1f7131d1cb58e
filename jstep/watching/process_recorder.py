"""The observer that records the times of each process but the first.

The `Recorder` of process 0 cannot know them.
"""

import threading
from typing import Any

import jax

from jstep.core.logs import logger
from jstep.core.stopwatch import CLOCKS
from jstep.loop.observer import Observer
from jstep.loop.run_context import RunContext
from jstep.record.process_files import ProcessFile, read_process
from jstep.record.run_record import process_file_of
from jstep.stores.owners import this_process


class ProcessRecorder(Observer):
    """The observer that writes a process's file, each `ProcessFile.period` seconds and last."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._write_periodically, name="jstep-process-record", daemon=True
        )

    def on_restored(self, start_number: int) -> None:
        run = self._run
        where = run.options.directory
        index = jax.process_index()
        if where is None or index == 0 or not start_number:
            return
        prefix = run.options.prefix
        # The file is replaced, except the hashes of batches, with which a restart compares its
        # first one.
        earlier = None if not run.origin.is_restored else read_process(where, prefix, index)
        batches = {} if earlier is None else earlier["batches"]
        fields = {"start": start_number, "process": this_process(), "batches": batches}
        run.shared[ProcessFile] = ProcessFile(where, prefix, index, fields | self._current())
        self._thread.start()

    def _current(self) -> dict[str, Any]:
        signals = self._run.signals
        own_signal = None
        if signals.received is not None and signals.received_at is not None:
            own_signal = [signals.received.name, signals.received_at]
        return self._run.recorded_times() | {"written": CLOCKS.wall(), "signal": own_signal}

    def _write_periodically(self) -> None:
        file = process_file_of(self._run)
        while file is not None and not self._ended.is_set():
            try:
                file.write(self._current())
            except Exception:  # an error here must end neither the run nor its record
                logger.debug("the record of this process was not written", exc_info=True)
            file.due.wait(file.period)
            file.due.clear()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        file = process_file_of(self._run)
        if file is None:
            return
        self._ended.set()
        file.due.set()
        self._thread.join(timeout=10)  # it may be blocked on an object store
        if not self._thread.is_alive():
            file.write(self._current())
        file.close()
