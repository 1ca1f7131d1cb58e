"""JAX's persistent compilation cache, enabled for the duration of a run."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jstep.core.logs import logger
from jstep.stores.files import make_directories

_SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    # XLA's caches have keys with the path: a moved cache would be useless.
    "jax_persistent_cache_enable_xla_caches": "none",
}
"""Every program is cached, whatever its size and compile time."""
_lock = threading.Lock()
"""Held by the run whose settings apply: JAX's settings are global, and overlapping runs use those
of the first."""


@contextlib.contextmanager
def persistent_cache(directory: str | None) -> Iterator[None]:
    """Use a directory as JAX's persistent compilation cache, and restore JAX's settings."""
    try:
        if directory is not None:
            make_directories(directory)
    except OSError as error:
        logger.warning(
            "compile_cache=%s: %s; the run compiles its programs without a cache", directory, error
        )
        directory = None
    if directory is None or not _lock.acquire(blocking=False):
        yield
        return
    settings = {**_SETTINGS, "jax_compilation_cache_dir": directory}
    earlier = {name: getattr(jax.config, name) for name in settings}
    try:
        _set(settings)
        yield
    finally:
        _set(earlier)
        _lock.release()


def _set(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX keeps an open cache, even if the settings change.
    compilation_cache.reset_cache()
