"""JAX's persistent compilation cache, enabled for the duration of a run."""

import contextlib
import dataclasses
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jstep.core.exceptions import context_manager
from jstep.stores.files import make_folders, sync_files, sync_folder

_logger = logging.getLogger("jstep")

_SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",
}
"""Every program is cached, whatever its size and compile time. XLA's own caches are disabled because they include the
path of the directory in the key of each program: after the directory is moved, nothing would be found.
"""


@dataclasses.dataclass
class _Cache:
    """JAX's cache, one per process, and JAX's earlier settings."""

    directory: str
    before: dict[str, Any]
    runs: int = 0


_lock = threading.Lock()
_cache: _Cache | None = None
"""The cache of the current runs: the first one sets it up, and the last one to leave restores JAX's settings."""


@context_manager
def persistent_cache(directory: str | None) -> Iterator[None]:
    """Use a directory as JAX's persistent compilation cache, and restore JAX's settings afterwards.

    The settings are global: while one run has a cache, all threads use it, and another run's directory is not used. The
    last of several overlapping runs restores the settings.
    """
    if directory is None or not _is_writable(directory) or _has_others(directory):
        yield
        return
    global _cache
    with _lock:
        if _cache is None:
            settings = {**_SETTINGS, "jax_compilation_cache_dir": directory}
            _cache = _Cache(directory, {name: getattr(jax.config, name) for name in settings})
            _set(settings)
        elif directory != _cache.directory:
            _logger.warning(
                "compile_cache=%s: another run of this process uses %s; both use it", directory, _cache.directory
            )
        cache = _cache
        cache.runs += 1
    existing = _entries(cache.directory)
    try:
        yield
    finally:
        with _lock:
            cache.runs -= 1
            if not cache.runs:
                _set(cache.before)
                _cache = None
        _sync(cache.directory, _entries(cache.directory) - existing)


def _set(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX keeps an open cache, even if the settings change.
    compilation_cache.reset_cache()


_ENTRY = re.compile(r".+-[0-9a-f]{64}-cache", re.DOTALL)
"""The names of JAX's entries; the directory may have other files, too."""


def _entries(directory: str) -> set[str]:
    with contextlib.suppress(OSError):
        return {os.path.join(directory, name) for name in os.listdir(directory) if _ENTRY.fullmatch(name)}
    return set()


def _has_others(directory: str) -> bool:
    """Return whether an entry is not a regular file: JAX would wait for a FIFO."""
    others = [path for path in _entries(directory) if os.path.exists(path) and not os.path.isfile(path)]
    if others:
        _logger.warning(
            "compile_cache=%s: %s is not a regular file; the run compiles without a cache", directory, others[0]
        )
    return bool(others)


def _sync(directory: str, entries: set[str]) -> None:
    try:
        sync_files(entries)
        sync_folder(directory)
    except FileNotFoundError:  # another process emptied the cache
        pass
    except OSError as error:
        _logger.warning("compile_cache=%s: %s; after a power cut its programs may be compiled again", directory, error)


def _is_writable(directory: str) -> bool:
    try:
        make_folders(directory)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError as error:
        _logger.warning(
            "compile_cache=%s: cannot be written (%s); the run compiles its programs without a cache",
            directory,
            error.strerror or error,
        )
        return False
