"""Peak operations per second of a device, by the format of its matrix products.

How a device computes a float32 product: `jax.lax.Precision`.
"""

import importlib.resources
import re
import tomllib
from collections.abc import Mapping

from jstep.core.jaxprs import Product

_NEGLIGIBLE = 0.01
"""Products of formats without a figure are ignored below this share of all operations."""

_PRESET = re.compile(r"(BF16|F16|TF32|F32|F64)_\1_\w+?(?:_X(\d))?")
_FORMATS = {"bfloat16": "bf16", "float16": "f16", "float64": "f64", "int8": "int8", "uint8": "int8"}
_PASSES = {"DEFAULT": 1, "HIGH": 3, "HIGHEST": 6}
"""bfloat16 passes that a TPU runs for a float32 product, by precision."""

_SHEETS = importlib.resources.files("jstep.loop").joinpath("peaks.toml").read_text(encoding="utf-8")

PEAKS: Mapping[str, Mapping[str, float]] = {
    kind: {name: rate * 1e12 for name, rate in rates.items()} for kind, rates in tomllib.loads(_SHEETS).items()
}
"""`device_kind` → format → operations per second."""


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
    on_tpu, rates = device_kind.startswith("TPU"), PEAKS.get(device_kind, {})
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
