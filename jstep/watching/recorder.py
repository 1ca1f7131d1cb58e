"""The observer that records a start in a file of its own, and reports what has changed since the last one."""

import contextlib
import functools
import itertools
import math
import re
import threading
from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

import jax

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.core import processes, stopwatch
from jstep.core.checks import truncate
from jstep.core.jaxprs import without_addresses
from jstep.core.logs import BELOW_BAR, logger
from jstep.core.meshes import internal_transfers
from jstep.core.secret_text import error_text
from jstep.core.tables import printable
from jstep.core.threads import SerialTasks, Task, in_background, wait_until_done
from jstep.core.trees import Tree
from jstep.data.sequence import BatchSequence
from jstep.evaluating.evaluation_hook import best_checkpoints, newest_results, watched_metrics
from jstep.evaluating.keep_best import KeepBest, data_hash
from jstep.loop.chunks import Chunk
from jstep.loop.origin import PARENT, PARENT_RUN, PAST, START, STOPPED
from jstep.loop.run_context import Observer, RunContext
from jstep.loop.stages import Stage, lanes_of
from jstep.metering.numbers import is_ready, read_values, scalars
from jstep.record.code import GIT_TIMEOUT_SECS, code_version
from jstep.record.config import command_line, encoded
from jstep.record.differences import changes
from jstep.record.schema import Start
from jstep.record.stall_files import exit_reason
from jstep.record.starts import FINISHED, KILLED, StartFile, program_path, read_starts, valid, with_card
from jstep.state.sharding import describe_devices
from jstep.stores.owners import is_alive, this_process
from jstep.stores.urls import absolute, location
from jstep.training.metrics import LOSS
from jstep.training.step import step_function
from jstep.watching.card import card, program_card, shortened

_MAX_VALUES = 128
_MAX_BYTES = 4096
_MAX_SAVES = 20
_MAX_LINES = 40


