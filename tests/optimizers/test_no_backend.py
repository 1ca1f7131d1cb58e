"""Building optimizers initializes no backend, so that `jax.distributed.initialize` may follow."""

import pytest
from processes import python

CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax, numpy as np
import jstep
sys.path.insert(0, "tests")
key = np.array([0, 7], np.uint32)
jax.random.key = lambda seed: key  # creating a key would initialize the backend
from optimizer_table import TABLE
schedule = jstep.linear_warmup(jstep.exponential_decay(0.1, 10, 0.5), 5)
for name, entry in TABLE.items():
    for rate in (0.1, schedule, np.float32(0.1), jstep.held("rate", 0.1)):
        if name != "from_optax":
            optimizer = entry.make(rate)
            jstep.chain(jstep.stateless(lambda u, p, n: u), jstep.scope(optimizer, "s"))
print("built", len(TABLE))
"""


@pytest.mark.thorough
def test_building_optimizers_initializes_no_backend():
    """With a platform that does not exist, any use of a device fails."""
    assert "built" in python("-c", CODE, JAX_PLATFORMS="none_such")
