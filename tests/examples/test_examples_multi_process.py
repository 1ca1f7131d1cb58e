"""examples/multi_process.py, shortened."""

import os
import re

import pytest
from programs import finished


@pytest.mark.thorough
def test_a_killed_and_restarted_run_gives_the_same_weights(tmp_path):
    env = {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
        # The processes that it starts share compiled programs.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = finished("multi_process.py", "--steps", 80, "--heartbeat", 5, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "The final weights match an undisturbed run" in done.stdout
    codes = re.search(r"exit codes \[(-?\d+), (-?\d+)\]", done.stdout)
    assert codes[2] == "-9"
    assert codes[1] not in ("0", "-9")
    assert "process 0: restored model-50" in done.stdout
    assert re.search(r"process 0: step 80  loss", done.stdout)
