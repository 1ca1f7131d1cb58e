"""`train` with stages: which step is run when, errors before the first step, and compilation in the
background."""

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import train
from positioned import Positioned

import jstep

BATCHES = [np.full(3, n, np.float32) for n in range(40)]


def near(params, x):
    return jnp.sum((params["w"] - x) ** 2)


def far(params, x):
    loss = jnp.sum(jnp.abs(params["w"] + x))
    return loss, {"sign": jnp.sum(jnp.sign(params["w"]))}


OPTIMIZER = jstep.adam(0.1)
NEAR = jstep.minimize(near, OPTIMIZER)
FAR = jstep.minimize(far, OPTIMIZER, has_aux=True)


def make_state(step=0, optimizer=OPTIMIZER):
    return jstep.TrainState.create({"w": jnp.ones(3)}, optimizer, global_step=step)


def by_hand(steps, stages, batches=BATCHES):
    state = make_state()
    for n in range(steps):
        step = stages[max(k for k in stages if k <= n)]
        state, _ = step(state, batches[n])
    return state


def train_stages(stages, last, batches=BATCHES, state=None, **kwargs):
    return train(
        last, batches, step=stages, state=make_state() if state is None else state, **kwargs
    )


@pytest.mark.thorough(except_for=["30-1"])
@pytest.mark.parametrize("steps_per_call", [1, 3, 7])
@pytest.mark.parametrize("last", [5, 9, 10, 11, 30])
def test_each_step_uses_the_function_of_its_stage(last, steps_per_call):
    stages = {0: NEAR, 10: FAR, 13: NEAR}
    state = train_stages(stages, last, steps_per_call=steps_per_call)
    expected = by_hand(last, stages)
    assert jstep.global_step(state) == last
    equal = np.testing.assert_array_equal if steps_per_call == 1 else np.testing.assert_allclose
    kwargs = {} if steps_per_call == 1 else {"rtol": 1e-5}
    equal(state.params["w"], expected.params["w"], **kwargs)


@pytest.mark.thorough(except_for=["11-1"])
@pytest.mark.parametrize("steps_per_call", [1, 7])
@pytest.mark.parametrize("stop", [4, 9, 10, 11, 15])
def test_resume_with_stages_is_identical(stop, steps_per_call, tmp_path):
    stages = {0: NEAR, 10: FAR}
    kwargs = {"steps_per_call": steps_per_call, "save_checkpoint_steps": 5}
    uninterrupted = train_stages(stages, 20, checkpoint_dir=tmp_path / "uninterrupted", **kwargs)
    train_stages(stages, stop, checkpoint_dir=tmp_path / "resumed", **kwargs)
    resumed = train_stages(stages, 20, checkpoint_dir=tmp_path / "resumed", **kwargs)
    np.testing.assert_array_equal(jstep.fingerprint(uninterrupted), jstep.fingerprint(resumed))
    state, args = jstep.replay(stages, make_state(), BATCHES, tmp_path / "resumed", 17)
    np.testing.assert_array_equal(args[0], BATCHES[17])
    np.testing.assert_allclose(
        FAR(state, *args)[0].params["w"], by_hand(18, stages).params["w"], rtol=1e-5
    )


# Errors before the first step


def wrong_shape(params, x):
    return jnp.sum(params["w"].reshape(3, 1) * x.reshape(1, 4))


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_an_error_in_a_later_stage_is_found_before_the_first_step(steps_per_call):
    hooks = [jstep.every(1, lambda *_: pytest.fail("a step was taken"))]
    stages = {0: NEAR, 5: FAR, 30: jstep.minimize(wrong_shape, OPTIMIZER)}
    with pytest.raises(ValueError, match=r"train_step\[30\].*step 30.*TypeError"):
        train_stages(stages, 40, hooks=hooks, steps_per_call=steps_per_call)
    # A stage that is never reached is not checked.
    assert jstep.global_step(train_stages(stages, 30)) == 30


NO_STEP = [jstep.every(1, lambda *_: pytest.fail("a step was taken"))]
SOURCES = {
    "list": lambda: BATCHES,
    "sequence": lambda: jstep.batches(np.ones(24, np.float32), 3),
    "function": lambda: lambda n: BATCHES[n],
    "iterator": lambda: iter(BATCHES),
    "loader": lambda: Positioned(BATCHES.__getitem__),
    "from_state": lambda: jstep.from_state(lambda step, state: BATCHES[step]),
}


def update_with_half_precision(*args):
    updates, slots = OPTIMIZER.update(*args)
    return updates, {**slots, "m": jax.tree.map(lambda m: m.astype(jnp.bfloat16), slots["m"])}


OTHERS = {
    "fewer": jstep.gradient_descent(0.1),
    "other": jstep.momentum(0.1, 0.9),
    "more": jstep.ademamix(0.1),
    "dtype": OPTIMIZER._replace(update=update_with_half_precision),
    "wrapper": jstep.with_moving_average(OPTIMIZER, jstep.ExponentialMovingAverage(0.9)),
}


