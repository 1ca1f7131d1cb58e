"""The observer that records a start in its own file.

Besides the loop, three kinds of threads use it: one writes the file every second, savers' threads
call `flush`, and one describes the start and each of its programs.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import Any

import jax

from jstep.compiling.chunks import Chunk
from jstep.compiling.stages import Stage
from jstep.core import processes, stopwatch
from jstep.core.checks import truncate
from jstep.core.jaxprs import strip_addresses
from jstep.core.logs import BELOW_BAR, logger
from jstep.core.secret_text import error_text
from jstep.core.threads import SerialTasks, Task, run_in_background, wait_until_done
from jstep.core.trees import Tree
from jstep.hooks.origin import Kind, Lineage, Origin
from jstep.hooks.run_extra import CODE, CONFIG, PARENT, PARENT_RUN, PAST, STOPPED
from jstep.loop.observer import Observer
from jstep.loop.run_context import RunContext
from jstep.origin.arguments import Options
from jstep.record.code import GIT_TIMEOUT_SECS, code_version
from jstep.record.config import as_config, command_line
from jstep.record.run_record import file_of
from jstep.record.schema import Start
from jstep.record.stall_files import FOLDER as STALLS
from jstep.record.stall_files import exit_reason
from jstep.record.starts import FAILED, FINISHED, FOLDER, KILLED, StartFile, read_starts, valid
from jstep.state.sharding import describe_devices
from jstep.stores.objects import START_TIMEOUT_SECS, Objects
from jstep.stores.owners import is_alive, remove_temporary, this_process
from jstep.stores.urls import is_url
from jstep.watching.lineage import find_lineage, find_run_of_best
from jstep.watching.record_numbers import RecordNumbers
from jstep.watching.restart_report import describe_past, report_changes
from jstep.watching.start_setup import describe_program, describe_setup

_MAX_SAVES = 20
"""The number of the newest saves that a record lists."""
_MAX_REASON = 1000
"""The maximum number of characters of the reason of an end."""
_JOIN_SECS = 10
"""The seconds to wait for a thread at the end, which may be blocked on an object store."""


class Recorder(Observer):
    """The observer that writes the file of a start.

    It does so at some events, and every `StartFile.period` seconds in between. Only process 0
    writes, and only if the run has a checkpoint_dir or a logdir.
    """

    options = frozenset({"config"})

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self._numbers = RecordNumbers(run)
        # The starts before this one; None until they are read.
        self._earlier: Sequence[Start] | None = None
        self._problem: Exception | None = None  # why they cannot be read
        self._opening: Task[None] | None = None
        self._thread = threading.Thread(
            target=self._write_periodically, name="jstep-record", daemon=True
        )
        self._ended = threading.Event()
        self._has_failed = False
        # Saves that have begun; `flush` moves them to the file just before they appear.
        self._begun_saves: list[list[Any]] = []
        self._lock = threading.Lock()
        # Once the run is open, these belong to the tasks, which run one after the other.
        self._setup: dict[str, Any] = {}
        # The past in the restored checkpoint, until it is compared.
        self._saved_past: Mapping[str, Any] | None = None
        self._tasks = SerialTasks("jstep-setup", _not_recorded)

    # The start.

    @classmethod
    def check(cls, options: Options) -> Options:
        return dataclasses.replace(options, config=as_config(options.config))

    def find_lineage(self, origin: Origin) -> Lineage:
        if processes.is_single_process():
            return self._find_lineage(origin)
        # The other processes need not read the records of all earlier starts.
        text = processes.text_from_first(lambda: json.dumps(self._find_lineage(origin)))
        return Lineage(*json.loads(text))

    def _find_lineage(self, origin: Origin) -> Lineage:
        lineage = origin.lineage
        if origin.kind is Kind.BRANCHED:
            if lineage.parent is None or lineage.parent_run is not None:
                return lineage
            return lineage._replace(parent_run=find_run_of_best(lineage.parent["path"]))
        where = self.run.options.directory
        # A bucket is only read in `_open`, whose wait a signal can end.
        if where is None or is_url(where):
            return lineage
        self._read_earlier(where)
        return find_lineage(self.run.options, origin, valid(self._earlier or ()), self.run.new_name)

    def _read_earlier(self, where: str) -> None:
        try:
            prefix = self.run.options.prefix
            self._earlier = read_starts(where, prefix).get(prefix, ())
        except (OSError, ValueError) as problem:
            self._problem = problem

    def on_open(self, origin: Origin) -> int | None:
        where = self.run.options.directory
        if where is None or not processes.is_process_0():
            return None
        _prepare_directories(self.run.options, has_saver=self.run.saver is not None)
        # In a thread: a signal ends this wait, but leaves no start without its file. The task is
        # made before its thread, so that `__exit__` either cancels it, or waits for the file and
        # writes the end of the start.
        self._opening = Task()
        run_in_background(
            functools.partial(self._open, where, origin),
            name="jstep-record-open",
            task=self._opening,
        )
        wait_until_done(self._opening)
        self._opening.result()
        file = file_of(self.run)
        if file is None:
            return None
        self._thread.start()
        self._tasks.add(self._add_code)
        number: int = file.fields["number"]
        return number

    def _open(self, where: str, origin: Origin) -> None:
        prefix = self.run.options.prefix
        if self._earlier is None and self._problem is None:
            self._read_earlier(where)
        if self._earlier is None:
            logger.warning("%s: this run cannot be recorded: %s", where, self._problem)
            return
        newest = None
        if not origin.lineage.is_copy:
            newest = next(reversed(valid(self._earlier)), None)
        if newest is not None:
            self._numbers.inherit(newest)
        fields = self._initial_fields(where, origin.lineage, newest) | self._numbers.fields()
        file = StartFile(where, prefix, self._earlier, fields)
        _end_earlier(file, claimed=origin.is_claimed)
        self.run.shared[StartFile] = file

    def _initial_fields(self, where: str, lineage: Lineage, newest: Start | None) -> dict[str, Any]:
        options = self.run.options
        state = self.run.state
        self._numbers.use_devices(state)
        parent_run = lineage.parent_run
        if parent_run is None and newest is not None:
            parent_run = newest[PARENT_RUN]
        contents: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # the state may be shapes, or donated
            devices = describe_devices(state)
            contents["devices"] = f"{devices['of_state']}×{devices['kind']}"
            contents["parameters"] = sum(
                math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params)
            )
        return {
            "run": lineage.name,
            "process": this_process(),
            "processes": None if processes.is_single_process() else jax.process_count(),
            "began": stopwatch.CLOCKS.wall() - sum(self.run.watch.seconds().values()),
            "directory": where,
            "logdir": None if options.logdir is None else os.fspath(options.logdir),
            "last_step": options.last_step,
            "argv": command_line(),
            "config": options.config,
            "commit": None,
            "edits": None,
            PARENT: lineage.parent,
            PARENT_RUN: parent_run,
            "copied": lineage.is_copy,
            "saved": [],
            "stalls": [],
            "batches": {},
            "compared_batch": False,
            "other_batch": None,
            "end": None,
            "exception": None,
            **contents,
        }

    # While it lives.

    def _write_periodically(self) -> None:
        while (file := file_of(self.run)) is not None:
            file.due.wait(file.period)
            file.due.clear()
            if self._ended.is_set():
                return
            try:
                self._numbers.sample()
                file.write(self._numbers.fields())
            except Exception as error:
                # It must end neither the run nor its record, which lacks a second.
                if not self._has_failed:
                    self._has_failed = True
                    text = (
                        "the record of this run could not be "
                        "written at one second, at least: %s: %s"
                    )
                    logger.warning(text, type(error).__name__, error, extra=BELOW_BAR)

    def on_save(self, step: int) -> dict[str, Any]:
        """Return the checkpoint's past, which a restart compares, with the config and commit."""
        extra = self.run.origin.extra
        file = file_of(self.run)
        if file is not None:
            self._numbers.read_latest()
            stepping = round(self.run.watch.seconds().get(stopwatch.STEPPING, 0.0), 6)
            save = [step, stepping, self._numbers.examples(), self._numbers.learning_rate()]
            with self._lock:
                self._begun_saves = [*self._begun_saves, save]
        has_past = self.run.origin.is_restored or PAST in extra
        if step <= self.run.course.first and has_past:
            # No step was run: a start that resumes from here is compared with the one that trained
            # this state.
            return {key: extra[key] for key in (PAST, CONFIG, CODE) if key in extra}
        if not self._is_active():
            return {}
        # A function, which is called while the checkpoint is written, because hashing the rows of
        # the batches takes long.
        kept: dict[str, Any] = {PAST: functools.partial(describe_past, self.run, step)}
        if self.run.options.config is not None:
            kept[CONFIG] = dict(self.run.options.config)
        if file is not None and file.fields["commit"] is not None:
            kept[CODE] = {name: file.fields[name] for name in ("commit", "edits")}
        return kept

    def on_replaced(self, step: int, author: str, old_state: Tree, new_state: Tree) -> None:
        self._numbers.changes.add(step, author, old_state, new_state)

    def flush(self) -> None:
        file = file_of(self.run)
        if file is None:
            return
        with self._lock:
            saved = [*file.fields["saved"], *self._begun_saves]
            self._begun_saves = []
        file.write({**self._numbers.fields(), "saved": saved[-_MAX_SAVES:]}, flush=True)

    # What the start was given, and its programs: tasks that run in the background, in order.

    def _is_active(self) -> bool:
        run = self.run
        return processes.is_process_0() and run.is_open and (run.saver or file_of(run)) is not None

    def _add_code(self) -> None:
        code = code_version()
        file = file_of(self.run)
        if code is not None and file is not None:
            file.write(code)

    def on_restored(self, start_number: int) -> None:
        run = self.run
        if not self._is_active():
            return
        saved_past = run.origin.extra.get(PAST)
        if run.origin.is_restored:
            self._saved_past = saved_past
        first = run.course.first
        shapes = run.components.dispatch.table.state_shapes

        def record() -> None:
            self._setup = describe_setup(
                run.options,
                run.given,
                run.train_steps,
                first,
                shapes,
                run.components.batches.source.given,
            )
            self._write_setup()

        self._tasks.add(record)

    def _write_setup(self) -> None:
        file = file_of(self.run)
        if file is not None:
            file.write_setup(self._setup)

    def on_first_call(self, chunk: Chunk, state: Tree) -> None:
        if not self._is_active():
            return
        with contextlib.suppress(Exception):
            traced = chunk.trace(state)
            args = chunk.step_args
            stage = chunk.program.stage
            constants = chunk.program.constants.values
            self._tasks.add(lambda: self._add_program(stage, traced, constants, args))

    def on_no_steps(self) -> None:
        self._tasks.add(functools.partial(self._compare_once, is_idle=True))

    def _add_program(
        self, stage: Stage, traced: Any, constants: Mapping[str, Any], args: Any
    ) -> None:
        program = describe_program(stage.first, stage.single_step, traced, constants, args)
        self._setup = {**self._setup, "programs": [*self._setup.get("programs", ()), program]}
        self._write_setup()
        file = file_of(self.run)
        if file is not None and traced is not None:
            file.write_program(stage.first, strip_addresses(str(traced.jaxpr)))
        self._compare_once()

    def _compare_once(self, *, is_idle: bool = False) -> None:
        """Report changes, once the first program is known, or it is known that there is none."""
        saved_past = self._saved_past
        self._saved_past = None
        if saved_past is not None:
            report_changes(self.run, saved_past, self._setup, is_idle=is_idle)

    # The end.

    def on_close(self) -> None:
        self._numbers.read_latest()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        run = self.run
        self._ended.set()
        # A signal may have interrupted `on_open` while its task was running.
        if self._opening is not None and not self._opening.cancel():
            wait([self._opening], timeout=_JOIN_SECS)
        if not run.signals.received_twice:
            self._tasks.wait(GIT_TIMEOUT_SECS + 1)
        file = file_of(run)
        if file is None:
            return
        file.due.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_SECS)
        status, reason, exception = _outcome(run, error)
        fields = {
            "saved": self._completed(file.fields["saved"]),
            "end": [status, reason],
            "exception": exception,
        }
        file.close({**self._numbers.fields(), **fields})

    def _completed(self, saves: list[Any]) -> list[Any]:
        """Return the saves without those that failed after `flush`.

        These are newer than the newest checkpoint.
        """
        saver = self.run.saver
        # After a second signal the run does not wait for a save in progress, which may still
        # succeed.
        if saver is None or self.run.signals.received_twice:
            return saves
        with contextlib.suppress(Exception):
            newest = saver.latest_step() or 0
            return [save for save in saves if save[0] <= newest]
        return saves


