"""Drawn programs: hooks that act and fail, several savers, signals, batches that change; the run
ends as a plain one.

Each fault of a program happens once, at a drawn step; the run is started again until it ends.
Whatever happened, it must end with the bits of the run without faults, apply `end` once, and leave
the checkpoint of each complete start.
"""

import collections
import dataclasses
import os
import random
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import printed
from processes import run as run_all

import jstep
from jstep.hooks.run_hook import RunHook

OPTIMIZER = jstep.adam(0.05)
Pair = collections.namedtuple("Pair", "x y")
MOST_STARTS = 15
EVALUATED_EVERY = 7
WITHIN_ITERATIONS = ("hook", "evaluate", "at last")
"""Places of which an error ends an iteration early, so that nothing of it is saved."""

STRUCTURES = {
    "array": lambda x: x,
    "tuple": lambda x: (x, x + 1),
    "named tuple": lambda x: Pair(x, {"z": x}),
    "list": lambda x: [x, x],
    "dict": lambda x: {"b": {"c": x}, "a": np.float32(1)},
}


class ToldError(Exception):
    """A fault of a drawn program."""


def loss_fn(params: Any, *batch: Any) -> Any:
    x = next(leaf for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf))
    return jnp.mean((x @ params["w"] - 1.0) ** 2)


def make_state() -> jstep.TrainState:
    return jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER)


STEP = jstep.minimize(loss_fn, OPTIMIZER)
OTHER = jstep.minimize(loss_fn, OPTIMIZER, donate=False)


@dataclasses.dataclass
class Program:
    """A drawn program.

    Attributes:
        draw: The source of randomness.
        faulty: Whether its faults happen.
    """

    draw: random.Random
    faulty: bool = True

    def __post_init__(self) -> None:
        draw = self.draw
        self.last = draw.randrange(8, 20)
        self.steps_per_call = draw.choice([1, 2, 3, "auto"])
        self.structure = STRUCTURES[draw.choice(sorted(STRUCTURES))]
        self.sizes = [draw.choice([2, 4, 4, 4, 6]) for _ in range(self.last)]
        self.halves = draw.sample(range(1, self.last + 1), 2)
        self.saves = draw.choice([None, 2, 5])
        self.ends = draw.random() < 0.6
        places = ["hook", "batch", "close", "end", "save", "evaluate", "at last"]
        kinds = ["signal", "signal", "error"]
        self.faults = {
            (draw.choice(places), draw.randrange(1, self.last + 1)): draw.choice(kinds)
            for _ in range(draw.randrange(1, 5))
        }
        self.memory = np.zeros(2, np.float32)
        self.examples = (0, 0)
        self.first = 0

    def maybe(self, place: str, step: int) -> None:
        """Let the fault of this place happen, once, at its step or after it."""
        due = next((at for at in self.faults if at[0] == place and at[1] <= step), None)
        if due is None or not self.faulty:
            return
        if self.faults.pop(due) == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise ToldError(place)

    def batch(self, step: int) -> Any:
        """The batch of a step: its size changes."""
        self.maybe("batch", step)
        x = np.random.default_rng(step).normal(size=(self.sizes[step], 2)).astype(np.float32)
        return self.structure(x)

    def halve(self, step: int, state: Any, metrics: Any) -> Any:
        """Returns a state in memory of its own at some steps, and fills that again at the
        others."""
        self.memory[:] = np.nan
        if step not in self.halves:
            return None
        np.multiply(np.asarray(state.params["w"]), np.float32(0.5), out=self.memory)
        return state.replace(params={"w": self.memory})

    def hooks(self, directory: Path | None) -> list[Any]:
        """New hooks, of one start."""
        program = self

        class Ends(RunHook):
            def begin(self, state: Any) -> None:
                program.first, program.examples = jstep.global_step(state), (0, 0)

            def end(self, step: int, state: Any) -> Any:
                program.maybe("end", step)
                program.examples = self._run.examples
                return (
                    state.replace(params=jax.tree.map(lambda x: 3 * x, state.params))
                    if program.ends
                    else None
                )

            def close(self) -> None:
                step = self._run.step
                super().close()
                if program.faulty and ("close", step) in program.faults:
                    del program.faults["close", step]
                    os.kill(os.getpid(), signal.SIGTERM)

        class AtLast(jstep.StepCounterHook):
            def after_step(self, step: int, state: Any, metrics: Any) -> Any:
                program.maybe("at last", step)
                return super().after_step(step, state, metrics)

        def evaluate(state: Any) -> Any:
            program.maybe("evaluate", jstep.global_step(state))
            return {"loss": float(state.params["w"].sum())}

        def look(step: int, state: Any, metrics: Any) -> None:
            program.maybe("hook", step)
            OTHER(state, np.ones((2, 2), np.float32))

        found = [
            jstep.every(1 if self.steps_per_call == 1 else 2, look),
            jstep.every(1, self.halve),
            jstep.EvaluationHook(evaluate, every_n_steps=EVALUATED_EVERY),
            AtLast(every_n_steps=5),
            Ends(),
        ]
        if directory is not None:
            check = (lambda step: program.maybe("save", step),)
            found.insert(
                0, jstep.CheckpointSaverHook(directory / "second", save_steps=4, before_save=check)
            )
        return found

    def start(self, directory: Path | None = None) -> jstep.TrainState:
        """Start the run, or start it again."""
        return jstep.train(
            STEP,
            make_state(),
            self.batch,
            self.last,
            hooks=self.hooks(directory),
            checkpoint_dir=None if directory is None else directory / "own",
            save_checkpoint_steps=self.saves,
            steps_per_call=self.steps_per_call if self.faulty else 1,
            progress=False,
        )


