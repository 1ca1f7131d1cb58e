"""What hooks tell the object that makes the batches is in the checkpoint of their step: 17 + 23 steps are 40."""

import os
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from points import Remembering

import jstep

OPTIMIZER = jstep.adam(1e-2)
X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
Y = X @ np.array([1, -1, 2, 0.5], np.float32)


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    error = x @ params["w"] - y
    return jnp.mean(error**2), {"error": jnp.abs(error)}


STEP = jstep.minimize(loss_fn, OPTIMIZER, has_aux=True)


def make_state() -> jstep.TrainState:
    return jstep.TrainState.create({"w": jnp.zeros(4)}, OPTIMIZER)


class Buffer(Remembering):
    """Prioritized replay: rows are drawn by their errors, which a hook tells."""

    def __init__(self) -> None:
        self.priority, self.rng, self.last = np.ones(64), np.random.default_rng(1), np.zeros(8, int)

    def __call__(self, step: int, state: jstep.TrainState) -> Any:
        self.last = self.rng.choice(64, 8, p=self.priority / self.priority.sum())
        return X[self.last], Y[self.last]

    def tell(self, step: int, state: jstep.TrainState, metrics: Any) -> None:
        self.priority[self.last] = np.asarray(metrics["error"]) + 1e-3


class UnknownAtFirst(Buffer):
    """A buffer that does not know its position before its first batch."""

    def state_dict(self) -> Any:
        if not self.last.any():
            raise RuntimeError("no batch was made yet")
        return vars(self)


def run(buffer: Any, last: int | None, directory: Path | None, hooks: Any = (), step: Any = STEP, **kwargs: Any) -> Any:
    """The end of a run in which a hook tells the buffer the errors of each step, before other hooks are called."""
    kwargs = {"progress": False, "log_steps": None, "save_checkpoint_secs": None} | kwargs
    hooks = [jstep.every(1, buffer.tell), *hooks]
    return jstep.train(
        step, make_state(), jstep.from_state(buffer), last, hooks=hooks, checkpoint_dir=directory, **kwargs
    )


def by_hand(steps: int, buffer: Any) -> jstep.TrainState:
    state = make_state()
    for step in range(steps):
        state, metrics = STEP(state, *buffer(step, state))
        buffer.tell(step + 1, state, metrics)
    return state


WHOLE = Buffer()
END = by_hand(40, WHOLE)


def assert_resumes(directory: Path, kind: type[Buffer] = Buffer, last: int = 40) -> None:
    """A run from the newest checkpoint ends as the loop by hand, and so does its buffer."""
    buffer = kind()
    assert run(buffer, last, directory) == END
    np.testing.assert_array_equal(buffer.priority, WHOLE.priority)


@pytest.mark.thorough(except_for=["UnknownAtFirst"])
@pytest.mark.parametrize("kind", [Buffer, UnknownAtFirst])
def test_a_run_in_two_parts_is_a_whole_one(tmp_path: Path, kind: type[Buffer]) -> None:
    assert run(kind(), 17, tmp_path) == by_hand(17, Buffer())
    assert_resumes(tmp_path, kind)
    found = jstep.replay(STEP, make_state(), jstep.from_state(kind()), tmp_path, 17)
    assert found.state == by_hand(17, Buffer())
    after = Buffer()
    by_hand(17, after)
    np.testing.assert_array_equal(found.args[0], after(17, found.state)[0])


class ToldError(Exception):
    """A failure of a hook, a step or a batch."""


def fail_at(step: int, when: str) -> dict[str, Any]:
    """Arguments of `run` that make it fail at a step."""

    def hook(n: int, state: Any, metrics: Any) -> None:
        if n == step:
            raise ToldError

    def train_step(state: Any, *args: Any) -> Any:
        if jstep.global_step(state) == step:
            raise ToldError
        return STEP(state, *args)

    return {"hook": {"hooks": [jstep.every(1, hook)]}, "step": {"step": train_step}}[when]


@pytest.mark.parametrize("when", ["hook", "step"])
def test_an_error(tmp_path: Path, when: str) -> None:
    """A batch whose step failed is made again; what hooks tell after the last complete step is kept."""
    with pytest.raises(ToldError):
        run(Buffer(), 40, tmp_path, **fail_at(23, when))
    assert jstep.Saver(tmp_path).latest_step() == 23
    assert_resumes(tmp_path)


class Breaks(Buffer):
    """A buffer that changes and then fails, is interrupted, or ends."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self._how = how

    def __call__(self, step: int, state: jstep.TrainState) -> Any:
        batch = super().__call__(step, state)
        if step == 23:
            self._how()
        return batch

    def state_dict(self) -> Any:
        return {name: value for name, value in vars(self).items() if name != "_how"}


def fail() -> None:
    raise ToldError


def end() -> None:
    raise StopIteration


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.thorough(except_for=["fail", "interrupt"])
@pytest.mark.parametrize("how", [fail, end, interrupt])
def test_a_batch_that_could_not_be_made(tmp_path: Path, how: Any) -> None:
    """A restart makes it again, from the position after the hooks of the step before."""
    if how is end:
        run(Breaks(how), None, tmp_path)
    else:
        with pytest.raises(jstep.Preempted if how is interrupt else ToldError):
            run(Breaks(how), 40, tmp_path)
    assert jstep.Saver(tmp_path).latest_step() == 23
    assert_resumes(tmp_path)
