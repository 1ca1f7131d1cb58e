"""The compiled programs of a run: one for a single step and one for `steps_per_call` steps, for each stage."""

import contextlib
import logging
import math
from collections.abc import Callable
from typing import Any

import jax

from jstep.hooks.dispatched_steps import DispatchedSteps
from jstep.hooks.skipped_updates import skip_metric_of
from jstep.loop.background_compiler import BackgroundCompiler
from jstep.loop.batch_feeder import Call
from jstep.loop.cards import Cards
from jstep.loop.compilations import compilations_here, seconds_here
from jstep.loop.redundant_rows import warn_of_redundant_rows
from jstep.loop.stages import TrainSteps, name_of_step
from jstep.loop.trace_step import trace_step
from jstep.state import keep_roles
from jstep.timeline import Stopwatch
from jstep.timeline.stopwatch import STARTING
from jstep.training import TrainStep, scanned_step
from jstep.training.call_errors import explain_a_list

_logger = logging.getLogger("jstep")


def is_compiled(step: Any) -> bool:
    """Whether a step is compiled, so that it receives JAX arrays whatever it is called with."""
    return isinstance(step, TrainStep) or hasattr(step, "lower")


class Programs:
    """The programs of a run: each call runs its steps with the program for it, and each compilation is logged.

    Args:
        stages: The training steps, by the step at which each begins.
        unroll: As in `scan_steps`.
        several: Whether there are calls of several steps.
        first_call: A context manager for the very first call.
        watch: The stopwatch of the run; compilation is not counted as time of the steps.

    Attributes:
        on_device: Whether batches must be put on the device, for a step that is not compiled.
        stacks_one: Whether calls of one step must be stacked too, because the step is compiled only when scanned.
        first_compiler: Compiles the first program in the background; None if it is not.
        ahead_compiler: Compiles later programs in the background, or None.
        dispatched: The steps that were dispatched, recorded on request.
        cards: Records each program after its first call; None to record nothing.
    """

    def __init__(
        self,
        stages: TrainSteps,
        unroll: Any = None,
        *,
        several: bool = True,
        first_call: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        watch: Stopwatch | None = None,
    ) -> None:
        self._stages, self._unroll, self._has_several = stages, unroll, several
        are_compiled = all(map(is_compiled, stages.values))
        self.stacks_one, self.on_device = several and not are_compiled, not (several or are_compiled)
        self.first_compiler: BackgroundCompiler | None = None
        self.ahead_compiler: BackgroundCompiler | None = None
        self._first_call: Callable[[], contextlib.AbstractContextManager[Any]] | None = first_call
        self.dispatched = DispatchedSteps()
        self.cards: Cards | None = None
        self._begun: set[tuple[int, int]] = set()
        self._prepared: set[Any] = set()
        self._latest: Any = stages.values[0]
        self._stage, self._first, self._until = 0, 0, -1.0
        self._one: Any = None
        self._several: Any = None
        self._name, self._is_compiled = "", False
        self._compilations, self._seconds = compilations_here(), seconds_here()  # of the thread that runs the loop
        self._watch = watch

    def of_stage(self, stage: int, *, stacked: bool = False) -> Any:
        """The training step of a stage, scanned if batches are stacked."""
        step = self._stages.values[stage]
        return scanned_step(step, self._unroll) if stacked else step

    def name_of(self, stage: int) -> str:
        """The name of the training step of a stage, for logs."""
        step = self._stages.values[stage]
        return name_of_step(step) if len(self._stages.values) > 1 else getattr(step, "__name__", "train_step")

    @property
    def takes_single_steps(self) -> bool:
        """Whether there was a call of one step."""
        return any(steps == 1 for _, steps in self._begun)

    def prepare(self, stage: int, steps: int, args: Any) -> bool:
        """Record that a program is compiled ahead of its first call; return False if it was recorded before."""
        is_new = (stage, steps, args) not in self._prepared
        self._prepared |= {(stage, steps), (stage, steps, args)}
        return is_new

    @property
    def constant_metrics(self) -> Any:
        """The names of the metrics of the latest call that are constants, not computed by the step."""
        return getattr(self._latest, "constant_metrics", ())

    @property
    def skip_metric(self) -> str | None:
        """The metric of the latest call that is 1 if the whole update was skipped; None without a guard."""
        return skip_metric_of(self._latest)

    def __call__(self, state: Any, call: Call) -> Any:
        """Run the steps of a call; return the new state and the metrics."""
        step = self.step_of(call)
        if self.first_compiler is not None:
            self.first_compiler.before(call.first)
            self.first_compiler = None
        if self.ahead_compiler is not None:
            self.ahead_compiler.before(call.first, self._as_starting)
        self._latest = step
        is_first = (self._stage, call.steps) not in self._begun
        if is_first:
            self._begun.add((self._stage, call.steps))
            self._log_compilation(step, call)
        before, seconds = self._compilations[0], self._seconds[0]
        try:
            if self._first_call is None:
                result = step(state, *call.args)
            else:
                with self._first_call():
                    result = step(state, *call.args)
                self._first_call = None
        except Exception as error:
            explain_a_list(error, call.args)
            raise
        if isinstance(result, tuple) and len(result) == 2:
            result = keep_roles(state, result[0]), result[1]
        if self._compilations[0] != before:
            if self._watch is not None:
                self._watch.reassign(STARTING, self._seconds[0] - seconds)
            if not is_first and self._is_compiled:
                self._log_recompilation(call)
        if self.dispatched.is_wanted and isinstance(result, tuple):
            program, new = (self._stage, call.steps), result[0]
            self.dispatched.add(program, call.steps, new, call.args, lambda: trace_step(step, new, call.args))
        if self.ahead_compiler is not None and isinstance(result, tuple):
            self.ahead_compiler.after(result[0], call.args, stacked=call.stacked)
        if is_first and isinstance(result, tuple) and len(result) == 2:
            if len(self._begun) == 1:
                warn_of_redundant_rows(step, result[0], call.args)
            if self.cards is not None:
                self.cards.record_program(step, self._first, call.steps, *result, call.args)
        return result

    def _as_starting(self) -> contextlib.AbstractContextManager[None]:
        """A context manager that counts the time of a compilation as start-up."""
        return contextlib.nullcontext() if self._watch is None else self._watch.part(STARTING)

    def step_of(self, call: Call) -> Any:
        """The training step for a call: `step_of(call)(state, *call.args)` repeats the call."""
        if not self._first <= call.first < self._until:
            self._enter(call.first)
        return self._several if call.stacked else self._one

    def _enter(self, step: int) -> None:
        """Switch to the stage that contains a step."""
        number = self._stage = self._stages.index(step)
        stop = self._stages.edge_after(step)
        self._first, self._until = self._stages.firsts[number], math.inf if stop is None else stop
        self._one = self.of_stage(number)
        self._several = self.of_stage(number, stacked=True) if self._has_several else self._one
        self._name = self.name_of(number)
        self._is_compiled = self._has_several or is_compiled(self._one)

    def _log_compilation(self, step: Any, call: Call) -> None:
        """Log why a program is compiled, unless the run has only one."""
        size = getattr(step, "_cache_size", None)
        staged = len(self._stages.firsts) > 1
        if not (self._has_several or staged) or size is None or size() or (self._stage, call.steps) in self._prepared:
            return
        why = f"steps_per_call={call.steps}" if call.steps > 1 else call.why or "it is the first call"
        _logger.info("compiling %s for %s: %s", self._name, _steps(call.steps), why)

    def _log_recompilation(self, call: Call) -> None:
        shapes = ", ".join(
            f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}"
            for leaf in jax.tree.leaves(call.args)[:5]
        )
        _logger.info(
            "compiled %s again for %s: its batch differs from earlier ones in shapes, dtypes or placement (%s), or its "
            "state in placement",
            self._name,
            _steps(call.steps),
            shapes,
        )


def _steps(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"
