"""The observer of FLOP/s: the operations of the steps that were dispatched, as a share of the devices' peak."""

import dataclasses
import functools
import logging
import re
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax

from jstep.core.jaxprs import Product, body_of, recomputes
from jstep.core.placement import device_count, device_of
from jstep.core.work import work_of
from jstep.loop.calls import Call
from jstep.loop.run import Observer, Run
from jstep.state.train_state import TrainState

# The operations of the steps of a run, and the observer that compares them with the peak.

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
        is_traced: Whether a hook has requested the operations, too; before the first step.
        work: The operations of one step of each program.
    """

    def __init__(self) -> None:
        self.is_traced = False
        self.work: dict[Hashable, StepWork] = {}
        self._steps: dict[Hashable, int] = {}

    def add(self, call: Call, state: Any) -> None:
        """Add the steps of a call, which returned a state."""
        program = call.program
        try:
            self._steps[program] += call.steps
        except KeyError:
            self.work[program], self._steps[program] = self._of(call, state), call.steps

    def steps(self) -> Steps:
        """The steps so far."""
        return dict(self._steps)

    def _of(self, call: Call, state: Any) -> StepWork:
        tree = state, call.of_one
        known = StepWork(device_count(tree), device_of(tree).device_kind)
        if not self.is_traced:
            return known
        try:
            traced = call.trace(state)
            if traced is None:
                return known
            body = body_of(traced.jaxpr)
        except Exception as error:  # a failure to count must not stop the run
            _logger.warning("the operations of a step could not be counted: %s: %s", type(error).__name__, error)
            return known
        work = work_of(body)
        return dataclasses.replace(known, flops=work.all, products=work.products, recomputes=recomputes(body))


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
        dispatched: The steps of the run.
        peak_flops: Peak operations per second of one device; None to look it up.
        flops_per_step: Operations of a step, summed over all devices; None to count those of the traced step.
    """

    def __init__(self, dispatched: DispatchedSteps, peak_flops: float | None, flops_per_step: float | None) -> None:
        self._work, self._peak, self._flops = dispatched.work, peak_flops, flops_per_step
        self.steps = dispatched.steps
        self._log_once = functools.cache(_log_unknown)

    def between(self, before: Steps, after: Steps, seconds: float) -> Utilization | None:
        """The utilization of the steps between two counts; None if it is not known for all of them."""
        at_peak, is_twice = 0.0, False
        for program, count in (Counter(after) - Counter(before)).items():
            work = self._work[program]
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


def _log_unknown(why: str) -> None:
    if jax.process_index() == 0:
        _logger.info("neither mfu nor hfu is shown: %s; give StepCounterHook(peak_flops=…)", why)


class Meters(Observer):
    """Meters of the utilization of a run, for the hooks that show it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._dispatched = DispatchedSteps()

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Make a meter, before the first step; None if the peak of the device is not known."""
        device, dispatched, after_call = device_of(state), self._dispatched, self.run.programs.after_call
        if peak_flops is None and not has_peaks(device.device_kind):
            if device.platform != "cpu" or flops_per_step is not None:
                _log_unknown(f"the peak of the device {device.device_kind!r} is not known")
            return None
        dispatched.is_traced = dispatched.is_traced or peak_flops is None or flops_per_step is None
        if dispatched.add not in after_call:
            after_call.append(dispatched.add)
        return UtilizationMeter(dispatched, peak_flops, flops_per_step)


# Peak operations per second of a device, by the format of its matrix products.
#
# Figures are for dense products, without structured sparsity, at the clock that the vendor assumes. They are per JAX
# device: TPUs before v4, and tpu7x, have two devices per chip.
#
# Source: for TPUs `docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm` and its pages of v2 to tpu7x, a chip's
# "peak compute". For GPUs NVIDIA's data sheets of V100, T4, A100, A10, L4, L40S, H100, H200, GH200 and Blackwell
# (HGX B200, GB200), halved if they count sparsity. How a device computes a float32 product: `jax.lax.Precision`.


def _rates(**rates: float) -> Mapping[str, float]:
    return {name: rate * 1e12 for name, rate in rates.items() if rate}


def _nvidia(half: float, tf32: float, f32: float, f64: float, int8: float, f8: float = 0.0) -> Mapping[str, float]:
    return _rates(bf16=half, f16=half, tf32=tf32, f32=f32, f64=f64, int8=int8, f8=f8)


def _tpu(bf16: float, int8: float = 0.0, f8: float = 0.0) -> Mapping[str, float]:
    return _rates(bf16=bf16, int8=int8 or bf16, f8=f8 or bf16)


_NEGLIGIBLE = 0.01
"""Products of formats without a figure are ignored below this share of all operations."""

