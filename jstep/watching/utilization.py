"""The observer of FLOP/s, as a share of the devices' peak."""

import functools
import importlib.resources
import tomllib
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from jstep.compiling.chunks import Chunk
from jstep.core import processes
from jstep.core.jaxprs import Product, body_of, has_remat
from jstep.core.logs import logger
from jstep.core.placement import device_count, device_of
from jstep.core.trees import Tree
from jstep.logs.speed import MeterMaker
from jstep.loop.observer import Observer
from jstep.loop.run_context import RunContext
from jstep.metering.work import work_of
from jstep.state.train_state import TrainState

# Peak operations per second of a device, by the format of its matrix products. How a device
# computes a float32 product depends on its `jax.lax.Precision`.

_NEGLIGIBLE = 0.01
"""The share of all operations below which formats without a figure are ignored."""

_FORMATS = {"bfloat16": "bf16", "float16": "f16", "float64": "f64", "int8": "int8", "uint8": "int8"}
_PASSES = {"DEFAULT": 1, "HIGH": 3, "HIGHEST": 6}
"""bfloat16 passes that a TPU runs for a float32 product, by precision."""

_SHEETS = (
    importlib.resources.files("jstep.watching").joinpath("peaks.toml").read_text(encoding="utf-8")
)

PEAKS: Mapping[str, Mapping[str, float]] = {
    kind: {name: rate * 1e12 for name, rate in rates.items()}
    for kind, rates in tomllib.loads(_SHEETS).items()
}
"""`device_kind` → format → operations per second."""


def peak_rate(device_kind: str, products: Mapping[Product, float]) -> float | None:
    """A device's peak for a mix of matrix products; None if it is unknown.

    It is Σ operations / Σ (operations / peak of their format).
    """
    total = sum(products.values())
    counted = 0.0
    seconds = 0.0
    for product, flops in products.items():
        rate = format_rate(device_kind, product)
        if rate is not None:
            counted = counted + flops
            seconds = seconds + flops / rate
    if not counted or counted < (1 - _NEGLIGIBLE) * total:
        return None
    return counted / seconds


def format_rate(device_kind: str, product: Product) -> float | None:
    """Return a device's peak for products of one format and precision; None if it is unknown."""
    if product.precision not in (*_PASSES, "ANY_F8"):
        return None
    is_tpu = device_kind.startswith("TPU")
    rates = PEAKS.get(device_kind, {})
    is_float8 = product.dtype.startswith("float8") or product.precision == "ANY_F8"
    name = "f8" if is_float8 else _FORMATS.get(product.dtype, "")
    passes = 1
    if is_tpu and product.dtype in ("float32", "float16"):
        name = "bf16"
        passes = _PASSES[product.precision]
    elif not is_tpu and product.dtype == "float32":
        has_tf32 = "tf32" in rates and product.precision != "HIGHEST"
        name = "tf32" if has_tf32 else "f32"
    return rates[name] / passes if name in rates else None


# The operations of the steps that were dispatched, and their share of the peak.

Steps = Mapping[Hashable, int]


class Utilization(NamedTuple):
    """A FLOP/s utilization, named `hfu` or `mfu`.

    It is `hfu` if it includes operations that are recomputed to save memory, else `mfu`.
    """

    name: str
    value: float


class _Work(NamedTuple):
    """The work of a step of a program.

    Attributes:
        secs_at_peak: The seconds that it would take at the peak of all devices; None if that is not
            known.
        recomputes: Whether it computes anything twice, to save memory.
    """

    secs_at_peak: float | None
    recomputes: bool


class UtilizationMeter:
    """Meter of the utilization.

    That is Σ over steps of operations / (peak · number of devices · seconds).
    """

    def __init__(self, peak_flops: float | None, flops_per_step: float | None) -> None:
        self._peak = peak_flops
        self._flops = flops_per_step
        self._work: dict[Hashable, _Work] = {}  # by program
        self._steps = Counter[Hashable]()
        self._log_once = functools.cache(_log_unknown)

    def steps(self) -> Steps:
        return dict(self._steps)

    def utilization(self, first: Steps, last: Steps, seconds: float) -> Utilization | None:
        """Return the utilization between two counts of `steps`; None if a program's is unknown."""
        secs_at_peak = 0.0
        recomputes = False
        for program, count in (Counter(last) - Counter(first)).items():
            work = self._work[program]
            if work.secs_at_peak is None:
                return None
            secs_at_peak = secs_at_peak + count * work.secs_at_peak
            recomputes = recomputes or work.recomputes
        return Utilization("hfu" if recomputes else "mfu", secs_at_peak / seconds)

    def count(self, chunk: Chunk, state: Tree) -> None:
        if chunk.program not in self._work:
            self._work[chunk.program] = self._work_of(chunk, state)
        self._steps[chunk.program] += chunk.steps

    def _work_of(self, chunk: Chunk, state: Tree) -> _Work:
        tree = (state, chunk.step_args)
        flops = self._flops
        peak = self._peak
        recomputes = False
        kind = device_of(tree).device_kind
        if flops is None or peak is None:
            try:
                traced = chunk.trace(state)
                if traced is None:
                    return _Work(None, recomputes=False)
                body = body_of(traced.jaxpr)
            except Exception as error:  # a failure to count must not stop the run
                logger.warning(
                    "the operations of a step could not be counted: %s: %s",
                    type(error).__name__,
                    error,
                )
                return _Work(None, recomputes=False)
            work = work_of(body)
            if flops is None:
                flops = work.flops
                recomputes = has_remat(body)
            if peak is None:
                peak = peak_rate(kind, work.products)
            if peak is None and work.products:
                formats = ", ".join(
                    sorted({f"{product.dtype} ({product.precision})" for product in work.products})
                )
                self._log_once(
                    f"the peak of {kind!r} is not known for matrix products of {formats}"
                )
        if peak is None:
            return _Work(None, recomputes)
        return _Work(flops / (peak * device_count(tree)), recomputes)


def _log_unknown(why: str) -> None:
    if processes.is_process_0():
        logger.info("neither mfu nor hfu is shown: %s; give StepCounterHook(peak_flops=…)", why)


class Meters(Observer):
    """The observer that counts operations for `mfu` and `hfu`, if the device's peak is known."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        run.shared[MeterMaker] = MeterMaker(self._make)

    def _make(
        self, state: TrainState, peak_flops: float | None, flops_per_step: float | None
    ) -> Any:
        device = device_of(state)
        if peak_flops is None and device.device_kind not in PEAKS:
            if device.platform != "cpu" or flops_per_step is not None:
                _log_unknown(f"the peak of the device {device.device_kind!r} is not known")
            return None
        meter = UtilizationMeter(peak_flops, flops_per_step)
        self._run.components.dispatch.add_listener(meter.count)
        return meter
