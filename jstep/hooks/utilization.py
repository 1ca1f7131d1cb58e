"""FLOP/s utilization: the fraction of the devices' peak that a run reaches."""

import logging
from typing import Any, NamedTuple

import jax

from jstep.core.checks import as_number
from jstep.core.devices import has_peaks, peak_of
from jstep.core.placement import device_of
from jstep.hooks.dispatched_steps import DispatchedSteps, Steps, StepWork
from jstep.state.train_state import TrainState

_logger = logging.getLogger("jstep")


class Utilization(NamedTuple):
    """A FLOP/s utilization.

    Attributes:
        name: `"mfu"`, or `"hfu"` if it includes operations that are recomputed to save memory.
        value: A fraction.
    """

    name: str
    value: float


class UtilizationMeter:
    """Meter of the utilization: the time that steps would take at the peak, divided by the time that they take.

    Utilization = Σ over steps of operations / (peak · number of devices), divided by the seconds that they took.

    Args:
        peak_flops: Peak operations per second of one device; None to look it up.
        flops_per_step: Operations of a step, summed over all devices; None to count those of the traced step.

    Raises:
        TypeError: An argument is not a number.
        ValueError: An argument is not positive and finite.
    """

    def __init__(self, peak_flops: float | None = None, flops_per_step: float | None = None) -> None:
        self._peak = _positive(peak_flops, "peak_flops", "operations a second of one device")
        self._flops = _positive(flops_per_step, "flops_per_step", "operations of a step, all devices together")
        self._dispatched: DispatchedSteps | None = None
        self._warned: set[str] = set()

    def begin(self, dispatched: DispatchedSteps | None, state: TrainState) -> None:
        """Request the counts of steps, if the peak of the device is known."""
        self._dispatched, self._warned = None, set()
        if dispatched is None:
            return
        device = device_of(state)
        if self._peak is None and not has_peaks(device.device_kind):
            if device.platform != "cpu" or self._flops is not None:
                self._log_once(f"the peak of the device {device.device_kind!r} is not known")
            return
        dispatched.want(traced=self._peak is None or self._flops is None)
        self._dispatched = dispatched

    def steps(self) -> Steps | None:
        """The counts of steps so far; None if the utilization is not measured."""
        return None if self._dispatched is None else self._dispatched.steps()

    def between(self, before: Steps | None, after: Steps | None, seconds: float) -> Utilization | None:
        """The utilization of the steps between two counts; None if it is not known for all of them."""
        if self._dispatched is None or before is None or after is None:
            return None
        at_peak, is_twice = 0.0, False
        for program, steps in after.items():
            count = steps - before.get(program, 0)
            if count:
                work = self._dispatched.work_of(program)
                secs = self._secs(work)
                if secs is None:
                    return None
                at_peak, is_twice = at_peak + count * secs, is_twice or work.recomputes
        return Utilization("hfu" if is_twice and self._flops is None else "mfu", at_peak / seconds)

    def _secs(self, work: StepWork) -> float | None:
        """The seconds that a step would take at the peak."""
        flops = work.flops if self._flops is None else self._flops
        peak = peak_of(work.device_kind, work.products) if self._peak is None else self._peak
        if peak is None and work.products:
            formats = ", ".join(sorted({f"{one.dtype} ({one.precision})" for one in work.products}))
            self._log_once(f"the peak of {work.device_kind!r} is not known for matrix products of {formats}")
        return None if flops is None or peak is None else flops / (peak * work.devices)

    def _log_once(self, why: str) -> None:
        if why not in self._warned and jax.process_index() == 0:
            self._warned.add(why)
            _logger.info("neither mfu nor hfu is shown: %s; give StepCounterHook(peak_flops=…)", why)


def shown_share(share: Utilization | None) -> list[str]:
    """The utilization as shown in log lines, such as "mfu 0.412", in a list; empty if it is not known."""
    return [] if share is None else [f"{share.name} {share.value:.3g}"]


def _positive(value: Any, argument: str, meaning: str) -> float | None:
    return None if value is None else as_number(value, argument, low=0, above=True, meaning=meaning)
