"""Strictness by configuration: what a user's strict settings would refuse, the tests refuse."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA's pool has a thread for each core. Collectives of 8 devices block in it, and on few cores block each other
# until XLA gives up, after 40 s.
os.environ.setdefault("NPROC", "64")

import hypothesis
import jax
import pytest

# It may be ignored in what runs the tests, as under nohup or in a background job of a script, and would be in the
# processes that they start: one that waits for Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiling is what the tests spend their time on, and a third of it remains where XLA takes no pains with what it
# makes. `XLA_FLAGS= pytest` tests with the code that users run. Flags come and go with jaxlib, which aborts at one it
# does not know: so they are tried first, once, in another process. Processes that tests start inherit them.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
if "XLA_FLAGS" not in os.environ:
    tried = [sys.executable, "-c", "import jax; jax.devices()"]
    known = subprocess.run(tried, env=os.environ | {"XLA_FLAGS": QUICK}, capture_output=True, timeout=300, check=False)
    os.environ["XLA_FLAGS"] = QUICK if known.returncode == 0 else ""

# Several folders have a conftest.py; as modules to look for doctests in, their names would clash.
collect_ignore_glob = ["*conftest.py"]

# Eight devices for the tests of sharding; what says nothing of devices lives on the first. Not by the environment,
# which subprocesses inherit.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")

# The first example of a property compiles; a machine that is slow today must not fail for it.
hypothesis.settings.register_profile("jstep", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jstep")


@pytest.fixture(autouse=True)
def settings_are_left_as_they_were():
    """A mesh or an option that a test forgets would change what the tests after it see, in one order of many."""

    def settings() -> object:
        return dict(jax.config.values), jax.sharding.get_abstract_mesh(), jax.config.jax_enable_x64

    before = settings()
    yield
    assert settings() == before, "the test left JAX with other settings"


@pytest.fixture
def x64():
    """float64 and int64 for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def compilations() -> Callable[[], contextlib.AbstractContextManager[list[str]]]:
    """`with compilations() as seen:` lists what XLA compiled inside the block."""

    @contextlib.contextmanager
    def watch() -> Iterator[list[str]]:
        seen: list[str] = []

        def listener(event: str, duration: float, **kwargs: str | int) -> None:
            if event == "/jax/core/compile/backend_compile_duration":
                seen.append(event)

        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            yield seen
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)

    return watch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes share the tests by their names, which an address in memory would make different in each."""
    strange = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if strange:
        raise pytest.UsageError(f"tests are named after an address in memory: {strange[:3]}; give them ids")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there before the first test stays to the last: no collection of garbage looks through it again."""
    gc.collect()
    gc.freeze()
