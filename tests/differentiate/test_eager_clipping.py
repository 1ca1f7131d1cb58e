"""Clipping outside a compiled step."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jstep


@pytest.mark.thorough
def test_clipping_outside_a_step_compiles_once(compilations: Any) -> None:
    def clips() -> None:
        tree = {"a": np.ones(7, np.float32), "b": [jnp.ones((7, 2))]}
        jstep.global_norm(tree)
        jstep.clip_by_global_norm(tree, 1.0)
        jstep.clip_by_norm(tree, 1.0)
        jstep.clip_by_norm(tree["b"], 1.0, axes=[1])
        jstep.clip_by_average_norm(tree, 0.1)

    clips()
    with compilations() as seen:
        clips()
    assert seen == []