def check_program(seed: int, directory: Path) -> None:
    """Run a drawn program with its faults, and compare it with the run without."""
    expected = Program(random.Random(seed), faulty=False).start()
    program, state = Program(random.Random(seed)), None
    for _ in range(MOST_STARTS):
        left: Any = None
        before = jstep.Saver(directory / "own").latest_step()
        try:
            state = program.start(directory)
            break
        except (jstep.Preempted, ToldError) as error:
            left = error
        step = jstep.global_step(left.state)
        expected_step = step or None
        # A signal while a run closes that an error has ended: the error is the context.
        error = left if isinstance(left, ToldError) else left.__context__
        # The last evaluation is a part of the end, before which a checkpoint is saved.
        is_at_end = str(error) == "evaluate" and step == program.last and step % EVALUATED_EVERY
        if str(error) in WITHIN_ITERATIONS and not is_at_end:
            # What was saved at an earlier boundary: by this start when it was due, or by the one
            # before.
            due = (step - 1) // program.saves * program.saves if program.saves else 0
            expected_step = max(due, before or 0) or None
        saved = jstep.Saver(directory / "own").latest_step()
        notes = getattr(left, "__notes__", "")
        assert saved == expected_step, f"left at step {step}, saved {saved}: {left!r} {notes}"
    assert state is not None, f"{program.faults} are left"
    assert state == expected
    assert program.examples == (sum(program.sizes[program.first :]), 0)
    program.faulty = False
    again = program.start(directory)  # a finished run changes nothing
    assert again == expected
    assert jstep.Saver(directory / "own").latest_step() == program.last


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(60))
def test_a_drawn_program(seed: int, tmp_path: Path) -> None:
    check_program(seed, tmp_path)


SLOW = """
from jstep.compiling import dispatch
draw = np.random.default_rng(int(sys.argv[5]))
dispatch.MAX_CALL_SECS = float(draw.choice([0.005, 0.05, 0.2]))  # the step is quick
opt = jstep.gradient_descent(0.1)
step = jstep.minimize(lambda p, x: jnp.mean((x @ p["w"] - 1.0) ** 2), opt)
slow, pause = int(draw.integers(2)), float(draw.choice([0.0005, 0.003, 0.01]))
last, at, who = int(draw.integers(60, 400)), int(draw.integers(4, 60)), int(draw.integers(2))
if sys.argv[6] == "late":
    at = last  # JAX looks for requests once a second, when the run has ended

def batches():
    while True:
        if process == slow:
            time.sleep(pause)
        yield np.ones((8, 4), np.float32)

class Calls(jstep.Hook):
    ends, sent = [], False
    def next_due(self, n):
        return None
    def after_step(self, n, state, metrics):
        self.ends.append(n)
        if sys.argv[6] != "end" and process == who and n >= at and not Calls.sent:
            Calls.sent = True
            os.kill(os.getpid(), signal.SIGTERM)

state = jstep.TrainState.create({"w": jnp.zeros(4)}, opt, mesh=mesh)
hooks = [Calls(), jstep.StallHook(warn_secs=30.0, exit_secs=60.0)]
how = "end"
try:
    jstep.train(step, state, batches(), last, hooks=hooks, checkpoint_dir=directory, log_steps=None, progress=False,
                steps_per_call="auto", batch_sharding=rows)
except jstep.Preempted:
    how = "preempted"
    try:
        jstep.train(step, state, batches(), last, checkpoint_dir=directory, progress=False)
    except RuntimeError as error:
        print("again", error, flush=True)
print("ended", how, Calls.ends, jstep.Saver(directory).latest_step() == Calls.ends[-1], flush=True)
"""  # noqa: E501


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("how", ["end", "signal", "late"])
def test_two_processes_of_which_one_is_slow(how: str, seed: int, tmp_path: Path) -> None:
    """Both make the same calls, whatever either of them measured, and leave at one step with a
    checkpoint."""
    output = run_all(SLOW, 2, str(tmp_path), str(seed), how)
    found = [printed(lines, "ended") for lines in output]
    assert found[0] is not None
    assert found[0] == found[1]
    assert found[0].endswith("] True")
    assert how != "late" or found[0].startswith("preempted")
    if found[0].startswith("preempted"):
        assert all("JAX stops only one" in str(printed(lines, "again")) for lines in output)