_PRESET = re.compile(r"(BF16|F16|TF32|F32|F64)_\1_\w+?(?:_X(\d))?")
_FORMATS = {"bfloat16": "bf16", "float16": "f16", "float64": "f64", "int8": "int8", "uint8": "int8"}
_PASSES = {"DEFAULT": 1, "HIGH": 3, "HIGHEST": 6}
"""bfloat16 passes that a TPU runs for a float32 product, by precision."""

_HOPPER_PEAKS = _nvidia(989.4, 494.7, 66.9, 66.9, 1978.9, 1978.9)


GPU_PEAKS: Mapping[str, Mapping[str, float]] = {
    **{f"Tesla V100-SXM2-{size}GB": _rates(f16=125, f32=15.7, f64=7.8) for size in (16, 32)},
    **{f"Tesla V100-PCIE-{size}GB": _rates(f16=112, f32=14, f64=7) for size in (16, 32)},
    "Tesla T4": _rates(f16=65, f32=8.1, f64=0.25, int8=130),
    **dict.fromkeys(
        ["NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"],
        _nvidia(312, 156, 19.5, 19.5, 624),
    ),
    "NVIDIA A10": _nvidia(125, 62.5, 31.2, 0.49, 250),
    "NVIDIA L4": _nvidia(121, 60.5, 30.3, 0.47, 242.5, 242.5),
    "NVIDIA L40S": _nvidia(362.05, 183, 91.6, 1.43, 733, 733),
    "NVIDIA H100 80GB HBM3": _HOPPER_PEAKS,
    "NVIDIA H100 PCIe": _nvidia(756.5, 378, 51, 51, 1513, 1513),
    "NVIDIA H100 NVL": _nvidia(835.5, 417.5, 60, 60, 1670.5, 1670.5),
    **dict.fromkeys(["NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB"], _HOPPER_PEAKS),
    "NVIDIA B200": _nvidia(2250, 1125, 75, 37, 4500, 4500),
    "NVIDIA GB200": _nvidia(2500, 1250, 80, 40, 5000, 5000),
}
"""`device_kind` → format → operations per second."""

TPU_PEAKS: Mapping[str, Mapping[str, float]] = {
    "TPU v2": _tpu(46 / 2),
    "TPU v3": _tpu(123 / 2),
    "TPU v4": _tpu(275),
    **dict.fromkeys(["TPU v5 lite", "TPU v5e"], _tpu(197, int8=393)),
    **dict.fromkeys(["TPU v5", "TPU v5p"], _tpu(459, int8=918)),
    **dict.fromkeys(["TPU v6 lite", "TPU v6e"], _tpu(918, int8=1836)),
    "TPU7x": _tpu(2307 / 2, f8=4614 / 2),
}
"""`device_kind` → format → operations per second."""


def has_peaks(device_kind: str) -> bool:
    """Whether peak figures are known for a device."""
    return device_kind in TPU_PEAKS or device_kind in GPU_PEAKS


def peak_of(device_kind: str, products: Mapping[Product, float]) -> float | None:
    """Return the peak operations per second of a device for a mix of matrix products.

    Peak = Σ operations / Σ (operations / peak of their format), which for a single format is the peak of that format.

    Args:
        device_kind: The value of `device.device_kind`.
        products: Operations by the format of their operands.

    Returns:
        Operations per second of one device; None if there is no figure for the device or the format, or no product.
    """
    total, known, seconds = sum(products.values()), 0.0, 0.0
    for product, flops in products.items():
        rate = rate_of(device_kind, product)
        if rate is not None:
            known, seconds = known + flops, seconds + flops / rate
    return None if not known or known < (1 - _NEGLIGIBLE) * total else known / seconds


def rate_of(device_kind: str, product: Product) -> float | None:
    """Return the peak operations per second for products of one format; None if there is no figure."""
    preset = _PRESET.fullmatch(product.precision)
    if preset is None and product.precision not in (*_PASSES, "ANY_F8"):
        return None
    on_tpu = device_kind in TPU_PEAKS
    rates = TPU_PEAKS[device_kind] if on_tpu else GPU_PEAKS.get(device_kind, {})
    is_float8 = product.dtype.startswith("float8") or product.precision == "ANY_F8"
    name, passes = "f8" if is_float8 else _FORMATS.get(product.dtype, ""), 1
    if on_tpu and preset is not None:
        name = "bf16" if preset[1] in ("BF16", "F32") else ""
        passes = int(preset[2] or 1) if preset[1] == "BF16" else _PASSES["HIGHEST"]
    elif on_tpu and product.dtype in ("float32", "float16"):
        name, passes = "bf16", _PASSES[product.precision]
    elif preset is not None:
        name, passes = preset[1].lower(), int(preset[2] or 1)
    elif not on_tpu and product.dtype == "float32":
        name = "tf32" if "tf32" in rates and product.precision != "HIGHEST" else "f32"
    return rates[name] / passes if name in rates else None
