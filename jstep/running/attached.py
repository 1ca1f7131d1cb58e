"""The observers attached to each run; the only place where the kernel names another room."""

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

from jstep.core.checks import format_value
from jstep.loop.observer import Observer
from jstep.origin.arguments import Options

_ROOM = "jstep.watching"
"""Named, not imported: a run works without it."""
_OPTIONS = ("logdir", "config", "log_steps", "save_summaries_steps")
"""The options that the kernel does not use, at least not for itself."""


@functools.cache
def attached_observers() -> tuple[type[Observer], ...]:
    if importlib.util.find_spec(_ROOM) is None:
        return ()
    observers: tuple[type[Observer], ...] = importlib.import_module(f"{_ROOM}.observers").OBSERVERS
    return observers


def check_attached(options: Options, defaults: Mapping[str, Any]) -> Options:
    """Let each observer check the options that it uses; an option that nobody uses is an error."""
    used = set[str]()
    for observer in attached_observers():
        options = observer.check(options)
        used |= observer.options
    for name in _OPTIONS:
        value = getattr(options, name)
        if name not in used and value is not None and value != defaults[name]:
            raise ValueError(
                f"{name}={format_value(value)}: nothing that is attached to this run uses it; "
                "leave it out, or install the whole package"
            )
    return options
