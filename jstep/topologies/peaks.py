"""Peak operations per second of a device, by the format of its matrix products.

Figures are for dense products, without structured sparsity, at the clock that the vendor assumes. They are per JAX
device: TPUs before v4, and tpu7x, have two devices per chip.

Source: for TPUs `docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm` and its pages of v2 to tpu7x, a chip's
"peak compute". For GPUs NVIDIA's data sheets of V100, T4, A100, A10, L4, L40S, H100, H200, GH200 and Blackwell
(HGX B200, GB200), halved if they count sparsity. How a device computes a float32 product: `jax.lax.Precision`.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from jstep.core.flops import Product
from jstep.topologies.devices import GPUS, TPUS

T = 1e12
_NEGLIGIBLE = 0.01
"""Products of formats without a figure are ignored below this share of all operations."""

_PRESET = re.compile(r"(BF16|F16|TF32|F32|F64)_\1_\w+?(?:_X(\d))?")
_PASSES = {"DEFAULT": 1, "HIGH": 3, "HIGHEST": 6}
"""bfloat16 passes that a TPU runs for a float32 product, by precision."""


def _nvidia(half: float, tf32: float, f32: float, f64: float, int8: float, f8: float = 0.0) -> Mapping[str, float]:
    rates = {"bf16": half, "f16": half, "tf32": tf32, "f32": f32, "f64": f64, "int8": int8, "f8": f8}
    return MappingProxyType({name: rate * T for name, rate in rates.items() if rate})


def _before_ampere(f16: float, f32: float, f64: float, int8: float = 0.0) -> Mapping[str, float]:
    rates = {"f16": f16, "f32": f32, "f64": f64, "int8": int8}
    return MappingProxyType({name: rate * T for name, rate in rates.items() if rate})


def _tpu(bf16: float, int8: float = 0.0, f8: float = 0.0) -> Mapping[str, float]:
    return MappingProxyType({"bf16": bf16 * T, "int8": (int8 or bf16) * T, "f8": (f8 or bf16) * T})


_A100 = _nvidia(312, 156, 19.5, 19.5, 624)
_HOPPER = _nvidia(989.4, 494.7, 66.9, 66.9, 1978.9, 1978.9)
_V5P, _V6E = _tpu(459, int8=918), _tpu(918, int8=1836)

GPU_PEAKS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "Tesla V100-SXM2-16GB": _before_ampere(125, 15.7, 7.8),
        "Tesla V100-SXM2-32GB": _before_ampere(125, 15.7, 7.8),
        "Tesla V100-PCIE-16GB": _before_ampere(112, 14, 7),
        "Tesla V100-PCIE-32GB": _before_ampere(112, 14, 7),
        "Tesla T4": _before_ampere(65, 8.1, 0.25, int8=130),
        GPUS["a100"].description: _A100,
        "NVIDIA A100-SXM4-40GB": _A100,
        "NVIDIA A100-PCIE-40GB": _A100,
        "NVIDIA A100 80GB PCIe": _A100,
        "NVIDIA A10": _nvidia(125, 62.5, 31.2, 0.49, 250),
        "NVIDIA L4": _nvidia(121, 60.5, 30.3, 0.47, 242.5, 242.5),
        "NVIDIA L40S": _nvidia(362.05, 183, 91.6, 1.43, 733, 733),
        GPUS["h100"].description: _HOPPER,
        "NVIDIA H100 PCIe": _nvidia(756.5, 378, 51, 51, 1513, 1513),
        "NVIDIA H100 NVL": _nvidia(835.5, 417.5, 60, 60, 1670.5, 1670.5),
        GPUS["h200"].description: _HOPPER,
        "NVIDIA GH200 480GB": _HOPPER,
        "NVIDIA GH200 120GB": _HOPPER,
        GPUS["b200"].description: _nvidia(2250, 1125, 75, 37, 4500, 4500),
        "NVIDIA GB200": _nvidia(2500, 1250, 80, 40, 5000, 5000),
    }
)
"""`device_kind` → format → operations per second."""

TPU_PEAKS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        TPUS["v2"].device_kind: _tpu(46 / 2),
        TPUS["v3"].device_kind: _tpu(123 / 2),
        TPUS["v4"].device_kind: _tpu(275),
        TPUS["v5e"].device_kind: _tpu(197, int8=393),
        "TPU v5e": _tpu(197, int8=393),
        TPUS["v5p"].device_kind: _V5P,
        "TPU v5p": _V5P,
        TPUS["v6e"].device_kind: _V6E,
        "TPU v6e": _V6E,
        TPUS["tpu7x"].device_kind: _tpu(2307 / 2, f8=4614 / 2),
    }
)
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
    if device_kind in TPU_PEAKS:
        rates = TPU_PEAKS[device_kind]
        name, passes = _on_tpu(product, preset)
    else:
        rates = GPU_PEAKS.get(device_kind, {})
        name, passes = _on_gpu(product, preset, has_tf32="tf32" in rates)
    return rates[name] / passes if name in rates else None


def _on_tpu(product: Product, preset: re.Match[str] | None) -> tuple[str, int]:
    if preset is not None:
        passes = int(preset[2] or 1) if preset[1] == "BF16" else _PASSES["HIGHEST"]
        return ("bf16" if preset[1] in ("BF16", "F32") else ""), passes
    if product.dtype in ("float32", "float16"):
        return "bf16", _PASSES[product.precision]
    return _format(product), 1


def _on_gpu(product: Product, preset: re.Match[str] | None, *, has_tf32: bool) -> tuple[str, int]:
    if preset is not None:
        return preset[1].lower(), int(preset[2] or 1)
    if product.dtype == "float32":
        return ("tf32" if has_tf32 and product.precision != "HIGHEST" else "f32"), 1
    return _format(product), 1


def _format(product: Product) -> str:
    if product.dtype.startswith("float8") or product.precision == "ANY_F8":
        return "f8"
    return {"bfloat16": "bf16", "float16": "f16", "float64": "f64", "int8": "int8", "uint8": "int8"}.get(
        product.dtype, ""
    )
