"""`train`: functions as hooks, results of hooks, state of hooks, and custom Savers."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import by_hand, make_state, same, train

import jstep

# Functions


@pytest.mark.parametrize(
    "make",
    [
        lambda tmp: jstep.EarlyStopping("loss"),
        lambda tmp: jstep.KeepBest(tmp, "loss"),
    ],
)
def test_a_callback_of_evaluations_is_rejected_with_advice(make, tmp_path):
    hook = jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=2)
    words = r"hooks\[1\]=.*: must be a hook.*EvaluationHook\(evaluate, every_n_steps=…, callbacks=\[…\]\)"
    for use in (lambda hooks: train(3, hooks=hooks), lambda hooks: jstep.plan(jstep.adam(), 10, hooks=hooks)):
        with pytest.raises(TypeError, match=words):
            use([hook, make(tmp_path)])


# Results of hooks


def scaled(state, factor):
    return state.replace(params=jax.tree.map(lambda p: p * factor, state.params))


@pytest.mark.thorough(except_for=["2"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_the_run_continues_with_a_state_that_a_hook_returns(steps_per_call, tmp_path):
    reference = []

    def halve(step, state, metrics):
        return scaled(state, 0.5)

    def look(step, state, metrics):
        reference.append(state)

    hooks = [jstep.every(4, halve), jstep.every(4, halve), jstep.every(4, look)]
    state = train(6, hooks=hooks, steps_per_call=steps_per_call, checkpoint_dir=tmp_path, save_checkpoint_steps=4)
    expected = by_hand(6, state=scaled(by_hand(4), 0.25))
    np.testing.assert_allclose(state.params["w"], expected.params["w"], rtol=1e-5)
    restored = jstep.Saver(tmp_path).restore(make_state(), step=4)  # the checkpoint holds the changed state
    np.testing.assert_allclose(restored.params["w"], 0.25 * by_hand(4).params["w"], rtol=1e-5)
    assert len(reference) == 1


# State of hooks


def test_hook_state_after_end_is_in_the_last_checkpoint(tmp_path):
    class Late(jstep.Hook):
        value = 0

        def end(self, step, state):
            self.value = 100

        def get_state(self):
            return self.value

        set_state = print

    train(4, hooks=[Late()], checkpoint_dir=tmp_path, save_checkpoint_steps=4)
    assert [one["state"] for one in jstep.Saver(tmp_path).extra()["hooks"]] == [100]


# Custom Savers and decorated steps


def test_a_custom_saver(tmp_path):
    with jstep.Saver(tmp_path, prefix="mine", max_to_keep=2) as saver:
        train(6, checkpoint_dir=saver, save_checkpoint_steps=1)
        assert saver.all_steps() == [5, 6]
        state = train(8, checkpoint_dir=saver)  # the first run did not close it
        saver.save(jax.tree.map(jnp.copy, by_hand(9)))
        assert saver.latest_step() == 9
    assert same(state, by_hand(8))
    with pytest.raises(ValueError, match="checkpoint_prefix='other': checkpoint_dir is a Saver, whose own prefix"):
        train(9, checkpoint_dir=saver, checkpoint_prefix="other")


def test_a_run_keeps_no_reference_to_its_state():
    """The state is freed by reference counting alone."""
    import weakref

    state = train(5, hooks=[jstep.every(2, lambda step, state, metrics: scaled(state, 0.5))])
    reference = weakref.ref(state)
    gc.disable()  # reference counting must suffice
    try:
        del state
        assert reference() is None
    finally:
        gc.enable()
