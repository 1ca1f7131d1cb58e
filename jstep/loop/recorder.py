"""The observer that records a start of a run in a file of its own, and reports what has changed since the last one."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.core import stopwatch, trees
from jstep.core.annotations import Tree
from jstep.core.checks import truncate
from jstep.core.jaxprs import hash_strings, part_for, program_text, without_addresses
from jstep.core.logs import BELOW_BAR
from jstep.core.meshes import internal_transfers, sharding_text
from jstep.core.plain import command_line, error_text, hide, is_secret, number, plain
from jstep.core.tables import printable
from jstep.core.threads import in_background, wait_until_done
from jstep.data.loaders import ReplayedBatches, StateBatches
from jstep.data.sequence import BatchSequence
from jstep.hooks.numbers import is_ready, read_values, scalars
from jstep.hooks.stall_files import exit_reason
from jstep.hooks.start_differences import SETTINGS, changes
from jstep.hooks.states import hook_key
from jstep.loop.arguments import Options
from jstep.loop.branch import PARENT, PARENT_RUN
from jstep.loop.calls import Call
from jstep.loop.compiler import shapes_of, type_text
from jstep.loop.dispatch import Dispatch
from jstep.loop.run import STOPPED, Observer, Origin, Run, name_of_run
from jstep.loop.setup import Setup
from jstep.loop.stages import TrainSteps, lanes_of, name_of_step
from jstep.state.sharding import describe_devices
from jstep.stores.owners import is_alive, this_process
from jstep.stores.repository import GIT_TIMEOUT_SECS, code_version
from jstep.stores.starts import FINISHED, KILLED, StartFile, has_trained
from jstep.stores.urls import absolute, location
from jstep.training.metrics import LOSS, StepMetrics

PAST, START = "past", "start"
"""The key of a checkpoint's `extra` with the batches before it, and in it that of the start that made it."""
_MAX_VALUES, _MAX_STALLS, _IDLE_STARTS, _MAX_ENTRY = 64, 100, 2, 1000
_logger = logging.getLogger("jstep")


