"""The times of a run: a stopwatch without gaps, the timeline that keeps them in a file, and the files of stalls."""

import contextlib
import functools
import json
import logging
import math
import os
import secrets
import threading
import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent import futures
from datetime import UTC, datetime
from typing import Any, NamedTuple

from jstep.checkpoint.directory import is_alive, this_process
from jstep.core.checks import as_text, scoped, shown
from jstep.stores.files import LocalLines, ObjectLines, is_directory, names_in, opened, replace_file
from jstep.stores.objects import Directory, Objects, absolute, is_url, join, location

# A stopwatch that divides the time of a run into parts without gaps, and the time before it started.

STARTING, STEPPING, WAITING = "starting", "stepping", "waiting"
SAVING, EVALUATING, HOOKS = "saving", "evaluating", "hooks"
PARTS = (STARTING, STEPPING, WAITING, SAVING, EVALUATING, HOOKS)
"""The parts that the time of one start is divided into."""

_VISITS = 64
"""The number of visits, or of calls of one thing, whose durations are kept."""
_SWITCHES = 256
"""The number of switches that are kept."""


class Stopwatch:
    """A stopwatch that assigns elapsed time to parts; one thread switches parts, any thread reads them.

    A switch reads the clock once and appends to a queue without a lock. It costs a fraction of a microsecond, and an
    exception between any two instructions, such as from a signal, leaves the times consistent. `seconds` empties the
    queue.

    Args:
        before: Seconds that had elapsed before the stopwatch was created; they belong to the first part.
        clock: A function that returns the time in seconds.

    Attributes:
        clock: The clock.
        mark: Appends a switch, `(part, time)`. Only the loop's path to a batch uses it, to switch without a call.
        current: The current part.
        waiting: The part for the time spent waiting for a batch; `starting` until the first step has returned.
        lasted: The seconds of the latest visits of each `part`, and of other things that `record` names.

    Example:
        >>> from jstep.hooks.timeline import Stopwatch
        >>> times = iter([0.0, 2.0, 5.0, 6.0])
        >>> watch = Stopwatch(clock=lambda: next(times))
        >>> with watch.part("saving"):
        ...     pass
        >>> {part: seconds for part, seconds in watch.seconds().items() if seconds}
        {'starting': 3.0, 'saving': 3.0}
    """

    def __init__(self, before: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._since = clock() - before
        self._folded = STARTING
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._marks: deque[tuple[str, float]] = deque()
        self.mark = self._marks.append
        self._lock = threading.Lock()
        self.current = self.waiting = STARTING
        self.lasted: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_VISITS))
        self._latest: deque[tuple[str, float]] = deque(maxlen=_SWITCHES)

    def switch(self, part: str) -> float:
        """Switch to another part, and return the time of the clock."""
        now = self.clock()
        self.mark((part, now))
        self.current = part
        return now

    @scoped
    def part(self, part: str) -> Iterator[None]:
        """Assign the time inside the context to a part; contexts can be nested."""
        before = self.current
        began = self.switch(part)
        try:
            yield
        finally:
            self.lasted[part].append(self.switch(before) - began)

    def record(self, thing: Hashable, began: float, share: float = 1.0) -> None:
        """Keep the duration of one call of a thing, from a time of the clock until now, or a share of it."""
        self.lasted[thing].append(share * (self.clock() - began))

    def reassign(self, part: str, seconds: float) -> None:
        """Reassign the last `seconds` seconds to a part."""
        now = self.clock()
        self._marks.extend(((part, now - seconds), (self.current, now)))

    def started(self) -> None:
        """End the part `starting`, when the first step has returned."""
        self.waiting = WAITING
        self.switch(STEPPING)

    def visits(self, part: str, after: str | None = None) -> list[float]:
        """Return the seconds of the latest visits of a part, or of those that follow another part."""
        self.seconds()
        with self._lock:
            marks = list(self._latest)
        each = zip(marks, marks[1:], marks[2:], strict=False)
        return [then - at for (before, _), (this, at), (_, then) in each if this == part and after in (None, before)][
            -_VISITS:
        ]

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part so far."""
        with self._lock:
            now = self.clock()
            totals, current, since, queue = self._totals, self._folded, self._since, self._marks
            marks = [queue.popleft() for _ in range(len(queue))]
            for part, at in marks:
                totals[current] += at - since
                current, since = part, at
            totals[current] += now - since
            self._folded, self._since = current, now
            self._latest.extend(marks[-_SWITCHES:])
            return dict(totals)

    def stop(self) -> None:
        """Keep the latest switches alone, when the times are no longer read."""
        self._marks = deque(maxlen=0)
        self.mark = self._latest.append


_trained: set[int] = set()
"""Ids of processes that have trained; a forked process inherits the set without its own id."""


def seconds_before_training() -> float:
    """Return the seconds since the start of this process on the first call, and 0 on later ones.

    It is also 0 on systems other than Linux, where the start is unknown and the time begins with the call of `train`.
    """
    if os.getpid() in _trained:
        return 0.0
    _trained.add(os.getpid())
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class Clocks(NamedTuple):
    """The clocks of a run.

    Attributes:
        seconds: A monotonic clock, in seconds.
        wall: Seconds since 1970.
        before: The seconds from the start of the process to the start of training.
    """

    seconds: Callable[[], float] = time.perf_counter
    wall: Callable[[], float] = time.time
    before: Callable[[], float] = seconds_before_training


CLOCKS = Clocks()
"""The clocks of every run; replaced in tests."""


def new_watch() -> Stopwatch:
    """The stopwatch of a run; for the first run of a process, it starts with the process."""
    return Stopwatch(CLOCKS.before(), CLOCKS.seconds)


# Reading the lines of a timeline, from a file or from the objects of all starts.

NAME = "timeline.jsonl"
OBJECTS = "timeline."
"""The beginning of object names; they end like `NAME`."""
VERSION = 1
START, TIMES = "start", "parts"
"""The kinds of lines that contain times."""
AGAIN = "time_again"
"""The last field of a line with times, equal to its `time` unless the line was only partly written."""
STALL = "stall"
"""The kind of a line about a stall: its `part`, and the seconds that it lasted, `stalled`."""

_logger = logging.getLogger("jstep")


class Times(Sequence[dict[str, Any]]):
    """The lines with times of one start, in an array for each number: a dictionary a line takes ten times the file."""

    def __init__(self) -> None:
        self._seconds = {part: array("d") for part in PARTS}
        self._time = array("d")
        self._first, self._now, self._checkpoint = array("q"), array("q"), array("q")  # -1 for none

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line that `_line` returned."""
        first, now = line["step"] or (-1, -1)
        checkpoint: Any = line.get("checkpoint")
        self._time.append(line["time"])
        self._first.append(first)
        self._now.append(now)
        self._checkpoint.append(checkpoint if isinstance(checkpoint, int) and _is_step(checkpoint) else -1)
        for part, seconds in self._seconds.items():
            seconds.append(line["seconds"].get(part, 0.0))

    def __len__(self) -> int:
        return len(self._time)

    def __getitem__(self, n: Any) -> Any:
        first, checkpoint = self._first[n], self._checkpoint[n]
        return {
            "time": self._time[n],
            "step": None if first < 0 else [first, self._now[n]],
            "seconds": {part: seconds[n] for part, seconds in self._seconds.items()},
            "checkpoint": None if checkpoint < 0 else checkpoint,
        }


