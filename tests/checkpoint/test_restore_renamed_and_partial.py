"""`Saver.restore` with `names` and with `partial`, and its messages; other kinds of states."""

import jax
import jax.numpy as jnp
import pytest
from checkpoint_states import NO_SLOTS, assert_same, state_at

import jstep
from jstep.checkpoint.saver import Saver
from jstep.core.trees import leaf_paths


@pytest.fixture
def saver(tmp_path):
    with Saver(tmp_path) as saver:
        state = state_at(7, 2.0)
        saver.save(state.replace(slots={"momentum": {"w": jnp.full((3, 2), 5.0)}}))
        yield saver


def renamed():
    return jstep.TrainState.create({"kernel": jnp.zeros((3, 2))}, jstep.momentum(0.1, 0.9))


MAPPING = {"params/kernel": "params/w", "slots/momentum/kernel": "slots/momentum/w"}


@pytest.mark.parametrize(
    "names",
    [MAPPING, MAPPING.get, lambda path: path.replace("kernel", "w")],
    ids=["mapping", "method", "function"],
)
def test_names_as_mapping_or_function(saver, names):
    for target in (renamed(), jax.eval_shape(renamed)):
        back = saver.restore(target, names=names)
        assert back.params["kernel"].tolist() == [[2, 2]] * 3
        assert back.slots["momentum"]["kernel"].tolist() == [[5, 5]] * 3
        assert int(back.global_step) == 7


def test_one_array_restored_to_two_paths(saver):
    target = jstep.TrainState.create({"a": jnp.zeros((3, 2)), "b": jnp.zeros((3, 2))}, NO_SLOTS)
    names = {"params/a": "slots/momentum/w", "params/b": "slots/momentum/w"}
    back = saver.restore(target, names=names, partial=True)
    assert back.params["a"].tolist() == back.params["b"].tolist() == [[5, 5]] * 3
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(back)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"deep": {"w": jnp.ones(2)}}, "ExponentialMovingAverage"),
        ({"w": jnp.ones(2)}, "ema/slow"),
        (jnp.ones(2), "ema"),
    ],
    ids=["tree", "scope", "leaf"],
)
def test_the_name_of_an_average_names_it_in_a_checkpoint(params, name, tmp_path):
    ema = jstep.ExponentialMovingAverage(0.5, name=name)
    optimizer = jstep.with_moving_average(jstep.gradient_descent(1.0), ema)
    state = jstep.TrainState.create(params, optimizer)
    state = jstep.apply_gradients(state, jax.tree.map(jnp.ones_like, params), optimizer)
    with Saver(tmp_path) as saver:
        saver.save(state)
        plain = jstep.TrainState.create(params, NO_SLOTS)
        (path,) = leaf_paths(plain.params)
        names = {"/".join(filter(None, ("params", path))): ema.average_name(path)}
        restored = saver.restore(plain, partial=True, names=names)
        assert_same(restored.params, jstep.averaged_params(state, name))
        # The parameter that the average replaces is not left over, with slots and without.
        assert_same(saver.restore(state, names=names).params, restored.params)
        assert_same(saver.restore_params(params, names=names), restored.params)
        with pytest.raises(ValueError, match="should be restored from 'w/other'"):
            saver.restore(plain, partial=True, names=dict.fromkeys(names, "w/other"))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda optimizer: jstep.partition({"a": optimizer}, lambda path, leaf: "a"),
        lambda optimizer: jstep.compact(optimizer, min_size=0),
        jstep.master_weights,
        jstep.skip_nonfinite,
    ],
    ids=["label", "compact", "masters", "guard"],
)
def test_the_name_of_an_average_below_wrappers(wrap, tmp_path):
    """An average is cast to the parameter, decoded, and found below labels and scopes."""
    ema = jstep.ExponentialMovingAverage(0.5)
    optimizer = wrap(jstep.with_moving_average(jstep.gradient_descent(1.0), ema))
    params = {"w": jnp.linspace(0.0, 1.0, 64, dtype=jnp.bfloat16).reshape(2, 32)}
    state = jstep.TrainState.create(params, optimizer)
    state = jstep.apply_gradients(state, jax.tree.map(jnp.ones_like, params), optimizer)
    with Saver(tmp_path) as saver:
        saver.save(state)
        names = {"params/w": ema.average_name("w")}
        assert_same(saver.restore_params(params, names=names), jstep.averaged_params(state))
        assert_same(saver.restore(state, names=names).params, jstep.averaged_params(state))


class TestPartial:
    def adam(self, params, step=0):
        return jstep.TrainState.create(params, jstep.adam(), global_step=step)

    def test_warns_about_fresh_slots_with_an_old_start_step(self, tmp_path, caplog):
        body, head = {"body": jnp.ones(3)}, {"head": jnp.ones(2)}
        with Saver(tmp_path) as saver:
            saver.save(self.adam(body).replace(global_step=jnp.int32(10_000)))
            back = saver.restore(self.adam(body | head), partial=True)
        assert int(back.global_step) == 10_000
        words = "as old as restored slots, with which they share an age (2)"
        assert f"{words}: 'slots/m/head', 'slots/v/head'" in caplog.text

    def test_the_suggested_remedy_works(self, tmp_path, caplog):
        """`partition`, a target created at that step, and `names` give the head a start_step of its
        own."""
        body, head = {"body": jnp.ones(3)}, {"head": jnp.ones(2)}
        optimizer = jstep.partition(
            {"old": jstep.adam(), "new": jstep.adam()},
            lambda path, leaf: "new" if path == "head" else "old",
        )
        with Saver(tmp_path) as saver:
            saver.save(self.adam(body).replace(global_step=jnp.int32(10_000)))
            target = jstep.TrainState.create(body | head, optimizer, global_step=10_000)
            back = saver.restore(
                target, partial=True, names=lambda path: path.replace("slots/old/", "slots/")
            )
        assert int(back.slots["old/start_step"]) == 0
        assert int(back.slots["new/start_step"]) == 10_000
        assert "restored in part" in caplog.text


class TestOtherStates:
    def population(self, steps):
        make = jax.vmap(
            lambda rate: jstep.TrainState.create({"w": jnp.ones(3) * rate}, jstep.adam(0.1))
        )
        return make(jnp.arange(3.0)).replace(global_step=jnp.asarray(steps))

    def test_a_population_has_one_step(self, tmp_path):
        with Saver(tmp_path, prefix="population") as saver:
            with pytest.raises(ValueError, match=r"\[6, 7, 8\]: must be one step"):
                saver.save(self.population([6, 7, 8]))
            state = self.population([20, 20, 20])
            assert saver.save(state).endswith("population-20")
            assert_same(saver.restore(state, step=20), state)
