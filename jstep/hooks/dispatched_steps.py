"""The steps that a run has handed to its devices, and what each of them computes."""

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from jstep.core.devices import device_count, device_of
from jstep.core.flops import Product, work_of
from jstep.core.operations import body_of, recomputes

_logger = logging.getLogger("jstep")

Steps = Mapping[Hashable, int]
"""How many steps of each program."""


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What one step of a program computes, all devices together.

    Attributes:
        devices: The number of devices.
        device_kind: What they are.
        flops: Operations; None if nobody wants to know, or the step is not compiled.
        products: Operations of matrix products by their format.
        recomputes: Whether `jax.checkpoint` computes some of them once more.
    """

    devices: int
    device_kind: str
    flops: float | None = None
    products: Mapping[Product, float] = dataclasses.field(default_factory=dict)
    recomputes: bool = False


class DispatchedSteps:
    """Counts the steps of each program of a run: of each stage, length of call, and shapes of the batch.

    What a step computes is counted once for each program, after its first call has been handed to the device, from the
    trace of that call.

    Attributes:
        is_wanted: Whether anybody wants to know; if nobody does, nothing is to be added.
    """

    def __init__(self) -> None:
        self.is_wanted = self._is_traced = False
        self._steps: dict[Hashable, int] = {}
        self._work: dict[Hashable, StepWork] = {}

    def want(self, *, traced: bool) -> None:
        """Asks for the steps, and perhaps for their operations; before the first step."""
        self.is_wanted, self._is_traced = True, self._is_traced or traced

    def add(self, program: Hashable, steps: int, state: Any, args: Any, trace: Callable[[], Any]) -> None:
        """Takes the steps of a call.

        Args:
            program: What it ran, as far as the shapes of the batch do not say.
            steps: How many steps.
            state: The state that it returned.
            args: Its batch.
            trace: Gives the trace of the call, or None if there is none.
        """
        leaves = jax.tree.leaves(args)
        key = (program, *[getattr(x, "shape", None) for x in leaves], *[getattr(x, "dtype", None) for x in leaves])
        try:
            self._steps[key] += steps
        except KeyError:
            self._work[key], self._steps[key] = self._of(steps, (state, args), trace), steps

    def steps(self) -> Steps:
        """The steps so far."""
        return dict(self._steps)

    def work_of(self, program: Hashable) -> StepWork:
        """What a step of a program computes."""
        return self._work[program]

    def _of(self, steps: int, tree: Any, trace: Callable[[], Any]) -> StepWork:
        known = StepWork(device_count(tree), device_of(tree).device_kind)
        if not self._is_traced:
            return known
        try:
            traced = trace()
            if traced is None:
                return known
            body = body_of(traced.jaxpr)
        except Exception as error:  # the step has run: that it cannot be counted must not stop it
            _logger.warning("the operations of a step could not be counted: %s: %s", type(error).__name__, error)
            return known
        work = work_of(body)
        products = {product: flops / steps for product, flops in work.products.items()}
        return dataclasses.replace(known, flops=work.all / steps, products=products, recomputes=recomputes(body))
