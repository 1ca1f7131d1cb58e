"""Sums over the steps that return the same metrics."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.contexts import internal_transfers
from jstep.hooks import metric_sums_program
from jstep.hooks.hook import Metrics
from jstep.hooks.metric_sums_program import SKIPS
from jstep.hooks.values import host, is_number, is_numeric

LOSS, GRAD_NORM = "loss", "grad_norm"
_CALLS, _VALUES = 16, 128
"""The maximum number of calls, and of values, to add in one dispatch, which costs as much as a small step."""


class Part(NamedTuple):
    """The part of an interval whose steps have the same metrics.

    Attributes:
        names: The accumulated metrics, in order.
        fixed: The constant metrics.
        steps: The number of steps.
        row: A row of the sums, on the device.
        step_of: Maps the index of a step in the interval to its number in the run.
    """

    names: list[str]
    fixed: list[tuple[str, Any]]
    steps: int
    row: Any
    step_of: Callable[[int], int]


class Layout:
    """Sums over the steps that return the same metrics."""

    def __init__(
        self, metrics: Metrics, stacked: bool, limits: list[float], constants: frozenset[str], skip: str | None
    ) -> None:
        numbers = [name for name, value in metrics.items() if is_number(value, int(stacked))]
        self.fixed = [(name, metrics[name]) for name in numbers if name in constants]
        devices = [n for n in numbers if n not in constants and isinstance(metrics[n], jax.Array)]
        self._plain = [n for n in numbers if n not in constants and not isinstance(metrics[n], jax.Array)]
        self.names = devices + self._plain
        loss = self.names.index(LOSS) if LOSS in self.names else None
        if loss is None and isinstance(metrics.get(LOSS), jax.Array) and is_numeric(metrics[LOSS]):
            loss = -1  # several numbers per step, or a constant
        self._wanted = [*devices, LOSS] if loss == -1 else devices
        index = {name: i for i, name in enumerate(self.names)}
        self._program = metric_sums_program.program(
            loss, None if skip is None else index.get(skip), index.get(GRAD_NORM), stacked
        )
        self._room = 1 if stacked or loss == -1 else max(1, min(_CALLS, _VALUES // max(1, len(devices))))
        values = [metrics[name] for name in self._wanted]
        self._is_global = any(not value.is_fully_addressable for value in values)
        wide = any(value.dtype.itemsize > 4 for value in values if is_numeric(value))
        rows = metric_sums_program.empty(len(self.names), limits, np.float64 if wide else np.float32)
        self.sums: Any = None
        if self.names or loss is not None:
            with internal_transfers():
                self.sums = jax.device_put(rows, _sums_sharding(values, self._is_global))
        self._held: list[tuple[list[Any], int]] = []
        self._halves: list[Any] = []
        self._total, self._stop = 0, -1
        self._pieces: list[tuple[int, int]] = []
        self._taken = [0] * len(limits)

    def changed(self, metrics: Metrics) -> list[str]:
        """The names of the constants that differ from those of this layout."""
        return [
            name
            for name, value in self.fixed
            if metrics[name] is not value and not np.array_equal(host(metrics[name]), host(value), equal_nan=True)
        ]

    def add(self, first: int, steps: int, metrics: Metrics) -> None:
        """Add the metrics of a call; several calls are collected and added at once."""
        if first != self._stop:
            self._pieces.append((self._total, first + 1))
        self._total += steps
        self._stop = first + steps
        if self.sums is None:
            return
        values = [metrics[name] for name in self._wanted]
        if self._is_global:  # other processes may not run this program
            values = [_local(value) for value in values]
        if self._plain:
            self._halves.append(_halves([metrics[name] for name in self._plain], self.sums.dtype))
        self._held.append((values, steps))
        if len(self._held) >= self._room:
            self.flush()

    def flush(self) -> None:
        """Add the collected calls."""
        if not self._held:
            return
        calls, count = [values for values, _ in self._held], sum(steps for _, steps in self._held)
        halves, missing = self._halves, self._room - len(calls)
        self._held, self._halves = [], []
        calls += calls[-1:] * missing  # padding, so that one program serves any number of calls
        plain = np.concatenate(halves + halves[-1:] * missing, axis=1) if halves else None
        with internal_transfers(), _without_nan_checks():
            self.sums = self._program(self.sums, calls, plain, np.int32(count))

    def resume_from(self, sums: Any) -> None:
        """Continue the counts of consecutive skipped steps of another layout."""
        if self.sums is not None:
            with internal_transfers(), _without_nan_checks():
                self.sums = metric_sums_program.with_skips(self.sums, host(sums)[:, SKIPS])

    def take(self, number: int) -> Part | None:
        """Return the sums that a subscriber has not taken yet; None if there are no new steps."""
        before, self._taken[number] = self._taken[number], self._total
        if self._total == before:
            return None
        self.flush()
        pieces = tuple(self._pieces)
        gone = min(self._taken)
        while len(self._pieces) > 1 and self._pieces[1][0] <= gone:
            del self._pieces[0]

        def step_of(i: int) -> int:
            base, step = next(piece for piece in reversed(pieces) if piece[0] <= before + i)
            return step + before + i - base

        row: Any = _Nothing()
        if self.sums is not None:
            with internal_transfers(), _without_nan_checks():
                row, self.sums = metric_sums_program.take(self.sums, np.int32(number))
        return Part(self.names, self.fixed, self._total - before, row, step_of)


def _halves(values: list[Any], dtype: Any) -> np.ndarray[Any, Any]:
    """Split numbers of the host into two floats each: [2, steps, metrics]."""
    both = np.stack([np.asarray(value, np.float64).reshape(-1) for value in values], axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        high = both.astype(dtype)
        low = np.where(np.isfinite(high), both - high, 0).astype(dtype)
    return np.stack([high, low])


class _Nothing:
    """The row of a layout without metrics to accumulate."""

    is_fully_addressable = True

    def copy_to_host_async(self) -> None:
        """Do nothing."""

    def is_ready(self) -> bool:
        """True."""
        return True

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.full(metric_sums_program.WATCHED, -1.0)


def _local(value: Any) -> Any:
    """This process's copy of a value that is replicated over all processes."""
    is_global = isinstance(value, jax.Array) and not value.is_fully_addressable
    return value.addressable_data(0) if is_global else value


def _sums_sharding(values: list[Any], is_global: bool) -> Any:
    """The sharding of the sums: replicated over the devices of the values."""
    value = next((_local(value) for value in values if getattr(value, "committed", False)), None)
    if value is None:
        return None
    if isinstance(value.sharding, NamedSharding):
        return NamedSharding(value.sharding.mesh, PartitionSpec())
    return value.sharding


def _checks_nans() -> bool:
    flags: Any = jax.config
    return bool(flags.jax_debug_nans or flags.jax_debug_infs)


def _without_nan_checks() -> contextlib.AbstractContextManager[object]:
    """Disable JAX's checks for NaN and infinity: here, such sums are results, not errors."""
    if not _checks_nans():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(jax.debug_nans(False))
    stack.enter_context(jax.debug_infs(False))
    return stack
