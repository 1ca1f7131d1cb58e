"""A run that uses most of jstep in seconds: it trains, is resumed, evaluates, and writes summaries
and weights.

`dev/versions.sh smoke` lets it run with the lowest versions of all dependencies.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import jstep


def main() -> None:
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    optimizer = jstep.with_moving_average(jstep.adamw(1e-2), jstep.ExponentialMovingAverage(0.9))

    def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean((x @ params["w"] - x) ** 2)

    step = jstep.minimize(loss_fn, optimizer)
    evaluate = jstep.evaluator(lambda params, x: {"loss": loss_fn(params, x)}, [x[:8]])
    with tempfile.TemporaryDirectory() as directory:
        run = pathlib.Path(directory, "run")
        for last_step in (4, 8):
            hooks = [jstep.EvaluationHook(evaluate, every_n_steps=2), jstep.History()]
            state = jstep.TrainState.create({"w": jnp.zeros((4, 4))}, optimizer)
            state = jstep.train(
                step,
                state,
                jstep.batches(x, 8),
                last_step,
                hooks=hooks,
                checkpoint_dir=run,
                logdir=run,
            )
        assert jstep.global_step(state) == 8
        path = jstep.save_weights(f"{directory}/w.safetensors", state.params)
        loaded = jstep.load_weights(path, state.params)
        np.testing.assert_array_equal(loaded["w"], state.params["w"])
        np.testing.assert_array_equal(
            jstep.load_weights(run / "model-8", state.params)["w"], state.params["w"]
        )
        jstep.report(run, f"{directory}/page.html")


if __name__ == "__main__":
    main()