class Recorder(Observer):
    """The observer that writes the file of a start: at some events, and every `StartFile.period` seconds in between.

    Only process 0 writes, and only if the run has a checkpoint_dir or a logdir.
    """

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._tick, name="jstep-record", daemon=True)
        self._pending: dict[str, Any] | None = None  # the latest metrics, until they are ready
        self._ratios = run.sums.follow_ratios()
        self._numbers: dict[str, dict[str, Any]] = {"values": {}, "best": {}}
        self._opening: Task[None] | None = None
        self._devices: list[Any] = []
        self._saving: list[list[Any]] = []  # the saves that are not complete
        self._has_failed = False
        self._samples = [0, 0]  # the seconds at which the loop was in a hook, and those at which the device computed
        self._card: dict[str, Any] = {}
        self._saved_past: Mapping[str, Any] | None = None  # the past of the restored checkpoint, until it is compared
        self._tasks = SerialTasks("jstep-card", _not_recorded)

    # The start and the end.

    def on_open(self) -> None:
        where = self.run.options.where
        if where is None or jax.process_index() != 0:
            return
        # In a thread: a signal ends this wait, but leaves no start without its file.
        self._opening = Task()
        in_background(functools.partial(self._open, where), name="jstep-record-open", task=self._opening)
        wait_until_done(self._opening)
        self._opening.result()
        if self.run.file is not None:
            self._thread.start()
            self._tasks.add(self._add_code)

    def _open(self, where: str) -> None:
        plan = self.run.plan
        prefix = self.run.options.prefix
        try:
            earlier = read_starts(where).get(prefix, [])
        except (OSError, ValueError) as error:
            logger.warning("%s: this run cannot be recorded: %s", where, error)
            return
        newest = None if plan.lineage.is_copy else next(reversed(valid(earlier)), None)
        if newest is not None:
            self._numbers = {"values": newest["values"], "best": newest["best"]}
        where = absolute(where)  # a run may change its folder
        file = StartFile(where, prefix, earlier, self._initial_fields(where, newest) | self._current_fields())
        _end_earlier(file, claimed=plan.is_claimed)
        self.run.file = file

    def _initial_fields(self, where: str, newest: Start | None) -> dict[str, Any]:
        options = self.run.options
        state = self.run.state
        lineage = self.run.plan.lineage
        arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        self._devices = list(arrays[0].sharding.addressable_devices) if arrays else []
        parent_run = lineage.parent_run
        if parent_run is None and newest is not None:
            parent_run = newest[PARENT_RUN]
        about: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # the state may be shapes, or donated
            devices = describe_devices(state)
            about["devices"] = f"{devices['of_state']}×{devices['kind']}"
            about["parameters"] = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
        return {
            "run": self.run.name,
            "process": this_process(),
            "processes": None if processes.is_single_process() else jax.process_count(),
            "began": stopwatch.CLOCKS.wall() - sum(self.run.watch.seconds().values()),
            "directory": where,
            "logdir": None if options.logdir is None else absolute(location(options.logdir, "logdir")),
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
            "other_batch": None,
            "end": None,
            "exception": None,
            **about,
        }

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if self._opening is not None and not self._opening.cancel():
            wait([self._opening], timeout=10)
        if not self.run.signals.received_twice:
            self._tasks.wait(GIT_TIMEOUT_SECS + 1)
        if (file := self.run.file) is not None:
            file.due.set()
            if self._thread.is_alive():
                self._thread.join(timeout=10)  # it may be blocked on an object store
            status, reason, exception = _outcome(self.run, error)
            fields = {"saved": self._complete(file.fields["saved"]), "end": [status, reason], "exception": exception}
            file.close({**self._current_fields(), **fields})

    def _complete(self, saved: list[Any]) -> list[Any]:
        with contextlib.suppress(Exception):
            if self.run.saver is not None and not self.run.signals.received_twice:  # else a save may go on
                newest = self.run.saver.latest_step() or 0
                return [save for save in saved if save[0] <= newest]
        return saved

    # What changes all the time.

    def on_close(self) -> None:
        self._read_latest_numbers()

    def flush(self) -> None:
        if (file := self.run.file) is not None:
            with self._lock:
                saved = [*file.fields["saved"], *self._saving]
                self._saving = []
            file.write({**self._current_fields(), "saved": saved[-_MAX_SAVES:]}, flush=True)

    def _tick(self) -> None:
        while (file := self.run.file) is not None:
            file.due.wait(file.period)
            file.due.clear()
            if self._over.is_set():
                return
            try:
                self._sample()
                file.write(self._current_fields())
            except Exception as error:  # it must end neither the run nor its record, which lacks a second
                if not self._has_failed:
                    self._has_failed = True
                    text = "the record of this run could not be written at one second, at least: %s: %s"
                    logger.warning(text, type(error).__name__, error, extra=BELOW_BAR)

    def _sample(self) -> None:
        if self.run.watch.current == stopwatch.HOOKS or self.run.watch.body_began is not None:
            is_busy = self.run.in_flight.unfinished() is not None
            self._samples = [self._samples[0] + 1, self._samples[1] + is_busy]

    def _current_fields(self) -> dict[str, Any]:
        run = self.run
        times = self.run.recorded_times()
        self._read_numbers()
        counter = run.counter
        peaks = [0]
        with contextlib.suppress(Exception):  # a backend may not know it
            peaks += [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in self._devices]
        hooks, busy = self._samples
        kept: dict[str, Any] = {}
        for hook in run.evaluations:
            for name, callback in watched_metrics(hook):
                if isinstance(callback, KeepBest):
                    kept[name] = {"mode": callback.mode, "data": data_hash(callback)}
        return {
            "now": stopwatch.CLOCKS.wall(),
            **times,
            "computing": times["seconds"].get(stopwatch.HOOKS, 0.0) * busy / hooks if hooks else None,
            **host_memory(),
            "examples": self._examples(),
            "state_changes": run.course.state_changes.as_record(),
            **_bounded(self._numbers["values"]),
            "best": dict(self._numbers["best"]),
            "kept": kept,
            "peak_bytes": max(peaks) or None,
            "mfu": None if counter is None else counter.mfu,
        }

    def _examples(self) -> int | None:
        counted, unknown = self.run.examples if self.run.is_open else (0, 0)
        return None if unknown else counted

    def _read_numbers(self) -> None:
        run = self.run
        if not run.is_open or run.file is None:
            return
        with self._lock, contextlib.suppress(Exception), internal_transfers():
            values = dict(self._numbers["values"])
            best = dict(self._numbers["best"])
            if self._pending is None:
                numbers = scalars(run.metrics or {}, run.constant_metrics())
                self._pending = dict(itertools.islice(numbers.items(), _MAX_VALUES))
            if is_ready(self._pending.values()):
                numbers = self._pending
                self._pending = None
                values |= read_values(numbers)
            values |= self._ratios.arrived()
            for hook in run.evaluations:
                values |= read_values(newest_results(hook) or {})
                for name, kept in best_checkpoints(hook).items():
                    best[name] = [kept.value, kept.step, absolute(kept.path)]
            watched = [LOSS, *(name for hook in run.evaluations for name, _ in watched_metrics(hook))]
            first = {name: values[name] for name in watched if name in values}
            self._numbers = {"values": first | values, "best": best}

    def _read_latest_numbers(self) -> None:
        with contextlib.suppress(Exception):  # a step that failed has no metrics
            self.run.sums.cut()
        if self._pending is not None:  # the numbers of an earlier step, which were not ready
            self._read_numbers()
        self._read_numbers()

    # The card, in background threads, in order.

    def _is_active(self) -> bool:
        run = self.run
        return jax.process_index() == 0 and run.is_open and (run.saver or run.file) is not None

    def _add_code(self) -> None:
        if (code := code_version()) is not None and (file := self.run.file) is not None:
            file.write(code)

    def on_restored(self) -> None:
        run = self.run
        if not self._is_active():
            return
        if run.restored is not None and isinstance(past := run.origin.extra.get(PAST), dict):
            self._saved_past = past
        first = run.course.first
        shapes = run.components.dispatch.table.state_shapes

        def record() -> None:
            self._card = card(run.options, run.train_steps, first, shapes, run.components.batches.source.given)
            self._write_card()

        self._tasks.add(record)

    def _write_card(self) -> None:
        if (file := self.run.file) is not None:
            file.write_card(self._card)

    def on_first_call(self, chunk: Chunk, state: Tree) -> None:
        if self._is_active():
            with contextlib.suppress(Exception):
                traced = chunk.trace(state)
                args = chunk.step_args
                stage = chunk.program.stage
                constants = chunk.program.constants.values
                self._tasks.add(lambda: self._add_program(stage, traced, constants, args))

    def on_no_steps(self) -> None:
        self._tasks.add(functools.partial(self._compare, is_idle=True))

    def _add_program(self, stage: Stage, traced: Any, constants: Mapping[str, Any], args: Any) -> None:
        added = program_card(stage.first, stage.single, traced, constants, args)
        self._card = {**self._card, "programs": [*self._card.get("programs", ()), added]}
        self._write_card()
        if (file := self.run.file) is not None and traced is not None:
            file.write_program(stage.first, without_addresses(str(traced.jaxpr)))
        self._compare()

    def _compare(self, *, is_idle: bool = False) -> None:
        saved_past = self._saved_past
        self._saved_past = None
        run = self.run
        if saved_past is not None and run.saver is not None and run.restored is not None:
            self._report(saved_past, run.saver, run.restored, is_idle=is_idle)

    # What a restart says.

    def on_save(self, step: int) -> dict[str, Any]:
        extra = self.run.origin.extra
        file = self.run.file
        if file is not None:
            self._read_latest_numbers()
            stepping = round(self.run.watch.seconds().get(stopwatch.STEPPING, 0.0), 6)
            rate = self._numbers["values"].get("learning_rate")
            with self._lock:
                self._saving = [*self._saving, [step, stepping, self._examples(), rate]]
        if step <= self.run.course.first and (self.run.restored is not None or PAST in extra):  # no step was run
            return {key: extra[key] for key in (PAST, "config", "code") if key in extra}
        if not self._is_active():
            return {}
        kept: dict[str, Any] = {PAST: functools.partial(self._past, step)}
        if self.run.options.config is not None:
            kept["config"] = dict(self.run.options.config)
        if file is not None and file.fields["commit"] is not None:
            kept["code"] = {name: file.fields[name] for name in ("commit", "edits")}
        return kept

    def _past(self, step: int) -> dict[str, Any]:
        past: dict[str, Any] = {"lanes": lanes_of(self.run.train_steps.value_at(max(step - 1, 0)))}
        if (file := self.run.file) is not None:
            past[START] = [file.fields["number"], file.fields["began"]]
        if isinstance(batches := self.run.components.batches.source.given, BatchSequence):
            before = batches[:step]
            definition = {name: shortened(part) for name, part in before.definition().items() if name != "num_epochs"}
            past |= {"rows": before.rows_hash(), "batches": definition}
        return past

    def _report(self, saved_past: Mapping[str, Any], saver: Saver, step: int, *, is_idle: bool) -> None:
        name = checkpoint_name(saver.prefix, step)
        past = self._past(step)
        file = self.run.file
        bits = list[str]()
        place = list[str]()
        earlier = [] if file is None else valid(file.earlier)
        before = next((start for start in earlier if [start["number"], start["began"]] == saved_past.get(START)), None)
        if file is not None and before is not None:
            path = program_path(file.where, file.fields)
            current = {**file.fields, "config": self.run.options.config, "card": self._card, "programs": path}
            found = changes(with_card(file.where, before), current, leave_out=("batches", "lanes"))
            bits = [*found.bits, *self._rate_change(before, step, found.bits)]
            place = found.place
        elif earlier:
            logger.info("%s: the start that wrote it has no record, so only lanes and batches are compared", name)
        if step and saved_past.get("lanes") != past["lanes"]:
            bits.append(f"lanes: {saved_past.get('lanes')} before, {past['lanes']} now")
        if "rows" in saved_past and "rows" in past and saved_past["rows"] != past["rows"]:
            older, newer = ({"card": {"batches": entry["batches"]}} for entry in (saved_past, past))
            lines = [line.removeprefix("batches: ") for line in changes(older, newer).lines]
            why = "; ".join(lines) or "their definition is the same, but the rows are not"
            bits.append(
                f"batches: those before step {step} are not the ones that {name} was trained on: {why}. The run "
                f"continues with batch {step} of the new definition, so rows may be repeated or left out."
            )
        if bits:
            every = [printable(line) for line in (*bits, *place)]
            ending = [f"and {len(every) - _MAX_LINES} more"] if len(every) > _MAX_LINES else []
            if is_idle:
                ending.append(_UNTRAINED)
            text = "".join(f"\n  {line}" for line in (*every[:_MAX_LINES], *ending))
            message = "%s: the configuration changed since this checkpoint was written:%s"
            logger.warning(message, name, text, extra=BELOW_BAR)
        elif place:
            logger.info("%s: since this checkpoint was written, %s", name, "; ".join(map(printable, place)))

    def _rate_change(self, before: Start, step: int, bits: list[str]) -> list[str]:
        """Describe how the learning rate of the last step before the checkpoint has changed."""
        old_rate = next((save[3] for save in before["saved"] if save[0] == step), None)
        pure_step = step_function(self.run.train_steps.value_at(max(step - 1, 0)))
        is_named = any(re.match(r"learning_rate(\[\d+\])?: ", line) for line in bits)
        if not bits or old_rate is None or pure_step is None or is_named:
            return []
        with contextlib.suppress(Exception), internal_transfers():  # it is held in the state, or has another name
            rate = float(pure_step.optimizer.hyperparameters(step - 1)["learning_rate"])  # type: ignore[union-attr]
            if abs(rate - old_rate) > 1e-5 * max(abs(rate), abs(old_rate)):
                return [f"learning_rate at step {step}: {old_rate:.6g} before, {rate:.6g} now"]
        return []


