"""A restart with nothing to do says what has changed, and that none of it was trained; custom steps are compared."""

import itertools
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

X = np.ones((8, 3), np.float32)
UNTRAINED = "none of this was trained, as the run takes no step: give another checkpoint_dir, or a larger last_step"


@pytest.fixture(autouse=True)
def informed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jstep")


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines below the warning of what has changed; forget them."""
    texts = [record.getMessage() for record in caplog.records if "this run has changed" in record.getMessage()]
    assert len(texts) <= 1
    assert not [record for record in caplog.records if "could not be recorded" in record.getMessage()]
    caplog.clear()
    return [line.strip() for text in texts for line in text.splitlines()[1:]]


def loss_of(scale: float) -> Callable[..., jax.Array]:
    def loss(params: Any, x: Any) -> jax.Array:
        return scale * jnp.mean((x @ params["w"]) ** 2)

    return loss


def start(directory: pathlib.Path, last_step: int, batches: Any, scale: float = 1.0, rate: float = 0.1) -> None:
    optimizer = jstep.momentum(rate, 0.9)
    step = jstep.minimize(loss_of(scale), optimizer)
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
    jstep.train(step, state, batches, last_step, checkpoint_dir=directory, config={"rate": rate}, progress=False)


BATCHES: dict[str, Callable[[], Any]] = {
    "function": lambda: lambda step: X,
    "batches": lambda: jstep.batches(np.ones((64, 3), np.float32), 8, seed=0),
    "list": lambda: [X] * 9,
    "data that has ended": lambda: jstep.batches(np.ones((24, 3), np.float32), 8, seed=0, num_epochs=1),
}
TRACED = "the traced step differs"


@pytest.mark.thorough(except_for=["function", "data that has ended"])
@pytest.mark.parametrize("name", BATCHES)
def test_what_changed_and_was_not_trained(name: str, tmp_path: pathlib.Path, caplog: Any) -> None:
    batches = BATCHES[name]
    start(tmp_path, 3, batches())
    start(tmp_path, 3, batches())
    assert reported(caplog) == []
    changed = ["config: rate: 0.1 before, 0.2 now", UNTRAINED]
    start(tmp_path, 3, batches(), rate=0.2)
    assert reported(caplog) == changed
    start(tmp_path, 2, batches(), scale=2.0, rate=0.2)  # last_step is before the checkpoint
    assert reported(caplog) == changed  # programs are not compared, as none is traced
    start(tmp_path, 4, batches(), rate=0.2)
    found = ["learning_rate: 0.1 before, 0.2 now", TRACED, "config: rate: 0.1 before, 0.2 now"]
    assert reported(caplog) == found * (name != "data that has ended")  # these steps were trained, if there are any


def test_an_iterator_is_not_read(tmp_path: pathlib.Path, caplog: Any) -> None:
    read = []

    def rows() -> Iterator[Any]:
        for n in itertools.count():
            read.append(n)
            yield X

    start(tmp_path, 3, rows())
    read.clear()
    start(tmp_path, 3, rows(), scale=2.0, rate=0.2)
    assert (read, reported(caplog)) == ([], ["config: rate: 0.1 before, 0.2 now", UNTRAINED])


@pytest.mark.thorough(except_for=["True"])
@pytest.mark.parametrize("jit", [True, False])
def test_a_custom_step_is_compared(jit: bool, tmp_path: pathlib.Path, caplog: Any) -> None:
    def start(scale: float, last_step: int) -> None:
        optimizer = jstep.momentum(0.1, 0.9)

        def custom(state: jstep.TrainState, x: Any) -> Any:
            value, gradients = jax.value_and_grad(loss_of(scale))(state.params, x)
            return jstep.apply_gradients(state, gradients, optimizer), {"loss": value, "rows": jnp.float32(8)}

        state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
        step = jax.jit(custom) if jit else custom
        jstep.train(step, state, lambda n: X, last_step, checkpoint_dir=tmp_path, progress=False)

    start(1.0, 3)
    assert reported(caplog) == []
    start(1.0, 5)
    assert reported(caplog) == []
    start(2.0, 6)
    found = reported(caplog)
    if jit:
        (line,) = found
        assert line == TRACED
