"""The global step: a learning rate that depends on it, and a run that forgets to increment it.

    python examples/global_step.py

Gradient descent on (w·x − y)² with exponential_decay(0.1, decay_steps=10, decay_rate=2): the
learning rate doubles in ten steps, to make the change visible.
"""

import argparse

import jax.numpy as jnp

import jstep


def loss_fn(params, x, y):
    return jnp.square(params["w"] * x - y)


def run(steps, *, increment_global_step):
    """Train for some steps, and print the learning rate and the step after each."""
    learning_rate = jstep.exponential_decay(0.1, decay_steps=10, decay_rate=2.0)
    optimizer = jstep.gradient_descent(learning_rate)
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    train_step = jstep.minimize(loss_fn, optimizer, increment_global_step=increment_global_step)
    x, y = jnp.float32(1.0), jnp.float32(2.0)
    for _ in range(steps):
        state, _metrics = train_step(state, x, y)
        # This reads the step after every update; a training loop should not wait for the device so
        # often.
        step = jstep.global_step(state)
        print(f"{learning_rate(step):.6g} {step}")
    return state


def main(steps=10):
    print("Each update increments the step, and the learning rate follows it (rate, step):")
    state = run(steps, increment_global_step=True)
    print(f"w = {state.params['w']:.6f}, which should be 2\n")
    print(
        "The same run without incrementing the step: parameters are updated, "
        "but the learning rate stays constant:"
    )
    state = run(steps, increment_global_step=False)
    print(f"w = {state.params['w']:.6f} after {steps} updates that were not counted")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="number of updates (default 10)")
    main(parser.parse_args().steps)
