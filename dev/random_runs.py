"""Random programs with random faults, each compared with an undisturbed run of the same program.

    python dev/random_runs.py 400             # seeds 0 to 399
    python dev/random_runs.py 20 --first 1000 --processes 2

A program is a loop (`train`, `Run`, `every`, a body that makes its batches, a generator around the
loop, a loop in the body of another one), with hooks that have memories and change the state,
evaluations with callbacks, logs and savers. It ends at `last_step`, with its batches, or by a hook;
its body may catch errors. A fault is an error, an exit, an interrupt, a signal, SIGKILL or a full
disk, in a method of a hook, a callback, an evaluation, a `write`, the body or a batch. Each start
has one; after the last fault the program runs to its end. Then it is started twice more, which must
do nothing, and once with more steps to take.

Compared are the bits of the state, the memories, the best checkpoints, the rows of History and of
MetricsHook, and the newest point of each step in event files; of each start, the checkpoint that
its note names, and how its record says that it ended. The starts of a program with a SIGKILL are
processes of their own, which takes longer.
"""

import argparse
import asyncio
import contextlib
import functools
import gc
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import Any, ClassVar, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import jstep
from jstep.record.starts import read_starts, valid

PLACES = (
    *(
        "begin", "before_step", "after_step", "end", "get_state", "set_state", "before_save",
        "saved", "closed",
    ),
    *("change", "callback", "evaluate", "write", "body", "batch", "fsync", "inner"),
)  # fmt: skip
ERRORS = {"OSError": OSError, "SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt,
          "CancelledError": asyncio.CancelledError, "GeneratorExit": GeneratorExit,
          "StopIteration": StopIteration}  # fmt: skip
SIGNALS = "SIGTERM", "SIGINT", "SIGUSR1", "SIGKILL", "SIGINT twice"
MORE_STEPS = 3
"""The steps that a program takes beyond its end, when it is continued."""
START_SECS = 300.0
"""After this time a start in a process of its own is ended, and reported: it hangs, or the machine
is too busy."""


class Fault(NamedTuple):
    """Something that comes at the n-th call of a place, counted in one start."""

    place: str
    kind: str
    number: int


class Program(NamedTuple):
    """What is the same in all starts."""

    mode: str
    ending: str
    steps_per_call: int
    last_step: int
    save_steps: int | None
    save_secs: float | None
    hooks: tuple[str, ...]
    has_logdir: bool
    has_second_saver: bool
    has_means: bool
    best_to_keep: int
    catches_errors: bool
    processes: int


def draw(seed: int, processes: int) -> tuple[Program, list[Fault]]:
    rng = random.Random(seed)
    mode = rng.choice(["train", "train", "run", "every", "loop", "generator", "nested"])
    endings = ["last_step", "last_step", "hook"]
    if mode != "loop":
        endings.append("batches")
    hooks = [
        "memory", "change", "history", "metrics", "evaluation", "second evaluation", "plain end",
    ]  # fmt: skip
    chosen = rng.sample(hooks, rng.randint(2, len(hooks)))
    program = Program(
        mode=mode,
        ending=rng.choice(endings),
        steps_per_call=1 if mode == "loop" else rng.choice([1, 1, 4]),
        last_step=rng.randint(4, 8),
        save_steps=rng.choice([1, 2, 3, None]),
        save_secs=rng.choice([None, None, None, 1e-9]),
        hooks=tuple(chosen),
        has_logdir=rng.random() < 0.5,
        has_second_saver=rng.random() < 0.3,
        has_means=rng.random() < 0.3,
        best_to_keep=rng.choice([1, 1, 3]),
        catches_errors=rng.random() < 0.2,
        processes=processes,
    )
    faults = []
    for _ in range(rng.randint(1, 3)):
        place = rng.choice(PLACES)
        kinds = [*ERRORS, *SIGNALS]
        kind = "OSError" if place == "fsync" else rng.choice(kinds)
        faults.append(Fault(place, kind, rng.randint(1, 9 if place == "fsync" else 6)))
    return program, faults