@pytest.mark.thorough(
    except_for=["True-function-fewer", "False-function-dtype", "True-loader-other"]
)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("jit", [True, False])
def test_a_stage_of_another_optimizer_is_found_before_the_first_step(source, other, jit):
    """Whatever the batches are, as it needs none of them."""
    stages = {0: NEAR, 6: jstep.minimize(near, OTHERS[other], jit=jit)}
    with pytest.raises(
        ValueError,
        match=r"train_step\[6\]: it cannot take step 6, the first of its stage: .* slot",
    ):
        train_stages(stages, 10, SOURCES[source](), hooks=NO_STEP)
    with pytest.raises(ValueError, match=r"train_step\[6\]: it cannot take step 6"):
        train_stages({**stages, 4: FAR}, 10, SOURCES[source](), hooks=NO_STEP)
    assert jstep.global_step(train_stages(stages, 6, SOURCES[source]())) == 6  # it is never reached


def test_a_stage_of_another_optimizer_in_a_body_that_makes_the_batches():
    stages = {0: NEAR, 6: jstep.minimize(near, jstep.momentum(0.1, 0.9))}
    run = jstep.Run(stages, make_state(), jstep.from_loop(), 10, progress=False)
    with pytest.raises(ValueError, match=r"train_step\[6\]: it cannot take step 6"):
        run.__enter__()


def with_other_slots(optimizer):
    """An optimizer that leaves the slots of others as they are."""

    def init(params, global_step=0):
        return optimizer.init(params, global_step) | {"other": jnp.zeros(2)}

    def update(updates, slots, params, step, context):
        mine = {name: slot for name, slot in slots.items() if name != "other"}
        updates, mine = optimizer.update(updates, mine, params, step)
        return updates, slots | mine

    return jstep.Optimizer(init, update, optimizer.hyperparameters, takes_context=True)


def only_of_small_gradients():
    """An optimizer whose update needs more than zeros and ones."""

    def update(updates, slots, params, step, context):
        if context.key is not None:
            raise TypeError("without a key")
        return jax.tree.map(lambda g: -0.1 * g, updates), {}

    return jstep.Optimizer(
        lambda params, global_step=0: {}, update, lambda step: {}, takes_context=True
    )


def test_stages_that_fit_are_taken():
    """Slots of others may be in the state; and what an update needs besides slots, its step finds
    out."""
    first, second = with_other_slots(OPTIMIZER), with_other_slots(jstep.adam(0.01))
    stages = {
        0: jstep.minimize(near, first),
        4: jstep.minimize(near, second),
        6: jstep.minimize(near, first),
    }
    function = SOURCES["function"]()
    assert jstep.global_step(train_stages(stages, 8, function, make_state(optimizer=first))) == 8
    plain = jstep.gradient_descent(0.1)
    stages = {0: jstep.minimize(near, plain), 4: jstep.minimize(near, only_of_small_gradients())}
    assert jstep.global_step(train_stages(stages, 8, function, make_state(optimizer=plain))) == 8


@pytest.mark.parametrize(
    "other",
    [
        jstep.dynamic_loss_scale(OPTIMIZER),
        jstep.with_noise_scale(OPTIMIZER),
        jstep.master_weights(OPTIMIZER),
        jstep.compact(OPTIMIZER, min_size=0),
        jstep.partition({"a": OPTIMIZER, "b": jstep.momentum(0.1, 0.9)}, lambda path, leaf: "a"),
        jstep.update_every(OPTIMIZER, 2, accumulate=True),
        jstep.skip_nonfinite(
            jstep.with_moving_average(
                jstep.schedule_free_sgd(0.1), jstep.ExponentialMovingAverage(0.9)
            )
        ),
    ],
)
def test_an_equal_optimizer_of_a_stage_fits(other):
    """Two optimizers of the same call are two objects, and the slots of one fit the other."""
    state = make_state(optimizer=other)
    stages = {
        0: jstep.minimize(near, other),
        2: jstep.minimize(far, other._replace(), has_aux=True),
    }
    assert jstep.global_step(train_stages(stages, 4, SOURCES["function"](), state)) == 4


NO_INCREMENT = jstep.minimize(near, OPTIMIZER, increment_global_step=False)


