"""Peak device memory, from the compiler's memory analysis."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jstep.tools.cost import device_peak

MB = 10**6


def report(device, host=(0, 0, 0, 0), **others):
    names = ("argument", "output", "alias", "temp")
    sizes = {f"{name}_size_in_bytes": int(n * MB) for name, n in zip(names, device, strict=True)}
    sizes |= {f"host_{name}_size_in_bytes": int(n * MB) for name, n in zip(names, host, strict=True)}
    return SimpleNamespace(**sizes, **{name: int(n * MB) for name, n in others.items()})


# Reports of the TPU compiler for v5e:2x4, libtpu 0.0.42 and 0.0.50.
REPORTS = {
    "large": (report((403.18, 402.65, 402.65, 134.41), peak_memory_in_bytes=537.40), 537.40),
    "small, mostly in VMEM": (report((50.86, 50.33, 50.33, 0), peak_memory_in_bytes=122.69), 50.86),
    "temporaries counted twice": (report((163.62, 163.6, 163.6, 731.49), peak_memory_in_bytes=667.8), 667.8),
    "slots on the host": (
        report((134.74, 134.22, 134.22, 268.95), (268.44, 268.44, 268.44, 0), peak_memory_in_bytes=604.51),
        336.07,
    ),
    "only written to the host": (report((3000, 3000, 3000, 3000), (0, 3000, 0, 0), peak_memory_in_bytes=9000), 6000),
    "temporaries on the host": (
        report((134.74, 134.22, 134.22, 472.25), (268.44, 268.44, 268.44, 268.44), peak_memory_in_bytes=738.74),
        470.3,
    ),
    "allocation reported": (
        report((163.62, 163.6, 163.6, 731.49), peak_memory_in_bytes=667.8, total_allocation_bytes=680.99),
        680.99,
    ),
    "no peak reported": (report((10, 10, 4, 3)), 19),
}


@pytest.mark.parametrize("name", REPORTS)
def test_peak_from_compiler_reports(name):
    memory, want = REPORTS[name]
    assert device_peak(memory) == pytest.approx(want * MB, abs=MB / 10)


@pytest.mark.parametrize("memory", [None, SimpleNamespace(), SimpleNamespace(argument_size_in_bytes=1)])
def test_unknown_peak(memory):
    assert device_peak(memory) is None


def test_peak_of_a_compiled_program():
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    assert device_peak(double.lower(x).compile().memory_analysis()) == 2**20
