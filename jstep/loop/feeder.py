"""Calls of a run: batches cut at stages and due hooks, read ahead where it pays, and the loop over them."""

import dataclasses
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.checks import as_function
from jstep.core.trees import arguments_of, flatten
from jstep.data.loaders import LivePosition, Source
from jstep.data.rows import Staircase, as_staircase
from jstep.data.to_devices import Reader, as_shardings, copied, placement
from jstep.distributed import processes
from jstep.hooks.hook import NEVER
from jstep.hooks.timeline import Stopwatch
from jstep.loop.stopping import StopSignals, StopWaiting
from jstep.queues.queues import until_end

# Whether a thread reads the batches ahead of the loop, decided all along by what either way costs the loop.
#
# A thread hides the time that batches take, and costs time of its own: handing over, and the interpreter's lock, which
# Python code of the thread and of the loop cannot hold at once. What this costs depends on the machine, its load, the
# batches, and the step, so it is measured: now and then the other way is on trial for a few calls, and is kept if it
# makes the calls quicker.

_SHARE = 0.05
"""The share of the time of a step that a thread must gain."""
_LOSSES = 0.01
"""The share of the run's time that trials may cost."""
_APART = 16
"""The time between trials, as a multiple of the time of a trial that cost nothing."""
_MOST_CALLS = 64
"""The most calls from one decision to the next: enough for a good estimate."""
_HAND_OVER = 1e-4
"""The seconds that a step must wait for its batch before a thread is tried: handing a batch over wakes a thread twice
and moves the interpreter's lock as often, which takes tens of microseconds, and more beside busy processes."""
AHEAD = 2
"""The number of calls whose batches the thread reads ahead of the loop."""


TimedCall = tuple[float, float, int]
"""The seconds that the loop waited for the batches of a call, those until it needed the next ones, and its steps.

A plain tuple, because one is made at each call.
"""


class Choice(NamedTuple):
    """A way of reading batches, used until the next decision.

    Attributes:
        ahead: Whether a thread reads them ahead of the loop.
        calls: The number of calls until the next decision.
        is_trial: Whether this way of reading is on trial.
        is_second: Whether the other way has won a trial, and this is the way before, on trial once more.
        usual: During a trial, the cost of the other way, in seconds per step.
        trial: The number of calls of the next trial.
        patience: The seconds until the next trial; negative if it is overdue.
    """

    ahead: bool = False
    calls: int = 4
    is_trial: bool = False
    is_second: bool = False
    usual: float = 0.0
    trial: int = 8
    patience: float = 0.0


