"""A state that other code donated is refused by name, by every kind of step and on every kind of
mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jstep
from jstep.slots.roles import roles_in

OPTIMIZER = jstep.momentum(0.1, 0.9)
X = np.ones(4, np.float32)


def loss_fn(params, x):
    return jnp.mean((params["w"] - x) ** 2) + params["b"] ** 2


def make_step(**kwargs):
    return jstep.minimize(loss_fn, OPTIMIZER, **kwargs)


def make_state(kind, optimizer=OPTIMIZER, params=None):
    params = {"w": jnp.zeros(4), "b": 0.0} if params is None else params
    mesh = None
    if kind != "one device":
        mesh = jax.make_mesh((2,), ("data",), axis_types=(getattr(AxisType, kind),))
    return jstep.TrainState.create(params, optimizer, mesh=mesh)


def custom():
    inner = make_step(jit=False)
    return jstep.TrainStep(lambda state, x: inner(state, x))


KINDS = ["one device", "Auto", "Explicit"]
STEPS = {
    "minimize": make_step,
    "not donating": lambda: make_step(donate=False),
    "custom": custom,
    "scan_steps": lambda: jstep.scan_steps(make_step()),
}
MESSAGE = (
    "the state's 'params/[bw]' was donated to an earlier step and deleted. "
    "Use the state that the step returned"
)


@pytest.mark.thorough(
    except_for=["all-scan_steps-one device", "params-not donating-Auto", "all-custom-Explicit"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("of", ["all", "params"])
def test_a_step_by_hand(kind, name, of):
    """The step returned the state last, so that it would not look at it again."""
    step, other = STEPS[name](), make_step()
    x = X[None] if name == "scan_steps" else X
    latest, _ = step(make_state(kind), x)
    for _ in range(2):  # in the form for its own results, too
        latest, _ = step(latest, x)
    if of == "all":
        other(latest, X)
    else:  # the global step lives on
        jax.jit(lambda params: params, donate_argnums=0)(latest.params)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=MESSAGE):
            step(latest, x)
    assert int(step(make_state(kind), x)[0].global_step) == 1


@pytest.mark.thorough(except_for=["jit-Explicit", "K steps-one device"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["minimize", "custom", "jit", "K steps"])
def test_in_a_run(kind, name):
    inner = make_step(jit=False)
    step = (
        jax.jit(lambda state, x: inner(state, x)) if name == "jit" else STEPS.get(name, make_step)()
    )
    other = make_step()

    def forgets(n, state, metrics):
        other(state, X)  # without donate=False

    with pytest.raises(RuntimeError, match=MESSAGE) as caught:
        jstep.train(
            step,
            make_state(kind),
            lambda n: X,
            12,
            hooks=[jstep.every(6, forgets)],
            steps_per_call=3 if name == "K steps" else 1,
            progress=False,
        )
    assert (
        "at step 6, after the update with batch 5, while running the step on batch"
        in caught.value.__notes__[-1]
    )
    assert "it is lost" in caught.value.__notes__[-1]


# Shared buffers that a step would donate twice or donate and read; JAX would crash on a mesh, jstep
# raises.

OPTIMIZER_OF_BUFFERS = jstep.lookahead(jstep.adam(0.01))
X_OF_BUFFERS = np.ones((8, 3), np.float32)


def loss_fn_of_buffers(params, x, teacher=None):
    return jnp.mean((x @ params["w"]) ** 2) + (0 if teacher is None else jnp.sum(teacher["w"]))


def create(kind):
    return make_state(kind, OPTIMIZER_OF_BUFFERS, {"w": jnp.ones((3, 2))})


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "alias", [lambda tree: tree, lambda tree: jax.device_put(tree, tree["w"].sharding)]
)
def test_slots_that_share_buffers_with_parameters(kind, alias):
    step = jstep.minimize(loss_fn_of_buffers, OPTIMIZER_OF_BUFFERS)
    state, _ = step(create(kind), X_OF_BUFFERS)
    aliased = state.replace(slots={**state.slots, "slow": alias(state.params)})
    with pytest.raises(ValueError, match="'params/w' and 'slots/slow/w' share one buffer"):
        step(aliased, X_OF_BUFFERS)
    with pytest.raises(ValueError, match="'params/w' and 'slots/slow/w' share one buffer"):
        jstep.scan_steps(step)(aliased, X_OF_BUFFERS[None])
    copied = state.replace(slots={**state.slots, "slow": jax.tree.map(jnp.copy, state.params)})
    assert jstep.global_step(step(copied, X_OF_BUFFERS)[0]) == 2


@pytest.mark.thorough(except_for=["Explicit"])
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_share_buffers_with_parameters(kind):
    step = jstep.minimize(loss_fn_of_buffers, OPTIMIZER_OF_BUFFERS)
    for state in (create(kind), step(create(kind), X_OF_BUFFERS, None)[0]):
        with pytest.raises(
            ValueError, match="'params/w' and the step's argument '1/w' share one buffer"
        ):
            step(state, X_OF_BUFFERS, state.params)
    state = create(kind)
    kept, _ = jstep.minimize(loss_fn_of_buffers, OPTIMIZER_OF_BUFFERS, donate=False)(
        state, X_OF_BUFFERS, state.params
    )
    assert jstep.global_step(kept) == 1


# A state between two calls of a step: what travels with it, by hand, in runs, and from one step to
# another.

OPTIMIZER_BETWEEN_CALLS = jstep.adam(0.1)


def loss(params, x):
    return jnp.sum((params["dense"]["kernel"] * x + params["bias"]) ** 2)


def fresh(**options):
    params = {"dense": {"kernel": jnp.arange(3.0)}, "bias": jnp.ones(3)}
    return jstep.TrainState.create(params, OPTIMIZER_BETWEEN_CALLS, **options)


def by_hand(step, state, count):
    for n in range(count):
        state, _ = step(state, batch(n))
    return state


def run(step, state, last_step, **options):
    return jstep.train(step, state, batch, last_step, log_steps=None, progress=False, **options)


def batch(step):
    return np.full(3, step, np.float32)


def test_by_hand_and_in_runs_the_bits_are_the_same_and_a_step_is_compiled_once():
    expected = by_hand(jstep.minimize(loss, OPTIMIZER_BETWEEN_CALLS), fresh(), 9)
    step = jstep.minimize(loss, OPTIMIZER_BETWEEN_CALLS)
    state = run(step, by_hand(step, fresh(), 3), 6)
    assert type(state) is jstep.TrainState
    for n in range(6, 9):
        state, _ = step(state, batch(n))
    assert state == expected
    assert step._cache_size() == 1


@pytest.mark.thorough(except_for=["without"])
@pytest.mark.parametrize("first", ["with roles", "without"])
def test_a_state_made_by_hand_has_the_roles_in_a_run_that_it_has_by_hand(first):
    made = fresh()
    without = jstep.TrainState(made.params, made.slots, made.global_step)
    states = [fresh(), without] if first == "with roles" else [without, fresh()]
    seen = []
    for call in (run, by_hand):
        step = jstep.minimize(loss, OPTIMIZER_BETWEEN_CALLS)
        ends = [call(step, jax.tree.map(jnp.copy, state), 3) for state in states]
        seen.append([dict(roles_in(end)) for end in ends])
        assert ends[0] == ends[1]
        assert step._cache_size() == 2  # the trace for one structure is not used for the other
    assert seen[0] == seen[1] == [dict(roles_in(state)) for state in states]


def test_a_step_that_was_called_by_hand_is_not_compiled_again_as_a_later_stage():
    first, later = (
        jstep.minimize(loss, OPTIMIZER_BETWEEN_CALLS),
        jstep.minimize(loss, OPTIMIZER_BETWEEN_CALLS),
    )
    later(fresh(), batch(0))
    run({0: first, 3: later}, fresh(), 6)
    assert (first._cache_size(), later._cache_size()) == (1, 1)
