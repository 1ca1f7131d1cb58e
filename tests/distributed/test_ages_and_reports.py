"""Two processes: ages of slots that a partial restore makes, and what the optimizers of custom
steps report."""

import processes
import pytest

AGES = """
old = jstep.momentum(0.1, 0.9)
new = jstep.with_moving_average(jstep.adam(0.02), jstep.ExponentialMovingAverage(0.99, zero_debias=True))

def sharded(optimizer, params, global_step=0):
    state = jstep.TrainState.create(params, optimizer, global_step)
    return jstep.shard_state(state, mesh, [("w", P("data"))])

with jstep.Saver(directory) as saver:
    saver.save(sharded(old, init(), 1000))
    restored = saver.restore(sharded(new, jax.tree.map(jnp.zeros_like, init())), partial=True)
    fresh = sharded(new, init(), 1000)
    ahead = sharded(new, init())
    ahead = jstep.minimize(loss_fn, new, donate=False)(ahead, data[:4])[0]
    kept = saver.restore(ahead, partial=True)

def local(leaf):
    return np.asarray(leaf.addressable_data(0)).tobytes()

step = jstep.minimize(loss_fn, new, donate=False)
same = [all(local(a) == local(b) for a, b in zip(*map(jax.tree.leaves, (restored, fresh)), strict=True))]
moved = [step(state, data[:4])[0] for state in (restored, fresh)]
same.append(all(local(a) == local(b) for a, b in zip(*map(jax.tree.leaves, moved), strict=True)))
print("same", *same)
print("ages", int(fresh.slots["start_step"]), int(kept.slots["start_step"]), flush=True)
"""  # noqa: E501

REPORTS = """
held = jstep.adam(jstep.held("learning_rate", 0.02))

def custom(state, x):
    loss, gradients = jstep.compute_gradients(loss_fn)(state.params, x)
    return jstep.apply_gradients(state, gradients, held), {"loss": loss}

class Halve(jstep.Hook):
    def after_step(self, step, state, metrics):
        return jstep.set_hyperparameter(state, "learning_rate", 0.01) if step == 2 else None

steps = {"jit": jax.jit(custom, donate_argnums=0), "eager": custom, "TrainStep": jstep.TrainStep(custom)}
for name, step in steps.items():
    history = jstep.History(every_n_steps=1)
    state = jstep.shard_state(jstep.TrainState.create(init(), held), mesh)
    jstep.train(step, state, batches, 4, hooks=[history, Halve()], log_steps=None, batch_sharding="data")
    print(name, *np.asarray(history["learning_rate"][1]).round(4), sorted(history.names), flush=True)
"""  # noqa: E501


@pytest.mark.thorough
def test_ages_of_new_slots_are_those_of_fresh_ones(tmp_path):
    for lines in processes.run(AGES, 2, tmp_path):
        assert processes.printed(lines, "same") == "True True"
        assert processes.printed(lines, "ages") == "1000 999"


@pytest.mark.thorough
def test_custom_steps_show_the_rate_on_each_process(tmp_path):
    for lines in processes.run(REPORTS, 2, tmp_path):
        shown = {processes.printed(lines, name) for name in ("jit", "eager", "TrainStep")}
        assert shown == {"0.02 0.02 0.01 0.01 ['learning_rate', 'loss']"}
