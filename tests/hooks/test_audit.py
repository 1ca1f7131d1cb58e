"""`AuditHook`: one flipped bit in one of two executions is detected before the step is saved."""

import logging

import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import bits
from jax.sharding import PartitionSpec as P

import jstep

RNG = jax.random.key(3)


def noisy(params, x, rng):
    return faults.loss_fn(params, x) + jnp.sum(jax.random.normal(rng, (3,)) * params["w"])


VARIANTS = {"first": {"execution": 1}, "not donated": {"donate": False}, "microbatches": {"num_microbatches": 2}}


@pytest.mark.thorough(except_for=["microbatches"])
@pytest.mark.parametrize("kwargs", VARIANTS.values(), ids=VARIANTS)
def test_one_flipped_bit_is_detected_before_the_save(tmp_path, kwargs):
    faulty, seen = faults.Faulty(4, **kwargs), []
    hooks = jstep.every(1, lambda step, state, metrics: seen.append(step)), jstep.AuditHook(every_n_steps=2)
    with pytest.raises(jstep.AuditError, match=r"update 4 → 5 was computed twice.* leaf differs: params/w[.]") as info:
        faults.train(faulty.train_step, 9, *hooks, checkpoint_dir=tmp_path, save_checkpoint_steps=1)
    assert (info.value.step, info.value.leaves) == (5, ("params/w",))  # as NanLossDuringTrainingError.step
    assert info.value.state is None or jstep.global_step(info.value.state) == 4
    assert seen == [1, 2, 3, 4]
    assert jstep.Saver(tmp_path).latest_step() == 4
    assert faulty.executions == {0: 2, 1: 1, 2: 2, 3: 1, 4: 2}


@pytest.mark.thorough(except_for=["5-3"])
@pytest.mark.parametrize(("step", "first"), [(0, 0), (5, 3)])
def test_a_call_of_several_steps_is_repeated_entirely(step, first):
    faulty = faults.Faulty(step)
    with pytest.raises(jstep.AuditError, match=f"updates {first} → {first + 3} were") as info:
        faults.train(faulty.train_step, 9, jstep.AuditHook(every_n_steps=5), steps_per_call=3)
    assert info.value.step == first + 1


def test_on_mismatch_log_continues_with_the_first_result(caplog):
    expected = faults.train(faults.Faulty().train_step, 6)
    for execution, is_correct in ((2, True), (1, False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "jstep"):
            hook = jstep.AuditHook(every_n_steps=1, on_mismatch="log")
            found = faults.train(faults.Faulty(3, execution).train_step, 6, hook)
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("the update 3 → 4 was computed twice")
        assert line.endswith("The run continues with the first result.")
        assert (bits(found) == bits(expected)) == is_correct


CLEAN = {"donated": ({}, {}), "rng": ({"loss_fn": noisy, "rng": RNG}, {"steps_per_call": 3})}


@pytest.mark.thorough(except_for=["donated"])
@pytest.mark.parametrize(("step_options", "train_options"), CLEAN.values(), ids=CLEAN)
def test_clean_audits_change_no_results_and_recompile_nothing(step_options, train_options):
    step_options = dict(step_options)
    loss = step_options.pop("loss_fn", faults.loss_fn)
    steps = [jstep.minimize(loss, faults.OPTIMIZER, **step_options) for _ in range(2)]
    audited = faults.train(steps[0], 24, jstep.AuditHook(every_n_steps=1), **train_options)
    plain = faults.train(steps[1], 24, **train_options)
    assert bits(audited) == bits(plain)
    assert steps[0]._cache_size() == steps[1]._cache_size()


def test_stages_and_held_hyperparameters():
    optimizer = jstep.momentum(jstep.held("learning_rate", 0.1), 0.9)
    stages = {n: jstep.minimize(faults.loss_fn, optimizer, num_microbatches=k) for n, k in ((0, 1), (3, 2))}
    state = jstep.TrainState.create({"w": jnp.ones(3), "b": jnp.float32(0.5)}, optimizer)
    slow = jstep.every(2, lambda step, state, metrics: jstep.set_hyperparameter(state, "learning_rate", 0.1 / step))
    end = faults.train(stages, 7, slow, jstep.AuditHook(every_n_steps=1), state=state)
    assert jstep.global_step(end) == 7
    faulty = {0: faults.Faulty().train_step, 3: faults.Faulty(4).train_step}
    with pytest.raises(jstep.AuditError, match="update 4 → 5 "):
        faults.train(faulty, 7, jstep.AuditHook(every_n_steps=2))


# Plain Python steps


def test_a_nondeterministic_plain_step_is_reported():
    generator = np.random.default_rng(0)

    def step(state, x):
        w = state.params["w"] + generator.normal(size=3).astype(np.float32)
        return state.replace(params={**state.params, "w": w}, global_step=state.global_step + 1), {"loss": x.sum()}

    with pytest.raises(jstep.AuditError, match=r"not deterministic"):
        faults.train(step, 3, jstep.AuditHook())


def test_a_plain_step_can_donate_or_overwrite_its_batch():
    pure = jstep.minimize(faults.loss_fn, faults.OPTIMIZER, jit=False)

    def donating(state, x):
        state, metrics = pure(state, x)
        return state, {**metrics, "twice": 2 * x}

    compiled, buffer = jax.jit(donating, donate_argnums=(0, 1)), faults.DATA[0]

    def writing(state, x):
        state, metrics = compiled(state, jnp.array(x))
        buffer[...] += 1.0
        return state, metrics

    faults.train(compiled, 3, jstep.AuditHook(every_n_steps=1), steps_per_call=1)
    jstep.train(writing, faults.make_state(), lambda step: buffer, 3, hooks=[jstep.AuditHook()], progress=False)


def test_a_fault_in_one_replica_names_the_device():
    mesh = jax.make_mesh((2,), ("data",))
    correct_step = jstep.minimize(faults.loss_fn, faults.OPTIMIZER)
    calls = []

    def step(state, x):
        calls.append(None)
        new, metrics = correct_step(state, x)
        if len(calls) == 2:
            shards = [shard.data for shard in new.params["w"].addressable_shards]
            shards[1] = shards[1].at[2].set(jnp.nextafter(shards[1][2], jnp.inf))
            w = jax.make_array_from_single_device_arrays((3,), new.params["w"].sharding, shards)
            new = new.replace(params={**new.params, "w": w})
        return new, metrics

    state = jstep.shard_state(faults.make_state(), mesh, P())
    name = str(mesh.devices.flat[1])
    with pytest.raises(jstep.AuditError, match=rf"1 leaf differs: params/w \(on {name} alone\)"):
        faults.train(step, 3, jstep.AuditHook(), state=state)


# Errors


def test_an_error_in_the_second_execution_gets_a_note():
    calls = []
    correct_step = jstep.minimize(faults.loss_fn, faults.OPTIMIZER)

    def step(state, x):
        calls.append(None)
        if len(calls) == 2:
            raise MemoryError("no room")
        return correct_step(state, x)

    with pytest.raises(MemoryError) as info:
        faults.train(step, 3, jstep.AuditHook())
    assert "jstep: raised while AuditHook computed step 0 a second time" in info.value.__notes__


def test_a_state_without_fingerprint_is_rejected_at_the_start():
    state = faults.make_state().replace(params={"w": jnp.ones(3), "name": "dense"})
    with pytest.raises(TypeError, match="params/name"):
        faults.train(lambda state, x: (state, {}), 3, jstep.AuditHook(), state=state)
