"""Proximal policy optimization (PPO): environments, rollouts, updates in one compiled step.

    python examples/ppo.py                 # less than a minute on two CPU cores
    python examples/ppo.py --dir runs/ppo  # save checkpoints and curves; the same command resumes

The environment has the equations of gym's CartPole-v1: an episode ends when the pole falls or after
500 pushes, and its return is the number of pushes. A step of `train` is one iteration of PPO: the
policy acts for PUSHES pushes in each environment, then EPOCHS × MINIBATCHES updates use these
transitions. The updates do not change the global step; the iteration increments it once. So Adam's
bias correction counts updates, while the learning rate, the checkpoints and the log count
iterations. The environments and the PRNG key are in the model state, so a checkpoint contains the
whole experiment: a run that is killed and restarted ends with bitwise the same state as an
uninterrupted one.
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp

import jstep

ENVIRONMENTS, PUSHES = 16, 128
EPOCHS, MINIBATCHES = 4, 4
DISCOUNT, TRACE, CLIP = 0.99, 0.95, 0.2
LONGEST = 500


def reset(key, count):
    """Carts of new episodes: position, speed, angle and angular speed."""
    return jax.random.uniform(key, (count, 4), minval=-0.05, maxval=0.05)


def push(cart, action):
    """One Euler step of 0.02 s for each cart, which is pushed left (0) or right (1) with 10 N."""
    _, speed, angle, spin = cart.T
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    force = (20.0 * action - 10.0 + 0.05 * spin**2 * sin) / 1.1
    angular = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    linear = force - 0.05 * angular * cos / 1.1
    return cart + 0.02 * jnp.stack([speed, linear, spin, angular], axis=1)


def has_fallen(cart):
    return (jnp.abs(cart[:, 0]) > 2.4) | (jnp.abs(cart[:, 2]) > jnp.deg2rad(12.0))


def create_environments(key, count):
    zeros = jnp.zeros(count, jnp.int32)
    return {"cart": reset(key, count), "pushes": zeros, "last_return": zeros}


def advance(environments, action, key):
    """Push each cart, and start a new episode where one has ended.

    One ends when the pole fell, or stood for LONGEST pushes.
    """
    cart, pushes = push(environments["cart"], action), environments["pushes"] + 1
    done = has_fallen(cart) | (pushes == LONGEST)
    new = {
        "cart": jnp.where(done[:, None], reset(key, len(cart)), cart),
        "pushes": jnp.where(done, 0, pushes),
        "last_return": jnp.where(done, pushes, environments["last_return"]),
    }
    return new, done


def init_params(key):
    """Two networks with two hidden layers of 64: logits of both actions, the value of a state."""

    def layers(key, outputs, scale):
        keys = jax.random.split(key, 3)
        sizes = ((4, 64, 2**0.5), (64, 64, 2**0.5), (64, outputs, scale))
        return [
            {
                "kernel": jax.nn.initializers.orthogonal(gain)(key, (fan_in, fan_out)),
                "bias": jnp.zeros(fan_out),
            }
            for key, (fan_in, fan_out, gain) in zip(keys, sizes, strict=True)
        ]

    actor_key, critic_key = jax.random.split(key)
    return {"actor": layers(actor_key, 2, 0.01), "critic": layers(critic_key, 1, 1.0)}


def network(layers, x):
    *hidden, last = layers
    for layer in hidden:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]


def log_probability(params, cart, action):
    log_p = jax.nn.log_softmax(network(params["actor"], cart))
    return jnp.take_along_axis(log_p, action[..., None], axis=-1)[..., 0], log_p


def value_of(params, cart):
    return network(params["critic"], cart)[..., 0]


def rollout(params, environments, key):
    """Act for PUSHES pushes; return the environments and what was seen.

    The latter are arrays of shape (PUSHES, ENVIRONMENTS, …).
    """

    def act(environments, key):
        action_key, reset_key = jax.random.split(key)
        cart = environments["cart"]
        action = jax.random.categorical(action_key, network(params["actor"], cart))
        log_p, _ = log_probability(params, cart, action)
        environments, done = advance(environments, action, reset_key)
        seen = {
            "cart": cart,
            "action": action,
            "log_p": log_p,
            "value": value_of(params, cart),
            "done": done,
        }
        return environments, seen

    return jax.lax.scan(act, environments, jax.random.split(key, PUSHES))


def advantages(seen, last_value):
    """Generalized advantage estimation, backwards in time; the reward of each push is 1."""

    def estimate(carry, now):
        advantage, next_value = carry
        continues = 1.0 - now["done"]
        error = 1.0 + DISCOUNT * next_value * continues - now["value"]
        advantage = error + DISCOUNT * TRACE * continues * advantage
        return (advantage, now["value"]), advantage

    _, found = jax.lax.scan(estimate, (jnp.zeros_like(last_value), last_value), seen, reverse=True)
    return found


def loss_fn(params, batch):
    """The clipped objectives of policy and value, and a bonus for entropy."""
    log_p, all_log_p = log_probability(params, batch["cart"], batch["action"])
    ratio = jnp.exp(log_p - batch["log_p"])
    gain = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    policy_loss = -jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain).mean()

    value = value_of(params, batch["cart"])
    near = batch["value"] + jnp.clip(value - batch["value"], -CLIP, CLIP)
    target = batch["advantage"] + batch["value"]
    value_loss = 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2).mean()

    entropy = -(jnp.exp(all_log_p) * all_log_p).sum(axis=-1).mean()
    return policy_loss + 0.5 * value_loss - 0.01 * entropy, {"entropy": entropy}


def minibatches(seen, key):
    """All minibatches of an iteration: arrays of shape (EPOCHS × MINIBATCHES, rows, …).

    Each epoch shuffles anew.
    """
    rows = ENVIRONMENTS * PUSHES
    orders = jax.vmap(lambda key: jax.random.permutation(key, rows))(jax.random.split(key, EPOCHS))
    orders = orders.reshape(EPOCHS * MINIBATCHES, rows // MINIBATCHES)
    return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:])[orders], seen)


def make_step(optimizer):
    """The step of `train`: one iteration."""
    update = jstep.minimize(
        loss_fn, optimizer, has_aux=True, increment_global_step=False, jit=False
    )

    def iteration(state):
        environments, key = state.model_state["environments"], state.model_state["key"]
        key, acting, shuffling = jax.random.split(key, 3)
        environments, seen = rollout(state.params, environments, acting)
        seen["advantage"] = advantages(seen, value_of(state.params, environments["cart"]))

        state = state.replace(model_state={"environments": environments, "key": key})
        state, metrics = jax.lax.scan(update, state, minibatches(seen, shuffling))
        shown = {name: metrics[name].mean() for name in ("loss", "entropy", "learning_rate")}
        shown["return"] = environments["last_return"].mean()
        return jstep.increment_global_step(state), shown

    return jstep.TrainStep(iteration)


@jax.jit
def greedy_returns(params, key):
    """The returns of 100 episodes in which the policy always takes its most probable action."""

    def act(carry, _):
        cart, pushes, stands = carry
        cart = push(cart, jnp.argmax(network(params["actor"], cart), axis=-1))
        return (cart, pushes + stands, stands & ~has_fallen(cart)), None

    start = (reset(key, 100), jnp.zeros(100, jnp.int32), jnp.ones(100, bool))
    (_, pushes, _), _ = jax.lax.scan(act, start, None, LONGEST)
    return pushes


def main(steps=300, seed=0, directory=None):
    optimizer = jstep.chain(
        jstep.clip_gradients(by_global_norm=0.5),
        jstep.adam(jstep.linear(1e-3, 0.0, steps)),
    )
    param_key, environment_key, key, test_key = jax.random.split(jax.random.key(seed), 4)
    world = {"environments": create_environments(environment_key, ENVIRONMENTS), "key": key}
    state = jstep.TrainState.create(init_params(param_key), optimizer, model_state=world)
    print(state)

    started = time.perf_counter()
    state = jstep.train(
        make_step(optimizer),
        state,
        lambda step: (),  # the step makes its own data
        last_step=steps,
        hooks=[jstep.NanLossHook()],
        checkpoint_dir=directory,
        save_checkpoint_steps=max(1, steps // 10),
        log_steps=max(1, steps // 10),
        logdir=directory,
    )
    seconds = time.perf_counter() - started

    greedy = greedy_returns(state.params, test_key).mean()
    print(f"{seconds:.1f} s including compilation")
    print(
        f"greedy return after {steps} iterations: "
        f"{greedy:.1f} of {LONGEST}, the mean of 100 episodes"
    )
    # Two runs with the same fingerprint ended in bitwise the same state.
    print("fingerprint of the state: {:08x}{:08x}".format(*jax.jit(jstep.fingerprint)(state)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="iterations of the run (default 300)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, environments and actions (default 0)"
    )
    parser.add_argument(
        "--dir", dest="directory", help="save checkpoints and event files here (default: save none)"
    )
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:  # train has logged where it stopped, and saved if it has a directory
        sys.exit(130)