# The program.


class Come:
    """Lets a fault come, and counts the calls of each place."""

    fault: Fault | None = None
    process = 0
    calls: ClassVar[dict[str, int]] = {}

    @classmethod
    def at(cls, place: str) -> None:
        number = cls.calls.get(place, 0) + 1
        cls.calls[place] = number
        fault = cls.fault
        if fault is None or fault.place != place or fault.number != number:
            return
        if fault.kind in ERRORS:
            raise ERRORS[fault.kind](f"{fault.kind} in {place}")
        if fault.kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif cls.process == 0:  # one process receives a signal, and all have to agree
            name, _, twice = fault.kind.partition(" ")
            signal.raise_signal(getattr(signal, name))
            if twice:
                signal.raise_signal(getattr(signal, name))


def fail_fsync() -> None:
    sync = os.fsync

    def fsync(file: int) -> None:
        try:
            Come.at("fsync")
        except OSError as error:
            raise OSError(28, "No space left on device") from error
        sync(file)

    os.fsync = fsync


class Memory(jstep.Hook):
    """Remembers what it has seen, in each method that belongs to an iteration or to the end."""

    key = "memory"

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, state: Any) -> None:
        self.seen = []
        Come.at("begin")

    def before_step(self, step: int, state: Any) -> None:
        self.seen.append(["before", step])
        Come.at("before_step")

    def after_step(self, step: int, state: Any, metrics: Any) -> None:
        self.seen.append(["after", step])
        Come.at("after_step")

    def end(self, step: int, state: Any) -> Any:
        self.seen.append(["end", step])
        Come.at("end")
        return scaled(state, 1.5)

    def before_save(self, step: int) -> None:
        Come.at("before_save")

    def saved(self, step: int, path: str) -> None:
        if Come.fault is None or Come.fault.kind in ERRORS:
            # It is called in a thread, where no signal is raised.
            Come.at("saved")

    def closed(self) -> None:
        Come.at("closed")

    def get_state(self) -> Any:
        Come.at("get_state")
        return list(self.seen)

    def set_state(self, value: Any) -> None:
        self.seen = list(value)
        Come.at("set_state")


class Change(jstep.Hook):
    """Changes the state, by a number that it counts."""

    key = "change"

    def __init__(self) -> None:
        self.count = 0

    def begin(self, state: Any) -> None:
        self.count = 0

    def after_step(self, step: int, state: Any, metrics: Any) -> Any:
        self.count += 1
        Come.at("change")
        return scaled(state, 1 + self.count / 64)

    def get_state(self) -> int:
        return self.count

    def set_state(self, value: int) -> None:
        self.count = value


class PlainEnd(jstep.Hook):
    """An `end` without a memory."""

    def end(self, step: int, state: Any) -> Any:
        Come.at("end")
        return scaled(state, 0.75)


class Stops(jstep.Hook):
    """A hook that stops the run at a step, and keeps it stopped."""

    key = "stops"

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self._step = 0

    def begin(self, state: Any) -> None:
        self._step = 0

    def after_step(self, step: int, state: Any, metrics: Any) -> bool:
        self._step = step
        return step >= self._last_step

    def get_state(self) -> int:
        return self._step

    def set_state(self, value: int) -> bool:
        self._step = value
        return value >= self._last_step


class Callback:
    """A callback that remembers the steps that it has seen, and changes the state."""

    key = "callback"
    on_cadence_only = True

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, step: int, state: Any, results: Any) -> Any:
        self.seen.append(step)
        Come.at("callback")
        return scaled(state, 0.875)

    def begin(self, state: Any) -> None:
        self.seen = []

    def get_state(self) -> list[int]:
        return list(self.seen)

    def set_state(self, value: list[int]) -> None:
        self.seen = list(value)