@pytest.mark.thorough(except_for=["function", "list"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_step_of_minimize_that_does_not_increment_is_found_before_the_first_step(source):
    words = (
        "does not increment global_step, which each step of a run must do once; pass "
        "increment_global_step=False"
    )
    with pytest.raises(ValueError, match=f"train_step: near {words}"):
        train_stages(NO_INCREMENT, 10, SOURCES[source](), hooks=NO_STEP)
    with pytest.raises(ValueError, match=rf"train_step\[6\]: near {words}"):
        train_stages({0: NEAR, 6: NO_INCREMENT}, 10, SOURCES[source](), hooks=NO_STEP)
    assert jstep.global_step(train_stages({0: NEAR, 6: NO_INCREMENT}, 6, SOURCES[source]())) == 6


def custom(increments):
    def step_of_mine(state, x):
        gradients = jax.grad(near)(state.params, x)
        state = jstep.apply_gradients(state, gradients, OPTIMIZER, increment_global_step=False)
        return (jstep.increment_global_step(state) if increments else state), {}

    return step_of_mine


@pytest.mark.parametrize(
    "compiled", [jax.jit, jstep.TrainStep, lambda step: jax.jit(jax.jit(step))]
)
def test_a_compiled_step_that_does_not_increment_is_found_with_its_batch(compiled):
    with pytest.raises(
        ValueError,
        match=r"train_step\[6\]: step_of_mine does not increment global_step",
    ):
        train_stages({0: NEAR, 6: compiled(custom(False))}, 10, hooks=NO_STEP)
    assert jstep.global_step(train_stages({0: NEAR, 6: compiled(custom(True))}, 10)) == 10


def test_a_stage_whose_batch_has_another_shape():
    batches = [*BATCHES[:7], *[np.ones((2, 2), np.float32)] * 33]
    with pytest.raises(ValueError, match=r"train_step\[7\]"):
        train_stages({0: NEAR, 7: FAR}, 10, batches)


@pytest.mark.parametrize("kind", ["list", "jstep.batches"])
def test_batches_that_end_before_a_stage(kind, caplog):
    rows = np.zeros((8, 3), np.float32)
    batches = BATCHES[:8] if kind == "list" else jstep.batches(rows, 1, num_epochs=1, shuffle=False)
    one = lambda params, x: near(params, x.reshape(-1)[:3])  # noqa: E731
    stages = {0: jstep.minimize(one, OPTIMIZER), 20: FAR}
    assert jstep.global_step(train_stages(stages, 30, batches)) == 8
    assert "ended after step 8" in caplog.text


# Compilation in the background


def steps_of(*losses):
    return [jstep.minimize(lambda params, x, k=k: k * near(params, x), OPTIMIZER) for k in losses]


@pytest.mark.thorough(except_for=["4-function"])
@pytest.mark.parametrize("source", ["list", "function", "iterator"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_the_next_stage_is_compiled_before_it_is_due(
    source, steps_per_call, compiling_threads, caplog
):
    caplog.set_level(logging.INFO)
    first, second = steps_of(2.0, 3.0)
    batches = {
        "list": lambda: BATCHES,
        "function": lambda: lambda n: BATCHES[n],
        "iterator": lambda: iter(BATCHES),
    }
    before_boundary = []

    def seen(step, state, metrics):
        before_boundary.append(list(compiling_threads))

    train_stages(
        {0: first, 8: second},
        16,
        batches[source](),
        hooks=[jstep.every(8, seen)],
        steps_per_call=steps_per_call,
    )
    after = compiling_threads[len(before_boundary[0]) :]
    assert compiling_threads.count("jstep-compile") == 1
    assert "MainThread" not in after  # the main thread compiles nothing after step 8
    messages = [r.getMessage() for r in caplog.records if "compil" in r.getMessage()]
    assert any("compiled train_step ahead of step 8" in m for m in messages)
    assert not any("again" in m for m in messages)


def test_batch_shapes_are_compiled_before_they_are_due(compiling_threads):
    step = jstep.minimize(lambda params, x: jnp.mean((x @ params["w"]) ** 2), OPTIMIZER)
    rows = np.arange(50, dtype=np.float32).reshape(50, 1) * np.ones(3, np.float32)
    data = jstep.batches(rows, 8, shuffle=False, drop_remainder=False)
    seen = []
    hook = jstep.every(6, lambda *_: seen.append(compiling_threads.count("MainThread")))
    train_stages(step, 30, data, hooks=[hook])
    # One of them is the first program, which is compiled while the first batch is fetched.
    assert compiling_threads.count("jstep-compile") == 2
    assert len(set(seen)) == 1


def test_a_compiler_error_is_raised_at_its_step(caplog):
    def fails(params, x):
        return near(params, x) + jax.ffi.ffi_call(
            "no_such_target", jax.ShapeDtypeStruct((), np.float32)
        )(x)

    stages = {
        0: NEAR,
        5: jstep.minimize(lambda p, x: fails(jax.lax.stop_gradient(p), x) + near(p, x), OPTIMIZER),
    }
    with pytest.raises(Exception, match="no_such_target") as failed:
        train_stages(stages, 10)
    assert jstep.global_step(failed.value.state) == 5
    assert "could not be compiled ahead" in caplog.text


def test_a_stage_that_could_not_be_compiled_ahead_is_announced_when_it_is(caplog):
    """The loop waits for the compiler there, which the log explains."""
    caplog.set_level(logging.INFO)

    def later(params, x):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("not in this thread")
        return far(params, x)

    stages = {0: NEAR, 4: jstep.minimize(later, OPTIMIZER, has_aux=True)}
    train_stages(stages, 6, iter(BATCHES))
    (name,) = {
        record.args[0] for record in caplog.records if "could not be compiled ahead" in record.msg
    }
    assert f"compiling {name} for 1 step" in caplog.messages
