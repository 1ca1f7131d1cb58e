"""Counts of the steps dispatched to the devices, and the operations of each."""

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from jstep.core.placement import device_count, device_of
from jstep.core.programs import Product, body_of, recomputes, work_of

_logger = logging.getLogger("jstep")

Steps = Mapping[Hashable, int]
"""Number of steps by program."""


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The operations of one step of a program, summed over all devices.

    Attributes:
        devices: The number of devices.
        device_kind: The kind of the devices.
        flops: The number of operations; None if not requested, or if the step is not compiled.
        products: The operations of matrix products by format.
        recomputes: Whether `jax.checkpoint` repeats some of the operations.
    """

    devices: int
    device_kind: str
    flops: float | None = None
    products: Mapping[Product, float] = dataclasses.field(default_factory=dict)
    recomputes: bool = False


class DispatchedSteps:
    """Counts of the steps of each program of a run, by stage and shapes of the batch.

    The operations of a step are counted once for each program, after its first call was dispatched, from the trace of
    that call.

    Attributes:
        is_wanted: Whether a hook has requested the counts; if not, `add` must not be called.
    """

    def __init__(self) -> None:
        self.is_wanted = self._is_traced = False
        self._steps: dict[Hashable, int] = {}
        self._work: dict[Hashable, StepWork] = {}

    def want(self, *, traced: bool) -> None:
        """Request the counts, and if `traced` the operations; must be called before the first step."""
        self.is_wanted, self._is_traced = True, self._is_traced or traced

    def add(self, program: Hashable, steps: int, state: Any, args: Any, trace: Callable[[], Any]) -> None:
        """Add the steps of a call.

        Args:
            program: Identifies the program, together with the shapes of the batch.
            steps: The number of steps.
            state: The state that the call returned.
            args: The batch.
            trace: Returns the trace of one step, or None.
        """
        leaves = jax.tree.leaves(args)
        key = (program, *[getattr(x, "shape", None) for x in leaves], *[getattr(x, "dtype", None) for x in leaves])
        try:
            self._steps[key] += steps
        except KeyError:
            self._work[key], self._steps[key] = self._of((state, args), trace), steps

    def steps(self) -> Steps:
        """The steps so far."""
        return dict(self._steps)

    def work_of(self, program: Hashable) -> StepWork:
        """The operations of one step of a program."""
        return self._work[program]

    def _of(self, tree: Any, trace: Callable[[], Any]) -> StepWork:
        known = StepWork(device_count(tree), device_of(tree).device_kind)
        if not self._is_traced:
            return known
        try:
            traced = trace()
            if traced is None:
                return known
            body = body_of(traced.jaxpr)
        except Exception as error:  # a failure to count must not stop the run
            _logger.warning("the operations of a step could not be counted: %s: %s", type(error).__name__, error)
            return known
        work = work_of(body)
        return dataclasses.replace(known, flops=work.all, products=work.products, recomputes=recomputes(body))