def read(path: Any, prefix: str = "model") -> list[Times]:
    """Return the lines with times of each start of a run, in the order of its starts.

    A torn last line is skipped silently; other corrupted lines are skipped with a warning.

    Args:
        path: The directory of the checkpoints or the logdir, a timeline in it, or a URL of one of these.
        prefix: The prefix of the run's checkpoints.

    Raises:
        FileNotFoundError: There is no timeline.
        ValueError: The timeline has no start with this prefix, or was written by a newer version of jstep.
        OSError: The timeline cannot be read.
    """
    where, prefix = absolute(location(path, "path")), as_text(prefix, "prefix")
    starts: defaultdict[str, Times] = defaultdict(Times)
    others: dict[str, None] = {}
    known: set[str] = set()
    places = _places(where)
    for place in places:
        with opened(place) as file:
            for number, raw in enumerate(file, 1):
                line = _line(raw)
                if line is None:
                    if raw.strip() and raw.endswith(b"\n"):
                        text = shown(raw.decode(errors="replace").strip(), 60)
                        _logger.warning(
                            "%s: line %d is not a line of a timeline and is skipped: %s", place, number, text
                        )
                    continue
                if line["prefix"] != prefix:
                    others.setdefault(line["prefix"])
                    continue
                if line["kind"] == START:
                    _check_version(line.get("version"), place, number)
                    known.add(line["start"])
                if line["kind"] in (START, TIMES):
                    starts[line["start"]].append(line)
    if not known:
        raise ValueError(
            f"prefix={prefix!r}: expected the prefix of a run in {where}, which has "
            f"{', '.join(map(repr, others)) or 'none'}; give the checkpoint_prefix of the run"
        )
    found = [lines for start, lines in starts.items() if start in known]
    return sorted(found, key=lambda lines: lines[0]["time"]) if len(places) > 1 else found