class Validation:
    def __iter__(self) -> Any:
        for _ in range(2):
            Come.at("evaluate")
            yield np.float32(0.5)


class Body:
    """What a body remembers: as a hook, or as an object of `from_loop`."""

    key = "body"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def begin(self, state: Any) -> None:
        self.seen = []

    def get_state(self) -> list[int]:
        return list(self.seen)

    def set_state(self, value: list[int]) -> None:
        self.seen = list(value)


def scaled(state: Any, factor: float) -> Any:
    return state.replace(params=jax.tree.map(lambda leaf: leaf * jnp.float32(factor), state.params))


def batches_until(end: float) -> Any:
    def batch(step: int) -> Any:
        if step >= end:
            raise jstep.OutOfRangeError("there are no more batches")
        Come.at("batch")
        return np.full(3, np.sin(step), np.float32)

    return batch


def on_all_processes(state: Any) -> Any:
    if jax.process_count() == 1:
        return state
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    return jstep.shard_state(state, mesh, jax.sharding.PartitionSpec())


def inner_result(directory: str, step: int) -> float:
    """Train a few steps in the body of a step, in a directory of its own; return a number that
    depends on all of it."""
    optimizer, step_fn, _ = compiled()
    seen: list[int] = []

    class Inner(jstep.Hook):
        key = "inner"

        def after_step(self, step: int, state: Any, metrics: Any) -> Any:
            seen.append(step)
            Come.at("inner")
            return scaled(state, 1.25)

        def end(self, step: int, state: Any) -> Any:
            Come.at("inner")
            return scaled(state, 0.5)

        def get_state(self) -> Any:
            return list(seen)

        def set_state(self, value: Any) -> None:
            seen[:] = value

    state = on_all_processes(jstep.TrainState.create({"w": jnp.full(3, 1.0 / step)}, optimizer))
    state = jstep.train(
        step_fn, state, lambda step: np.full(3, step, np.float32), 3, hooks=[Inner()],
        log_steps=None, progress=False, checkpoint_dir=os.path.join(directory, "inner", str(step)),
        save_checkpoint_steps=1,
    )  # fmt: skip
    return float(state.params["w"].addressable_data(0)[0]) + len(seen)


@functools.cache
def compiled() -> tuple[Any, Any, Any]:
    """Return what is compiled once for all programs of a process."""
    optimizer = jstep.momentum(0.1, 0.9)
    step_fn = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)
    evaluate = jstep.evaluator(
        lambda params, x: {"value": (jnp.sin(7 * jnp.sum(params["w"])) * x, 1.0)}, Validation()
    )
    return optimizer, step_fn, evaluate


