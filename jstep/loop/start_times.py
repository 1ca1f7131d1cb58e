"""The times of a start, in which restoring, compiling and the first batch overlap."""

import dataclasses
import logging
import time
from collections.abc import Iterator

from jstep.core.exceptions import scoped
from jstep.loop.compile_counts import compiled_here

_logger = logging.getLogger("jstep")


@dataclasses.dataclass
class StartTimes:
    """The duration of each part of a start, in seconds; parts overlap.

    Attributes:
        began: When the start began.
        parts: Name of the part → seconds.
        is_cached: Whether the compiled programs were found in JAX's persistent cache.
        is_logged: Whether the run logs lines, and `log` one of them.
    """

    began: float = dataclasses.field(default_factory=time.perf_counter)
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    is_cached: bool = False
    is_logged: bool = False

    def left(self, seconds: float) -> float:
        """Return what is left of some seconds, counted from the begin of the start."""
        return max(0.0, self.began + seconds - time.perf_counter())

    @scoped
    def part(self, name: str) -> Iterator[None]:
        """Time a part."""
        then = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - then

    @scoped
    def compiling(self) -> Iterator[None]:
        """Time compilation, and record whether JAX's persistent cache had the programs."""
        here = compiled_here()
        hits, before = here.hits, here.programs
        with self.part("compile"):
            yield
        if here.programs > before:
            self.is_cached = here.programs - before <= here.hits - hits

    def log(self) -> None:
        """Log one line when the first step has been dispatched, if the run logs lines."""
        names = ("devices", "restore", "compile", "first batch")
        words = [
            f"{name} {self.parts[name]:.1f}{' (cached)' if name == 'compile' and self.is_cached else ''}"
            for name in names
            if name in self.parts
        ]
        if words and self.is_logged:
            _logger.info("first step after %.1f s: %s", time.perf_counter() - self.began, ", ".join(words))
