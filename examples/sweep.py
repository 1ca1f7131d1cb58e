"""Sixteen learning rates at once: `vmap` over a population of states; then train the best on.

    python examples/sweep.py

A learning rate in the state (`jstep.held`) is an array, so `vmap` over the whole step (loss,
gradient, Adam, global step) trains sixteen models in one compiled program, on the same batches, in
little more time than one. The best member of the population is an ordinary state. `jstep.train`
continues from it and reduces its learning rate when the validation loss stops improving.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import jstep


def make_data(count, seed):
    """Points (count, 8) and a nonlinear function of them."""
    x = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    y = np.sin(2.0 * x[:, 0]) * x[:, 1] + np.abs(x[:, 2])
    return x, y.astype(np.float32)


def init_params(key, width=64):
    keys = jax.random.split(key, 3)
    return {
        "w1": jax.random.normal(keys[0], (8, width)) / np.sqrt(8.0).astype(np.float32),
        "b1": jnp.zeros(width),
        "w2": jax.random.normal(keys[1], (width, width)) / np.sqrt(width).astype(np.float32),
        "b2": jnp.zeros(width),
        "w3": jax.random.normal(keys[2], (width,)) / np.sqrt(width).astype(np.float32),
    }


def errors(params, x, y):
    """The squared error of each point."""
    hidden = jnp.tanh(x @ params["w1"] + params["b1"][None])
    hidden = jnp.tanh(hidden @ params["w2"] + params["b2"][None])
    return (hidden @ params["w3"] - y) ** 2


def loss_fn(params, x, y):
    return jnp.mean(errors(params, x, y))


def main(steps=300, more=700, seed=0):
    optimizer = jstep.adam(jstep.held("learning_rate", 1e-3))
    train_step = jstep.minimize(loss_fn, optimizer)
    batches = jstep.batches(make_data(4096, seed=1), batch_size=128, seed=seed)
    validation = make_data(1000, seed=2)
    params = init_params(jax.random.key(seed))

    # A population is a state with a leading axis on every leaf, including the step.
    def make(rate):
        state = jstep.TrainState.create(params, optimizer)
        return jstep.set_hyperparameter(state, "learning_rate", rate)

    rates = np.geomspace(1e-4, 1.0, 16).astype(np.float32)
    population = jax.vmap(make)(rates)
    step_all = jax.jit(jax.vmap(train_step, in_axes=(0, None, None)), donate_argnums=0)
    losses_of_all = jax.jit(jax.vmap(loss_fn, in_axes=(0, None, None)))

    population, _ = step_all(population, *batches[0])  # compiles
    began = time.perf_counter()
    for n in range(1, steps):
        population, _ = step_all(population, *batches[n])
    losses = np.asarray(losses_of_all(population.params, *validation))
    print(
        f"{len(rates)} rates, {steps} steps each, "
        f"in {time.perf_counter() - began:.1f} s; validation losses:"
    )
    for rate, loss in zip(rates, losses, strict=True):
        print(f"  {rate:<9.3g} {loss:.4f}")

    best = int(np.nanargmin(losses))
    state = jax.tree.map(lambda leaf: leaf[best], population)
    print(f"best: {rates[best]:.3g}; continuing from step {jstep.global_step(state)}")

    evaluate = jstep.evaluator(lambda params, x, y: {"loss": errors(params, x, y)}, [validation])
    state = jstep.train(
        train_step,
        state,
        # Batch N depends only on N: the best member gets the same batches as in a run alone.
        batches,
        last_step=steps + more,
        hooks=[
            jstep.EvaluationHook(
                evaluate,
                every_n_steps=50,
                callbacks=[jstep.ReduceOnPlateau("loss", "learning_rate", factor=0.3, patience=1)],
            )
        ],
        log_steps=100,
    )
    loss = evaluate(state)["loss"]
    print(
        f"after {jstep.global_step(state)} steps: validation loss {loss:.4f}, learning rate "
        f"{jstep.get_hyperparameter(state, 'learning_rate'):.3g}"
    )
    return losses, loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="steps of the population (default 300)"
    )
    parser.add_argument(
        "--more", type=int, default=700, help="further steps of the best member (default 700)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights and batches (default 0)"
    )
    main(**vars(parser.parse_args()))
