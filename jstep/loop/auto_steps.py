"""`steps_per_call="auto"`: the maximum number of steps of a call is chosen from the times of the first calls."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jstep.core.logs import logger
from jstep.core.threads import in_background
from jstep.core.trees import Tree
from jstep.distributed import processes
from jstep.loop.programs import READ_AHEAD, Chunk, ProgramTable

MAX_CALL_SECS, MAX_STEPS_PER_CALL = 5e-3, 64
"""The maximum duration of a call in seconds, and its maximum number of steps."""
_UNTIMED, _TIMED = 2, 5
"""The number of calls for compilation and warm-up, and of timed calls."""


def choose_max_steps(seconds: float) -> int:
    """Return the maximum number of steps of a call, a power of two, from the duration of a step."""
    return int(min(MAX_STEPS_PER_CALL, 2 ** max(0, math.floor(math.log2(MAX_CALL_SECS / seconds)))))


class AutoSteps:
    """Timer of the first calls of a run, which then switches to longer calls once their program is compiled.

    It waits for the device during the timed calls. All processes switch at the same step, after everything read ahead;
    for this they wait for the compilation.
    """

    def __init__(self, table: ProgramTable, clock: Callable[[], float] = time.perf_counter) -> None:
        self._table, self._clock = table, clock
        self._left, self._seconds = _UNTIMED + _TIMED, math.inf

    @property
    def is_over(self) -> bool:
        return not self._left

    def timed(self, state: Tree, chunk: Chunk) -> Any:
        self._left -= 1
        is_timed = self._left < _TIMED
        if is_timed:
            jax.block_until_ready(state)
        began = self._clock()
        result = chunk.program.run(state, chunk, self._table.sums)
        if is_timed:
            jax.block_until_ready(result[0])
            self._seconds = min(self._seconds, self._clock() - began)
        if self.is_over:
            self._choose(self._seconds, chunk.first + 1 + READ_AHEAD)
        return result

    def _choose(self, seconds: float, first: int) -> None:
        is_alone = processes.is_single_process()
        if not is_alone:
            seconds = float(processes.max_over_processes(np.array([seconds], np.float32))[0])
        max_steps = choose_max_steps(seconds)
        steps = "1 step" if max_steps == 1 else f"up to {max_steps} steps"
        logger.info('steps_per_call="auto": %s per call (one step takes %.3g ms)', steps, 1e3 * seconds)
        lengthen = functools.partial(self._lengthen, max_steps, first)
        if max_steps > 1:
            in_background(lengthen, name="jstep-compile") if is_alone else lengthen()

    def _lengthen(self, max_steps: int, first: int) -> None:
        failed = False
        try:
            self._table.compile_longer(max_steps)
        except Exception as error:
            failed = True
            text = "the program of %d steps could not be compiled: %s: %s"
            logger.warning(text, max_steps, type(error).__name__, error)
        if not processes.any_process(failed):
            self._table.switch(max_steps, first)