def run_program(program: Program, directory: str) -> dict[str, Any]:
    optimizer, step_fn, evaluate = compiled()
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    state = on_all_processes(state)
    memory, change, callback, body = Memory(), Change(), Callback(), Body()
    history = jstep.History(every_n_steps=3, mean=program.has_means)
    best = jstep.KeepBest(
        os.path.join(directory, "best"), "value", mode="max", max_to_keep=program.best_to_keep
    )
    rows_path = os.path.join(directory, "rows.jsonl")

    def write(step: int, values: dict[str, float]) -> None:
        Come.at("write")
        with open(rows_path, "a") as file:
            file.write(json.dumps([step, round(values["loss"], 5)]) + "\n")

    made = {
        "memory": memory, "change": change, "history": history, "plain end": PlainEnd(),
        "metrics": jstep.MetricsHook(write, every_n_steps=2, mean=program.has_means),
        "evaluation": jstep.EvaluationHook(evaluate, every_n_steps=2, callbacks=[best, callback]),
        "second evaluation": jstep.EvaluationHook(evaluate, every_n_steps=3, prefix="second"),
    }  # fmt: skip
    hooks: list[Any] = [made[name] for name in program.hooks]
    if program.mode != "loop":
        hooks.append(body)
    if program.ending == "hook":
        hooks.append(Stops(program.last_step))
    if program.has_second_saver:
        hooks.append(jstep.CheckpointSaverHook(os.path.join(directory, "other"), save_steps=2))
    options: dict[str, Any] = {
        "hooks": hooks, "checkpoint_dir": os.path.join(directory, "run"),
        "save_checkpoint_secs": program.save_secs, "save_checkpoint_steps": program.save_steps,
        "log_steps": None, "progress": False, "steps_per_call": program.steps_per_call,
        "logdir": os.path.join(directory, "run") if program.has_logdir else None,
        "save_summaries_steps": 2,
    }  # fmt: skip
    last_step = program.last_step if program.ending == "last_step" else program.last_step + 9
    caught = [OSError] if program.catches_errors else []
    batches = batches_until(program.last_step if program.ending == "batches" else float("inf"))
    if program.mode == "train":
        state = jstep.train(step_fn, state, batches, last_step, **options)
    elif program.mode == "generator":
        run = jstep.Run(step_fn, state, batches, last_step, **options)
        for step in steps_of(run):
            run_body(program, run, step, body, directory)
        state = run.state
    else:
        source = jstep.from_loop(body=body) if program.mode == "loop" else batches
        # An error of the run that the block swallows comes again where the block ends.
        with (
            jstep.Run(step_fn, state, source, last_step, **options) as run,
            contextlib.suppress(*caught),
        ):
            for step in run.every(3) if program.mode == "every" else run:
                run_body(program, run, step, body, directory)
        state = run.state
    return {
        "w": hashlib.sha256(
            np.asarray(state.params["w"].addressable_data(0)).tobytes()
        ).hexdigest()[:12],
        "memories": [memory.seen, change.count, callback.seen, body.seen],
        "history": [
            [step, {k: round(v, 5) for k, v in row.items()}] for step, row in history._rows.items()
        ],
    }


def steps_of(run: Any) -> Any:
    """A generator around the loop, which is dropped if the code that consumes it raises."""
    with run:
        yield from run


def run_body(program: Program, run: Any, step: int, body: Body, directory: str) -> None:
    body.seen.append(step)
    with contextlib.suppress(*([OSError] if program.catches_errors else [])):
        if program.mode == "loop":
            run.train_step(np.full(3, np.sin(step), np.float32))
        Come.at("body")
    if program.mode == "nested":
        run.state = scaled(run.state, inner_result(directory, step) / 16)
    elif program.mode != "loop":
        run.state = scaled(run.state, 1.125)
    body.seen.append(-step)


# One start, in a process of its own.


def call_here(result_path: str, fn: Any) -> Any:
    return json.loads(json.dumps(fn()))  # as from a fork


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def call_in_fork(result_path: str, fn: Any) -> Any:
    """Call a function in a fork, as this process must not use a device before it forks again;
    return its result."""
    pid = os.fork()
    if pid == 0:
        with open(result_path, "w") as file:
            json.dump(fn(), file)
        os._exit(0)
    os.waitpid(pid, 0)
    with open(result_path) as file:
        return json.load(file)


def observe(
    program: Program, directory: str, fault: Fault | None, process: int = 0
) -> dict[str, Any]:
    """Run a program once in this process; return how it ended, and what it said."""
    Come.fault, Come.process, Come.calls = fault, process, {}
    lines = Lines()
    logger = logging.getLogger("jstep")
    logger.addHandler(lines)
    level_before = logger.level
    logger.setLevel(logging.INFO)
    found: dict[str, Any] = {"ended": "finished", "notes": []}
    try:
        found |= run_program(program, directory)
    except BaseException as error:
        found["ended"] = type(error).__name__
        found["notes"] = getattr(error, "__notes__", [])
        found["text"] = f"{type(error).__name__}: {error}"
        if found["ended"] in (
            "AssertionError",
            "AttributeError",
            "TypeError",
            "NameError",
            "KeyError",
        ):
            found["traceback"] = traceback.format_exc()
    finally:
        if program.mode == "generator":
            gc.collect()  # it is closed where nothing refers to it any more
        logger.removeHandler(lines)
        logger.setLevel(level_before)
    found["lines"] = lines.lines
    found["calls"] = dict(Come.calls)
    return found


