"""Tools on URLs: inspect, diff, replay and goodput."""

import json

import jax.numpy as jnp

import jstep
from jstep.look.cli import main

OPTIMIZER = jstep.gradient_descent(0.1)
STEP = jstep.minimize(lambda params, x: ((params["w"] - x) ** 2).sum(), OPTIMIZER)


def make_state():
    return jstep.TrainState.create({"w": jnp.zeros(3)}, OPTIMIZER)


def test_inspect_diff_and_replay_by_url(store, capsys):
    for name, other in (("a", 0.0), ("b", 1.0)):
        jstep.train(
            STEP,
            make_state(),
            lambda step, other=other: jnp.float32(step + other * (step >= 3)),
            6,
            hooks=[jstep.FingerprintHook(every_n_steps=1)],
            checkpoint_dir=f"{store.run}/{name}",
            logdir=f"{store.run}/{name}/log",
            save_checkpoint_steps=2,
            progress=False,
        )
    a, b = f"{store.run}/a", f"{store.run}/b"
    capsys.readouterr()
    assert main(["inspect", a]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == ["model-2", "model-4", "model-6", "not"]  # verified
    assert main(["inspect", f"{a}/model-4", "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4
    assert main(["diff", a, b]) == 1
    assert "the runs diverge at step 4" in capsys.readouterr().out
    assert main(["diff", f"{a}/log/fingerprints.jsonl", f"{b}/log"]) == 1
    assert "the runs diverge at step 4, number 4 of 6 common steps" in capsys.readouterr().out
    assert main(["diff", f"{a}/model-2", f"{b}/model-2"]) == 0
    state, args = jstep.replay(STEP, make_state(), lambda step: jnp.float32(step), a, 5)
    assert (jstep.global_step(state), float(args[0])) == (5, 5.0)
