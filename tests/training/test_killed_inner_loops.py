"""Programs with inner loops that are stopped three times end as those that were not."""

import pathlib
import re

import jax
import numpy as np
import pytest

import jstep

PAGE = pathlib.Path(__file__).parents[2] / "docs/recipes/inner-loops.md"
PROGRAMS = {
    "jstep inside a loss": "(maml, lambda: jstep.TrainState.create(params, outer))",
    "Nested states": "(diloco, with_workers)",
    "Control variates": "(jstep.TrainStep(scaffold), "
    "lambda: jstep.TrainState.create(params, server, 0, zeros))",
}


class StopHook(jstep.Hook):
    def __init__(self, at):
        self.at = at

    def after_step(self, step, state, metrics):
        if step >= self.at:
            raise RuntimeError("stopped")


@pytest.mark.thorough
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("title", PROGRAMS)
def test_a_program_that_is_stopped_three_times_ends_the_same(title, steps_per_call, tmp_path):
    text = PAGE.read_text()
    first, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    names = {}
    with jax.numpy_rank_promotion("allow"):
        for part in (first, *[section for section in sections if section.startswith(title)]):
            for code in re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL):
                exec(compile(code, str(PAGE), "exec"), names)
        step, fresh = eval(PROGRAMS[title], names)

        def run(directory, hooks=()):
            options = {
                "save_checkpoint_steps": 3,
                "log_steps": None,
                "steps_per_call": steps_per_call,
            }
            return jstep.train(
                step,
                fresh(),
                names["batches"],
                12,
                checkpoint_dir=directory,
                hooks=hooks,
                **options,
            )

        want = run(tmp_path / "whole")
        for at in (2, 5, 11):
            with pytest.raises(RuntimeError, match="stopped"):
                run(tmp_path / "stopped", [StopHook(at)])
        got = run(tmp_path / "stopped")
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)
