"""Large leaves, limited by memory: microbatches compared with Optax, and sparse rows with dense
gradients. optax.MultiSteps is a call for each microbatch, and jstep one for all: two features, so
that the scan by hand is what jstep is to be compared with.

    python benchmarks/bench_large.py
"""

import sys

import jax
import jax.numpy as jnp
import optax
from _timing import interleaved, optax_step, report, runner

import jstep


def microbatches(n=8):
    """Return contenders for a wide two-layer network on n microbatches of 4 rows, dominated by
    accumulation."""

    def init():
        return {"w1": jnp.full((1024, 4096), 0.01), "w2": jnp.full((4096, 1024), 0.01)}

    def loss_fn(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["w1"]) @ params["w2"] - x))

    x = jax.random.normal(jax.random.key(0), (4 * n, 1024))
    ours = jstep.adam(1e-3)
    step = jstep.minimize(loss_fn, ours, num_microbatches=n)
    theirs = optax.MultiSteps(optax.adam(1e-3), every_k_schedule=n)

    update = optax_step(theirs)
    compiled = jax.jit(
        lambda state, x: update(state, jax.grad(loss_fn)(state[0], x)), donate_argnums=0
    )
    plain = optax.adam(1e-3)

    def scanned(state, x):
        """Add the gradients of the microbatches in a scan, then update once: what one would write
        by hand."""
        params, _ = state

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, part)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x.reshape(n, 4, -1))
        return optax_step(plain)(state, jax.tree.map(lambda t: t / n, total))

    def optax_round(state, x):
        for part in jnp.split(x, n):
            state = compiled(state, part)
        return state

    our_state, optax_state = jstep.TrainState.create(init(), ours), (init(), theirs.init(init()))
    parameter_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(init()))
    for name, lowered in (
        ("jstep", step.lower(our_state, x)),
        ("optax.MultiSteps", compiled.lower(optax_state, x[:4])),
    ):
        memory = lowered.compile().memory_analysis()
        total = (
            memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        )
        total -= memory.alias_size_in_bytes
        print(
            f"  {name}: peak {total / parameter_bytes:.2f} times "
            "the parameters' bytes (state, gradients, all)"
        )
    return {
        f"jstep, {n} microbatches": runner(lambda s, x: step(s, x)[0], our_state, x),
        "optax.MultiSteps": runner(optax_round, optax_state, x),
        "Optax, scanned by hand": runner(
            jax.jit(scanned, donate_argnums=0), (init(), plain.init(init())), x
        ),
    }


def sparse(rows=1000, table=(1_000_000, 64)):
    optimizer = jstep.adagrad(0.1)
    step = jax.jit(
        lambda state, grads: jstep.apply_gradients(state, grads, optimizer), donate_argnums=0
    )
    indices = jax.random.randint(jax.random.key(0), (rows,), 0, table[0])
    some = {"table": jstep.IndexedSlices(jnp.ones((rows, table[1])), indices, table)}
    every = {"table": jnp.ones(table)}

    def state():
        return jstep.TrainState.create({"table": jnp.zeros(table)}, optimizer)

    return {"1000 rows": runner(step, state(), some), "dense": runner(step, state(), every)}


def main():
    title, bound = (
        "8.4M parameters, 8 microbatches of 4 rows, Adam",
        {
            ("jstep, 8 microbatches", "Optax, scanned by hand"): 1.05,
            ("jstep, 8 microbatches", "optax.MultiSteps"): None,
        },
    )
    good = report(title, interleaved(microbatches(), 1, 9), bound, 1e3)
    title = "Adagrad on a table of 1M × 64"
    return report(title, interleaved(sparse(), 3, 9), {("1000 rows", "dense"): 0.03}, 1e3) and good


if __name__ == "__main__":
    sys.exit(not main())