def fields_with(where: str, *words: str, start: str = "") -> list[dict[str, Any]]:
    """Return the fields of each line that has one of these words, of all runs, in the order of their starts.

    The other lines, most of a timeline, are not parsed. Corrupted ones are skipped.

    Args:
        where: A directory or URL.
        words: Keys or values of the lines.
        start: The name of the start that is looked for; the objects of others are not read.

    Raises:
        FileNotFoundError: There is no timeline.
        OSError: The directory or a timeline cannot be read.
    """
    marks, begins = [f'"{word}"'.encode() for word in words], f'"{START}", "start"'.encode()
    found: list[dict[str, Any]] = []
    began: dict[str, float] = {}
    places = [place for place in _places(where) if not start or place.endswith((NAME, f"-{start}.jsonl"))]
    for place in places:
        with opened(place) as file:
            for raw in file:
                is_wanted = any(mark in raw for mark in marks)
                if not (is_wanted or begins in raw) or not isinstance(line := _parsed(raw), dict):
                    continue
                if line.get("kind") == START and is_seconds(line.get("time")):
                    began.setdefault(str(line.get("start")), line["time"])
                if is_wanted:
                    found.append(line)
    return sorted(found, key=lambda line: began.get(str(line.get("start")), 0.0)) if len(places) > 1 else found


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _places(where: str) -> list[str]:
    missing = f"{where}: there is no timeline; give the checkpoint_dir of a run, or its logdir if it has none"
    if where.endswith(".jsonl"):
        return [where]
    if is_url(where):
        names = sorted(Directory(where).listing(OBJECTS))
    elif is_directory(where):
        names = names_in(where)
    else:
        raise FileNotFoundError(f"{where}: no such directory")
    # A run that was copied between a disk and a bucket, and resumed there, has the file and objects.
    places = [join(where, name) for name in names if _is_timeline(name)]
    if not places:
        raise FileNotFoundError(missing)
    return places


def _is_timeline(name: str) -> bool:
    return name.startswith(OBJECTS) and name.endswith(".jsonl") and "/" not in name


def _check_version(version: Any, place: str, number: int) -> None:
    if type(version) is not int or version > VERSION:
        raise ValueError(
            f"{place}: line {number} has version={shown(version)}: expected at most {VERSION}; it was written by a "
            "newer jstep, which can read it"
        )


def _line(raw: bytes) -> dict[str, Any] | None:
    found = _parsed(raw)
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in ("kind", "start", "prefix")):
        return None
    newer = found["kind"] == START and found.get("version") != VERSION  # reported by _check_version
    return found if newer or found["kind"] not in (START, TIMES) or _has_times(found) else None


def _has_times(found: dict[str, Any]) -> bool:
    step, seconds = found.get("step"), found.get("seconds")
    if not is_seconds(found.get("time")) or not isinstance(seconds, dict):
        return False
    if found.get(AGAIN, found["time"]) != found["time"]:  # partly written over the one before
        return False
    if not (step is None or (isinstance(step, list) and len(step) == 2 and all(_is_step(one) for one in step))):
        return False
    return all(name in PARTS and is_seconds(value) for name, value in seconds.items())


