"""Count the calls of jstep's functions in a run: in a start, a restart, a step and an end, with and
without observers.

`python dev/calls.py` prints a table. Calls are those of the main thread, with those of generators
and comprehensions; code lines are those of the functions that are called, without docstrings,
comments and blank lines.
"""

import collections
import pathlib
import sys
import tempfile
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import jax.numpy as jnp

import jstep
from jstep.running import run as running
from jstep.running.attached import attached_observers

ROOT = str(pathlib.Path(jstep.__file__).parent)
STEPS = 40


class Counter:
    """Counts calls by phase while it is active."""

    def __init__(self) -> None:
        self.phase = ""
        self.calls: dict[str, collections.Counter[CodeType]] = collections.defaultdict(
            collections.Counter
        )

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.calls[self.phase][frame.f_code] += 1


class Marks(jstep.Hook):
    """Names the phase by what the run does."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def before_step(self, step: int, state: Any) -> None:
        self._counter.phase = "first step" if step in (0, STEPS) else "step"

    def end(self, step: int, state: Any) -> None:
        self._counter.phase = "end"


def counted_run(counter: Counter, directory: str, last_step: int) -> None:
    optimizer = jstep.adam(1e-3)
    train_step = jstep.minimize(lambda params, x: jnp.sum(jnp.square(params["w"] * x)), optimizer)
    state = jstep.TrainState.create({"w": jnp.ones((8, 8))}, optimizer)
    batches = jstep.batches(jnp.ones((64, 8)), 8, num_epochs=None)
    counter.phase = "start"
    sys.setprofile(counter)
    try:
        jstep.train(
            train_step, state, batches, last_step, checkpoint_dir=directory, hooks=[Marks(counter)]
        )
    finally:
        sys.setprofile(None)


def code_lines(codes: set[CodeType]) -> int:
    """Return the number of code lines of functions; a line of two nested functions counts once."""
    lines: set[tuple[str, int]] = set()
    for code in codes:
        lines |= {(code.co_filename, line) for _, _, line in code.co_lines() if line}
    return len(lines)


def rows(attached: Callable[[], tuple[type[Any], ...]]) -> list[tuple[str, int, int, int]]:
    """Return the calls, functions and code lines of each phase of a new and of a restored run with
    these observers."""
    vars(running)["attached_observers"] = attached
    found: list[tuple[str, int, int, int]] = []
    with tempfile.TemporaryDirectory() as directory:
        for name, last_step in (("new", STEPS), ("restored", 2 * STEPS)):
            counter = Counter()
            counted_run(counter, directory, last_step)
            for phase in ("start", "first step", "step", "end"):
                calls = counter.calls[phase]
                total = calls.total() // (STEPS - 1) if phase == "step" else calls.total()
                found.append((f"{name}: {phase}", total, len(calls), code_lines(set(calls))))
            everything = set[CodeType]().union(*counter.calls.values())
            total = sum(calls.total() for calls in counter.calls.values())
            found.append((f"{name}: all", total, len(everything), code_lines(everything)))
    return found


def main() -> None:
    counted_run(Counter(), tempfile.mkdtemp(), 2)  # imports, caches
    with_observers = rows(attached_observers)
    without = rows(lambda: ())
    print("| run: phase | calls, functions, lines | without observers |")
    print("|---|---|---|")
    for (name, *counts), (_, *alone) in zip(with_observers, without, strict=True):
        print(f"| {name} | {', '.join(map(str, counts))} | {', '.join(map(str, alone))} |")


if __name__ == "__main__":
    main()
