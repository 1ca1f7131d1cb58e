"""NumPy memory that comes into a state is copied, whichever door it comes in by: other code may
fill it again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import aligned

import jstep

OPTIMIZER = jstep.gradient_descent(jstep.held("learning_rate", 0.0))  # the parameters must stay
SIZE = 1024


def make_state(params=None):
    return jstep.TrainState.create({"w": jnp.zeros(SIZE) if params is None else params}, OPTIMIZER)


def loss_fn(params, x):
    return jnp.mean((params["w"] - x) ** 2)


def make_step(**kwargs):
    return jstep.minimize(loss_fn, OPTIMIZER, **kwargs)


def run(state, hooks=(), step=None, **kwargs):
    step = make_step(donate=False) if step is None else step
    return jstep.train(
        step, state, lambda n: np.ones(SIZE, np.float32), 6, hooks=hooks, progress=False, **kwargs
    )


def filled(array, value):
    array[...] = value
    return array


def refill(array):
    """What a simulator or a loader does with its own memory."""
    filled(array, 1000.0)


Door = Callable[[np.ndarray[Any, Any], Path], Any]


def once(array, at=2):
    """A function `(step, state, results) -> state` that gives the memory at one step, and fills it
    at the next."""

    def give(step, state, _):
        if step == at:
            return state.replace(params={"w": filled(array, 5.0)})
        return refill(array)

    return give


def made_by_hand(state, array):
    return jstep.TrainState({"w": array}, state.slots, state.global_step)


def by_create(array, path):
    return make_state(filled(array, 5.0))


def by_replace(array, path):
    return make_state().replace(params={"w": filled(array, 5.0)})


def by_shard_state(array, path):
    state = make_state()
    return jstep.shard_state(
        made_by_hand(state, filled(array, 5.0)), jax.make_mesh((2,), ("data",))
    )


def by_a_step(array, path):
    """A step by hand reads the memory before it returns, or copies it: the program may run
    later."""
    state, _ = make_step(donate=False)(
        made_by_hand(make_state(), filled(array, 5.0)), np.ones(SIZE, np.float32)
    )
    return state


def by_a_run(array, path):
    hook = jstep.every(1, lambda step, state, metrics: refill(array))
    return run(made_by_hand(make_state(), filled(array, 5.0)), [hook])


def by_a_hook(array, path):
    return run(make_state(), [jstep.every(1, once(array))])


def by_end(array, path):
    class End(jstep.Hook):
        def end(self, step, state):
            return state.replace(params={"w": filled(array, 5.0)})

    return run(make_state(), [End()], checkpoint_dir=path)


def by_a_callback(array, path):
    class Keeps:
        """Its array comes back from the checkpoint, and is given again."""

        array: Any = None

        def __call__(self, step, state, results):
            if step > 4 and self.array is not None:
                return refill(self.array)
            self.array = filled(array if self.array is None else self.array, 5.0)
            return state.replace(params={"w": self.array})

        def get_state(self):
            return self.array

        def set_state(self, value):
            self.array = value

    def part(last):
        hook = jstep.EvaluationHook(lambda state: {"x": 0.0}, every_n_steps=2, callbacks=[Keeps()])
        step = make_step(donate=False)
        rows = np.ones(SIZE, np.float32)
        return jstep.train(
            step,
            make_state(),
            lambda n: rows,
            last,
            hooks=[hook],
            checkpoint_dir=path,
            progress=False,
        )

    part(3)
    return part(8)


def by_a_stage(array, path):
    """A stage that is not compiled gives its memory to the next one."""
    second = make_step(donate=False)

    def first(state, x):
        new = made_by_hand(jstep.increment_global_step(state), filled(array, 5.0))
        return new, {"loss": 0.0}

    hook = jstep.every(1, lambda step, state, metrics: refill(array))
    return run(make_state(), [hook], {0: first, 3: second})


def by_a_restore(array, path):
    """A checkpoint is restored into arrays of the host."""
    with jstep.Saver(path) as saver:
        saver.save(make_state(filled(array, 5.0)))
        saver.wait()
        on_host = made_by_hand(make_state(), filled(array, 7.0))
        return saver.restore(on_host)


DOORS = {name: door for name, door in globals().items() if name.startswith("by_")}


@pytest.mark.parametrize("name", DOORS)
def test_memory_is_copied(name, tmp_path):
    array = aligned((SIZE,))
    state = DOORS[name](array, tmp_path)
    filled(array, 1000.0)
    np.testing.assert_array_equal(np.asarray(state.params["w"]), np.full(SIZE, 5.0, np.float32))