def is_seconds(value: Any) -> bool:
    """Whether a value is a number of seconds."""
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


# Writing the timeline of a run, one line per write.


class Timeline:
    """Writer for the timeline of a run. It is thread-safe, and a failed write never ends the run.

    In a directory, the timeline is one file that every start appends to; a torn last line of a killed process is
    removed. Below a URL, each start has an object, which is uploaded every ten seconds and before each checkpoint. In
    both, the newest times replace the previous ones, but not those of a checkpoint.

    Args:
        where: The directory or URL, as returned by `jstep.stores.objects.location`.
        prefix: The prefix of the run's checkpoints.

    Attributes:
        where: The directory or URL.
        start: The name of this start, which all of its lines have.

    Raises:
        OSError: The timeline cannot be created or written.
    """

    def __init__(self, where: str, prefix: str) -> None:
        self.where, self.start, self._prefix = where, secrets.token_hex(4), prefix
        self._lock = threading.Lock()
        self._failing = False
        self._is_object = is_url(where)
        if self._is_object:
            now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")  # names sort in the order of the starts
            path = join(where, f"{OBJECTS}{now}-{self.start}.jsonl")
            self._lines: LocalLines | ObjectLines = ObjectLines(path, resume=False)
        else:
            self._lines = LocalLines(join(where, NAME))

    def write(self, kind: str, *, to_disk: bool = False, **fields: Any) -> None:
        """Write a line.

        Args:
            kind: The kind of the line.
            to_disk: Whether to upload it at once, below a URL.
            **fields: Other fields, with JSON values.
        """
        line = {"kind": kind, "start": self.start, "prefix": self._prefix, **fields}
        text = (json.dumps(line, allow_nan=False) + "\n").encode()
        with self._lock:
            try:
                self._lines.write(text, replaceable=kind == TIMES and not to_disk)
                if self._is_object:
                    self._lines.sync(to_disk=to_disk)
            except OSError as error:
                self._warn(error)
            else:
                self._failing = False

    def flush(self) -> None:
        """Flush the lines to the disk, if it is a file: `write` uploads objects."""
        if self._is_object:
            return
        with self._lock:
            try:
                self._lines.sync(to_disk=True)
            except OSError as error:
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._failing:
            _logger.warning("%s: the times of this run cannot be kept: %s", self._lines.path, error)
        self._failing = True

    def close(self) -> None:
        """Close the timeline."""
        with self._lock:
            try:
                self._lines.close()
            except OSError as error:
                _logger.warning("%s: the last times of this run are lost: %s", self._lines.path, error)


# The files `stalls/PROCESS.json` of a run: what each process that hangs waits for, for the others and for people.

FOLDER, STALLS_VERSION = "stalls", 1
CALL, WITH_OTHERS = "call", "agreement"
"""The kinds of waits that are usually for other processes."""
_TYPES = {"process": int, "processes": int, "host": str, "pid": int, "stall": bool, "since": float, "renewed": float}
_TEXTS = ("kind", "what", "line")
_SILENT = 60.0
"""Seconds without a renewal after which the file of another host is stale; hosts' clocks may differ."""

Fields = Mapping[str, Any]
"""The fields of a file."""


def read_stalls(where: str) -> tuple[list[Fields], list[str]]:
    """Return what the processes of a run wait for, the oldest first, and the problems of files that cannot be read.

    Files of processes that have ended, or that do not renew them, are left out. A process that does not hang writes a
    file while others do, whose `stall` is false.

    Args:
        where: A directory or URL.

    Raises:
        OSError: The directory cannot be read.
    """
    found, problems, folder = [], [], join(where, FOLDER)
    # Not `Directory`: nothing is lost if a list is not whole.
    names = Objects(folder).list() if is_url(folder) else names_in(folder) if is_directory(folder) else []
    for name in [name for name in names if name.endswith(".json")]:
        try:
            with opened(join(folder, name)) as file:
                one = json.loads(file.read())
            if isinstance(one, dict) and type(one.get("version")) is int and one["version"] > STALLS_VERSION:
                raise ValueError("it was written by a newer jstep")
            if not isinstance(one, dict) or not all(isinstance(one.get(key), kind) for key, kind in _TYPES.items()):
                raise ValueError("it is not the file of a stall")
        except FileNotFoundError:  # the process continued meanwhile
            continue
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{join(folder, name)} is skipped: {error}")
            continue
        alive = is_alive(one)
        is_current = time.time() - one["renewed"] < _SILENT if alive is None else alive
        if is_current and "exit_code" not in one:
            found.append({**one, **{key: str(one.get(key, "")) for key in _TEXTS}})
    return sorted(found, key=lambda one: float(one["since"])), problems