class Recorder(Observer):
    """The observer that keeps the file of a start: at its events, and every second while steps are made.

    Only process 0 writes, and only if the run has a checkpoint_dir or a logdir.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._wall = stopwatch.CLOCKS.wall() - sum(setup.watch.seconds().values())
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._tick, name="jstep-record", daemon=True)
        self._run: Run | None = None
        self._pending: dict[str, Any] | None = None  # the latest metrics, until they are ready
        self._numbers: dict[str, dict[str, Any]] = {"values": {}, "best": {}}
        self._opening: Future[None] | None = None
        self._stopped_by: object = None  # the hook that stopped an earlier start
        self._devices: list[Any] = []
        self._saver: Saver | None = None
        self._origin, self._batches = Origin(), None
        self._card: dict[str, Any] = {}
        self._kept: Mapping[str, Any] | None = None  # the past of the restored checkpoint, until it is compared
        self._latest: list[Future[None]] = []  # the newest task; each waits for the one before

    # The start and the end.

    def opened(self, saver: Saver | None, origin: Origin) -> None:
        self._saver, where = saver, self.setup.options.where
        if where is None or jax.process_index() != 0:
            self.setup.watch.stop()
            return
        # In a thread: a signal ends this wait, but leaves no start without its file.
        self._opening = in_background(functools.partial(self._open, where, saver, origin), name="jstep-record-open")
        wait_until_done(self._opening)
        self._opening.result()
        if self.setup.lines.file is not None:
            self._thread.start()
            self._begin(self._add_code)

    def _open(self, where: str, saver: Saver | None, origin: Origin) -> None:
        options = self.setup.options
        try:
            file = StartFile(where, options.checkpoint_prefix if saver is None else saver.prefix)
        except (OSError, ValueError) as error:
            _logger.warning("%s: this run cannot be recorded: %s", where, error)
            self.setup.watch.stop()
            return
        _end_earlier(file, claimed=origin.is_claimed)
        if not origin.is_copy:
            _warn_of_no_progress(file, origin.latest or origin.given or 0, options.last_step)
        self._stopped_by = origin.extra.get(STOPPED)
        state = self.setup.loop.state
        leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        self._devices = list(next((leaf.sharding.addressable_devices for leaf in leaves), ()))
        now, seconds = stopwatch.CLOCKS.wall(), self.setup.watch.seconds()
        about: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # the state may be shapes, or donated
            devices = describe_devices(state)
            about["devices"] = f"{devices['of_state']}×{devices['kind']}"
            about["parameters"] = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
        if origin.is_copy:
            file.fields["before"] = None
            file.fields["count"] = 1
        file.write(
            start=secrets.token_hex(4),
            run=name_of_run(self.setup, origin),
            process=this_process(),
            claims=origin.is_claimed,
            opened=now,
            began=now - sum(seconds.values()),
            directory=absolute(where),
            logdir=None if options.logdir is None else absolute(location(options.logdir, "logdir")),
            last_step=options.last_step,
            argv=command_line(),
            config=options.config,
            **{PARENT: origin.parent, PARENT_RUN: origin.parent_run, "copied": origin.is_copy},
            **about,
            **self._newest(),
        )
        self.setup.lines.open(file)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if self._opening is not None:
            wait([self._opening], timeout=10)
        if not self.setup.signals.received_twice:
            wait(self._latest, timeout=GIT_TIMEOUT_SECS + 1)
        if self._thread.is_alive():
            self._thread.join(timeout=10)  # it may be blocked on an object store
        status, reason, exception = _outcome(self.setup, error, self._stopped_by)
        self._write(end=[status, reason], exception=exception)
        self.setup.lines.close()
        self.setup.watch.stop()

    # What changes all the time.

    def before_begin(self, run: Run) -> None:
        self._run = run

    def before_close(self) -> None:
        for _ in range(2):  # the previous numbers may not have been ready
            self._read_numbers()

    def flush(self) -> None:
        self._write()

    def about_to_save(self) -> None:
        newest = self._newest()
        saved = [self.setup.loop.step, newest["seconds"].get(stopwatch.STEPPING, 0.0), newest["examples"]]
        file = self.setup.lines.file
        if file is not None:
            file.write(**newest, saved=saved, flush=not file.is_url)

    def _write(self, **fields: object) -> None:
        if (file := self.setup.lines.file) is not None:
            file.write(**self._newest(), **fields)

    def _tick(self) -> None:
        while (file := self.setup.lines.file) is not None and not self._over.wait(file.period):
            try:
                self._write()
            except Exception as error:  # an error here must not end the run
                _logger.warning("the record of this run cannot be kept: %s", error)
                return

    def _newest(self) -> dict[str, Any]:
        loop, seconds, run = self.setup.loop, self.setup.watch.seconds(), self._run
        self._read_numbers()
        counted, unknown = (0, 0) if run is None else run.reports.examples
        counter = None if run is None else run.reports.counter
        peaks = [0]
        with contextlib.suppress(Exception):  # a backend may not know it
            peaks += [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in self._devices]
        return {
            "now": stopwatch.CLOCKS.wall(),
            "time": round(self._wall + sum(seconds.values()), 6),
            "step": [loop.first, max(loop.first, loop.step)] if loop.is_known else None,
            "seconds": {part: round(max(0.0, value), 6) for part, value in seconds.items() if value},
            "examples": None if unknown else counted,
            **{name: dict(of) for name, of in self._numbers.items()},
            "peak_bytes": max(peaks) or None,
            "mfu": None if counter is None else counter.mfu,
        }

    def _read_numbers(self) -> None:
        """Read the numbers of the latest step once they are ready, without waiting for the device."""
        run = self._run
        if run is None or self.setup.lines.file is None:
            return
        with self._lock, contextlib.suppress(Exception), internal_transfers():
            if self._pending is None:
                numbers = scalars(run.metrics or {}, run.constant_metrics())
                self._pending = dict(list(numbers.items())[:_MAX_VALUES])
            if is_ready(self._pending.values()):
                numbers, self._pending = self._pending, None
                self._numbers["values"] |= {name: number(value) for name, value in read_values(numbers).items()}
            for hook in run.evaluations:
                newest = {} if hook.newest is None else read_values(hook.newest[1])
                self._numbers["values"] |= {name: number(value) for name, value in newest.items()}
                self._numbers["best"] |= {
                    name: [number(best.value), best.step, absolute(best.path)] for name, best in hook.best.items()
                }
            self._numbers["values"] = dict(list(self._numbers["values"].items())[: 2 * _MAX_VALUES])

    # The card, in background threads, in order.

    def _is_active(self) -> bool:
        return jax.process_index() == 0 and (self.setup.lines.file is not None or self._saver is not None)

    def _begin(self, task: Callable[[], None]) -> None:
        before = self._latest

        def run() -> None:
            wait(before)
            try:
                task()
            except Exception as error:
                _logger.warning("this run could not be recorded: %s: %s", type(error).__name__, error, extra=BELOW_BAR)

        self._latest = [in_background(run, name="jstep-card")]

    def _add_code(self) -> None:
        if (code := code_version()) is not None and (file := self.setup.lines.file) is not None:
            file.write(**{name: code.get(name) for name in ("commit", "edits")})

    def restored(self, saver: Saver | None, origin: Origin, dispatch: Dispatch, batches: Tree) -> None:
        self._batches, self._origin, self._stage_of = batches, origin, dispatch.table.stage_of
        if not self._is_active():
            return
        if origin.restored is not None and isinstance(kept := origin.extra.get(PAST), dict):
            self._kept = kept
        loop = self.setup.loop
        made_of = self.setup.options, self.setup.train_steps, loop.first, shapes_of(loop.state), origin.held, batches

        def record() -> None:
            self._card = {**card(*made_of), "programs": []}
            self._write(card=self._card)

        self._begin(record)

    def after_first(self, call: Call, state: Tree) -> None:
        if self._is_active():
            with contextlib.suppress(Exception):
                traced, args, program = call.trace(state), call.step_args, call.program
                stage, constants = program.stage, program.constants.values
                self._begin(lambda: self._add_program(stage, traced, constants, args))

    def idle(self, shapes: Callable[[int], Any]) -> None:
        """Compare a start that takes no step with the start that made its checkpoint."""
        if self._kept is not None:
            last = max(self.setup.loop.first - 1, 0)
            stage, state = self._stage_of(last), shapes_of(self.setup.loop.state)

            def record() -> None:
                args = traced = None
                with contextlib.suppress(Exception):  # there is no batch, or it does not fit the step
                    args = shapes(last)
                    traced = None if args is None else stage.trace(state, args)
                self._add_program(stage, traced, {}, args, is_idle=True)

            self._begin(record)

    def _add_program(
        self, stage: Any, traced: Any, constants: Mapping[str, Any], args: Any, *, is_idle: bool = False
    ) -> None:
        program = program_card(traced, constants, args)
        self._card["programs"] = [*self._card.get("programs", ()), {"stage": stage.first, **program}]
        if not is_idle:
            self._write(card=dict(self._card))
        kept, self._kept = self._kept, None
        if kept is not None and self._saver is not None and self._origin.restored is not None:
            self._report(kept, self._saver, self._origin.restored, is_idle=is_idle)

    def checkpoint_extra(self, step: int) -> dict[str, Any]:
        """Return the past to save with a checkpoint, as `{PAST: …}`."""
        extra = self._origin.extra
        if step <= self.setup.loop.first and (self.setup.loop.is_restored or PAST in extra):  # no step was run
            return {key: extra[key] for key in (PAST, "config", "code") if key in extra}
        if not self._is_active():
            return {}
        kept: dict[str, Any] = {PAST: self._past(step)}
        if self.setup.options.config is not None:
            kept["config"] = dict(self.setup.options.config)
        file = self.setup.lines.file
        if file is not None and (commit := file.fields.get("commit")) is not None:
            kept["code"] = {"commit": commit, "edits": file.fields.get("edits")}
        return kept

    def _past(self, step: int) -> dict[str, Any]:
        past: dict[str, Any] = {"lanes": lanes_of(self.setup.train_steps.at(max(step - 1, 0)))}
        if (file := self.setup.lines.file) is not None:
            past[START] = file.fields["start"]
        if isinstance(self._batches, BatchSequence):
            before = self._batches[:step]
            definition = {name: _short(part) for name, part in before.definition().items() if name != "num_epochs"}
            past |= {"rows": before.rows_hash(), "batches": definition}
        return past

    def _report(self, kept: Mapping[str, Any], saver: Saver, step: int, *, is_idle: bool) -> None:
        """Log what has changed since the start that made the checkpoint: a warning if its bits change."""
        name, now, file = checkpoint_name(saver.prefix, step), self._past(step), self.setup.lines.file
        bits, place = list[str](), list[str]()
        starts = [] if file is None else [one for one in file.earlier if one.get("start") == kept.get(START)]
        if starts and file is not None and (starts[-1].get("card") or {}).get("programs"):
            found = changes(starts[-1], {**file.fields, "card": self._card}, leave_out=("batches", "lanes"))
            bits, place = found.bits, found.place
        elif file is not None and file.earlier:
            _logger.info("%s: the start that made it has no card, so only lanes and batches are compared", name)
        if step and kept.get("lanes") != now["lanes"]:
            bits.append(f"lanes: {kept.get('lanes')} before, {now['lanes']} now")
        if "rows" in kept and "rows" in now and kept["rows"] != now["rows"]:
            then, new = ({"card": {"batches": past["batches"]}} for past in (kept, now))
            why = "; ".join(changes(then, new).lines) or "their definition is the same, but not the rows it takes"
            bits.append(
                f"batches: those before step {step} are not the ones that {name} was trained on: {why}. The run "
                f"continues with batch {step} of the new definition, so rows may be repeated or left out."
            )
        if bits:
            lines = "".join(f"\n  {printable(line)}" for line in (*bits, *place, *[_UNTRAINED] * is_idle))
            text = "%s: this run has changed since the start that made it:%s"
            _logger.warning(text, name, lines, extra=BELOW_BAR)
        elif place:
            _logger.info("%s: since the start that made it, %s", name, "; ".join(map(printable, place)))


_UNTRAINED = "none of this was trained, as the run takes no step: give another checkpoint_dir, or a larger last_step"


# The contents of a card.


def card(
    options: Options, stages: TrainSteps, step: int, state: Tree, held: Mapping[str, float], batches: Tree
) -> dict[str, Any]:
    lanes = {str(stage.first): lanes_of(stage.value) for stage in stages.stages()}
    variables = [name for name in sorted(os.environ) if name == "XLA_FLAGS" or name.startswith("JAX_")]
    return {
        "step": step,
        "versions": _versions(),
        "environment": {k: "(not recorded)" if is_secret(k, os.environ[k]) else hide(os.environ[k]) for k in variables},
        "settings": {name: plain(getattr(jax.config, name, None)) for name in SETTINGS},
        "devices": describe_devices(state),
        "state": _state(state, held),
        "batches": _batches(batches),
        "stages": {str(stage.first): name_of_step(stage.value) for stage in stages.stages()},
        "lanes": lanes if len(set(lanes.values())) > 1 else next(iter(lanes.values())),
        "arguments": {
            field.name: _argument(field.name, getattr(options, field.name))
            for field in dataclasses.fields(options)
            if field.name != "config"
        },
    }


def _argument(name: str, value: Any) -> Any:
    try:
        if isinstance(value, Saver):
            return plain(value.directory)
        if name == "hooks":
            return [without_addresses(hook_key(hook)) for hook in value]
        if name == "batch_sharding":
            is_leaf = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
            leaves = jax.tree.leaves(value, is_leaf=is_leaf)
            return [
                sharding_text(one) if isinstance(one, jax.sharding.Sharding) else str(one) for one in leaves
            ] or None
        return plain(value, name)
    except Exception:
        return plain(type(value))


def program_card(traced: Any, constants: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Return the record of a program: its constant hyperparameters, and a hash of all that its results need."""
    shapes = [f"{path or 'batch'}: {type_text(leaf)}" for path, leaf in trees.leaves_with_paths(args)]
    record: dict[str, Any] = {"batch": _short(shapes), "hyperparameters": {k: plain(v) for k, v in constants.items()}}
    return record | {"hash": None if traced is None else program_hash(traced)}