def cost(calls: Sequence[TimedCall]) -> tuple[float, float]:
    """Return the typical seconds per step that the loop waited, and those of everything.

    Some waits are long by chance, as when another process had the core: the longest of every sixteen are left out.
    The others count on average, as loaders may be slow at every second or third batch. Of the rest, the median counts:
    some calls save or evaluate, which has nothing to do with the batches.
    """
    waits = sorted(waited / steps for waited, _, steps in calls)
    waits = waits[: len(waits) - -(-len(waits) // 16)]
    waited = sum(waits) / len(waits)
    return waited, waited + sorted(rest / steps for _, rest, steps in calls)[len(calls) // 2]


def decide(choice: Choice, calls: Sequence[TimedCall]) -> Choice:
    """Return how to read the next batches.

    Trials last longer and longer, for better estimates. After each, the next one waits until its loss is a small share
    of the time of the run. A way that wins must do so twice, against the calls before it and those after it, because a
    machine may become quicker at any time. A thread must gain a share of the time, whichever way is on trial. As long
    as the loop reads the batches itself and waits next to nothing for them, or less than handing them over would take,
    a thread could gain nothing and there is no trial.

    Args:
        choice: How batches were read.
        calls: The calls since the last decision.
    """
    waited, now = cost(calls)
    steps = sum(steps for _, _, steps in calls)
    if choice.is_trial:
        thread, alone = (now, choice.usual) if choice.ahead else (choice.usual, now)
        ahead = thread < (1 - _SHARE) * alone
        if ahead == choice.ahead and not choice.is_second:
            return choice._replace(ahead=not ahead, is_second=True, usual=now)
        loss = 0.0 if choice.is_second else (now - choice.usual) * steps
        longer = min(2 * choice.trial, _MOST_CALLS)
        return Choice(ahead, calls=choice.trial, trial=longer, patience=max(loss / _LOSSES, _APART * now * steps))
    patience = choice.patience - now * steps
    if patience > 0 or not (choice.ahead or waited > max(_SHARE * now, _HAND_OVER)):
        return choice._replace(calls=min(2 * choice.calls, _MOST_CALLS), patience=patience)
    return Choice(not choice.ahead, calls=choice.trial, is_trial=True, usual=now, trial=choice.trial)


class ReadAhead:
    """The current choice of a run, revised as the times of its calls come in.

    Attributes:
        choice: How batches are read now.
    """

    def __init__(self) -> None:
        self.choice = Choice()
        self._calls: list[TimedCall] = []
        # Not representative: what precedes the first call, the first calls, which open files and compile, and those
        # after a change, whose batches are still read the other way.
        self._unsettled = AHEAD + 1

    def after_call(self, waited: float, rest: float, steps: int) -> bool:
        """Record the call that has ended, as in `TimedCall`; return whether the thread reads the next batches."""
        if self._unsettled:
            self._unsettled -= 1
            return self.choice.ahead
        self._calls.append((waited, rest, steps))
        if len(self._calls) >= self.choice.calls:
            before = self.choice.ahead
            self.choice = decide(self.choice, self._calls)
            self._calls.clear()
            self._unsettled = AHEAD if self.choice.ahead != before else 0
        return self.choice.ahead


class NeverAhead(ReadAhead):
    """For batches that must not be made ahead, whatever the times."""

    def after_call(self, waited: float, rest: float, steps: int) -> bool:
        """False."""
        return False


# The stages of a run: which training step runs when, and where calls must end.

TrainSteps = Staircase[Callable[..., Any]]

_MOST_CHANGES = 64
"""The maximum number of changes of batch shapes to compile ahead; later ones are compiled when they are due."""
_AHEAD = 8
"""The number of ends of calls that are known ahead; more than the calls that a thread prefetches."""


class Segment(NamedTuple):
    """A range of steps that one program runs: one training step, batches of the same shapes.

    Attributes:
        first: The first step.
        stop: The step after the last.
        stage: The index of the stage.
        is_edge: Whether a stage begins with it.
    """

    first: int
    stop: int
    stage: int
    is_edge: bool


def stages_of(train_step: Any) -> TrainSteps:
    """Normalize one training step, or a mapping of stages, to a staircase.

    Raises:
        TypeError: A training step is not a function, or a key is not an integer.
        ValueError: The mapping is empty, or its keys lack 0 or include a negative step.
    """
    return as_staircase(train_step, "train_step", _as_step)


def _as_step(value: Any, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = as_function(value, name, "(state, *args) -> (state, metrics)")
    return function


def name_of_step(step: Any) -> str:
    """The name of a training step among several: that of its loss if it comes from `minimize`."""
    return str(getattr(step, "title", None) or getattr(step, "__name__", "train_step"))


def lanes_of(step: Any) -> int | None:
    """The number of lanes of a training step; None if it computes in none, or is a function that does not say so."""
    found = getattr(step, "lanes", None)
    return found if isinstance(found, int) else None


class StageBoundaries:
    """The steps at which calls must end because another program follows.

    Args:
        stages: The training steps.
        next_change: Maps a step to the next one at which the shapes of the batches change, or to None; None if the
            changes are not known.
    """

    def __init__(self, stages: TrainSteps, next_change: Callable[[int], int | None] | None = None) -> None:
        self._stages, self._next_change = stages, next_change

    def after(self, step: int, last_step: int) -> int:
        """The first such step after `step`, at most `last_step`."""
        change = None if self._next_change is None else self._next_change(step)
        edge = self._stages.edge_after(step)
        return min(end for end in (last_step, change, edge) if end is not None)

    def ends(self, start: int, last_step: int, due_after: Callable[[int], int] = lambda step: NEVER) -> Iterator[int]:
        """Yield the steps at which calls must end, in order, the last one included.

        Args:
            start: The first step.
            last_step: The step at which the run ends.
            due_after: Maps a step to the next one at which a hook is due.
        """
        step = start
        while step < last_step:
            step = min(self.after(step, last_step), due_after(step))
            yield step

    def segments(self, start: int, last_step: int) -> Iterator[Segment]:
        """Yield the segments of a run in order."""
        first, changes = start, 0
        while first < last_step:
            stop = self.after(first, last_step)
            is_edge = first in self._stages.firsts
            changes += not is_edge
            if changes > _MOST_CHANGES:
                # Skip to the next stage: all stages are compiled ahead.
                edge = self._stages.edge_after(first)
                if edge is None:
                    return
                first, changes = edge, 0
                continue
            yield Segment(first, stop, self._stages.index(first), is_edge)
            first = stop


class EndsAhead(Iterator[int]):
    """The steps at which calls end, computed in the thread of the loop and read in the thread that makes the batches.

    They depend on the user's hooks, which must not be called from another thread. An error in one of them ends the run
    at the last step that is known, however far ahead that was found.

    Args:
        ends: The steps, from `StageBoundaries.ends`.
    """

    def __init__(self, ends: Iterator[int]) -> None:
        self._ends, self._thread = ends, threading.get_ident()
        self._known: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
        self._is_over = False

    def extend(self) -> None:
        """Compute the next steps; must be called in the thread of the loop after each call."""
        while self._known.qsize() < _AHEAD and not self._is_over:
            try:
                self._known.put(next(self._ends))
            except Exception as error:
                self._is_over = True
                self._known.put(error)

    def close(self) -> None:
        """End the steps, for a thread that waits for one."""
        self._known.put(StopIteration())

    def __next__(self) -> int:
        if self._known.empty() and threading.get_ident() == self._thread:
            self.extend()
        end = self._known.get()
        if isinstance(end, Exception):
            self._known.put(end)
            raise end
        return end


# Stack, place and prefetch batches.


class Plan(NamedTuple):
    """The form of calls with batches of some shapes.

    Attributes:
        most: The most steps of a call.
        looped: What runs calls of up to that many steps; None if each call is one call of the training step.
        is_stacked: Whether the arguments of the steps are stacked.
    """

    most: int = 1
    looped: Any = None
    is_stacked: bool = False


@dataclasses.dataclass(slots=True)  # not frozen: creating a frozen one takes four times as long
class Call:
    """The batches of one call.

    Attributes:
        args: The arguments of one step; if `is_stacked`, those of `most` steps, the last ones being padding.
        steps: The number of steps.
        first: The step at which the call begins.
        position: The position of the source after these batches, from `copied_position`; None if not known.
        shapes: The structure, shapes and dtypes of each of its batches.
        looped: As in `Plan`.
        most: As in `Plan`.
        is_stacked: As in `Plan`.
    """

    args: tuple[Any, ...]
    steps: int
    first: int
    position: Any = None
    shapes: Any = None
    looped: Any = None
    most: int = 1
    is_stacked: bool = False


CopiedBatches = Iterator[tuple[Any, Any]]
"""Batches that no other code writes to, each with the position after it."""
PlanOf = Callable[[int, Any, Callable[[], tuple[Any, ...]]], Plan]
"""`plan(step, shapes, args)`, as `Programs.plan`."""


def make_calls(
    items: CopiedBatches,
    start: int,
    sharding: Any = None,
    *,
    on_device: bool = False,
    plan: PlanOf | None = None,
    ends: Iterable[int] = (),
) -> Iterator[Call]:
    """Yield batches as the arguments of calls.

    A call of several steps ends where its plan, the shapes of the batches or `ends` require it.

    Args:
        items: The batches, from `copied_batches`.
        start: The step of the first batch.
        sharding: The sharding of a batch, as in `prefetch_to_device`; None does not move it.
        on_device: Whether to put batches without a sharding on the default device, for a step that is not compiled:
            such a step would see NumPy arrays or JAX arrays, depending on whether batches are prefetched.
        plan: Returns how calls are made; None if each takes one step.
        ends: The steps at which calls must end, in order; the last one ends the run.
    """
    one = None if sharding is None and not on_device else placement(as_shardings(sharding))
    many = None if sharding is None else placement(as_shardings(sharding, stacked=True))
    if plan is None:
        for step, (batch, position) in enumerate(items, start):
            placed = batch if one is None else one(batch)
            args = placed if type(placed) is tuple else arguments_of(placed)
            yield Call(args, 1, step, position, _shapes_of(batch))
        return
    step = start
    some: list[tuple[Any, Any]] = []
    for end in ends:
        while step < end:
            some = some or list(itertools.islice(items, 1))
            if not some:
                return
            batch, shapes = some[0][0], _shapes_of(some[0][0])
            most, looped, is_stacked = plan(step, shapes, functools.partial(_args_of, batch, one))
            later: list[tuple[Any, Any]] = []
            while len(some) < min(most, end - step) and not later and (item := next(items, None)) is not None:
                (some if _shapes_of(item[0]) == shapes else later).append(item)
            if not is_stacked:
                placed = batch if one is None else one(batch)
            else:
                whole = _stacked([batch for batch, _ in some], most)
                placed = whole if many is None else many(whole)
            yield Call(arguments_of(placed), len(some), step, some[-1][1], shapes, looped, most, is_stacked)
            step += len(some)
            some = later


def _args_of(batch: Any, place: Callable[[Any], Any] | None) -> tuple[Any, ...]:
    args: tuple[Any, ...] = arguments_of(batch if place is None else place(batch))
    return args


def copied_batches(source: Source, fetched: "FetchCounter | None" = None) -> CopiedBatches:
    """Yield each batch of a source, copied if necessary so that no other code writes to it, and the position after it.

    Args:
        source: The batches. The position of those that are made with the state is not taken here: see `LivePosition`.
        fetched: A counter of the batches.
    """
    fetched = fetched or FetchCounter()
    at, fresh = None if source.is_of_state else source.position, source.fresh
    for batch in until_end(source.items):
        yield copied(batch, fresh=fresh), None if at is None else at()
        fetched.count += 1  # after it was placed, too: errors name the batch that was not


def _shapes_of(batch: Any) -> Any:
    """The structure, shapes and dtypes of a batch; batches that can be stacked agree in them."""
    leaves, structure = flatten(batch)
    return structure, tuple((leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf) for leaf in leaves)


def _stacked(some: list[Any], most: int) -> Any:
    """Stack batches of the same shapes; the last one is repeated where there are fewer than `most`."""
    flat = [flatten(one) for one in some]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return flat[0][1].unflatten([_stack([*column, *[column[-1]] * (most - len(some))]) for column in columns])


def _stack(leaves: list[Any]) -> Any:
    return _stack_arrays(leaves) if isinstance(leaves[0], jax.Array) else np.stack(leaves)


_stack_arrays = jax.jit(jnp.stack)  # one dispatch for all leaves of a column


@dataclasses.dataclass(slots=True)
class FetchCounter:
    """The number of batches that were fetched."""

    count: int = 0


class BatchFeeder:
    """Iterator over the calls of a run. Their batches are read by the loop, or ahead of it by a thread.

    Whoever reads, the calls are the same, in the same order: the thread reads on request only, and the loop reads only
    when it has taken all that it requested.

    Args:
        source: The batches.
        made: The calls, from `make_calls`.
        signals: Interrupt the wait for a batch when the run is to stop.
        watch: The stopwatch of the run.
        read_ahead: Decides after each call whether the thread reads.

    Attributes:
        waiting: Whether the loop is waiting for a batch.
        steps: The number of steps of the latest call.
        got: When the loop got it, in seconds of the stopwatch.
        live: The position of a source whose batches are made with the state; None for any other.
        position: The position of any other source after the latest call, from `copied_position`; None if not known.
    """

    def __init__(
        self,
        source: Source,
        made: Iterator[Call],
        signals: StopSignals | None = None,
        watch: Stopwatch | None = None,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self._watch = Stopwatch() if watch is None else watch
        self._read_ahead: ReadAhead = read_ahead or (NeverAhead() if source.is_of_state else ReadAhead())
        self._made, self._signals = made, StopSignals() if signals is None else signals
        self._reader, self._requested = Reader(functools.partial(next, made)), 0
        self._waited = self.got = 0.0
        self.waiting = False
        self.steps, self._taken = 1, 0
        self._before: Any = None
        self.live = LivePosition(source.position, source.begin) if source.is_of_state and source.position else None
        at = None if source.is_of_state else source.begin or source.position
        self.position = at() if at else None

    def __iter__(self) -> "BatchFeeder":
        return self

    def __next__(self) -> Call:
        self.waiting = True
        # From here on a signal interrupts the wait; check for one that arrived before.
        if self._signals.interrupts:
            raise StopWaiting
        watch = self._watch
        clock, mark, before, waiting = watch.clock, watch.mark, watch.current, watch.waiting
        asked = clock()
        mark((waiting, asked))  # `watch.switch`, without the calls, which cost as much as a small batch
        watch.current = waiting
        try:
            ahead = self._read_ahead.after_call(self._waited, asked - self.got, self.steps)
            if self._requested:
                call: Call = self._reader.take()
                self._requested -= 1
            elif self.live is None:
                call = next(self._made)
            else:
                self.live.prepare()
                call = self.live.take(self._made)
            if ahead:
                self._reader.request(AHEAD - self._requested)
                self._requested = AHEAD
        except StopIteration:
            self.waiting = False
            raise
        finally:
            got = clock()
            mark((before, got))
            watch.current = before
        self.waiting = False
        if self.live is not None:
            self.live.after_batch()
        self._waited, self.got = got - asked, got
        # If the wait is interrupted, the position stays before the batch, however much of it was read.
        self.steps = steps = call.steps
        self._taken += steps
        self._before, self.position = self.position, call.position
        return call

    @property
    def may_be_interrupted(self) -> bool:
        """Whether a signal may interrupt the loop now without losing a batch or a position."""
        return self.waiting and not (self.live is not None and self.live.is_moving)

    def is_position_lost(self, steps: int) -> bool:
        """Whether the position after that many steps was too large to be copied before it moved on."""
        return self.live is not None and self.live.is_lost(steps < self._taken)

    def position_after(self, steps: int) -> Any:
        """The position after that many steps: all that were fetched, or all but those of the latest call."""
        if self.live is not None:
            return self.live.now() if steps >= self._taken else self.live.before
        return self.position if steps >= self._taken else self._before

    def close(self) -> None:
        """End the thread."""
        self._reader.close()


def fetched_by_all(calls: Iterable[Call]) -> Iterable[Call]:
    """Return the calls; the first one is fetched by all processes, or there is an error on all of them."""
    if processes.is_single_process():
        return calls
    rest = iter(calls)
    first = processes.on_all_processes(lambda: next(rest, None), "batches: the first one cannot be fetched")
    if processes.any_process(first is None) and first is not None:
        raise ValueError("batches: another process has no batch at all; give each process a part")
    return rest if first is None else itertools.chain([first], rest)


# Running the steps of a call, and the state of a run that has no hooks.

RunCall = Callable[[Any, Call], Any]
"""`run_call(state, call) -> (state, metrics)`: `Programs`."""


class Loop(Protocol):
    """The current step and state: a `LoopState`, or the `Run` of `train`."""

    step: int
    state: Any
    metrics: Any
    rows: int | None
    shapes: Any


@dataclasses.dataclass(slots=True)
class LoopState:
    """The current state of a run.

    Attributes:
        step: The step of the last complete state.
        state: That state.
        metrics: The metrics of the last step; None before the first call.
        rows: The number of examples per step; None if not known.
        shapes: The shapes of its batch, as in `Call`.
    """

    step: int
    state: Any
    metrics: Any = None
    rows: int | None = None
    shapes: Any = None


def take_steps(loop: Loop, run_call: RunCall, call: Call) -> None:
    """Run the steps of a call. It never waits for the device.

    Args:
        loop: The current step and state; it is up to date if the call raises.
        run_call: Runs the steps.
        call: The batches, from `jstep.loop.feeder.make_calls`.
    """
    result = run_call(loop.state, call)
    if call.shapes != loop.shapes or loop.metrics is None:
        loop.shapes, loop.rows = call.shapes, _rows(call)
    loop.state, loop.metrics = result
    loop.step = call.first + call.steps


def run_steps(loop: LoopState, run_call: RunCall, calls: Iterable[Call], stop: int) -> None:
    """Run steps up to `stop`, or until the calls end: what `train` does without hooks, for `replay`, `verify_resume`.

    To run from a state at step 3 to step 7, two steps per call:

        stages = stages_of(train_step)                                 # jstep.loop.feeder
        source = source_of(batches, 3, 7)                              # jstep.data.loaders
        ends = StageBoundaries(stages, source.next_change).ends(3, 7)
        programs = Programs(stages, 2, state=state)                    # jstep.loop.programs
        calls = programs.calls(copied_batches(source), 3, ends)        # jstep.loop.feeder
        loop = LoopState(3, state)
        run_steps(loop, programs, calls, 7)
        loop.step, loop.state                                          # 7, or less if the batches ended

    Args:
        loop: The initial step and state, which is donated to a compiled step; kept up to date.
        run_call: Runs the steps of a call.
        calls: The calls.
        stop: The step at which to end.
    """
    for call in calls:
        take_steps(loop, run_call, call)
        if loop.step >= stop:
            break


def _rows(call: Call) -> int | None:
    """The size of the leading axis of all arguments of a step; None if the sizes differ or no argument has one."""
    axis = int(call.is_stacked)
    shapes = [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(call.args)]
    sizes = {shape[axis] for shape in shapes if shape is not None and len(shape) > axis}
    return sizes.pop() if len(sizes) == 1 else None
