"""JAX's persistent compilation cache, enabled for the duration of a run."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jstep.stores.files import make_folders

_logger = logging.getLogger("jstep")
_SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",  # their keys have the path, so that a moved cache has nothing
}
"""Every program is cached, whatever its size and compile time."""
_lock = threading.Lock()
_before: list[dict[str, Any]] = []
"""JAX's settings before each of the present runs; the settings are global, and those of the first run hold for all."""


@contextlib.contextmanager
def persistent_cache(directory: str | None) -> Iterator[None]:
    """Use a directory as JAX's persistent compilation cache; the last of overlapping runs restores JAX's settings."""
    if directory is None or not _is_made(directory):
        yield
        return
    settings = {**_SETTINGS, "jax_compilation_cache_dir": directory}
    with _lock:
        _before.append({name: getattr(jax.config, name) for name in settings})
        if len(_before) == 1:
            _set(settings)
    try:
        yield
    finally:
        with _lock:
            first = _before.pop(0)
            if _before:
                _before[0] = first
            else:
                _set(first)


def _set(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX keeps an open cache, even if the settings change.
    compilation_cache.reset_cache()


def _is_made(directory: str) -> bool:
    try:
        make_folders(directory)
    except OSError as error:
        _logger.warning("compile_cache=%s: %s; the run compiles its programs without a cache", directory, error)
        return False
    return True