_UNTRAINED = "none of this has an effect, as the run takes no step: pass another checkpoint_dir, or a larger last_step"


def _end_earlier(file: StartFile, *, claimed: bool) -> None:
    start = file.earlier[-1] if file.earlier else None
    if start is None or start["problem"] or start["end"] is not None:
        return
    if claimed or is_alive(start["process"]) is False:
        file.end_earlier(start["number"], [KILLED, exit_reason(file.where, file.prefix, start["began"])])


def host_memory() -> dict[str, int | None]:
    found = dict[str, int | None].fromkeys(("host_bytes", "host_peak_bytes"))
    with contextlib.suppress(OSError, ValueError, KeyError), open("/proc/self/status") as file:
        sizes = dict(re.findall(r"^(VmRSS|VmHWM):\s*(\d+)", file.read(), re.MULTILINE))
        return {name: int(sizes[key]) * 1024 for name, key in zip(found, ("VmRSS", "VmHWM"), strict=True)}
    return found


def _bounded(values: Mapping[str, Any]) -> dict[str, Any]:
    sizes = itertools.accumulate([len(encoded({name: value})) for name, value in values.items()])
    count = min(_MAX_VALUES, len([size for size in sizes if size <= _MAX_BYTES]))
    return {"values": dict(itertools.islice(values.items(), count)), "values_left_out": len(values) - count}


