"""The two ways of the recipe "A new optimizer at a stage", with optimizers whose slots have an age and copies."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "stages.md"
FIRST, LAST = 5, 9
SECOND = {
    "adam": lambda: jstep.adamw(0.05),
    "schedule_free": lambda: jstep.schedule_free_sgd(0.1),
    "lookahead": lambda: jstep.lookahead(jstep.adam(0.05), 2),
}


@pytest.mark.thorough(except_for=["schedule_free"])
@pytest.mark.parametrize("name", SECOND)
def test_one_run_is_two_runs_bit_for_bit(name: str) -> None:
    (code,) = re.findall(r"^(def optimizer_of.*?)\n\n\n", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    second = SECOND[name]()
    defined: dict[str, Any] = {"jax": jax, "jstep": jstep}
    defined["STAGES"] = {"first": (0, jstep.momentum(0.05, 0.9)), "second": (FIRST, second)}
    exec(code, defined)  # the page's own function

    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.mean((x @ params["w"] - 1) ** 2)

    params = {"w": jnp.linspace(-1.0, 1.0, 4)}
    x = np.random.default_rng(0).normal(size=(LAST, 8, 4)).astype(np.float32)

    def trained(optimizer: Any, state: Any, steps: range) -> Any:
        train_step = jstep.minimize(loss_fn, optimizer, donate=False)
        for n in steps:
            state, _ = train_step(state, x[n])
        return state

    first = defined["STAGES"]["first"][1]
    state = trained(first, jstep.TrainState.create(params, first), range(FIRST))
    state = jstep.TrainState.create(state.params, second, global_step=state.global_step)
    two = trained(second, state, range(FIRST, LAST))
    stages = [defined["optimizer_of"](one) for one in ("first", "second")]
    state = trained(stages[0], jstep.TrainState.create(params, stages[0]), range(FIRST))
    one = trained(stages[1], state, range(FIRST, LAST))
    np.testing.assert_array_equal(one.params["w"], two.params["w"])
    for slot, tree in two.slots.items():
        for mine, other in zip(jax.tree.leaves(one.slots[f"second/{slot}"]), jax.tree.leaves(tree), strict=True):
            np.testing.assert_array_equal(mine, other)
