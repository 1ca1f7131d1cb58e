"""A training step returns the kind of state that it was given: structure, shapes and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

ROWS = np.ones((8, 4, 8), np.float32)
TREE = {"w": np.ones((8, 8), np.float32), "n": np.int32(0), "pair": (np.float32(0), np.float32(1))}
WRONG = {
    r"whose '{}/w' is bfloat16\[8,8\] instead of float32\[8,8\]": lambda tree: {
        "w": tree["w"].astype(jnp.bfloat16)
    },
    r"whose '{}/n' is float32\[\] instead of int32\[\]": lambda tree: {"n": jnp.float32(tree["n"])},
    r"whose '{0}/n' is int32\[2\].*, "
    r"whose '{0}/w' is float32\[2,8\] instead of float32\[8,8\]": lambda tree: {
        "w": tree["w"][:2], "n": np.zeros(2, np.int32)
    },
    r"with '{}/new'": lambda tree: {"new": jnp.mean(tree["w"])},
    r"without '{}/n'": lambda tree: {"n": None},
    "whose '{}/pair' is of type list instead of tuple": lambda tree: {"pair": list(tree["pair"])},
}  # fmt: skip
WHERE = {
    "params": (
        lambda state: state.params,
        lambda state, new: state.replace(params=new, slots=state.slots),
    ),
    "slots/model_state": (
        lambda state: state.model_state,
        lambda state, new: state.replace(model_state=new),
    ),
    "slots/mine": (
        lambda state: state.slots["mine"],
        lambda state, new: state.replace(slots={**state.slots, "mine": new}),
    ),
}


def state_of_trees():
    optimizer = jstep.Optimizer(
        lambda params, step=0: {"mine": jax.tree.map(jnp.zeros_like, params)}, None, None
    )
    return jstep.TrainState.create(TREE, optimizer, model_state=TREE)


def step_of(change):
    def step(state, x):
        return change(jstep.increment_global_step(state)), {"loss": jnp.mean(x)}

    return step


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("said", WRONG)
def test_a_step_returns_the_kind_of_state_that_it_was_given(said, where):
    read, replace = WHERE[where]
    step = step_of(lambda state: replace(state, {**read(state), **WRONG[said](read(state))}))
    state, x = state_of_trees(), ROWS[0]
    kind = "of the structure, shapes and dtypes of its argument"
    match = f"train_step=step: must return a state {kind}, got one {said.format(where)}; cast"
    pure = jstep.scan_steps(step)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    for call, arguments in (
        (jstep.TrainStep(step), (state, x)),
        (jstep.TrainStep(step).eval_shape, (state, x)),
        (jstep.scan_steps(jstep.TrainStep(step)), (state, ROWS)),
        (pure, (state, ROWS)),
        (jax.jit(pure), (state, ROWS)),
        (jax.vmap(pure, (0, None)), (states, ROWS)),
    ):
        with pytest.raises(TypeError, match=match):
            call(*arguments)


def test_a_leaf_that_is_not_an_array_is_named():
    step = step_of(lambda state: state.replace(model_state={**state.model_state, "n": "3"}))
    with pytest.raises(
        TypeError,
        match=r"train_step=step: .* the leaf at 'slots/model_state/n' is a str, '3', which",
    ):
        jstep.TrainStep(step)(state_of_trees(), ROWS[0])


RUNS = {
    "TrainStep": (jstep.TrainStep, {}),
    "plain": (lambda step: step, {}),
    "jit": (jax.jit, {}),
    "several steps a call": (jstep.TrainStep, {"steps_per_call": 2}),
    "several steps a call of a plain function": (lambda step: step, {"steps_per_call": 2}),
    "stage": (
        lambda step: {0: jstep.TrainStep(step_of(lambda state: state)), 2: jstep.TrainStep(step)},
        {},
    ),
    "stage of jit": (
        lambda step: {0: jstep.TrainStep(step_of(lambda state: state)), 2: jax.jit(step)},
        {},
    ),
    "from_state": (jstep.TrainStep, {"batches": jstep.from_state(lambda n, state: ROWS[n])}),
}


@pytest.mark.thorough(except_for=["plain", "several steps a call", "stage"])
@pytest.mark.parametrize("name", RUNS)
def test_what_could_not_be_resumed_is_neither_trained_nor_saved(name, tmp_path):
    wrapped, options = RUNS[name]
    step = wrapped(
        step_of(
            lambda state: state.replace(model_state={**state.model_state, "new": jnp.float32(0)})
        )
    )
    options = {"batches": list(ROWS), "progress": False, "log_steps": None} | options
    with pytest.raises(
        (TypeError, ValueError),
        match=r"a state .*with 'slots/model_state/new'",
    ) as raised:
        jstep.train(step, state_of_trees(), last_step=4, checkpoint_dir=tmp_path, **options)
    assert isinstance(raised.value, ValueError) == name.startswith("stage")
    assert jstep.latest_checkpoint(tmp_path) is None


def test_a_plain_function_is_checked_at_each_step(tmp_path):
    def step(state, x):
        new = (
            state
            if state.global_step < 2
            else state.replace(params={**state.params, "n": jnp.float32(0)})
        )
        return jstep.increment_global_step(new), {}

    with pytest.raises(TypeError, match="whose 'params/n' is float32"):
        jstep.train(
            step, state_of_trees(), lambda n: ROWS[n], 4, checkpoint_dir=tmp_path, progress=False
        )
    assert jstep.Saver(tmp_path).latest_step() == 2


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_weak_types_become_strong(steps_per_call, compilations):
    """Python numbers fit wherever JAX would promote them to the dtype; the step is compiled
    once."""
    weak = {"w": jnp.broadcast_to(jnp.asarray(2.0), (8, 8)), "n": 3, "pair": (1, jnp.asarray(0.5))}
    step = jstep.TrainStep(
        step_of(lambda state: state.replace(slots={**state.slots, "model_state": weak}))
    )
    options = {"steps_per_call": steps_per_call, "progress": False, "log_steps": None}
    state = state_of_trees().replace(
        model_state={**TREE, "pair": (jnp.bfloat16(0), jnp.float32(0))}
    )
    state = jstep.train(step, state, lambda n: ROWS[n], 2, **options)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    with compilations() as seen:
        state = jstep.train(step, state, lambda n: ROWS[n], 6, **options)
    assert seen == []
    assert state.model_state["pair"] == (jnp.bfloat16(1), jnp.float32(0.5))
    with pytest.raises(
        TypeError,
        match=r"whose 'slots/model_state/n' is float32\[\] instead of int32\[\]",
    ):
        jstep.TrainStep(
            step_of(lambda state: state.replace(model_state={**TREE, "n": 3.0}))
        ).eval_shape(state, ROWS[0])


@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize("make", [jstep.TrainStep, jax.jit, lambda step: step])
def test_a_weak_integer_for_a_float_leaf_is_cast_at_every_call(make, steps_per_call, tmp_path):
    def step(state, x):
        flag = jnp.where(jnp.sum(x) > 0, 0, 1)
        return jstep.increment_global_step(state).replace(model_state={"flag": flag}), {}

    dtypes = set()
    for last in (3, 6):
        state = jstep.TrainState.create({"w": 0.0}, jstep.sgd(0.1), model_state={"flag": 1.0})
        hook = jstep.every(
            1, lambda step, state, metrics: dtypes.add(str(state.model_state["flag"].dtype))
        )
        options = {
            "checkpoint_dir": tmp_path,
            "log_steps": None,
            "steps_per_call": steps_per_call,
            "hooks": [hook],
        }
        state = jstep.train(make(step), state, lambda n: ROWS[n], last, **options)
    assert dtypes == {"float32"}
    assert (state.model_state["flag"], int(state.global_step)) == (0.0, 6)


@pytest.mark.parametrize("dtype", ["float64", "int64", ">f8"])
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("run", [False, True])
def test_a_step_that_is_not_traced_returns_the_own_dtypes_of_leaves(dtype, late, run, tmp_path):
    def step(state, x):
        number = int(state.global_step)
        w = np.asarray(state.params["w"]) * np.float32(0.5)
        w = w.astype(dtype) if number == late else w.astype(">f4") if number == 1 else w
        return jstep.increment_global_step(state).replace(params={"w": w}), {"loss": np.float64(1)}

    state = jstep.TrainState.create({"w": jnp.ones((8, 8))}, jstep.sgd(0.1))
    options = {"checkpoint_dir": tmp_path, "log_steps": None}
    native = np.dtype(dtype).newbyteorder("=")

    def train():
        if not run:
            return jstep.train(step, state, list(ROWS), 4, **options)
        with jstep.Run(step, state, list(ROWS), 4, **options) as training:
            return list(training)

    with pytest.raises(
        TypeError,
        match=rf"whose 'params/w' is {native}\[8,8\] instead of float32\[8,8\]",
    ):
        train()
    assert (jstep.Saver(tmp_path).latest_step() or 0) == late


def test_numpy_constants_in_a_traced_step_are_what_jax_makes_of_them():
    step = step_of(lambda state: state.replace(params={"w": np.zeros(2)}, slots=state.slots))
    state, _ = jstep.TrainStep(step)(
        jstep.TrainState.create({"w": jnp.ones(2)}, jstep.sgd(0.1)), ROWS[0]
    )
    assert state.params["w"].dtype == jnp.float32
