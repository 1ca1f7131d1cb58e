"""`steps_per_call="auto"`: choose the most steps of a call from the times of the first calls."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jstep.core.meshes import in_background
from jstep.distributed import processes

_logger = logging.getLogger("jstep")

AUTO = "auto"
LONGEST_CALL, MOST = 5e-3, 64
"""The seconds that a call may take, and the most steps that it may have."""
_UNTIMED, _TIMED = 2, 5
"""The number of calls that compile and warm up, and of those that are timed."""


def most_steps(seconds: float) -> int:
    """The most steps of a call, a power of two, for steps that take some seconds each."""
    most = 1
    while most < MOST and 2 * most * seconds <= LONGEST_CALL:
        most *= 2
    return most


class AutoSteps:
    """Timer of the first calls of a run, which then switches to longer calls once their program is compiled.

    It waits for the device during the calls that it times, so that their times are those of the device. Processes of
    one run switch at the same call; for that, they wait for the compilation.

    Args:
        compile: `compile(most)` compiles the program of up to that many steps.
        switch: `switch(most)` makes later calls of up to that many steps.
        clock: Returns seconds; replaced in tests.
    """

    def __init__(
        self,
        compile: Callable[[int], object],
        switch: Callable[[int], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._compile, self._switch, self._clock = compile, switch, clock
        self._calls = 0
        self._seconds: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether the number of steps is chosen."""
        return len(self._seconds) == _TIMED

    def before(self, state: Any) -> float:
        """Called before a call of one step; return the time, for `after`."""
        if self._calls >= _UNTIMED:
            jax.block_until_ready(state)
        return self._clock()

    def after(self, began: float, state: Any) -> None:
        """Called after it, with the state that it returned."""
        self._calls += 1
        if self._calls <= _UNTIMED:
            return
        jax.block_until_ready(state)
        self._seconds.append(self._clock() - began)
        if self.is_over:
            self._choose(min(self._seconds))

    def _choose(self, seconds: float) -> None:
        if not processes.is_single_process():
            (slowest,) = processes.max_over_processes(np.array([round(seconds * 1e6)], np.int32))
            seconds = float(slowest) / 1e6
        most = most_steps(seconds)
        steps = "1 step" if most == 1 else f"up to {most} steps"
        _logger.info('steps_per_call="auto": %s a call, as a step takes %.3g ms', steps, 1e3 * seconds)
        if most == 1:
            return
        if processes.is_single_process():
            in_background(functools.partial(self._prepare, most), name="jstep-compile")
        else:
            self._prepare(most)

    def _prepare(self, most: int) -> None:
        try:
            self._compile(most)
        except Exception as error:
            _logger.warning("the program of %d steps could not be compiled: %s: %s", most, type(error).__name__, error)
        else:
            self._switch(most)