def _prepare_directories(options: Options, *, has_saver: bool) -> None:
    """Fail early if a bucket does not answer, and remove files of stalls that dead processes left.

    With a Saver, the bucket has answered: its checkpoints were listed.
    """
    if not has_saver and options.directory is not None and is_url(options.directory):
        # Listed once: the record and the event files would each wait for a bucket that does not
        # answer.
        objects = Objects(options.directory)
        with objects.time_limit(START_TIMEOUT_SECS):
            objects.list(FOLDER, f"{FOLDER}~")
    for path in options.directories:
        stalls = os.path.join(path, STALLS)
        if not is_url(path) and not os.path.islink(stalls):
            remove_temporary(stalls)


def _end_earlier(file: StartFile, *, claimed: bool) -> None:
    """Write the end of the start before, if it was killed before it could."""
    start = file.earlier[-1] if file.earlier else None
    if start is None or start["problem"] or start["end"] is not None:
        return
    # With the claim of the checkpoints, no other start of this run can be alive, on any host.
    if claimed or is_alive(start["process"]) is False:
        file.end_earlier(
            start["number"], [KILLED, exit_reason(file.where, file.prefix, start["began"])]
        )


def _not_recorded(error: Exception) -> None:
    logger.warning(
        "this run could not be recorded: %s: %s", type(error).__name__, error, extra=BELOW_BAR
    )


def _outcome(run: RunContext, error: BaseException | None) -> tuple[str, str, str | None]:
    """Return how a start has ended, why, and the type of its exception."""
    signals = run.signals
    course = run.course
    # A KeyboardInterrupt or an exit of the user's own is no signal's, even if one came earlier.
    is_signal = error is not None and (signals.received_twice or signals.has_raised(error))
    if error is not None and (isinstance(error, Exception) or not is_signal):
        kind = type(error).__name__
        first_line = error_text(error).strip().partition("\n")[0]
        return FAILED, truncate(f"{kind}: {first_line}".rstrip(": "), _MAX_REASON), kind
    # A signal that came while the end was made leaves a run that is finished, if nothing of its end
    # was left out.
    if is_signal and not course.is_finished:
        return "interrupted", signals.reason, None
    stopped_by = course.stopped_by
    if stopped_by is None and run.step <= course.first:
        # This start took no step, as an earlier one was stopped by a hook.
        stopped_by = run.origin.extra.get(STOPPED)
    if isinstance(stopped_by, str):
        return FINISHED, f"stopped by {stopped_by}", None
    if course.has_first and run.step >= run.options.stop_step:
        return FINISHED, "", None
    return FINISHED, "the batches ended", None
