"""Peak device memory with slots on the host, according to the TPU compiler."""

import importlib.util
import json
from pathlib import Path

import pytest
from processes import python

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: pip install jax[tpu]",
    ),
]

SCRIPT = Path(__file__).with_name("slots_on_the_host.py")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def saved_fraction(model, optimizer, layout):
    """Return the saved fraction of the slots' bytes, measured in a subprocess because libtpu may
    abort."""
    out = python(SCRIPT, model, optimizer, layout, timeout=None, **ENVIRONMENT)
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("layout", ["replicated", "fsdp"])
@pytest.mark.parametrize("model", ["matrices", "transformer"])
def test_peak_memory_falls_by_most_of_the_slots(model, layout):
    assert saved_fraction(model, "adamw", layout) >= 0.7


@pytest.mark.parametrize("optimizer", ["guarded", "masters"])
def test_updates_with_norms_or_matrix_products_and_wrappers(optimizer):
    assert saved_fraction("matrices", optimizer, "replicated") >= 0.7
