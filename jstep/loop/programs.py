"""The two programs of a run: for one step, and for `steps_per_call` steps. What is compiled is logged."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

from jstep.core.notes import note
from jstep.hooks.skipped import skip_metric_of
from jstep.loop.feed import Call
from jstep.training import TrainStep, scanned_step

_logger = logging.getLogger("jstep")

_local = threading.local()


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compilations_here()[0] += 1


def _compilations_here() -> list[int]:
    """The number of compilations of this thread so far, in a list that goes on counting."""
    found: list[int] = _local.__dict__.setdefault("compilations", [0])
    return found


jax.monitoring.register_event_duration_secs_listener(_count)


def is_compiled(step: Any) -> bool:
    """Whether a step is compiled, and so sees JAX's arrays whatever it is given."""
    return isinstance(step, TrainStep) or hasattr(step, "lower")


class Programs:
    """Takes the steps of a call, by the program that the call is for.

    Args:
        train_step: The step.
        unroll: As in `scan_steps`.
        several: Whether there are calls of several steps.

    Attributes:
        stacks_one: Whether calls of one step have to be stacked, too: a step that is not compiled is compiled for that.
    """

    def __init__(self, train_step: Callable[..., Any], unroll: Any = None, *, several: bool = True) -> None:
        self._one, self._several = train_step, scanned_step(train_step, unroll) if several else None
        self._name = getattr(train_step, "__name__", "train_step")
        self.stacks_one = several and not is_compiled(train_step)
        self._is_compiled = several or is_compiled(train_step)
        self._begun: set[int] = set()
        self._latest: Any = train_step
        self._compilations = _compilations_here()  # the thread that drives

    @property
    def constant_metrics(self) -> Any:
        """The names of the metrics of the latest call that no step computes."""
        return getattr(self._latest, "constant_metrics", ())

    @property
    def skip_metric(self) -> str | None:
        """The name of the metric of the latest call that is 1 if the whole update was skipped; None without a guard."""
        return skip_metric_of(self._latest)

    def __call__(self, state: Any, call: Call) -> Any:
        """The state after the steps of a call, and their metrics."""
        step = self._latest = self._several if call.stacked and self._several is not None else self._one
        is_first = call.steps not in self._begun
        if is_first:
            self._begun.add(call.steps)
            self._announce(step, call)
        before = self._compilations[0]
        try:
            result = step(state, *call.args)
        except TypeError as error:
            if len(call.args) == 1 and isinstance(call.args[0], list):
                note(error, "jstep: the batch is a list, which is one argument; a tuple is several: give (x, y)")
            raise
        if self._compilations[0] != before and not is_first and self._is_compiled:
            self._say_again(call)
        return result

    def _announce(self, step: Any, call: Call) -> None:
        """Before the first call of a program; a run of single steps has one program, and no reason for it."""
        size = getattr(step, "_cache_size", None)
        if self._several is None or size is None or size():
            return
        why = f"steps_per_call={call.steps}" if call.steps > 1 else call.why or "it is the first call"
        _logger.info("compiling %s for %s: %s", self._name, _steps(call.steps), why)

    def _say_again(self, call: Call) -> None:
        shapes = ", ".join(
            f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}"
            for leaf in jax.tree.leaves(call.args)[:5]
        )
        _logger.info(
            "compiled %s again for %s: its batch differs from those before in shapes, dtypes or placement (%s)",
            self._name,
            _steps(call.steps),
            shapes,
        )


def _steps(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"
