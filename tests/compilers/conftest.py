"""Runs each of these tests in its own process: XLA's compilers may abort it and stay loaded until
it exits.

Tests are skipped if the compiler is not installed: `pip install 'jstep[tpu]'`, `'jstep[aot-cuda]'`.
"""

import importlib.util
import os
import signal
import subprocess
import sys

import pytest

LIMIT = 600
"""Time limit of one test in seconds."""
_IN_SUBPROCESS = "JSTEP_TEST_IN_SUBPROCESS"


def _is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


COMPILERS = {
    "tpu_compiler": ("libtpu", "pip install 'jstep[tpu]'"),
    "gpu_compiler": ("jax_plugins.xla_cuda13", "pip install 'jstep[aot-cuda]'"),
}


def pytest_collection_modifyitems(items):
    for item in items:
        for marker, (module, command) in COMPILERS.items():
            if item.get_closest_marker(marker) and not _is_installed(module):
                item.add_marker(pytest.mark.skip(reason=f"{module} is not installed: {command}"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if os.environ.get(_IN_SUBPROCESS) or not any(map(pyfuncitem.get_closest_marker, COMPILERS)):
        return None
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-x",
        pyfuncitem.nodeid,
    ]  # fmt: skip
    environment = os.environ | {_IN_SUBPROCESS: "1", "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command,
        cwd=pyfuncitem.config.rootpath,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        pytest.fail(
            f"the subprocess exited with code {process.returncode}:\n{output[-6000:]}",
            pytrace=False,
        )
    return True