def _not_recorded(error: Exception) -> None:
    logger.warning("this run could not be recorded: %s: %s", type(error).__name__, error, extra=BELOW_BAR)


def _outcome(run: RunContext, error: BaseException | None) -> tuple[str, str, str | None]:
    """Return how a start has ended, why, and the type of its exception."""
    signals = run.signals
    course = run.course
    # Not a KeyboardInterrupt or an exit of the user's own, nor what an earlier signal has not caused.
    is_signal = error is not None and (signals.received_twice or signals.has_raised(error))
    if error is not None and (isinstance(error, Exception) or not is_signal):
        kind = type(error).__name__
        first_line = error_text(error).strip().partition("\n")[0]
        return "failed", truncate(f"{kind}: {first_line}".rstrip(": "), 1000), kind
    # A signal that came while the end was made leaves a run that is finished, if nothing of its end was left out.
    if is_signal and not course.is_finished:
        return "interrupted", signals.reason, None
    earlier = run.origin.extra.get(STOPPED) if run.step <= course.first else None  # if this one took no step
    by = course.stopped_by or earlier
    if isinstance(by, str):
        return FINISHED, f"stopped by {by}", None
    is_at_last_step = course.is_first_known and run.step >= run.options.stop_step
    return FINISHED, "" if is_at_last_step else "the batches ended", None