def waited_for(found: Sequence[Fields]) -> list[Fields]:
    """The processes that the others wait for: those that do not wait for others, or else the smaller groups."""
    own = [one for one in found if one["kind"] not in (CALL, WITH_OTHERS)]
    often = Counter(one["what"] for one in found)
    smaller = [one for one in found if often[one["what"]] < max(often.values())]
    return own if len(own) < len(found) else smaller


def silent(found: Sequence[Fields], count: int) -> list[int]:
    """The processes of a run, of so many, of which there is no file."""
    return sorted(set(range(count)) - {one["process"] for one in found})


class StallFiles:
    """The file of one process, and what the others wrote, kept up to date by a thread of its own: a disk may hang.

    Args:
        where: The directory or URL of the run; None if it has none, so that nothing is written.
        process: The index of the process.
        warn_secs: Those of the `StallHook`.

    Attributes:
        others: What the other processes wrote when their files were last read.
        reads: How often they were read.
        shown: When the file was first written; None if there is none.
        period: The seconds after which the file is renewed, and those of the others are looked for.
    """

    def __init__(self, where: str | None, process: int, warn_secs: float) -> None:
        self._where, self._process = where or "", process
        self._folder = join(self._where, FOLDER)
        self.period = 10.0 if is_url(where) else min(15.0, max(0.25, warn_secs / 4))
        self._job: Any = None
        self._begun, self._may_exist, self._has_warned = -self.period, True, False  # that of an earlier start
        self.others: list[Fields] = []
        self.reads = 0
        self.shown: float | None = None

    def exchange(self, fields: Callable[[], Fields] | None, *, read: bool = False, at_once: bool = False) -> None:
        """Begin to write the file (None: to remove it), and to read those of the others, if it is time for that."""
        from jstep.core.meshes import in_background  # not at the top: it imports JAX

        is_wanted = fields is not None or read or self._may_exist
        is_time = at_once or time.monotonic() - self._begun >= self.period or (fields is None and self._may_exist)
        if self._where and is_wanted and is_time and (self._job is None or self._job.done()):
            mine = None if fields is None else fields()
            self._begun = time.monotonic()
            self._job = in_background(lambda: self._exchange(mine, read), name="jstep-stall-files", daemon=True)

    def settle(self, fields: Callable[[], Fields] | None) -> None:
        """Write or remove the file now, but do not wait long for a disk."""
        for begin in (bool, functools.partial(self.exchange, fields, at_once=True)):
            begin()
            futures.wait([] if self._job is None else [self._job], timeout=5.0)

    def _exchange(self, mine: Fields | None, read: bool) -> None:
        try:
            if mine is not None or self._may_exist:
                self._may_exist = mine is not None
                self._write(mine)
                self.shown = None if mine is None else self.shown or time.monotonic()
        except OSError as error:
            if mine is not None and not self._has_warned:
                _logger.warning("%s: the stall cannot be written: %s", self._folder, error)
                self._has_warned = True
        try:
            if read:
                self.others = [one for one in read_stalls(self._where)[0] if one["process"] != self._process]
        finally:
            self.reads += read

    def _write(self, mine: Fields | None) -> None:
        name = f"{self._process}.json"
        own = {"version": STALLS_VERSION, "process": self._process, "renewed": time.time()}
        data = json.dumps({**own, **this_process(), **(mine or {})}).encode()
        if is_url(self._folder):
            Objects(self._folder).delete(name) if mine is None else Objects(self._folder).write(name, data)
        elif mine is not None:
            replace_file(join(self._folder, name), data)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.remove(join(self._folder, name))
