"""CONTRIBUTING.md: the hook that it shows works as it says, and the files that it names exist."""

import re
import textwrap

import jax.numpy as jnp
from source_files import ROOT, text_of

import jstep

TEXT = text_of(ROOT / "CONTRIBUTING.md")
(HOOK,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
OPTIMIZER = jstep.gradient_descent(0.1)


def test_the_hook_stops_a_run_when_the_file_appears(tmp_path):
    names = {}
    exec(textwrap.dedent(HOOK), names)
    hook = names["StopAtFileHook"](tmp_path / "stop", every_n_steps=2)

    def batch(step):
        if step == 3:
            (tmp_path / "stop").write_text("")
        return jnp.ones(())

    def run():
        state = jstep.TrainState.create({"w": jnp.ones(())}, OPTIMIZER)
        step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, OPTIMIZER)
        return jstep.global_step(jstep.train(step, state, batch, 10, hooks=[hook], checkpoint_dir=tmp_path / "run"))

    assert [run(), run()] == [4, 6]  # a restart runs steps until it is due again


def test_the_files_that_it_names_exist():
    named = set(re.findall(r"`((?:jstep|tests|docs)/[\w/.]+\.(?:py|pyi|md|sh))`", TEXT))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]
