"""A program on a simulated macOS: `system_program.py PART`, in an empty folder, which prints what
it did."""

import sys
import time

from other_system import install

if __name__ == "__main__":
    install()

import jax.numpy as jnp

import jstep

optimizer = jstep.adam(jstep.cosine_decay(0.1, 1000))
train_step = jstep.minimize(lambda params, x: jnp.mean((x @ params["w"]) ** 2), optimizer)


def train(last_step, log_steps=None, **options):
    state = jstep.TrainState.create({"w": jnp.ones((3, 2)), "ö": jnp.ones(3)}, optimizer)
    return jstep.train(
        train_step,
        state,
        lambda step: jnp.full((4, 3), step + 1.0),
        last_step,
        log_steps=log_steps,
        **options,
    )


def all_of_it():
    state = train(30, 10, checkpoint_dir="run", save_checkpoint_steps=3, logdir="run")
    again = train(40, checkpoint_dir="run")
    assert again == train(40)
    assert int(state.global_step) == 30
    with jstep.Saver("run") as saver:
        saver.save(again)
        saver.save(again)  # a step that is there
        try:
            jstep.Saver("run").save(again)
        except jstep.CheckpointError as error:
            print(type(error).__name__, "which is this one" in str(error))
    with jstep.Saver("run") as saver:  # the claim was given back
        assert saver.restore(again) == again
    jstep.save_weights("w.safetensors", again.params)
    jstep.save_weights("w.safetensors", again.params)
    best = jstep.KeepBest("best", "loss")
    evaluate = jstep.evaluator(
        lambda params, x: {"loss": jnp.sum(params["w"] ** 2)}, [jnp.ones((4, 3))]
    )
    train(
        30,
        hooks=[
            jstep.EvaluationHook(evaluate, every_n_steps=5, callbacks=[best]),
            jstep.StallHook(),
        ],
    )
    jstep.replay(train_step, again, lambda step: jnp.full((4, 3), step + 1.0), "run", step=35)
    jstep.goodput("run")
    begin = time.monotonic()
    late = jstep.every(1000, lambda *_: time.monotonic() - begin > 60)
    try:
        train(10**8, stop_secs=0.5, hooks=[late])
    except jstep.Preempted as error:
        print("stopped", error.code)
    from jstep.look import cli

    for command in (["inspect", "run"], ["goodput", "run"], ["stalls", "run"], ["events", "run"]):
        print(command[0], cli.main(command))


def main(part):
    if part == "all":
        all_of_it()
        return
    said = jstep.every(
        100, lambda step, state, metrics: print(step, flush=True) if step < 2000 else None
    )
    print("ends at", int(train(int(part), checkpoint_dir="killed", hooks=[said]).global_step))


if __name__ == "__main__":
    main(sys.argv[1])