def program_hash(traced: Any) -> str:
    """Hash a traced step by its text, and its constants by value; of the metrics, only the loss counts."""
    state, metrics, *others = traced.out_info
    parts = metrics.computed if isinstance(metrics, StepMetrics) else metrics
    if isinstance(parts, dict):
        parts = {name: jax.tree.map(lambda _, name=name: name == LOSS, part) for name, part in parts.items()}
    else:
        parts = jax.tree.map(lambda _: True, parts)
    flags = [*jax.tree.leaves(jax.tree.map(lambda _: True, state)), *jax.tree.leaves(parts)]
    flags += jax.tree.leaves(jax.tree.map(lambda _: True, others))
    closed, _ = part_for(traced.jaxpr, flags)
    digest = hashlib.blake2b(program_text(closed).encode(), digest_size=16)
    for const in closed.consts:
        with contextlib.suppress(Exception), internal_transfers():
            digest.update(np.asarray(const).tobytes())
    return digest.hexdigest()


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "jstep": str(sys.modules["jstep"].__version__),
    }
    for name in ("jax", "jaxlib", "orbax-checkpoint"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # such as a checkout on the path
            versions[name] = getattr(sys.modules.get(name), "__version__", None)
    return versions


def _state(state: Tree, held: Mapping[str, float]) -> dict[str, Any]:
    leaves = trees.leaves_with_paths(shapes_of(state))
    where = [
        f"{path} {'anywhere' if leaf.sharding is None else sharding_text(leaf.sharding)}"
        for path, leaf in leaves
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    return {
        "hash": hash_strings(*(f"{path} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves)),
        "sharding": hash_strings(*where),
        "params": sum(math.prod(leaf.shape) for path, leaf in leaves if path.split("/")[0] == "params"),
        "leaves": len(leaves),
        "dtypes": dict(sorted(collections.Counter(str(leaf.dtype) for _, leaf in leaves).items())),
        "slots": sorted(state.slots or ()),
    }


def _batches(batches: Tree) -> dict[str, Any]:
    if isinstance(batches, BatchSequence):
        definition = batches.definition()
    else:
        source = batches.make if isinstance(batches, ReplayedBatches | StateBatches) else batches
        definition = {"kind": plain(source if hasattr(source, "__qualname__") else type(source)), "length": None}
        with contextlib.suppress(Exception):  # a user-defined loader: it is endless, or its length is not known
            definition["length"] = len(batches)
    whole = hash_strings(json.dumps(definition, sort_keys=True))
    return {"hash": whole, **{key: _short(part) for key, part in definition.items()}}


def _short(value: object) -> Any:
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= _MAX_ENTRY else f"hash {hash_strings(text)}"


# Earlier starts, and the end.


def _end_earlier(file: StartFile, *, claimed: bool) -> None:
    """Write the end of the newest start if it was killed before it could."""
    start = file.earlier[-1] if file.earlier else None
    if start is None or start.get("problem") or start.get("end") or not start.get("process"):
        return
    if claimed or is_alive(start["process"]) is False:
        file.end_earlier(start, [KILLED, exit_reason(file.where, file.prefix, start["opened"])])


def _warn_of_no_progress(file: StartFile, step: int, last_step: int | None) -> None:
    ends: list[str] = []
    for start in reversed(file.earlier):
        end = start.get("end") or [KILLED, ""]
        if start.get("problem") or has_trained(start) or end[0] == FINISHED:
            break
        ends.append(": ".join(filter(None, end)))
    if len(ends) >= _IDLE_STARTS and (last_step is None or step < last_step):
        _logger.warning(
            "the last %d starts of this run took no step: %s. One that is stopped or killed while it restores and "
            "compiles needs more time (stop_secs of train, or the limit of the job), or compiled programs that are kept "
            "(compile_cache=True); one that fails or hangs will do so again",
            len(ends),
            "; ".join(truncate(printable(end), 200) for end in list(dict.fromkeys(ends))[:3]),
        )


def _outcome(setup: Setup, error: BaseException | None, stopped_by: object) -> tuple[str, str, str | None]:
    """Return how the run ended, why, and the class of its exception."""
    loop, signals = setup.loop, setup.signals
    is_done = loop.is_known and loop.step >= setup.options.stop_step
    is_signal = error is not None and (signals.received is not None or isinstance(error, KeyboardInterrupt))
    kind = None if error is None else type(error).__name__
    if error is not None and (isinstance(error, Exception) or not is_signal):
        first = error_text(error).strip().partition("\n")[0]
        return "failed", truncate(f"{kind}: {first}".rstrip(": "), 1000), kind
    if is_signal and not is_done:
        return "interrupted", "SIGINT" if signals.received is None else signals.reason, kind
    by = loop.stopped_by or (stopped_by if loop.step <= loop.first else None)  # an earlier start of this run, or now
    if isinstance(by, str):
        return FINISHED, f"stopped by {by}", None
    return FINISHED, "" if is_done else "the batches ended", None