def child(
    program: Program, directory: str, fault: Fault | None, process: int, port: int, result_path: str
) -> None:
    sys.stderr = open(os.path.join(directory, f"stderr.{process}"), "a")  # noqa: SIM115  until the process ends
    os.dup2(sys.stderr.fileno(), 2)
    jax.config.update("jax_compilation_cache_dir", CACHE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    fail_fsync()
    if program.processes > 1:
        jstep.distributed.initialize(f"127.0.0.1:{port}", program.processes, process)
    found = observe(program, directory, fault, process)
    with open(f"{result_path}.{process}", "w") as file:
        json.dump(found, file)
    sys.stderr.flush()
    os._exit(0)


def run_start(program: Program, directory: str, fault: Fault | None) -> dict[str, Any]:
    """Run a program once, in processes of its own; return what process 0 has found, or that it was
    killed."""
    result_path = os.path.join(directory, "result")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for process in range(program.processes):
        if os.path.exists(f"{result_path}.{process}"):
            os.unlink(f"{result_path}.{process}")
        pid = os.fork()
        if pid == 0:
            child(program, directory, fault, process, port, result_path)
        children.append(pid)
    deadline = time.monotonic() + START_SECS
    is_late = False
    left = set(children)
    while left:
        for pid in tuple(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
                if program.processes > 1 and not os.path.exists(
                    f"{result_path}.{children.index(pid)}"
                ):
                    # The others wait for one that was killed.
                    deadline = min(deadline, time.monotonic() + 5)
        if time.monotonic() > deadline:
            is_late = is_late or left == set(children)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            deadline += 60
        time.sleep(0.02)
    if is_late:
        raise TimeoutError(f"a start did not end within {START_SECS:.0f} s")
    if not os.path.exists(f"{result_path}.0"):
        return {"ended": "killed", "notes": [], "lines": []}
    with open(f"{result_path}.0") as file:
        found: dict[str, Any] = json.load(file)
    return found


# What is compared.


def left_behind(program: Program, directory: str) -> dict[str, Any]:
    """Return what a program has left on disk."""
    found: dict[str, Any] = {}
    for name in ("best", "other"):
        path = os.path.join(directory, name)
        prefix = "best" if name == "best" else "model"
        saver = jstep.Saver(path, prefix=prefix)
        steps = saver.all_steps() if os.path.isdir(path) else []
        found[name] = (
            [[step, saver.extra(step)] for step in steps] if name == "best" else steps[-1:]
        )
    rows_path = os.path.join(directory, "rows.jsonl")
    if os.path.exists(rows_path):
        with open(rows_path) as file:
            found["rows"] = sorted(dict(json.loads(line) for line in file).items())
    if program.has_logdir:
        found["points"] = sorted(points(os.path.join(directory, "run")).items())
    return found


def points(logdir: str) -> dict[str, float]:
    """Return the newest point of each tag and step in event files."""
    found: dict[str, float] = {}
    for name in sorted(name for name in os.listdir(logdir) if "tfevents" in name):
        for event in jstep.summary.summary_iterator(os.path.join(logdir, name)):
            for value in event.summary.value:
                number = value.simple_value or (
                    value.tensor.float_val[0] if value.tensor.float_val else None
                )
                if number is not None and "per" not in value.tag and "/sec" not in value.tag:
                    found[f"{value.tag} {event.step}"] = round(number, 5)
    return found


def files_of(directory: str) -> list[str]:
    found = []
    for above, _, names in os.walk(directory):
        for name in names:
            path = os.path.relpath(os.path.join(above, name), directory)
            if not re.search(r"starts|result|stderr|writer|\.lock|stalls", path):
                found.append(f"{path} {os.path.getsize(os.path.join(directory, path))}")
    return sorted(found)


def restored_step(found: dict[str, Any]) -> str | None:
    for line in found["lines"]:
        if match := re.match(r"restored (model-\d+)|no checkpoint in .*(starts at step 0)", line):
            return match[1] or "scratch"
    return None


def named_checkpoint(program: Program, found: dict[str, Any]) -> str | None:
    text = " ".join(
        [
            *found["notes"],
            found.get("text", ""),
            *(x for x in found["lines"] if "ends the run" in x),
        ]
    )
    matches = re.findall(
        r"resumes from (model-\d+)|is saved as (model-\d+)|begins (from scratch)",
        text,
    )
    if not matches:
        return None
    # What ends a run within another one has notes of both, the inner one's first.
    resumed, saved, scratch = matches[-1 if program.mode == "nested" else 0]
    return resumed or saved or (scratch and "scratch")


ENDINGS = {"finished": {"finished"}, "killed": {"killed"}, "Preempted": {"interrupted", "finished"},
           "KeyboardInterrupt": {"interrupted", "failed", "finished"}}  # fmt: skip


def differences(
    program: Program, faults: list[Fault], ours: dict[str, Any], theirs: dict[str, Any]
) -> list[str]:
    """Compare what a program has returned and left behind with the same of an undisturbed one."""
    problems = []
    for name in theirs:
        is_same = ours.get(name) == theirs[name]
        if name == "rows":
            # A run that a signal ends has a row of its last step, too; one that a tracker refused
            # is lost.
            is_refused = any(fault.place == "write" and fault.kind == "OSError" for fault in faults)
            lost = [row for row in theirs[name] if row not in ours.get(name, [])]
            is_same = len(lost) <= is_refused or program.has_means
        if not is_same:
            problems.append(f"{name}: {ours.get(name)}\n      undisturbed: {theirs[name]}")
    return problems


def problems_of(seed: int, processes: int, keep: str | None) -> tuple[list[str], int]:
    """Return what is wrong with a program, and the number of its starts that a fault has ended."""
    program, faults = draw(seed, processes)
    start = run_start if has_own_processes(seed, processes) else observe
    in_fork = call_in_fork if has_own_processes(seed, processes) else call_here
    above = tempfile.mkdtemp(prefix="random-runs-")
    problems: list[str] = []
    came = 0
    try:
        plain, disturbed = os.path.join(above, "plain"), os.path.join(above, "disturbed")
        for directory in (plain, disturbed):
            os.mkdir(directory)
        expected = start(program, plain, None)
        if expected["ended"] != "finished":
            return [f"undisturbed: {expected}"], 0
        named: str | None = None
        endings = []
        for fault in [*faults, None]:
            found = start(program, disturbed, fault)
            endings.append(found["ended"])
            came += found["ended"] != "finished"
            restored = restored_step(found)
            if named is not None and restored is not None and named != restored:
                problems.append(f"a note named {named}, the next start restored {restored}")
            named = named_checkpoint(program, found)
            if "traceback" in found:
                problems.append(found["traceback"])
            if fault is None and found["ended"] != "finished":
                problems.append(f"the start without a fault ended: {found}")
        result_path = os.path.join(above, "left")

        def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
            names = ("w", "memories", "history")
            ours = {name: ours.get(name) for name in names}
            theirs = {name: theirs.get(name) for name in names}
            ours |= in_fork(result_path, lambda: left_behind(program, disturbed))
            theirs |= in_fork(result_path, lambda: left_behind(program, plain))
            return differences(program, faults, ours, theirs)

        problems += compare(found, expected)
        recorded = [start["end"][0] if start["end"] else None for start in starts_in(disturbed)]
        # A start that failed before its record was opened has none.
        for ended, status in zip(reversed(endings), reversed(recorded), strict=False):
            allowed = ENDINGS.get(ended, {"failed"})
            if program.mode == "nested" and ended == "Preempted":
                # The run in the body obeys the signal, which is an error in the body.
                allowed = {*allowed, "failed"}
            if status not in allowed:
                problems.append(
                    f"the record says {status} of a start that ended: "
                    f"{ended}; all: {recorded}, {endings}"
                )
                break
        before = files_of(disturbed)
        for _ in range(2):
            idle = start(program, disturbed, None)
            done = {
                "before_step", "after_step", "end", "callback", "write", "body", "change", "inner",
            }  # fmt: skip
            calls = {place: n for place, n in idle.get("calls", {}).items() if place in done}
            if idle["ended"] != "finished" or calls or idle["memories"] != found.get("memories"):
                problems.append(
                    f"a start with nothing to do: {calls} {idle['ended']} {idle.get('memories')}"
                )
            if files_of(disturbed) != before:
                problems.append(
                    "a start with nothing to do has written: "
                    f"{set(files_of(disturbed)) ^ set(before)}"
                )
        program = program._replace(last_step=program.last_step + MORE_STEPS)
        expected = start(program, plain, None)
        found = start(program, disturbed, None)
        if expected["ended"] != "finished" or found["ended"] != "finished":
            problems.append(f"continued: {found}\n      undisturbed: {expected}")
        problems += [f"continued, {text}" for text in compare(found, expected)]
    finally:
        if keep and problems:
            shutil.copytree(above, os.path.join(keep, str(seed)), dirs_exist_ok=True)
        shutil.rmtree(above, ignore_errors=True)
    return [f"seed {seed}: {program}\n   {faults}", *problems] if problems else [], came


def starts_in(directory: str) -> list[Any]:
    return [*valid(read_starts(os.path.join(directory, "run")).get("model", []))]


CACHE = os.path.join(tempfile.gettempdir(), "random-runs-cache")


def has_own_processes(seed: int, processes: int) -> bool:
    """Whether each start of a program has to be a process: a fault kills it, or there are
    several."""
    return processes > 1 or any(fault.kind == "SIGKILL" for fault in draw(seed, processes)[1])


def check(seeds: list[int], processes: int, keep: str | None) -> tuple[int, int]:
    """Print what is wrong with programs; return the number of faults, and of programs with
    problems."""
    faults = bad = 0
    gc.freeze()  # what is there by now is not looked at by each collection
    for number, seed in enumerate(seeds):
        if number and number % 20 == 0:
            print(
                f"{number} programs, {faults} starts that a fault ended, {bad} with problems",
                file=sys.stderr,
                flush=True,
            )
        try:
            problems, came = problems_of(seed, processes, keep)
        except TimeoutError as error:
            problems, came = [f"seed {seed}: {error}"], 0
        faults += came
        bad += bool(problems)
        if problems:
            print("\n   ".join(problems), flush=True)
    return faults, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--keep", help="a directory for what runs with problems have left behind")
    parser.add_argument(
        "--kills", choices=["only", "none"], help="only programs with a SIGKILL, or none of these"
    )
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.count)
    split: dict[bool, list[int]] = {False: [], True: []}
    for seed in seeds:
        split[has_own_processes(seed, arguments.processes)].append(seed)
    faults = bad = checked = 0
    # First those that this process may fork for; the others share one process, whose programs are
    # compiled once.
    if arguments.kills != "none":
        faults, bad = check(split[True], arguments.processes, arguments.keep)
        checked = len(split[True])
    if arguments.kills != "only":
        fail_fsync()
        more_faults, more_bad = check(split[False], arguments.processes, arguments.keep)
        faults += more_faults
        bad += more_bad
        checked += len(split[False])
    print(
        f"{checked} programs, {faults} starts that a fault ended, {bad} with problems", flush=True
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
