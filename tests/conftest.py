"""Configuration of all tests: strict JAX settings, eight CPU devices and fast compilation."""

import contextlib
import ctypes
import functools
import gc
import logging
import os
import pathlib
import signal
import subprocess
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The processes of pytest-xdist have 80 columns, to which tables would be folded.
os.environ.pop("COLUMNS", None)
# XLA's thread pool has one thread per core. Collectives of 8 devices block its threads, so that on
# few cores they deadlock until XLA aborts after 40 s.
os.environ.setdefault("NPROC", "64")

import forked
import hypothesis
import jax
import pytest
import thorough
from jax.experimental.compilation_cache import compilation_cache

# Under nohup or in a background job SIGHUP and SIGINT are ignored. Processes that tests start would
# inherit that, and those that wait for Ctrl-C would wait forever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The tests spend most of their time compiling, which takes less than half as long without
# optimizations and in one piece. `XLA_FLAGS= pytest` tests with XLA's default optimization level.
# jaxlib aborts on unknown flags, and its flags change between versions, so they are first tried in
# another process. Processes that tests start inherit them.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if "XLA_FLAGS" not in os.environ:
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    done = subprocess.run(
        command,
        env=os.environ | {"XLA_FLAGS": QUICK},
        capture_output=True,
        timeout=300,
        check=False,
    )
    os.environ["XLA_FLAGS"] = QUICK if done.returncode == 0 else ""

# Rewriting assertions and tracing make many objects, few of them in cycles: to search for cycles as
# often as by default takes a tenth of the time of collecting the tests.
gc.set_threshold(100_000, 20, 20)

# Several folders have a conftest.py; collecting doctests from them would import modules of the same
# name.
collect_ignore_glob = ["*conftest.py"]

# Eight devices for the tests of sharding; other tests use the first one. This is not set through
# the environment, which subprocesses inherit.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")
# It takes a twentieth of the time, without the lines of operations.
jax.config.update("jax_traceback_in_locations_limit", 0)

# The first example of a property compiles, so there is no deadline, which would fail on slow
# machines.
hypothesis.settings.register_profile("jstep", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jstep")


def _settings():
    logger = logging.getLogger("jstep")
    logs = sys.modules.get("jstep.core.logs")
    # A run that was left open shows its own lines, and knows what it has warned of: later tests
    # would see no warnings.
    of_run = None if logs is None else logs.warned_in_run()
    logging_setup = logger.level, logger.propagate, list(logger.handlers), of_run
    return (
        dict(jax.config.values),
        jax.sharding.get_abstract_mesh(),
        jax.config.jax_enable_x64,
        logging_setup,
    )


_known_settings = []


@pytest.fixture(autouse=True)
def jax_settings_are_unchanged():
    """Check that a test leaves no mesh, option or run: it would affect the tests that happen to run
    after it."""
    before = _known_settings.pop() if _known_settings else _settings()
    yield
    _known_settings.append(_settings())
    assert _known_settings[0] == before, (
        "the test, or the first one's imports, changed settings of JAX or of logging"
    )


@functools.cache
def _known_code(code_version, *where):
    return code_version()


@pytest.fixture(autouse=True, scope="module")
def git_is_asked_once():
    """Let the runs of a process share what git says of their code, whose four processes take longer
    than a short run.

    tests/loop/test_code.py, whose runs ask it, replaces this fixture.
    """
    recorder = sys.modules.get("jstep.watching.recorder")
    if recorder is None:
        yield
        return

    def code_version():
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        return _known_code(real, main, None if main else os.getcwd())

    real = recorder.code_version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "code_version", code_version)
        yield


@pytest.fixture
def cli(capsys):
    """`cli(*arguments, code=0)` runs a command, which must exit with this code, and returns its
    `out` and `err`."""
    from jstep.look.cli import main

    def run(*arguments, code=0):
        assert main(list(map(str, arguments))) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def x64():
    """Enable float64 and int64 for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def host_memory():
    """Skip a test with arrays in host memory, sharded over several CPU devices, if XLA refuses such
    programs."""
    if jax.__version_info__ < (0, 10, 2):
        pytest.skip(
            "jaxlib before 0.10.2 refuses arrays in host memory in programs for several CPU devices"
        )


@pytest.fixture
def no_cached_programs():
    """Compile all programs of one test, for example because it reads their metadata."""
    was_enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", was_enabled)
    compilation_cache.reset_cache()


@pytest.fixture
def compilations(no_cached_programs):
    """A context manager: `with compilations() as seen:` lists the compilations inside of the
    block."""

    @contextlib.contextmanager
    def watch():
        seen = []

        def listener(event, duration, **kwargs):
            if event == "/jax/core/compile/backend_compile_duration":
                seen.append(event)

        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            yield seen
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)

    return watch


def pytest_configure(config):
    thorough.configure(config)
    # Repeated runs find compiled programs in .pytest_cache, as do the programs that tests start.
    if config.pluginmanager.hasplugin("cacheprovider"):
        forked.cache_compiled_programs(str(config.cache.mkdir("compiled")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each worker consecutive tests: those of a module share compiled programs and
    fixtures."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def _is_of_public_class(name):
    import jstep

    return any(
        part in jstep.__all__ and isinstance(getattr(jstep, part), type) for part in name.split(".")
    )


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items):
    """Apply the marker `thorough`, and check that no ID has an address: all workers need to find
    the same IDs.

    Examples of public classes are run by `test_docstrings.py`.
    """
    items[:] = [
        item
        for item in items
        if not (hasattr(item, "dtest") and _is_of_public_class(item.dtest.name))
    ]
    thorough.mark_cases(items)
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(
            f"tests are named after an memory address: {unstable[:3]}; give them ids"
        )


def pytest_collection_finish():
    """Exempt all objects that exist before the first test from garbage collection, which makes it
    faster."""
    gc.collect()
    gc.freeze()


MOST_BYTES, GROWTH = 1_100_000_000, 250_000_000
"""The resident memory above which a process drops its compiled programs (JAX's cache on the disk
has them), and the least growth since it did that last: to collect all objects takes a second."""
_after_dropping = [0]


def _resident():
    """The resident memory of this process in bytes; 0 where the system does not say it."""
    try:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    except OSError:
        return 0


@pytest.hookimpl(trylast=True)  # after the fixtures of the module
def pytest_runtest_teardown(item, nextitem):
    """Exempt also what a module leaves behind, such as compiled programs, unless the process has
    become large."""
    if nextitem is None or nextitem.path != item.path:
        is_large = _resident() > max(MOST_BYTES, _after_dropping[-1] + GROWTH)
        if is_large:
            gc.unfreeze()
            jax.clear_caches()
        gc.collect()
        gc.freeze()
        if is_large:
            with contextlib.suppress(OSError, AttributeError):  # glibc keeps what was freed
                ctypes.CDLL(None).malloc_trim(0)
            _after_dropping.append(_resident())
