"""Deep Q-learning (DQN) on CartPole in one compiled step: environments, replay buffer, update.

    python examples/dqn_on_device.py         # a few seconds on two CPU cores

Each step of `train` pushes the eight carts of ppo.py once, writes eight transitions to the buffer,
draws a batch and learns. The buffer, the environments and the PRNG key are in the model state, so a
checkpoint would hold the whole experiment. The position in the buffer follows from the step. Before
learning starts, a step only counts itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import ppo
from dqn import CAPACITY, CARTS, LONGEST, ROWS, init_params, loss_fn, network, transitions

import jstep

LEARNING_STARTS = 125


def interact(params, world, step):
    """Push each cart, and draw a batch; return the new world and the batch."""
    key, *keys = jax.random.split(world["key"], 5)
    cart = world["environments"]["cart"]
    explores = jax.random.uniform(keys[0], (CARTS,)) < jstep.linear(1.0, 0.05, 2000)(step)
    anything = jax.random.randint(keys[1], (CARTS,), 0, 2)
    action = jnp.where(explores, anything, network(params, cart).argmax(axis=1))
    environments, done = ppo.advance(world["environments"], action, keys[2])
    new = {"seen": cart, "action": action, "after": environments["cart"], "fell": done}

    def write(rows, new):
        return jax.lax.dynamic_update_slice_in_dim(rows, new, step * CARTS % CAPACITY, 0)

    buffer = jax.tree.map(write, world["buffer"], new)
    rows = jax.random.randint(keys[3], (ROWS,), 0, jnp.minimum((step + 1) * CARTS, CAPACITY))
    batch = jax.tree.map(lambda x: x[rows], buffer)
    return {"environments": environments, "buffer": buffer, "key": key}, batch


def make_step(optimizer):
    """The step of `train`."""
    update = jstep.minimize(loss_fn, optimizer, use_averages=True, jit=False)

    def learn(state, batch):
        state, metrics = update(state, batch)
        return state, metrics["loss"]

    def wait(state, batch):
        return jstep.increment_global_step(state), 0.0

    def step(state):
        step = state.global_step
        world, batch = interact(state.params, state.model_state, step)
        state = state.replace(model_state=world)
        state, loss = jax.lax.cond(step >= LEARNING_STARTS, learn, wait, state, batch)
        return state, {"loss": loss, "return": world["environments"]["last_return"].mean()}

    return jstep.TrainStep(step)


@jax.jit
def create(seed):
    """Parameters, and the world that the model state holds."""
    param_key, environment_key, key = jax.random.split(jax.random.key(seed), 3)
    environments = ppo.create_environments(environment_key, CARTS)
    buffer = jax.tree.map(jnp.asarray, transitions().rows)
    model_state = {"environments": environments, "buffer": buffer, "key": key}
    return init_params(param_key, 4, 64, 64, 2), model_state


def train(optimizer, steps=8000, seed=0):
    """Train; return the state, and the mean return every 100 steps."""
    params, world = create(seed)
    returns = []
    state = jstep.train(
        make_step(optimizer),
        jstep.TrainState.create(params, optimizer, model_state=world),
        lambda step: (),  # the step makes its own data
        steps,
        hooks=[
            jstep.MetricsHook(
                lambda step, metrics: returns.append(metrics["return"]), every_n_steps=100
            )
        ],
        steps_per_call=100,
        log_steps=1000,
    )
    return state, np.array(returns)


if __name__ == "__main__":
    target = jstep.ExponentialMovingAverage(0.0, every=60)
    _, returns = train(jstep.with_moving_average(jstep.adamw(1e-3, weight_decay=0.0), target))
    print(f"mean return of the last 2000 steps: {returns[-20:].mean():.1f} of {LONGEST}")
